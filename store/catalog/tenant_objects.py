"""The objects of one tenant in a store: their keys, and what is sealed of them."""

from __future__ import annotations

import hashlib
from copy import copy
from typing import TYPE_CHECKING, TypeAlias

from kvwire.errors import ArgumentError, AuthError, ConflictError, NotFoundError, StorageError
from kvwire.store.catalog.announcements import is_old
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES
from kvwire.store.key_kinds import content_digest
from kvwire.store.keys import KeySpace, check_tenant, tenant_hash
from kvwire.store.listing import ahead, children, read_ahead
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from kvwire.store.base import Store
    from kvwire.store.catalog_entry import CatalogEntry
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.crypto.sealing import BlobReader, TenantKeys
    from kvwire.types import BlobInfo

Config: TypeAlias = str | KeySpace
"""A model configuration: ``CacheMeta.config_digest()``, or what ``Catalog.configurations`` found."""
_WRITERS = 8
MAX_SMALL_BYTES = 1 << 30
"""Of a profile or text: more is not read."""


class TenantObjects:
    """One tenant's objects in a store: what all that is kept for it goes through."""

    def __init__(
        self, store: Store, tenant: str = "default", salt: bytes = b"", *, keyring: Keyring | None = None
    ) -> None:
        """Keep the store; nothing is read or written yet."""
        self._store = store
        self._tenant = tenant_hash(tenant, salt)
        self._keys: TenantKeys | None = keyring.tenant(self._tenant) if keyring else None

    @classmethod
    def of_hash(cls, store: Store, tenant: str, *, keyring: Keyring | None = None) -> Self:
        """The catalog of a tenant that is known by its hash alone, as operators see it in keys."""
        catalog = cls(store)
        catalog._tenant = check_tenant(tenant)
        catalog._keys = keyring.tenant(tenant) if keyring else None
        return catalog

    def over(self, store: Store) -> Self:
        """The same catalog, read and written through another store object, such as one that measures."""
        other = copy(self)
        other._store = store  # noqa: SLF001 - of this class
        return other

    @property
    def store(self) -> Store:
        """The store underneath."""
        return self._store

    @property
    def tenant(self) -> str:
        """The tenant's hash, as keys carry it."""
        return self._tenant

    def keys(self, config: Config) -> KeySpace:
        """The keys of this tenant for one model configuration."""
        space = config if isinstance(config, KeySpace) else KeySpace.of(self._tenant, config)
        if space.tenant != self._tenant:
            msg = "that model configuration is another tenant's: list the configurations of this one"
            raise ArgumentError(msg)
        return space

    def seal(self, blob: bytes) -> bytes:
        """A blob as it is to be stored: sealed, where this tenant's are."""
        return self._keys.seal_blob(blob) if self._keys else blob

    @property
    def is_sealed(self) -> bool:
        """Whether this tenant's objects are stored encrypted."""
        return bool(self._keys)

    def blob_reader(self) -> BlobReader:
        """A reader for one blob as it is stored."""
        from kvwire.store.crypto.sealing import PlainBlob

        return self._keys.blob_reader() if self._keys else PlainBlob()

    def blobs_of(self, entry: CatalogEntry) -> dict[str, int]:
        """Keys and sizes of a document's blobs."""
        if not entry.parts:
            return {} if entry.is_text else {entry.blob_key: entry.size}
        space = KeySpace(self._tenant, entry.blob_key.split("/")[2])
        return {space.blob(part.sha256): part.size for part in entry.parts}

    def reader_of(self, entry: CatalogEntry) -> BlobReader:
        """What reads a document as it is stored."""
        if not entry.parts:
            return self.blob_reader()
        from kvwire.store.crypto.joined import JoinedBlob

        return JoinedBlob(entry.parts, [self.blob_reader() for _ in entry.parts])

    def get_blob(self, entry: CatalogEntry, start: int = 0, end: int | None = None) -> bytes:
        """Read a range of a document's blob, or of what its parts would be as one."""
        if not entry.parts:
            return self._store.get(entry.blob_key, start, end)
        from kvwire.store.crypto.joined import Extents

        space = KeySpace(self._tenant, entry.blob_key.split("/")[2])
        wanted = [
            (space.blob(entry.parts[piece.part].sha256), piece.start, piece.end)
            for piece in Extents(entry.parts).pieces(start, end)
        ]
        threads = 1 if self._store.is_local else 8
        return b"".join(read() for _, read in ahead(wanted, lambda piece: self._store.get(*piece), threads))

    def read_header(self, entry: CatalogEntry) -> BlobInfo:
        """What a document's blob says of itself, of several parts what they say together."""
        return self.reader_of(entry).read_header(self.get_blob(entry, 0, entry.header_bytes))

    def configurations(self) -> Iterator[KeySpace]:
        """Model configurations that this tenant has anything of."""
        return (KeySpace(self._tenant, name) for name in children(self._store, f"v1/{self._tenant}/"))

    def read(self, config: Config, key: str) -> bytes | None:
        """Read an object of the catalog."""
        self.keys(config)
        return self.read_object(key)

    def read_each(self, config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """``read`` several objects, several at a time where the store is far."""
        space = self.keys(config)
        return read_ahead(self._store, keys, lambda key: self.read(space, key))

    @property
    def naming_secret(self) -> bytes:
        """Keys the names that could be guessed from hashes of short texts; empty where nothing is sealed."""
        return self._keys.naming_secret if self._keys else b""

    def put_entries(self, config: Config, entries: Iterable[tuple[str, bytes]]) -> None:
        """Write objects of the catalog, several at a time where the store knows how to."""
        self.keys(config)
        if self._store.is_local:
            seal = self._keys.seal if self._keys else lambda data, _: data
            self._store.put_many((key, seal(data, key)) for key, data in entries)
            return
        for _, written in ahead(entries, lambda pair: self.put_entry(*pair), _WRITERS):
            written()

    def intact(self, key: str, most: int | None = None) -> bytes | None:
        """Content that its key names by digest; None where it is damaged, not only in a copy of it nearby."""
        for _ in range(2):
            data = self._store.get(key, 0, most)
            if hashlib.sha256(data).hexdigest() == content_digest(key):
                return data
            self._store.distrust(key)
        return None

    def replace_entry(self, space: KeySpace, entry: CatalogEntry, etag: str) -> None:
        """Write an entry where it is still the one that was read."""
        key, data = space.document(entry.document_id), entry.to_json()
        sent = self._keys.seal(data, key) if self._keys else data
        if not self._store.replace(key, sent, etag):
            msg = (
                f"document {entry.document_id!r} was changed by another writer meanwhile, and its entry is as that one "
                "left it: look at the document and append again, or to a fork (--fork)"
            )
            raise ConflictError(msg)

    def write_blob(self, key: str, blob: bytes, *, overwrite: bool = False) -> None:
        """Write a blob that no entry names yet; one that lies there stays, unless it may soon be collected."""
        wrote = not overwrite and self._store.create(key, blob)
        if overwrite or not (wrote or self.is_young(key)):
            self._store.put(key, blob)

    def is_young(self, key: str) -> bool:
        """Whether content is there and will be for a while; where nobody can say, it is written again."""
        try:
            return not is_old(self._store.stat(key).modified)
        except (NotFoundError, StorageError):
            return False

    def read_object(self, key: str, most: int = MAX_ENTRY_BYTES + 1) -> bytes | None:
        """Read an object, and open it where it is sealed; None where it is not there."""
        try:
            data = self._store.get(key, 0, most)
        except NotFoundError:
            return None
        if content_digest(key):
            return data
        if self._keys:
            return self._keys.unseal(data, key)
        if data.startswith(SEALED_MAGIC):
            msg = f"{key} is sealed: give the keyring that it was written with (--keys)"
            raise AuthError(msg)
        return data

    def put_entry(self, key: str, data: bytes) -> None:
        """Write an object, sealed where this tenant's are."""
        self._store.put(key, self._keys.seal(data, key) if self._keys and not content_digest(key) else data)
