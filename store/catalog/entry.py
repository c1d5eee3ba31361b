"""A catalog entry: what a reader must know about a blob before it fetches any of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, CorruptError
from kvwire.store.keys import MAX_NAME_CHARS, check_key, content_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    _Check = tuple[str, Callable[[], bool]]

MAX_ENTRY_BYTES = 1 << 20  # an entry holds a few hundred bytes; more is not read
_MAX_BYTES = 1 << 62
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")


@dataclass(frozen=True)
class CatalogEntry:
    """One document's blob, or, where ``is_text``, one document of which only the text is kept.

    blob_key, sha256, size: where it lies and what it is. header_bytes: length of its head. All empty or 0, and no
    levels, without a blob; the text is then found by its token digest. tokens: of the document. token_digest,
    profile_digest: SHA-256, or the empty string where unknown or not needed. levels: (name, cumulative bytes) of each
    level, coarsest first.
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
        fields = asdict(self)
        fields["head_bytes"] = fields.pop("header_bytes")  # the name in the catalog since its first version
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CatalogEntry:
        """Parse strictly; unknown fields are ignored. Raises CorruptError."""
        fields = parse_object(data)
        levels = _field(fields, "levels", list)
        try:
            return cls(
                document_id=_field(fields, "document_id", str),
                blob_key=_field(fields, "blob_key", str),
                sha256=_field(fields, "sha256", str),
                size=_field(fields, "size", int),
                header_bytes=_field(fields, "head_bytes", int),
                tokens=_field(fields, "tokens", int),
                token_digest=_field(fields, "token_digest", str),
                profile_digest=_field(fields, "profile_digest", str),
                levels=tuple(_level(level) for level in levels),
            )
        except ArgumentError as error:
            msg = f"the catalog holds a bad entry ({error}): write the document again"
            raise CorruptError(msg) from error


def strict_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON. Raises ArgumentError, which quotes nothing of it, for NaN and where a name appears twice, too."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        msg = f"not valid JSON at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        msg = "not valid JSON: it must be UTF-8, hardly nested, and name nothing twice in one object"
    raise ArgumentError(msg)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object as ``strict_json`` does; CorruptError for anything else, and beyond MAX_ENTRY_BYTES."""
    if len(data) > MAX_ENTRY_BYTES:
        msg = f"a catalog entry is longer than {MAX_ENTRY_BYTES} bytes"
        raise CorruptError(msg)
    try:
        value = strict_json(data)
    except ArgumentError as error:
        msg = f"a catalog entry is {error}"
        raise CorruptError(msg) from error
    if not isinstance(value, dict):
        msg = f"a catalog entry must be a JSON object, got {type(value).__name__}"
        raise CorruptError(msg)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError
    return fields


def _no_constant(_: str) -> None:
    raise ValueError  # NaN and Infinity are no JSON


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401 - the type checked for is the caller's
    value = fields.get(name)
    if type(value) is not kind:  # exactly: JSON's true is no integer
        msg = f"a catalog entry's {name} must be of type {kind.__name__}, got {type(value).__name__}"
        raise CorruptError(msg)
    return value


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
        ("tokens is out of range", lambda: 0 <= entry.tokens < _MAX_BYTES),
        ("token_digest is not a SHA-256", lambda: bool(_DIGEST.fullmatch(entry.token_digest))),
        ("profile_digest is not a SHA-256", lambda: bool(_DIGEST.fullmatch(entry.profile_digest))),
        *(_text_checks(entry) if entry.is_text else _blob_checks(entry)),
    )
    return next((message for message, holds in checks if not holds()), None)


def _blob_checks(entry: CatalogEntry) -> tuple[_Check, ...]:
    return (
        ("blob_key is not a key", lambda: bool(check_key(entry.blob_key))),
        ("sha256 is not the digest in blob_key", lambda: content_digest(entry.blob_key) == entry.sha256),
        ("size is out of range", lambda: 0 < entry.size < _MAX_BYTES),
        ("head_bytes is out of range", lambda: 0 <= entry.header_bytes <= entry.size),
        ("a level is larger than the blob", lambda: all(0 <= size <= entry.size for _, size in entry.levels)),
    )


def _text_checks(entry: CatalogEntry) -> tuple[_Check, ...]:
    of_a_blob = (entry.sha256, entry.size, entry.header_bytes, entry.profile_digest, entry.levels)
    return (
        ("without blob_key, nothing can be told of a blob", lambda: of_a_blob == ("", 0, 0, "", ())),
        ("without blob_key, token_digest must name a text", lambda: bool(entry.token_digest and entry.tokens)),
    )
