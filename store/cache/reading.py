"""Reading through the tiers, the same for threads and event loops: only how they wait differs. And hints."""

from __future__ import annotations

import time
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from kvwire.errors import KvwireError, StorageError
from kvwire.store.base import clamp_range
from kvwire.store.cache.cache import DiskHit, Fetch, Hit, RangeCache, Wait
from kvwire.store.cache.local import Worker
from kvwire.store.cache.settings import PrefetchCounters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from kvwire.store.base import Data, Store
    from kvwire.store.cache.disk_tier import StoredFile
    from kvwire.store.cache.extents import Extent, InflightRead
    from kvwire.store.cache.settings import TierSettings

    Waiting: TypeAlias = Callable[[futures.Future[Any], float], Awaitable[object]]
    Sink: TypeAlias = Callable[[Data], None]

T = TypeVar("T")
_LOOK_S = 1.0  # how often a reader that waits for another passes on what that one has got so far
_PATIENCE_S = 10.0  # a hint that finds no pause for that long is worth nothing any more


class Origin(Protocol):
    """One object below the tiers."""

    @property
    def url(self) -> str:
        """Where it is, for people."""
        ...

    @property
    def size(self) -> int | None:
        """Its length, once a read has told it."""
        ...

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes, clamped at the object's end."""
        ...


class TierReading:
    """One read of one object; waiting: how it waits for a future, so many seconds at most.

    Of a reader that is cancelled what came is kept. An owner that asks again for what it is fetching hedges a request.
    """

    def __init__(
        self,
        cache: RangeCache,
        name: bytes,
        origin: Origin,
        waiting: Waiting,
        sink: Sink,
        *,
        owner: object = None,
        on_local: Callable[[int], None] | None = None,
        **lead: bool,
    ) -> None:
        """Prepare. on_local: told of bytes that a tier had.

        lead: ``whole``: nothing comes before all of a request is there; ``background``: requests are short.
        """
        self._cache, self._name, self._origin = cache, name, origin
        self._wait_for, self._sink, self._on_local = waiting, sink, on_local
        self._owner = self if owner is None else owner
        self._lead = lead
        self._position = 0
        self._end: int | None = None
        self._failures = 0  # of requests that it waited for

    async def read(self, start: int, end: int | None) -> None:
        """Give a range, each byte from the nearest tier that has it, as they arrive."""
        self.begin(start, end)
        while await self.advance():
            pass

    def begin(self, start: int, end: int | None) -> None:
        """Take a range, which ``advance`` gives piece by piece."""
        clamp_range(start, end, 0)
        self._position, self._end = start, end

    async def advance(self) -> bool:
        """Give the next bytes; whether more may follow."""
        match self._cache.step(self._name, self._position, self._end, self._owner, **self._lead):
            case None:
                return False
            case Hit(data):
                self._give(data, is_local=True)
            case DiskHit(extent):
                await self._load(extent)
            case Wait(flight) if flight.owner is self._owner:
                await self._hedge(flight)
            case Wait(flight):
                await self._follow(flight)
            case Fetch(flight):
                await self._fetch(flight)
                return self._position >= flight.end  # else the object ends here
        return True

    @property
    def _is_done(self) -> bool:
        return self._end is not None and self._position >= self._end

    def _give(self, data: Data, *, is_local: bool = False) -> None:
        if self._end is not None and len(data) > self._end - self._position:
            data = memoryview(data)[: max(0, self._end - self._position)]
        if data:
            self._position += len(data)
            if is_local and self._on_local is not None:
                self._on_local(len(data))
            self._sink(data)

    async def _load(self, extent: Extent[StoredFile]) -> None:
        """Give bytes from the disk; none where it is too slow or damaged."""
        loading = self._cache.loading(self._name, extent)
        await self._wait_for(loading, self._cache.stall_s)
        if not loading.done():
            self._cache.skip_disk()
        elif (data := loading.result()) is not None:
            self._give(memoryview(data)[self._position - extent.start :], is_local=True)

    async def _fetch(self, flight: InflightRead) -> None:
        """Fetch for all who wait, and land the flight whatever happens."""

        def take(data: Data) -> None:
            if flight.position + len(data) > flight.end:
                msg = f"{self._origin.url}: more bytes came than were asked for; the ranges of that store are broken"
                raise StorageError(msg)
            flight.feed(data)
            self._give(data)

        try:
            await self._origin.read(flight.start, flight.end, take)
            size = self._origin.size
            if size is not None and flight.position < min(size, flight.end):
                msg = f"{self._origin.url}: fewer bytes came than the object has; try again"
                raise StorageError(msg)  # noqa: TRY301 - the flight fails with it
        except BaseException as error:
            self._cache.complete(flight, error=error)
            raise
        self._cache.complete(flight, size)

    async def _follow(self, flight: InflightRead) -> None:
        """Pass on what another reader fetches."""
        began, seen, seen_at = self._position, flight.position, time.monotonic()
        is_over = False
        while not (is_over or self._is_done):
            await self._wait_for(flight.done, min(_LOOK_S, flight.limit_s))
            is_over = flight.done.done()  # before the bytes are looked at: all of them are there then
            for data in flight.since(self._position):
                self._give(data)
            if flight.position > seen:
                seen, seen_at = flight.position, time.monotonic()
            elif not is_over and time.monotonic() - seen_at >= flight.limit_s:
                self._cache.leave(flight)
                break
        if self._position == began and flight.error is not None:
            self._failures += 1
            if error := flight.verdict(self._failures):
                raise error

    async def _hedge(self, flight: InflightRead) -> None:
        """Fetch what this owner is fetching already, and keep whatever comes first."""
        pieces: list[Data] = []
        start, end = self._position, flight.end if self._end is None else min(self._end, flight.end)

        def take(data: Data) -> None:
            pieces.append(data)
            self._give(data)

        try:
            await self._origin.read(start, end, take)
        finally:  # also where the other request was faster, and this one is cancelled
            data = b"".join(pieces)
            self._cache.fetched(len(data))
            if data and not flight.stale:
                self._cache.keep(self._name, start, data[: end - start], self._origin.size)
        if not data:  # the object ends here, as the other request is about to tell
            await self._follow(flight)


class BlockingOrigin:
    """One object of a store, read in the thread that asks."""

    def __init__(self, store: Store, key: str) -> None:
        """Name it."""
        self._store, self._key = store, key
        self.url = f"{key} in {store.url}"
        self.size: int | None = None

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give a range; the store is asked for the length where less came."""
        data = self._store.get(self._key, start, end)
        if data:
            sink(data)
        if end is not None and len(data) < end - start:
            self.size = self._store.stat(self._key).size


async def _block(future: futures.Future[Any], seconds: float) -> None:
    futures.wait([future], seconds)


def _run(reading: Coroutine[Any, Any, T]) -> T:
    """Run what waits by blocking: it never gives up control in between, so it needs no event loop."""
    try:
        reading.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    reading.close()
    raise RuntimeError("a blocking read waited for an event loop")


def read_blocking(cache: RangeCache, name: bytes, origin: BlockingOrigin, start: int, end: int | None) -> bytes:
    """Read a range through the tiers in this thread; without a copy where it is one whole ``bytes`` already."""
    pieces: list[Data] = []
    _run(TierReading(cache, name, origin, _block, pieces.append, whole=True).read(start, end))
    if len(pieces) == 1:
        whole = pieces[0].obj if isinstance(pieces[0], memoryview) else pieces[0]
        if isinstance(whole, bytes) and len(whole) == len(pieces[0]):
            return whole
    return b"".join(pieces)


class Prefetcher:
    """Threads that walk through hinted ranges in short requests, each only once no foreground read is under way."""

    def __init__(self, cache: RangeCache, settings: TierSettings) -> None:
        """Start nothing yet."""
        self._cache = cache
        self._settings = settings
        self._worker = Worker("kvwire-prefetch", settings.prefetch_threads)
        self._closed = False
        self._hints: set[futures.Future[bool]] = set()
        self._counters = PrefetchCounters()

    def hint(self, name: bytes, origin: BlockingOrigin, start: int, end: int | None) -> futures.Future[bool]:
        """Queue a range; dropped where too many wait already. See ``TieredStore.prefetch``."""
        told = futures.Future[bool]()
        if self._worker.queued >= self._settings.prefetch_hints:
            self._counters.dropped += 1
            told.set_result(False)
            return told
        self._counters.taken += 1
        self._hints.add(told)
        told.add_done_callback(self._hints.discard)
        self._worker.submit(partial(self._walk, told, name, origin, start, end))
        if self._closed:
            told.cancel()
        return told

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
        for told in [*self._hints]:
            told.cancel()

    def _walk(
        self, told: futures.Future[bool], name: bytes, origin: BlockingOrigin, start: int, end: int | None
    ) -> None:
        reading = TierReading(self._cache, name, origin, _block, lambda _: None, whole=True, background=True)
        reading.begin(start, end)
        more = True
        try:
            while more and not self._closed and not told.cancelled():
                if not self._cache.wait_for_quiet(_PATIENCE_S):
                    self._counters.dropped += 1
                    break
                more = _run(reading.advance())
        except KvwireError:
            pass  # the reader of these bytes gets the error
        finally:
            with suppress(futures.InvalidStateError):  # it was cancelled
                told.set_result(not more)
