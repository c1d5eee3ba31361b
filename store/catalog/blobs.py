"""Blobs of documents: as they are stored, sealed or not, in one piece or in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.store.keys import KeySpace
from kvwire.store.listing import ahead

if TYPE_CHECKING:
    from kvwire.store.catalog.objects import TenantObjects
    from kvwire.store.catalog_entry import CatalogEntry
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.types import BlobInfo

_READERS = 8


class Blobs:
    """A tenant's blobs; ``Catalog.blobs`` is one."""

    def __init__(self, objects: TenantObjects) -> None:
        """Read and write through the catalog's objects."""
        self._objects = objects

    @property
    def is_sealed(self) -> bool:
        """Whether this tenant's objects are stored encrypted."""
        return bool(self._objects.secrets)

    def seal(self, blob: bytes) -> bytes:
        """A blob as it is to be stored: sealed, where this tenant's are."""
        return self._objects.secrets.seal_blob(blob) if self._objects.secrets else blob

    def of(self, entry: CatalogEntry) -> dict[str, int]:
        """Keys and sizes of a document's blobs."""
        if not entry.parts:
            return {} if entry.is_text else {entry.blob_key: entry.size}
        space = self._space(entry)
        return {space.blob(part.sha256): part.size for part in entry.parts}

    def reader(self, entry: CatalogEntry | None = None) -> BlobReader:
        """A reader for a document as it is stored; without an entry, for one blob."""
        if entry is None or not entry.parts:
            from kvwire.store.crypto.sealing import PlainBlob

            return self._objects.secrets.blob_reader() if self._objects.secrets else PlainBlob()
        from kvwire.store.crypto.joined import JoinedBlob

        return JoinedBlob(entry.parts, [self.reader() for _ in entry.parts])

    def get(self, entry: CatalogEntry, start: int = 0, end: int | None = None) -> bytes:
        """Read a range of a document's blob, or of what its parts would be as one."""
        store = self._objects.store
        if not entry.parts:
            return store.get(entry.blob_key, start, end)
        from kvwire.store.crypto.joined import Extents

        space = self._space(entry)
        wanted = [
            (space.blob(entry.parts[piece.part].sha256), piece.start, piece.end)
            for piece in Extents(entry.parts).pieces(start, end)
        ]
        return b"".join(
            read() for _, read in ahead(wanted, lambda piece: store.get(*piece), 1 if store.is_local else _READERS)
        )

    def header(self, entry: CatalogEntry) -> BlobInfo:
        """What a document's blob says of itself, of several parts what they say together."""
        return self.reader(entry).read_header(self.get(entry, 0, entry.header_bytes))

    def write(self, key: str, blob: bytes, *, overwrite: bool = False) -> None:
        """Write a blob that no entry names yet; one that lies there stays, unless it may soon be collected."""
        wrote = not overwrite and self._objects.store.create(key, blob)
        if overwrite or not (wrote or self._objects.is_young(key)):
            self._objects.store.put(key, blob)

    def _space(self, entry: CatalogEntry) -> KeySpace:
        return KeySpace(self._objects.tenant, entry.blob_key.split("/")[2])
