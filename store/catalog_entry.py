"""A catalog entry: what a reader must know about a blob before it fetches any of it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvwire._json import json_field, json_object
from kvwire.errors import ArgumentError, CorruptError
from kvwire.store.keys import MAX_NAME_CHARS, check_key

if TYPE_CHECKING:
    from collections.abc import Callable

    _Check = tuple[str, Callable[[], bool]]
    Outline = tuple[int, str]

MAX_ENTRY_BYTES = 1 << 20  # an entry holds a few hundred bytes; more is not read
MAX_PARTS = 4096
"""Of a document: their rows fit an entry."""
MAX_PART_HEADERS_BYTES = 1 << 26
"""Of a document's parts together: all of them are held at once."""
MAX_OUTLINE_BYTES = 1 << 21
"""Longest outline of a profile: its metadata has at most half of that."""
_MAX_BYTES = 1 << 62
_WHAT = "a catalog entry"
_DIGEST_CHARS = 64
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")


@dataclass(frozen=True)
class BlobPart:
    """One blob of a document that grew.

    Attributes:
        sha256: Of the blob.
        size: Of the blob, in bytes.
        header_bytes: Length of the blob's header.
        tokens: Of this part.
        token_digest: SHA-256 of the first part's own token ids, which names its text; empty for others, whose texts
            are found by their blobs.
    """

    sha256: str
    size: int
    header_bytes: int
    tokens: int
    token_digest: str = ""

    def to_row(self) -> list[object]:
        """As it is stored: digests in base85, since an entry is written again with each part."""
        digests = base64.b85encode(bytes.fromhex(self.sha256 + self.token_digest)).decode()
        return [digests, self.size, self.header_bytes, self.tokens]

    @classmethod
    def from_row(cls, row: object) -> BlobPart:
        """Read ``to_row``."""
        match row:
            case [str(text), int(size), int(header_bytes), int(tokens)] if bool not in map(type, row):
                try:
                    digests = base64.b85decode(text).hex()
                except ValueError:
                    digests = ""
                if len(digests) in (_DIGEST_CHARS, 2 * _DIGEST_CHARS):
                    return cls(digests[:_DIGEST_CHARS], size, header_bytes, tokens, digests[_DIGEST_CHARS:])
        msg = "each part of a document in the catalog must be digests and three numbers: write the document again"
        raise CorruptError(msg)


@dataclass(frozen=True)
class CatalogEntry:
    """One document's blob, or, where ``is_text``, one document of which only the text is kept.

    Attributes:
        document_id: The document's name; any text that can be encoded. New ones pass ``check_new_name``, too.
        blob_key: Where its blob lies, of several parts the first. Empty without one, and all about the blob is then
            empty or 0; the text is found by its token digest.
        sha256: Of the blob, of several parts the first.
        size: Of the blob, in bytes, or of all parts together.
        header_bytes: Length of the blob's header, or of all parts' together.
        tokens: Of the document.
        token_digest: SHA-256, or the empty string where unknown or not needed.
        profile_digest: SHA-256, or the empty string where unknown or not needed.
        levels: (name, cumulative bytes) of each level, coarsest first.
        profile_outline: Length and SHA-256 of what a profile in sections says of itself, so that its first sections can
            be read and checked alone; None where the profile has none, or nobody knows.
        parts: The blobs of a document that grew, in the order of its tokens; empty where there is one or none.
    """

    document_id: str
    blob_key: str
    sha256: str
    size: int
    header_bytes: int
    tokens: int
    token_digest: str
    profile_digest: str
    levels: tuple[tuple[str, int], ...]
    profile_outline: Outline | None = None
    parts: tuple[BlobPart, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other or are out of range."""
        problem = _problem(self)
        if problem:
            msg = f"not a catalog entry: {problem}"
            raise ArgumentError(msg)

    @property
    def is_text(self) -> bool:
        """Whether there is no blob: the document is computed from its token ids."""
        return not self.blob_key

    def to_json(self) -> bytes:
        """Serialise with sorted keys: equal entries give equal bytes."""
        told = asdict(self)
        told["head_bytes"] = told.pop("header_bytes")  # the name in the catalog since its first version
        if self.profile_outline is None:  # what has none stays byte for byte what it was
            del told["profile_outline"]
        told["parts"] = [part.to_row() for part in self.parts]
        del told["sha256" if self.parts else "parts"]  # of the first part, its key says it
        return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CatalogEntry:
        """Parse strictly; unknown fields are ignored.

        Args:
            data: The entry as ``to_json`` gives it.

        Returns:
            The entry.

        Raises:
            CorruptError: The bytes are no entry.
        """
        told = parse_object(data)
        levels = json_field(told, "levels", list, _WHAT)
        try:
            return cls(
                document_id=json_field(told, "document_id", str, _WHAT),
                blob_key=json_field(told, "blob_key", str, _WHAT),
                sha256=json_field(_with_sha256(told), "sha256", str, _WHAT),
                size=json_field(told, "size", int, _WHAT),
                header_bytes=json_field(told, "head_bytes", int, _WHAT),
                tokens=json_field(told, "tokens", int, _WHAT),
                token_digest=json_field(told, "token_digest", str, _WHAT),
                profile_digest=json_field(told, "profile_digest", str, _WHAT),
                levels=tuple(_level(level) for level in levels),
                profile_outline=outline_of(told),
                parts=tuple(BlobPart.from_row(row) for row in json_field({"parts": []} | told, "parts", list, _WHAT)),
            )
        except ArgumentError as error:
            msg = f"the catalog holds a bad entry ({error}): write the document again"
            raise CorruptError(msg) from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a catalog key."""
    return json_object(data, _WHAT, MAX_ENTRY_BYTES)


def outline_of(fields: dict[str, Any]) -> Outline | None:
    """Read the outline of a profile from an entry, or from what points to the profile in use."""
    match fields.get("profile_outline"):
        case None:
            return None
        case [int(size), str(sha256)] if not isinstance(size, bool) and _is_outline(size, sha256):
            return size, sha256
    msg = "a profile's outline in the catalog must be a length and a SHA-256: write the document again"
    raise CorruptError(msg)


def _is_outline(size: int, sha256: str) -> bool:
    return 0 < size <= MAX_OUTLINE_BYTES and bool(sha256 and _DIGEST.fullmatch(sha256))


def _with_sha256(told: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the digest that the blob's key carries where the parts stand for it."""
    key = told.get("blob_key")
    if not told.get("parts") or not isinstance(key, str):
        return told
    return told | {"sha256": key.rpartition("/")[2].removesuffix(".kvw")}


def _level(level: object) -> tuple[str, int]:
    match level:
        case [str(name), int(size)] if not isinstance(size, bool):
            return name, size
    msg = "each of a catalog entry's levels must be a name and a number of bytes"
    raise CorruptError(msg)


def _problem(entry: CatalogEntry) -> str | None:
    checks: tuple[_Check, ...] = (
        (
            f"the document id needs 1 to {MAX_NAME_CHARS} characters",
            lambda: 0 < len(entry.document_id) <= MAX_NAME_CHARS,
        ),
        ("the document id holds half a surrogate pair", lambda: _is_proper(entry.document_id)),
        ("tokens is out of range", lambda: 0 <= entry.tokens < _MAX_BYTES),
        ("token_digest is not a SHA-256", lambda: bool(_DIGEST.fullmatch(entry.token_digest))),
        ("profile_digest is not a SHA-256", lambda: bool(_DIGEST.fullmatch(entry.profile_digest))),
        (
            "profile_outline is no length and SHA-256 of a profile",
            lambda: entry.profile_outline is None or bool(entry.profile_digest and _is_outline(*entry.profile_outline)),
        ),
        *(_text_checks(entry) if entry.is_text else _blob_checks(entry)),
    )
    return next((message for message, holds in checks if not holds()), None)


def _is_proper(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _blob_checks(entry: CatalogEntry) -> tuple[_Check, ...]:
    return (
        ("blob_key is not a key", lambda: bool(check_key(entry.blob_key))),
        ("sha256 is no SHA-256", lambda: bool(entry.sha256 and _DIGEST.fullmatch(entry.sha256))),
        ("sha256 is not the digest in blob_key", lambda: entry.blob_key.rpartition("/")[2] == f"{entry.sha256}.kvw"),
        ("size is out of range", lambda: 0 < entry.size < _MAX_BYTES),
        ("head_bytes is out of range", lambda: 0 <= entry.header_bytes <= entry.size),
        ("a level is larger than the blob", lambda: all(0 <= size <= entry.size for _, size in entry.levels)),
        *_part_checks(entry),
    )


def _part_checks(entry: CatalogEntry) -> tuple[_Check, ...]:
    parts = entry.parts
    if not parts:
        return ()
    sums = (sum(part.size for part in parts), sum(part.header_bytes for part in parts), sum(p.tokens for p in parts))
    return (
        ("a document has 2 parts at least, or none", lambda: 1 < len(parts) <= MAX_PARTS),
        ("the first part is not the blob", lambda: parts[0].sha256 == entry.sha256),
        (
            "only the first part names its tokens",
            lambda: [bool(p.token_digest) for p in parts] == [True] + [False] * (len(parts) - 1),
        ),
        ("a part is out of range", lambda: all(0 < p.header_bytes <= p.size and p.tokens > 0 for p in parts)),
        ("the parts' headers are too long together", lambda: sums[1] <= MAX_PART_HEADERS_BYTES),
        ("the parts do not add up", lambda: sums == (entry.size, entry.header_bytes, entry.tokens)),
    )


def _text_checks(entry: CatalogEntry) -> tuple[_Check, ...]:
    of_a_blob = (entry.sha256, entry.size, entry.header_bytes, entry.profile_digest, entry.levels, entry.parts)
    return (
        ("without blob_key, nothing can be told of a blob", lambda: of_a_blob == ("", 0, 0, "", (), ())),
        ("without blob_key, token_digest must name a text", lambda: bool(entry.token_digest and entry.tokens)),
    )
