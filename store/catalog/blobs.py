"""Blobs and texts of documents: as they are stored, sealed or not, in one piece or in parts."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvwire import codec, types
from kvwire.errors import AuthError, CorruptError, FormatVersionError, NotFoundError, StorageError
from kvwire.store.catalog.objects import MAX_SMALL_BYTES
from kvwire.store.keys import space_of
from kvwire.store.listing import read_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.store.records import CatalogEntry
    from kvwire.types import BlobInfo


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
        space = space_of(entry.blob_key)
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

        space = space_of(entry.blob_key)
        wanted = [
            (space.blob(entry.parts[piece.part].sha256), piece.start, piece.end)
            for piece in Extents(entry.parts).pieces(start, end)
        ]
        return b"".join(read() for _, read in read_ahead(store, wanted, lambda piece: store.get(*piece)))

    def header(self, entry: CatalogEntry) -> BlobInfo:
        """What a document's blob says of itself, of several parts what they say together."""
        try:
            return self.reader(entry).read_header(self.get(entry, 0, entry.header_bytes))
        except (NotFoundError, CorruptError) as error:
            msg = f"the blob of {entry.document_id!r} cannot be read: encode the document again ({error})"
            raise type(error)(msg) from error

    def write(self, key: str, blob: bytes, *, overwrite: bool = False) -> None:
        """Write a blob that no entry names yet; one that lies there stays, unless it may soon be collected."""
        wrote = not overwrite and self._objects.store.create(key, blob)
        if overwrite or not (wrote or self._objects.is_young(key)):
            self._objects.store.put(key, blob)


class Texts:
    """A tenant's texts; ``Catalog.texts`` is one."""

    def __init__(self, objects: TenantObjects) -> None:
        """Read and write through the catalog's objects."""
        self._objects = objects

    def put(self, config: Config, token_ids: Sequence[int], *, document_id: str = "", overwrite: bool = False) -> str:
        """Write a text where it is not there yet; an entry that names it comes afterwards."""
        digest = types.digest_tokens(token_ids)
        key = self._objects.keys(config).text(digest)
        if not overwrite and self._objects.is_young(key) and (not document_id or document_id in self._names_in(key)):
            return digest
        names = [name for name in self._names_in(key) if name != document_id]
        self._objects.write(key, codec.pack_text(token_ids, [*names, document_id] if document_id else names))
        return digest

    def documents(self, config: Config, token_digest: str) -> tuple[str, ...]:
        """Which documents have a text, as far as it says itself."""
        return self._names_in(self._objects.keys(config).text(token_digest))

    def get(self, config: Config, token_digest: str) -> tuple[int, ...]:
        """Read a text."""
        ids = self._read(self._objects.keys(config).text(token_digest), f"text {token_digest[:12]}")
        if types.digest_tokens(ids) != token_digest:
            msg = f"text {token_digest[:12]} is damaged in {self._objects.store.url}: encode the document again"
            raise CorruptError(msg)
        return ids

    def of(self, config: Config, entry: CatalogEntry) -> tuple[int, ...]:
        """Read a document's text from beside its blobs."""
        if not entry.parts:
            return self.get(config, entry.token_digest)
        first, *others = entry.parts
        texts = [self.get(config, first.token_digest)]
        texts += [self.get_part(config, part.sha256) for part in others]
        ids = tuple(chain.from_iterable(texts))
        if types.digest_tokens(ids) != entry.token_digest:
            msg = f"the texts of the parts of {entry.document_id!r} are of another document: encode it again"
            raise CorruptError(msg)
        return ids

    def put_part(self, config: Config, sha256: str, token_ids: Sequence[int]) -> str:
        """Write the text of a document's part where it is not there yet."""
        key = self._objects.keys(config).part_text(sha256)
        if not self._objects.is_young(key):
            self._objects.write(key, codec.pack_text(token_ids))
        return key

    def get_part(self, config: Config, sha256: str) -> tuple[int, ...]:
        """Read the text of a document's part."""
        return self._read(self._objects.keys(config).part_text(sha256), f"the text of part {sha256[:12]}")

    def _read(self, key: str, what: str) -> tuple[int, ...]:
        data = self._objects.read(key, MAX_SMALL_BYTES)
        if data is None:
            raise NotFoundError(f"{what} is not in {self._objects.store.url}: encode the document again")
        return codec.read_text(data)

    def _names_in(self, key: str) -> tuple[str, ...]:
        try:
            data = self._objects.read(key, MAX_SMALL_BYTES)
            return () if data is None else codec.read_text_documents(data)
        except (AuthError, CorruptError, FormatVersionError, StorageError):
            return ()
