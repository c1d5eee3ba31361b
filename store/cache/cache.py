"""Memory and disk tiers as one cache of ranges: finds bytes, shares reads of the remote, and keeps what they bring.

No call here does any I/O on the remote, and calls of readers return at once, so that threads and event loops share one
cache. A reader asks ``step`` for one position at a time: it leads one read of the remote or waits for one, never both,
so that readers cannot wait for each other in a circle.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvwire.errors import KvwireError
from kvwire.store.cache.eviction import TierIndex
from kvwire.store.cache.extents import Extent, ExtentMap, InflightRead
from kvwire.store.cache.local import Worker
from kvwire.store.cache.settings import Counters, RemoteCounters, TierCounters
from kvwire.store.recent import Recent

if TYPE_CHECKING:
    from kvwire.store.cache.disk_tier import DiskTier, StoredFile
    from kvwire.store.cache.settings import TierSettings

EXTENT_BYTES = 512
"""Charged for each extent beyond its content: what Python needs to know of it."""
T = TypeVar("T")
_MOST_SIZES = 1 << 16  # of objects, as the remote or a file of the disk tier says, until one is distrusted
_LOAD_THREADS = 4  # that read files of the disk tier


@dataclass(frozen=True)
class Hit:
    """The next bytes are here."""

    data: memoryview


@dataclass(frozen=True)
class DiskHit:
    """The next bytes are in this file: wait for its ``loading``, and ``skip_disk`` where that hangs."""

    extent: Extent[StoredFile]


@dataclass(frozen=True)
class Wait:
    """The next bytes are being fetched: wait for the flight."""

    flight: InflightRead


@dataclass(frozen=True)
class Fetch:
    """Fetch the flight's range, and then ``complete`` it."""

    flight: InflightRead


Step: TypeAlias = Hit | DiskHit | Wait | Fetch | None
"""None: the object or the range ends here."""


class RangeCache:
    """Memory and disk over flights. Objects go by name: the digest of the remote's address and the key."""

    def __init__(self, memory_bytes: int, disk: DiskTier | None, settings: TierSettings, lock: threading.Lock) -> None:
        """Start without flights."""
        self._memory: TierIndex[bytes] = TierIndex(memory_bytes, EXTENT_BYTES)
        self._disk = disk
        self._settings = settings
        self.stall_s = settings.stall_s
        self._lock = lock
        self._reads: dict[bytes, ExtentMap[InflightRead]] = {}
        self.sizes: Recent[bytes, int] = Recent(_MOST_SIZES)
        self._loads = Worker("kvwire-disk-load", _LOAD_THREADS)
        self._foreground = 0
        self._quiet = threading.Condition(lock)
        self._remote = RemoteCounters()

    def use(self, name: bytes) -> None:
        """Count one use of an object."""
        with self._lock:
            self._memory.touched(name)
            if self._disk:
                self._disk.index.touched(name)

    def step(self, name: bytes, position: int, end: int | None, owner: object, **lead: bool) -> Step:
        """What to do for the next byte of a range."""
        with self._lock:
            size = self.sizes.get(name)
            stop = size if end is None or (size is not None and size < end) else end
            if stop is not None and position >= stop:
                return None
            if (held := self._memory.of(name).at(position)) is not None:
                return _held(self._memory.counters, held, held.value, position, stop)
            self._memory.counters.misses += 1
            if self._disk:
                if (stored := self._disk.at(name, position)) is not None:
                    data = stored.value.data
                    if data is None:
                        return DiskHit(stored)
                    return _held(self._disk.index.counters, stored, data, position, stop)
                self._disk.index.counters.misses += 1
            if name in self._reads and (flying := self._reads[name].at(position)) is not None:
                self._remote.waits += 1
                return Wait(flying.value)
            return Fetch(self._start(name, position, stop, owner, **lead))

    def loading(self, name: bytes, extent: Extent[StoredFile]) -> Future[bytes | None]:
        """Read a file in the background, and keep it in memory; readers share one future, which none can cancel."""
        with self._lock:
            if (loading := extent.value.loading) is not None:
                return loading
            future: Future[bytes | None] = Future()
            future.set_running_or_notify_cancel()
            promoted = self._memory.of(name).at(extent.start)
            if promoted is not None and (promoted.start, promoted.end) == (extent.start, extent.end):
                future.set_result(promoted.value)  # another load was faster
                return future
            extent.value.loading = future
        self._loads.submit(partial(self._load, name, extent, future))
        return future

    def skip_disk(self) -> None:
        """A load takes too long: what only the disk has comes from the remote for a while."""
        with self._lock:
            if self._disk:
                self._disk.skip_reads()

    def _load(self, name: bytes, extent: Extent[StoredFile], future: Future[bytes | None]) -> None:
        data = None
        try:
            data = self._loaded(name, extent)
        finally:
            with self._lock:
                extent.value.loading = None
            future.set_result(data)

    def _loaded(self, name: bytes, extent: Extent[StoredFile]) -> bytes | None:
        if self._disk is None or (found := self._disk.load(name, extent)) is None:
            return None
        data, size = found
        with self._lock:
            if not extent.value.dropped:
                if size is not None:
                    if self.sizes.get(name) not in (None, size) or size < self._top(name):
                        self._drop(name, 0, None)  # one of the lengths was true of another version: ask the remote
                        return None
                    self.sizes.put(name, size)
                self._keep(name, extent.start, data)
            counters = self._disk.index.counters
            counters.hits += 1
            counters.hit_bytes += len(data)
        return data

    def complete(self, flight: InflightRead, size: int | None = None, error: BaseException | None = None) -> None:
        """A flight is over: all its bytes are there, or it broke off, and what came is kept."""
        data = flight.pieces[0] if len(flight.pieces) == 1 else b"".join(flight.pieces)
        flight.data = data if isinstance(data, bytes) else bytes(data)
        with self._lock:
            self._unregister(flight)
            self._foreground -= not flight.background
            if not self._foreground:
                self._quiet.notify_all()
            self._remote.bytes += len(flight.data)
            flight.error = error if isinstance(error, KvwireError) else None
            self._remote.failures += flight.error is not None  # a leader that was cancelled is no failure of the remote
            if not flight.stale:
                if size is not None:
                    self.sizes.put(flight.name, size)
                if flight.data:
                    self._keep(flight.name, flight.start, flight.data)
        flight.pieces = []
        _resolve(flight)

    def leave(self, flight: InflightRead) -> None:
        """Stop waiting for a flight from which nothing comes: the next to ask leads another one."""
        with self._lock:
            if self._unregister(flight):
                self._remote.takeovers += 1
        _resolve(flight)

    def keep(self, name: bytes, start: int, data: bytes, size: int | None = None) -> None:
        """Take in bytes that came without a flight."""
        with self._lock:
            if size is not None:
                self.sizes.put(name, size)
            self._keep(name, start, data)

    def fetched(self, size: int) -> None:
        """Count a request that was made without a flight."""
        with self._lock:
            self._remote.requests += 1
            self._remote.bytes += size

    def drop(self, name: bytes, start: int = 0, end: int | None = None) -> None:
        """Forget the bytes of a range in all tiers, and what of them is still on its way.

        A range that ends beyond the object says that its length is wrong: any file of it would bring that back, so all
        of the object goes.
        """
        with self._lock:
            size = self.sizes.get(name)
            if size is None:
                size = max(self._top(name), self._inflight(name).end)
            is_beyond = end is None or end > size
            self._drop(name, *((0, None) if is_beyond else (start, end)))

    def wait_for_quiet(self, timeout_s: float) -> bool:
        """Wait until no reader in the foreground fetches anything."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._foreground, timeout_s)

    def counted(self) -> Counters:
        """The tiers' and the remote's counters."""
        with self._lock:
            disk = self._disk.index.counted() if self._disk else TierCounters()
            return Counters(memory=self._memory.counted(), disk=disk, remote=replace(self._remote))

    def drain(self, timeout_s: float) -> bool:
        """Wait until the disk holds what it was given."""
        return self._disk is None or self._disk.drain(timeout_s)

    def close(self) -> None:
        """Hand what only the memory holds to the disk, as far as time allows."""
        self._loads.close(0.0)
        if self._disk is None:
            return
        give_up_at = time.monotonic() + self._settings.close_s
        with self._lock:
            held = list(self._memory.all())
        for name, extent in held:
            with self._lock:
                has_room = self._disk.has_room(extent.length)
            if not has_room and not self._disk.drain(max(0.0, give_up_at - time.monotonic())):
                break
            with self._lock:
                self._disk.add(name, extent.start, extent.value, self.sizes.get(name))
        self._disk.close()

    # Under the lock.

    def _drop(self, name: bytes, start: int, end: int | None) -> None:
        for extent in self._memory.of(name).overlapping(start, end):
            self._memory.remove(name, extent)
        if self._disk:
            self._disk.drop(name, start, end)
        for flying in self._inflight(name).overlapping(start, end):
            flying.value.stale = True
            self._unregister(flying.value)
        self.sizes.forget(name)

    def _top(self, name: bytes) -> int:
        """End of what the tiers hold of an object."""
        disk = self._disk.index.of(name).end if self._disk else 0
        return max(self._memory.of(name).end, disk)

    def _start(
        self, name: bytes, start: int, stop: int | None, owner: object, *, whole: bool = False, background: bool = False
    ) -> InflightRead:
        settings = self._settings
        ends = [start + (settings.prefetch_bytes if background else settings.flight_bytes)]
        ends += [stop] if stop is not None else []
        ends += [at for at in (self._memory.of(name).next_start(start), self._inflight(name).next_start(start)) if at]
        if self._disk and (at := self._disk.index.of(name).next_start(start)):
            ends.append(at)
        limit_s = settings.answer_s if whole else settings.stall_s
        flight = InflightRead(name, start, min(ends), owner, limit_s, background=background)
        self._reads.setdefault(name, ExtentMap()).add(flight.start, flight.end, flight)
        self._foreground += not background
        self._remote.requests += 1
        return flight

    def _inflight(self, name: bytes) -> ExtentMap[InflightRead]:
        return self._reads.get(name) or ExtentMap()

    def _unregister(self, flight: InflightRead) -> bool:
        """Take a flight off the map; tells whether it was there."""
        flying = self._reads.get(flight.name)
        extent = flying.at(flight.start) if flying else None
        if flying is None or extent is None or extent.value is not flight:
            return False
        flying.remove(extent)
        if not flying:
            del self._reads[flight.name]
        return True

    def _keep(self, name: bytes, start: int, data: bytes) -> None:
        """Keep what of these bytes the memory has not; what it does not take, or gives up for it, goes to the disk."""
        memory, leaving = self._memory, []
        for first, last in memory.of(name).gaps(start, start + len(data)):
            part = data[first - start : last - start]
            if memory.fits(len(part)):
                memory.add(name, first, last, part)
                memory.counters.fills += 1
            else:
                memory.counters.refused += 1
                leaving.append((name, first, part))
        leaving += [(gone, extent.start, extent.value) for gone, extent in memory.overflow()]
        if self._disk:
            for gone, first, part in leaving:
                self._disk.add(gone, first, part, self.sizes.get(gone))


def _held(counters: TierCounters, extent: Extent[T], data: bytes, position: int, stop: int | None) -> Hit:
    end = extent.end if stop is None else min(stop, extent.end)
    view = memoryview(data)[position - extent.start : end - extent.start]
    counters.hits += 1
    counters.hit_bytes += len(view)
    return Hit(view)


def _resolve(flight: InflightRead) -> None:
    with suppress(InvalidStateError):  # the reader that left it was first
        flight.done.set_result(None)
