"""What a store is: named, immutable-looking byte strings that can be read in ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvwire.errors import ArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class ObjectStat:
    """Size in bytes and strong entity tag (without quotes) of one object."""

    size: int
    etag: str


class Store(Protocol):
    """Where blobs live. Every method may be called from any thread and raises only ``kvwire.errors``.

    Keys are checked by ``keys.check_key``: a bad one is an ArgumentError, a missing object a NotFoundError, anything
    that the disk or server did wrong a StorageError.
    """

    @property
    def url(self) -> str:
        """The store's address, as ``open_store`` takes it."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` (exclusive; None: to the end), clamped at the object's end."""
        ...

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write the whole object: readers see the old bytes or the new ones, never a mixture."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is no error."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys that start with ``prefix``, in ascending order."""
        ...

    def close(self) -> None:
        """Give back connections and memory; the store is not used afterwards."""
        ...


class ObjectReader(Protocol):
    """One version of one object, held open: it stays the same while the store's copy is replaced or deleted."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    @property
    def etag(self) -> str:
        """Strong entity tag, without quotes."""
        ...

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` (exclusive), clamped at the object's end."""
        ...

    def close(self) -> None:
        """Let go of the object."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """A store that can hold one version of an object open."""

    def snapshot(self, key: str) -> ObjectReader:
        """Open the object as it is now; the caller closes the reader."""
        ...


class _PlainReader:
    """Reads through ``Store.get``, for stores that keep no versions: of changes, only one of size is noticed."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._stat = store.stat(key)

    @property
    def size(self) -> int:
        return self._stat.size

    @property
    def etag(self) -> str:
        return self._stat.etag

    def read(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        data = self._store.get(self._key, start, max(start, end))
        if len(data) != max(0, end - start):
            msg = f"{self._key} changed its size while being read: open it again"
            raise StorageError(msg)
        return data

    def close(self) -> None:
        pass


def open_object(store: Store, key: str) -> ObjectReader:
    """Open one object of any store; the caller closes the reader. Raises NotFoundError where there is none."""
    return store.snapshot(key) if isinstance(store, Snapshots) else _PlainReader(store, key)


def clamp_range(start: int, end: int | None, size: int) -> tuple[int, int]:
    """Cut a half-open range at the object's size; ArgumentError where it starts below 0 or ends before it starts."""
    if start < 0 or (end is not None and end < start):
        msg = f"a byte range must run forwards from 0 or later, got {start} to {end}"
        raise ArgumentError(msg)
    return min(start, size), size if end is None else min(end, size)
