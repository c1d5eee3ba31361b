"""Records of the catalog, as JSON: entries of documents, models, pointers, announcements."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import asdict

from kvwire._json import Sha256, Sha256OrEmpty, check_version, json_object, record
from kvwire.errors import ArgumentError, CorruptError
from kvwire.store.keys import MAX_NAME_CHARS, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvwire.types import CacheMeta


MAX_ENTRY_BYTES = 1 << 20  # an entry holds a few hundred bytes; more is not read
MAX_PARTS = 4096
"""Of a document: their rows fit an entry."""
MAX_PART_HEADERS_BYTES = 1 << 26
"""Of a document's parts together: all of them are held at once."""
MAX_OUTLINE_BYTES = 1 << 21
"""Longest outline of a profile: its metadata has at most half of that."""
_MAX_BYTES = 1 << 62
VERSION = 1
"""Of records that carry one."""
MOST_TOKENS = 1 << 32
_WHAT, _ADVICE = "a catalog entry", "write the document again"
_DIGEST_CHARS = 64
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")

Outline: TypeAlias = tuple[Annotated[int, Meta(gt=0, le=MAX_OUTLINE_BYTES)], Sha256]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_MODEL, _MODEL_ADVICE = "a model record", "encode any document again, which writes it anew"


class BlobPart(Struct, frozen=True):
    """One blob of a document that grew."""

    sha256: str
    size: int  # of the blob, in bytes
    header_bytes: int
    tokens: int
    token_digest: str = ""  # of the first part's own token ids, which names its text; others' are found by their blobs

    def to_row(self) -> list[object]:
        """As it is stored: digests in base85, since an entry is written again with each part."""
        digests = base64.b85encode(bytes.fromhex(self.sha256 + self.token_digest)).decode()
        return [digests, self.size, self.header_bytes, self.tokens]

    @classmethod
    def from_row(cls, row: object) -> BlobPart:
        """Read ``to_row``."""
        text, size, header_bytes, tokens = record(row, tuple[str, int, int, int], "a document's part", _ADVICE)
        try:
            digests = base64.b85decode(text).hex()
        except ValueError:
            digests = ""
        if len(digests) not in (_DIGEST_CHARS, 2 * _DIGEST_CHARS):
            raise CorruptError(f"a document's part names no SHA-256: {_ADVICE}")
        return cls(digests[:_DIGEST_CHARS], size, header_bytes, tokens, digests[_DIGEST_CHARS:])


class CatalogEntry(Struct, frozen=True):
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
            be read and checked alone; None where the profile has none, or it is not known.
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
        problem = next(_problems(self), None)
        if problem:
            raise ArgumentError(f"not a catalog entry: {problem}")

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
        told["header_bytes"] = told.pop("head_bytes", None)
        rows = told.get("parts")
        if isinstance(rows, list) and rows:
            told["sha256"] = str(told.get("blob_key")).rpartition("/")[2].removesuffix(".kvw")
            told["parts"] = [BlobPart.from_row(row) for row in rows]
        return record(told, cls, _WHAT, _ADVICE)


class Record(Struct, frozen=True):
    """A small JSON object of the catalog, which carries a version; fields that are not known are passed over.

    Attributes:
        what: Of one, in words.
        advice: How a damaged one is replaced.
    """

    what: ClassVar[str]
    advice: ClassVar[str]

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same record."""
        fields = {"version": VERSION} | to_builtins(self)
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read ``to_json``.

        Args:
            data: As stored.

        Returns:
            The record.

        Raises:
            CorruptError: A field is missing or impossible.
            FormatVersionError: A later version wrote it.
        """
        return record(versioned(data, cls.what, cls.advice), cls, cls.what, cls.advice)


def versioned(data: bytes, what: str, advice: str) -> dict[str, Any]:
    """The fields of a record; FormatVersionError where a later version wrote it."""
    return check_version(json_object(data, what, MAX_ENTRY_BYTES, advice), VERSION, what)


def parse_object(data: bytes, what: str = _WHAT, advice: str = _ADVICE) -> dict[str, Any]:
    """Parse the JSON object of a catalog key."""
    return json_object(data, what, MAX_ENTRY_BYTES, advice)


def _problems(entry: CatalogEntry) -> Iterator[str]:
    """What is wrong, each line one rule; lines further down rely on those before them."""
    name, outline = entry.document_id, entry.profile_outline
    if not 0 < len(name) <= MAX_NAME_CHARS:
        yield f"the document id needs 1 to {MAX_NAME_CHARS} characters"
    if any("\ud800" <= character <= "\udfff" for character in name):
        yield "the document id holds half a surrogate pair"
    if not 0 <= entry.tokens < _MAX_BYTES:
        yield "tokens is out of range"
    for field in ("token_digest", "profile_digest"):
        if not _DIGEST.fullmatch(getattr(entry, field)):
            yield f"{field} is not a SHA-256"
    if outline and not (entry.profile_digest and 0 < outline[0] <= MAX_OUTLINE_BYTES and _is_digest(outline[1])):
        yield "profile_outline is no length and SHA-256 of a profile"
    yield from _text_problems(entry) if entry.is_text else _blob_problems(entry)


def _text_problems(entry: CatalogEntry) -> Iterator[str]:
    of_a_blob = (entry.sha256, entry.size, entry.header_bytes, entry.profile_digest, entry.levels, entry.parts)
    if of_a_blob != ("", 0, 0, "", (), ()):
        yield "without blob_key, nothing can be told of a blob"
    if not (entry.token_digest and entry.tokens):
        yield "without blob_key, token_digest must name a text"


def _blob_problems(entry: CatalogEntry) -> Iterator[str]:
    check_key(entry.blob_key)
    if not _is_digest(entry.sha256):
        yield "sha256 is no SHA-256"
    if entry.blob_key.rpartition("/")[2] != f"{entry.sha256}.kvw":
        yield "sha256 is not the digest in blob_key"
    if not 0 < entry.size < _MAX_BYTES:
        yield "size is out of range"
    if not 0 <= entry.header_bytes <= entry.size:
        yield "head_bytes is out of range"
    if not all(0 <= size <= entry.size for _, size in entry.levels):
        yield "a level is larger than the blob"
    if entry.parts:
        yield from _part_problems(entry, entry.parts)


def _part_problems(entry: CatalogEntry, parts: tuple[BlobPart, ...]) -> Iterator[str]:
    if not 1 < len(parts) <= MAX_PARTS:
        yield "a document has 2 parts at least, or none"
    if parts[0].sha256 != entry.sha256:
        yield "the first part is not the blob"
    if [bool(part.token_digest) for part in parts] != [True] + [False] * (len(parts) - 1):
        yield "only the first part names its tokens"
    if not all(0 < part.header_bytes <= part.size and part.tokens > 0 for part in parts):
        yield "a part is out of range"
    header_bytes = sum(part.header_bytes for part in parts)
    if header_bytes > MAX_PART_HEADERS_BYTES:
        yield "the parts' headers are too long together"
    sums = sum(part.size for part in parts), header_bytes, sum(part.tokens for part in parts)
    if sums != (entry.size, entry.header_bytes, entry.tokens):
        yield "the parts do not add up"


def _is_digest(text: str) -> bool:
    return len(text) == _DIGEST_CHARS and bool(_DIGEST.fullmatch(text))


class ProfilePointer(Struct):
    """The profile in use, and the outline of one in sections, as ``CatalogEntry`` has it."""

    profile_digest: Sha256
    profile_outline: Outline | None = None

    @classmethod
    def from_json(cls, data: bytes) -> ProfilePointer:
        """Parse it; CorruptError where it is none."""
        told = "the catalog's pointer to the profile", "kvwire store rebuild writes it again"
        return record(parse_object(data, *told), cls, *told)


class LinkReportShift(Struct):
    """The shift that a report on links measured; empty where none was learnt."""

    shift: Sha256OrEmpty | None = ""

    @classmethod
    def from_json(cls, data: bytes) -> LinkReportShift:
        """Parse it; CorruptError where it is none."""
        told = "the report on links", "run kvwire check-model again"
        return record(parse_object(data, *told), cls, *told)


class Announcement(Struct):
    """Names of the objects that a collector is about to delete."""

    collecting: list[str]

    @classmethod
    def from_json(cls, data: bytes) -> Announcement:
        """Parse it; CorruptError where it is none."""
        told = "an announcement", "it names no objects: collect again"
        return record(parse_object(data, *told), cls, *told)


class _Stored(Struct):
    config_digest: str
    meta: dict[str, Any]
    window: Annotated[int, Meta(gt=0, lt=MOST_TOKENS)]
    model_config_digest: Sha256OrEmpty
    profile_digest: Sha256OrEmpty


@dataclass(frozen=True)
class ModelRecord:
    """One model, as its caches need it. JSON in a store; docs/format.md tells the fields.

    Attributes:
        meta: Of all caches of the configuration, positions on and from 0; its dtype is that of the last writer's.
        window: Most tokens that a prompt may hold.
        model_config_digest: SHA-256 of the model's own configuration file; empty where the engine has none.
        profile_digest: SHA-256 of the profile in use when the record was written; empty where there was none.
    """

    meta: CacheMeta
    window: int
    model_config_digest: str = ""
    profile_digest: str = ""

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same record."""
        from kvwire.codec.format.metadata_json import meta_to_json

        fields = {
            "version": VERSION,
            "config_digest": self.meta.config_digest(),
            "meta": meta_to_json(replace(self.meta, token_digest="")),
            "window": self.window,
            "model_config_digest": self.model_config_digest,
            "profile_digest": self.profile_digest,
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelRecord:
        """Read ``to_json``.

        Args:
            data: As stored.

        Returns:
            The record.

        Raises:
            CorruptError: A field is missing or impossible, or the record contradicts itself.
            FormatVersionError: A later version wrote it.
        """
        from kvwire.codec.format.metadata_json import meta_from_json

        stored = record(versioned(data, _MODEL, _MODEL_ADVICE), _Stored, _MODEL, _MODEL_ADVICE)
        meta = replace(meta_from_json(stored.meta), positions="on")
        if meta.config_digest() != stored.config_digest:
            raise CorruptError(f"{_MODEL} contradicts itself: {_MODEL_ADVICE}")
        return cls(meta, stored.window, stored.model_config_digest, stored.profile_digest)
