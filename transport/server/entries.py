"""Whether bytes that are not addressed by their own hash belong under their key.

The rule: a key ``v1/<namespace>/<configuration>/catalog/...json`` takes an entry of the document, or of the tokens,
whose hash the key holds and whose blob, if it has one, lies in the same namespace; ``catalog/profile.json`` takes a
pointer to a profile, ``catalog/collecting/`` a collector's announcement. A key that ends in ``.kvt`` takes a text;
whether its tokens are those of the key is for its readers to check, as they do. What is sealed, for readers with a key
of their own, starts with a magic and is opaque.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError
from kvwire.store import CatalogEntry, KeySpace, content_digest, is_catalog_key, strict_json, text_digest
from kvwire.transport.server.http_errors import RefusedError
from kvwire.types import SEALED_MAGIC, TEXT_MAGIC

if TYPE_CHECKING:
    from kvwire.store import Data

MAX_ENTRY_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 20
_ANY = re.compile(r".+/catalog/.+\.json")
_ENTRY = re.compile(
    r"v1/(?P<tenant>[0-9a-f]{32})/(?P<config>[0-9a-f]{16})/catalog/"
    r"(?:(?P<kind>doc|tokens)/(?P<fold>[0-9a-f]{2})/(?P<digest>[0-9a-f]{64})|collecting/[0-9a-f]{32}|profile)\.json"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def limit_of(key: str, content_bytes: int) -> int | None:
    """Bytes that an object may have, ``content_bytes`` where its key has its hash; None where it cannot be written.

    The catalog takes small entries alone: a folder keeps them as rows of a database.
    """
    by_content, text = content_digest(key) is not None, text_digest(key) is not None
    if is_catalog_key(key) and (by_content or text):
        return None
    if by_content:
        return content_bytes
    if text:
        return MAX_TEXT_BYTES
    return MAX_ENTRY_BYTES if _ANY.fullmatch(key) else None


def check_entry(key: str, data: Data) -> None:
    """Refuse (422) bytes that do not belong under a key of the catalog or of a text."""
    head = bytes(data[: len(SEALED_MAGIC)])
    if text_digest(key) is not None:
        if head not in (TEXT_MAGIC, SEALED_MAGIC):
            raise RefusedError(422, "not a text of kvwire's", reason="entry")
        return
    match = _ENTRY.fullmatch(key)
    if match is None or (match["kind"] and match["digest"][:2] != match["fold"]):
        raise RefusedError(422, "the catalog has no entries of this name", reason="entry")
    if head == SEALED_MAGIC:
        return
    content = bytes(data)
    space = KeySpace(match["tenant"], match["config"])
    try:
        if match["kind"]:
            _check_document(key, space, CatalogEntry.from_json(content))
        elif key == space.current_profile:
            _check_pointer(strict_json(content))
        else:
            _check_announcement(strict_json(content))
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


def _check_announcement(fields: object) -> None:
    names = fields.get("collecting") if isinstance(fields, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RefusedError(422, "the announcement names no objects", reason="entry")
