"""The objects of one tenant in a store: their keys, and what is sealed of them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from kvwire.errors import ArgumentError, AuthError, ConflictError, CorruptError, NotFoundError, StorageError
from kvwire.store.base import is_there
from kvwire.store.catalog.announcements import is_old, wait_for_collectors
from kvwire.store.key_kinds import content_digest, is_intact
from kvwire.store.keys import KeySpace
from kvwire.store.listing import read_ahead, write_all
from kvwire.store.records import MAX_ENTRY_BYTES
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvwire.store.base import Store
    from kvwire.store.crypto.sealing import TenantKeys
    from kvwire.store.records import CatalogEntry

Config: TypeAlias = str | KeySpace
"""A model configuration: ``CacheMeta.config_digest()``, or what ``Catalog.configurations`` found."""
MAX_SMALL_BYTES = 1 << 30
"""Of a profile or text: more is not read."""


class TenantObjects:
    """One tenant's objects in a store: all parts of its catalog read and write through this."""

    def __init__(self, store: Store, tenant: str, keys: TenantKeys | None) -> None:
        """Keep the store; nothing is read or written yet."""
        self.store, self.tenant, self.secrets = store, tenant, keys

    def keys(self, config: Config) -> KeySpace:
        """The keys of this tenant for one model configuration."""
        space = config if isinstance(config, KeySpace) else KeySpace.of(self.tenant, config)
        if space.tenant != self.tenant:
            raise ArgumentError("that model configuration is another tenant's: list the configurations of this one")
        return space

    @property
    def naming_secret(self) -> bytes:
        """Keys the names that could be guessed from hashes of short texts; empty where nothing is sealed."""
        return self.secrets.naming_secret if self.secrets else b""

    def read(self, key: str, most: int = MAX_ENTRY_BYTES + 1) -> bytes | None:
        """Read an object, and open it where it is sealed; None where it is not there."""
        try:
            return self._opened(key, self.store.get(key, 0, most))
        except NotFoundError:
            return None

    def read_with_etag(self, key: str) -> tuple[bytes, str] | None:
        """``read``, for ``Store.replace``."""
        try:
            data, etag = self.store.get_with_etag(key, MAX_ENTRY_BYTES + 1)
        except NotFoundError:
            return None
        return self._opened(key, data), etag

    def _opened(self, key: str, data: bytes) -> bytes:
        if content_digest(key):
            return data
        if self.secrets:
            return self.secrets.unseal(data, key)
        if data.startswith(SEALED_MAGIC):
            raise AuthError(f"{key} is sealed: give the keyring that it was written with (--keys)")
        return data

    def read_each(self, keys: Iterable[str]) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """``read`` several objects, several at a time where the store is far."""
        return read_ahead(self.store, keys, self.read)

    def content(self, key: str, what: str, absent: str, damaged: str) -> bytes:
        """Content as its key names it; where it is not, an error says what it is and one of two pieces of advice."""
        try:
            data = intact(self.store, key, MAX_SMALL_BYTES)
        except NotFoundError as error:
            raise NotFoundError(f"{what} is not in {self.store.url}: {absent}") from error
        if data is None:
            raise CorruptError(f"{what} is damaged in {self.store.url}: {damaged}")
        return data

    def is_young(self, key: str) -> bool:
        """Whether content is there and will be for a while; False where the store cannot tell."""
        try:
            return not is_old(self.store.stat(key).modified)
        except (NotFoundError, StorageError):
            return False

    def sealed(self, key: str, data: bytes) -> bytes:
        """An object of the catalog as it is to be stored; content is never sealed here."""
        return self.secrets.seal(data, key) if self.secrets and not content_digest(key) else data

    def write(self, key: str, data: bytes) -> None:
        """Write an object, sealed where this tenant's are."""
        self.store.put(key, self.sealed(key, data))

    def write_many(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Write objects of the catalog, several at a time."""
        write_all(self.store, ((key, self.sealed(key, data)) for key, data in entries))

    def confirm(self, space: KeySpace, contents: Mapping[str, bytes], *others: str) -> None:
        """Write content again that a collector took before it saw the entry that names it; ``others``: wait for them.

        Called after the entry was written.
        """
        wait_for_collectors(self.store, space, [*contents, *others])
        for key, data in contents.items():
            is_lost = True
            with suppress(StorageError):  # a store with pending writes takes them while its remote cannot be asked
                is_lost = not is_there(self.store, key, len(data))
            if is_lost:  # hardly ever; to create it without a look would send all of it
                self.store.create(key, data)

    def replace_entry(self, space: KeySpace, entry: CatalogEntry, etag: str) -> None:
        """Write an entry where it is still the one that was read."""
        key = space.document(entry.document_id)
        if not self.store.replace(key, self.sealed(key, entry.to_json()), etag):
            raise ConflictError(
                f"document {entry.document_id!r} was changed by another writer meanwhile, and its entry is as that one "
                "left it: append or ask again, which goes on from there (kvwire append --fork leaves it as it is)"
            )


def intact(store: Store, key: str, most: int | None = None) -> bytes | None:
    """Content as its key names it; None where it is damaged, not only in a copy of it nearby."""
    for _ in range(2):
        data = store.get(key, 0, most)
        if is_intact(key, data):
            return data
        store.distrust(key)
    return None


def refresh(store: Store, key: str) -> bool:
    """Write content again where a collector may soon take it; False where it is gone or damaged."""
    try:
        if is_old(store.stat(key).modified):
            data = intact(store, key)
            if data is None:
                return False
            store.put(key, data)
    except NotFoundError:
        return False
    return True
