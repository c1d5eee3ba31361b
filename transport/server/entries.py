"""Whether the bytes of a catalog entry belong under its key.

The rule: a key ``v1/<namespace>/<configuration>/catalog/...json`` takes an entry of the document, or of the tokens,
whose hash the key holds and whose blob, if it has one, lies in the same namespace; ``catalog/profile.json`` takes a
pointer to a profile. Entries that are sealed, for readers with a key of their own, start with a magic and are opaque.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError
from kvwire.store import CatalogEntry, KeySpace

from .files import strict_json
from .refusals import RefusedError

if TYPE_CHECKING:
    from kvwire.store import Data

MAX_ENTRY_BYTES = 1 << 20
SEALED_MAGIC = b"\x89KVE\r\n\x1a\n"
_ANY = re.compile(r".+/catalog/.+\.json")
_ENTRY = re.compile(
    r"v1/(?P<tenant>[0-9a-f]{32})/(?P<config>[0-9a-f]{16})/catalog/"
    r"(?:(?P<kind>doc|tokens)/(?P<fold>[0-9a-f]{2})/(?P<digest>[0-9a-f]{64})|profile)\.json"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_entry_key(key: str) -> bool:
    """Whether a key is one of the catalog's, well-formed or not."""
    return _ANY.fullmatch(key) is not None


def check_entry(key: str, data: Data) -> None:
    """Refuse (422) bytes that do not belong under a key of the catalog."""
    match = _ENTRY.fullmatch(key)
    if match is None or (match["kind"] and match["digest"][:2] != match["fold"]):
        raise RefusedError(422, "the catalog has no entries of this name", reason="entry")
    content = bytes(data)
    if content.startswith(SEALED_MAGIC):
        return
    space = KeySpace(match["tenant"], match["config"])
    try:
        if match["kind"]:
            _check_document(key, space, CatalogEntry.from_json(content))
        else:
            _check_pointer(strict_json(content))
    except (CorruptError, ArgumentError) as error:
        raise RefusedError(422, f"not a catalog entry: {error}", reason="entry") from error


def _check_document(key: str, space: KeySpace, entry: CatalogEntry) -> None:
    keys = {space.document(entry.document_id)}
    if entry.token_digest:
        keys.add(space.token_entry(entry.token_digest))
    if key not in keys:
        raise RefusedError(422, "the entry speaks of another document than its key", reason="entry")
    if entry.blob_key and not entry.blob_key.startswith(f"v1/{space.tenant}/"):
        raise RefusedError(422, "the entry's blob lies in another namespace", reason="entry")


def _check_pointer(fields: object) -> None:
    digest = fields.get("profile_digest") if isinstance(fields, dict) else None
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise RefusedError(422, "the pointer names no profile", reason="entry")
