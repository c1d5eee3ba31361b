"""What a store is: named, immutable-looking byte strings that can be read in ranges."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from kvwire.errors import ArgumentError, NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


Data: TypeAlias = bytes | bytearray | memoryview
_COMPARED_BYTES = 8 << 20


@dataclass(frozen=True)
class ObjectStat:
    """What a store tells of an object without giving its bytes.

    Attributes:
        size: Length in bytes.
        etag: Strong entity tag, without quotes.
        modified: Time of writing in Unix seconds; 0: unknown.
    """

    size: int
    etag: str
    modified: float = 0.0


@dataclass(frozen=True)
class Listed:
    """One object of a listing.

    Attributes:
        key: Its key.
        size: Its length in bytes.
        modified: Time of writing in Unix seconds; 0: unknown.
    """

    key: str
    size: int
    modified: float = 0.0


class Store(Protocol):
    """Where blobs live. Every method may be called from any thread and raises only ``kvwire.errors``.

    Keys are checked by ``keys.check_key``: a bad one is an ArgumentError, a missing object a NotFoundError, anything
    that the disk or server did wrong a StorageError, refused credentials an AuthError. Where there is an object ``a``,
    a store may refuse ``a/b`` with a ConflictError, and the other way round: folders do, S3 and memory hold both, and
    nothing that kvwire writes needs both.

    A store that inherits from this class gets ``get_with_etag``, ``create``, ``put_many``, ``delete_many`` and ``keys``
    made of the other methods, a ``distrust`` that does nothing, and the answers of an ordinary remote store about what
    it can do besides.

    Attributes:
        is_local: Whether objects are at hand, so that reading several ahead gains nothing.
        is_lasting: Whether objects outlive this process.
    """

    is_local: bool = False
    is_lasting: bool = True

    @property
    def url(self) -> str:
        """The store's address, as ``open_store`` takes it."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a range of an object.

        Args:
            key: The object.
            start: First byte.
            end: The byte after the last; None: to the object's end.

        Returns:
            The bytes, clamped at the object's end.

        Raises:
            NotFoundError: There is no such object.
            ArgumentError: The key is none, or the range does not run forwards from 0 or later.
        """
        ...

    def get_with_etag(self, key: str, end: int | None = None) -> tuple[bytes, str]:
        """Read an object that may change, for ``replace``; one request where the store can.

        Args:
            key: The object.
            end: The byte after the last; None: to the object's end.

        Returns:
            The bytes and their entity tag, or an older one where the object is being replaced.

        Raises:
            NotFoundError: There is no such object.
        """
        etag = self.stat(key).etag
        return self.get(key, 0, end), etag

    def stat(self, key: str) -> ObjectStat:
        """Ask for an object's size and entity tag.

        Args:
            key: The object.

        Returns:
            Size, entity tag and time of writing.

        Raises:
            NotFoundError: There is no such object.
        """
        ...

    def put(self, key: str, data: Data) -> None:
        """Write the whole object: readers see the old bytes or the new ones, never a mixture.

        In a lasting store, the object outlives a crash of the machine from the return on.

        Args:
            key: The object.
            data: All of its bytes.
        """
        ...

    def create(self, key: str, data: Data) -> bool:
        """Write where there is nothing of that size yet. Saves time, but is no lock.

        Meant for content-addressed keys, where every writer of a key writes the same bytes.

        Args:
            key: The object.
            data: All of its bytes.

        Returns:
            Whether it wrote.
        """
        if is_there(self, key, memoryview(data).nbytes):
            return False
        self.put(key, data)
        return True

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write only where no other writer has written since: of several writers that saw one version, one wins.

        Stores that know no such thing look first and then write, which leaves a moment in between.

        Args:
            key: The object.
            data: All of its bytes.
            etag: Of the version that is to be replaced, from ``stat``; empty: nothing may lie there.

        Returns:
            Whether it wrote; False where another version lies there, or none.
        """
        if (tag_of(self, key) or "") != etag:
            return False
        self.put(key, data)
        return True

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Write objects, several at a time where the store knows how to.

        Args:
            items: Keys and all bytes of each.
        """
        for key, data in items:
            self.put(key, data)

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is no error.

        Args:
            key: The object.
        """
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, in as few requests as the store knows how to.

        Args:
            keys: The objects.
        """
        for key in keys:
            self.delete(key)

    def distrust(self, key: str, start: int = 0, end: int | None = None) -> None:
        """Take note that bytes of this range were wrong: a store that keeps copies of its own forgets them.

        Args:
            key: The object.
            start: First byte.
            end: The byte after the last; None: to the object's end.
        """
        del key, start, end

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """List objects.

        Args:
            prefix: What their keys start with.
            after: Keys up to this one are left out; empty: none is.

        Returns:
            The objects, in ascending order of keys.

        Raises:
            ArgumentError: No key could start with ``prefix``, or ``after`` is no key.
        """
        ...

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        """List keys, as ``scan`` does.

        Args:
            prefix: What they start with.
            after: Keys up to this one are left out; empty: none is.

        Returns:
            The keys, in ascending order.
        """
        return (listed.key for listed in self.scan(prefix, after))

    @property
    def folder(self) -> Path | None:
        """Folder on this machine that objects are moved into when they are written; None where there is none."""
        return None

    def exists(self) -> bool:
        """Whether there is a store at its address yet, as far as can be told without asking a server."""
        return True

    def opens_at_once(self, key: str) -> bool:
        """Whether opening an object takes so little that a thread for it would take longer.

        Args:
            key: The object.

        Returns:
            True where it does; False unless a store says otherwise.
        """
        del key
        return False

    def remove_leftovers(self, before: float) -> tuple[int, int]:
        """Remove what writers left unfinished.

        Args:
            before: Only what is older than this time (Unix seconds).

        Returns:
            How many were removed, and their bytes.
        """
        del before
        return 0, 0

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
        """Read a range of the version that is held.

        Args:
            start: First byte.
            end: The byte after the last.

        Returns:
            The bytes, clamped at the object's end.
        """
        ...

    def close(self) -> None:
        """Let go of the object."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """A store that can hold one version of an object open."""

    def snapshot(self, key: str) -> ObjectReader:
        """Open the object as it is now.

        Args:
            key: The object.

        Returns:
            A reader of this version; the caller closes it.

        Raises:
            NotFoundError: There is no such object.
        """
        ...


@dataclass(frozen=True, eq=False)
class HeldObject:
    """An ``ObjectReader`` of a version that its store is asked for range by range.

    Attributes:
        size: Length in bytes.
        etag: Strong entity tag, without quotes.
        fetch: Reads a range that lies in the object.
        modified: Time of writing in Unix seconds; 0: unknown.
    """

    size: int
    etag: str
    fetch: Callable[[int, int], bytes]
    modified: float = 0.0

    def read(self, start: int, end: int) -> bytes:
        """Read a range, clamped at the object's end."""
        start, stop = clamp_range(start, end, self.size)
        return self.fetch(start, stop) if start < stop else b""

    def close(self) -> None:
        """Nothing is held."""


def open_object(store: Store, key: str) -> ObjectReader:
    """Open one version of an object of any store; the caller closes it.

    Where the store keeps no versions, an object that has changed is refused.

    Raises:
        NotFoundError: There is no such object.
    """
    snapshot: Callable[[str], ObjectReader] | None = getattr(store, "snapshot", None)  # isinstance takes 20 us
    if snapshot:
        return snapshot(key)
    about = store.stat(key)

    def fetch(start: int, end: int) -> bytes:
        data = store.get(key, start, end)
        if len(data) != end - start or store.stat(key).etag != about.etag:
            raise StorageError(f"{key} changed while being read: open it again")
        return data

    return HeldObject(about.size, about.etag, fetch)


def holds(store: Store, key: str, data: Data) -> bool:
    """Whether an object is just these bytes: a write that is repeated, since its answer was lost, finds itself."""
    view = memoryview(data).cast("B")
    try:
        starts = range(0, len(view), _COMPARED_BYTES)
        return is_there(store, key, len(view)) and all(
            store.get(key, at, at + _COMPARED_BYTES) == view[at : at + _COMPARED_BYTES] for at in starts
        )
    except NotFoundError:  # deleted meanwhile
        return False


def look(store: Store, key: str) -> ObjectStat | None:
    """``stat``; None where nothing is there."""
    try:
        return store.stat(key)
    except NotFoundError:
        return None


def is_there(store: Store, key: str, size: int | None = None) -> bool:
    """Whether an object is there; where a size is given, whether it has that size."""
    found = look(store, key)
    return found is not None and size in (None, found.size)


def tag_of(store: Store, key: str) -> str | None:
    """An object's entity tag; None where nothing is there."""
    found = look(store, key)
    return found.etag if found else None


def modified(store: Store, key: str) -> float:
    """When an object was written; 0 where that is not known, or nothing is there."""
    found = look(store, key)
    return found.modified if found else 0.0


def merged(first: Iterator[Listed], second: Iterator[Listed]) -> Iterator[Listed]:
    """Two listings in order as one; of equal keys, the first listing's counts."""
    last = ""
    for listed in heapq.merge(first, second, key=lambda one: one.key):
        if listed.key != last:
            yield listed
        last = listed.key


def clamp_range(start: int, end: int | None, size: int) -> tuple[int, int]:
    """Cut a half-open range at the object's size.

    Args:
        start: First byte.
        end: The byte after the last; None: to the object's end.
        size: The object's length in bytes.

    Returns:
        Start and end, neither beyond ``size``.

    Raises:
        ArgumentError: The range starts below 0 or ends before it starts.
    """
    if start < 0 or (end is not None and end < start):
        raise ArgumentError(f"a byte range must run forwards from 0 or later, got {start} to {end}")
    return min(start, size), size if end is None else min(end, size)
