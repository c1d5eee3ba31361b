"""Documents of several parts in the catalog: how they grow, and how they are read as one.

An entry lists all parts of its document, and each part is a blob that names the tokens before its own. A part is
written before the entry that names it, and the entry only where no other writer changed it since it was read: of two
who append to one document at the same time, one is told to look again, and no entry ever loses a part that it had.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvwire import types
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.store.base import is_there
from kvwire.store.key_kinds import read_entry
from kvwire.store.keys import check_new_name
from kvwire.store.records import BlobPart, CatalogEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.store.catalog.blobs import Blobs, Texts
    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.keys import KeySpace


class Version(NamedTuple):
    """An entry as it was read, None where there is none, and what tells whether it is still the same."""

    entry: CatalogEntry | None
    etag: str


class GrownDocuments:
    """A tenant's documents as they grow; ``Catalog.grown`` gives them."""

    def __init__(self, objects: TenantObjects, blobs: Blobs, texts: Texts) -> None:
        """Read and write through the catalog's objects."""
        self._objects, self._blobs, self._texts, self._store = objects, blobs, texts, objects.store

    def version(self, config: Config, document_id: str) -> Version:
        """Look a document up in order to replace its entry."""
        key = self._objects.keys(config).document(document_id)
        found = self._objects.read_with_etag(key)
        if found is None:
            return Version(None, "")
        return Version(read_entry(key, found[0], document_id=document_id), found[1])

    def append_part(  # noqa: PLR0913 - the fields of one part
        self,
        config: Config,
        whole: CatalogEntry,
        etag: str,
        blob: bytes,
        token_ids: Sequence[int],
        *,
        document_id: str,
        header_bytes: int,
        token_digest: str,
        levels: Sequence[tuple[str, int]],
    ) -> CatalogEntry:
        """Write one more part of a document, and then the entry that names all of them."""
        space = self._objects.keys(config)
        added = BlobPart(hashlib.sha256(blob).hexdigest(), len(blob), header_bytes, len(token_ids))
        entry = replace(longer(whole, added, token_digest, levels), document_id=check_new_name(document_id, "document"))
        if document_id != whole.document_id:  # nothing keeps the parts of what it is forked from
            self._check_earlier(entry)
        self._blobs.write(space.blob(added.sha256), blob)
        self._texts.put_part(space, added.sha256, token_ids)
        self._objects.replace_entry(space, entry, etag)
        self._confirm_parts(space, entry, blob, token_ids)
        return entry

    def _confirm_parts(self, space: KeySpace, entry: CatalogEntry, blob: bytes, token_ids: Sequence[int]) -> None:
        """Write again what a collector took before it saw the entry; raise NotFoundError where it is not at hand."""
        added = entry.parts[-1].sha256
        blobs, text = self._blobs.of(entry), space.part_text(added)
        self._objects.confirm(space, {[*blobs][-1]: blob}, *blobs, text)
        self._texts.put_part(space, added, token_ids)
        self._check_earlier(entry)

    def _check_earlier(self, entry: CatalogEntry) -> None:
        """Raise NotFoundError where a part before the last is gone."""
        for number, key in enumerate([*self._blobs.of(entry)][:-1]):
            if not is_there(self._store, key):
                msg = f"part {number} of {entry.document_id!r} is gone from the store: encode the whole document anew"
                raise NotFoundError(msg)


def longer(whole: CatalogEntry, added: BlobPart, token_digest: str, levels: Sequence[tuple[str, int]]) -> CatalogEntry:
    """The entry of a document with one more part."""
    if [name for name, _ in levels] != [name for name, _ in whole.levels]:
        msg = f"a part of {whole.document_id!r} has other levels than those before it: encode the whole document anew"
        raise ArgumentError(msg)
    first = BlobPart(whole.sha256, whole.size, whole.header_bytes, whole.tokens, whole.token_digest)
    return replace(
        whole,
        size=whole.size + added.size,
        header_bytes=whole.header_bytes + added.header_bytes,
        tokens=whole.tokens + added.tokens,
        token_digest=token_digest,
        levels=tuple((name, size + more) for (name, size), (_, more) in zip(whole.levels, levels, strict=True)),
        parts=(*(whole.parts or (first,)), added),
    )


def leading(whole: CatalogEntry, tokens: int, token_ids: Sequence[int]) -> CatalogEntry | None:
    """The longest beginning in whole parts, without levels, in a document's first ``tokens``; None: there is none."""
    if whole.tokens <= tokens:
        return whole
    parts, at = [], 0
    for part in whole.parts:
        if at + part.tokens > tokens:
            break
        parts.append(part)
        at += part.tokens
    if not parts:
        return None
    return replace(
        whole,
        size=sum(part.size for part in parts),
        header_bytes=sum(part.header_bytes for part in parts),
        tokens=at,
        token_digest=types.digest_tokens(token_ids[:at]),
        levels=(),
        parts=tuple(parts) if len(parts) > 1 else (),
    )
