"""How threads read through the tiers: what is wanted now, and hints of what will be."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError, StorageError
from kvwire.store.cache.cache import DiskHit, Fetch, Hit, RangeCache, Wait
from kvwire.store.cache.local import Worker
from kvwire.store.cache.settings import PrefetchCounters

if TYPE_CHECKING:
    from kvwire.store.base import Store
    from kvwire.store.cache.cache import RangeCache
    from kvwire.store.cache.extents import InflightRead
    from kvwire.store.cache.settings import TierSettings


@dataclass(frozen=True)
class RemoteObject:
    """One object of the store below the tiers.

    Attributes:
        store: That store.
        key: The object.
    """

    store: Store
    key: str

    def get(self, start: int, end: int) -> bytes:
        """Read a range."""
        return self.store.get(self.key, start, end)

    def size(self) -> int:
        """The length, as the store states it."""
        return self.store.stat(self.key).size


class TierReading:
    """One read of one object."""

    def __init__(self, cache: RangeCache, name: bytes, remote: RemoteObject) -> None:
        """Prepare."""
        self._cache = cache
        self._name = name
        self._remote = remote
        self._failures = 0

    def read(self, start: int, end: int | None) -> bytes:
        """Read a range."""
        pieces: list[memoryview] = []
        position = start
        while True:
            match self._cache.step(self._name, position, end, self, whole=True):
                case None:
                    if end is not None and position < end and self._cache.doubt(self._name):
                        continue
                    break
                case Hit(data):
                    piece = data
                case DiskHit(extent):
                    piece = memoryview(self._cache.load(self._name, extent) or b"")[position - extent.start :]
                case Wait(flight):
                    piece = self._awaited(flight, position)
                case Fetch(flight):
                    piece = memoryview(lead(self._cache, flight, self._remote))
                    if not piece:  # the object ends here
                        break
            piece = piece if end is None else piece[: end - position]
            pieces.append(piece)
            position += len(piece)
        return _joined(pieces)

    def _awaited(self, flight: InflightRead, position: int) -> memoryview:
        wait_for(self._cache, flight)
        data = next(flight.since(position), memoryview(b""))
        if not data and flight.error is not None:
            self._failures += 1
            if error := flight.verdict(self._failures):
                raise error
        return data


def lead(cache: RangeCache, flight: InflightRead, remote: RemoteObject) -> bytes:
    """Fetch a flight's range in one call, and land it whatever happens."""
    size = None
    try:
        data = _checked(remote.get(flight.start, flight.end), flight)
        flight.feed(data)
        if flight.position < flight.end:
            size = remote.size()
            _check_end(flight.position, min(size, flight.end))
    except BaseException as error:
        cache.fail(flight, error)
        is_empty = isinstance(error, KvwireError) and flight.position == flight.start
        if is_empty and cache.believe(flight.name, flight.start):
            return b""
        raise
    cache.finish(flight, size)
    return data


def _check_end(position: int, end: int) -> None:
    if position < end:
        msg = f"the remote store gave {end - position} bytes less than the object has: try again"
        raise StorageError(msg)


def _checked(data: bytes, flight: InflightRead) -> bytes:
    if len(data) > flight.end - flight.start:
        msg = "the remote store gave more bytes than it was asked for: its ranges are broken"
        raise StorageError(msg)
    return data


def wait_for(cache: RangeCache, flight: InflightRead) -> None:
    """Block until a flight is over, or give it up where nothing comes any more."""
    while not flight.done.done():
        position = flight.position
        futures.wait([flight.done], flight.limit_s)
        if not flight.done.done() and flight.position == position:
            cache.leave(flight)


def _joined(pieces: list[memoryview]) -> bytes:
    """The pieces as one; without a copy where they are one whole ``bytes`` already."""
    if len(pieces) == 1 and isinstance(whole := pieces[0].obj, bytes) and len(whole) == len(pieces[0]):
        return whole
    return b"".join(pieces)


_PATIENCE_S = 10.0  # a hint that finds no pause for that long is worth nothing any more


class Prefetcher:
    """Threads that walk through hinted ranges in short requests, each only once the foreground is quiet.

    At most ``prefetch_threads * prefetch_bytes`` are on their way at a time, which is also the most that a foreground
    read can find ahead of its own bytes.
    """

    def __init__(self, cache: RangeCache, settings: TierSettings) -> None:
        """Start nothing yet."""
        self._cache = cache
        self._settings = settings
        self._worker = Worker("kvwire-prefetch", settings.prefetch_threads)
        self._closed = False
        self._counters = PrefetchCounters()

    def hint(self, name: bytes, remote: RemoteObject, start: int, end: int | None) -> None:
        """Queue a range; dropped where too many wait already."""
        if self._worker.queued >= self._settings.prefetch_hints:
            self._counters.dropped += 1
            return
        self._counters.taken += 1
        self._worker.submit(partial(self._walk, name, remote, start, end))

    def counted(self) -> PrefetchCounters:
        """The counters."""
        return PrefetchCounters(self._counters.taken, self._counters.dropped)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no hint is left."""
        return self._worker.drain(timeout_s)

    def close(self) -> None:
        """Drop the hints."""
        self._closed = True
        self._worker.close(self._settings.close_s)

    def _walk(self, name: bytes, remote: RemoteObject, start: int, end: int | None) -> None:
        position: int | None = start
        try:
            while position is not None and not self._closed:
                if not self._cache.wait_for_quiet(_PATIENCE_S):
                    self._counters.dropped += 1
                    return
                position = self._next(name, remote, position, end)
        except KvwireError:
            return  # whoever reads the bytes will hear of it

    def _next(self, name: bytes, remote: RemoteObject, position: int, end: int | None) -> int | None:
        """See to the next piece; returns where it ends, None at the end of all."""
        match self._cache.step(name, position, end, self, whole=True, background=True):
            case None:
                return None
            case Hit(data):
                return position + len(data)
            case DiskHit(extent):
                return position if self._cache.load(name, extent) is None else extent.end
            case Wait(flight):
                return flight.end
            case Fetch(flight):
                fetched = lead(self._cache, flight, remote)
                return flight.end if len(fetched) == flight.end - flight.start else None
