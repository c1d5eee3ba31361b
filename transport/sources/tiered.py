"""One object of a tiered store: what the tiers hold comes from there, gaps come from the remote and are kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, KvwireError, StorageError
from kvwire.store import clamp_range
from kvwire.store.cache import DiskHit, Fetch, Hit, Wait
from kvwire.transport.sources.base import ByteSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store import Data
    from kvwire.store.cache import Cached, Extent, InflightRead, StoredFile
    from kvwire.transport.sources.base import Sink

_LOOK_S = 1.0  # how often a reader that waits for another passes on what that one has got so far


class TieredSource(ByteSource):
    """Reads content through the tiers; readers that want the same bytes share one request.

    A reader that is cancelled in the middle of a request leaves what came, and one of those who waited asks for the
    rest. Where this source is asked for bytes that it is fetching already, it asks the remote a second time: that is
    how a fetcher hedges a slow request.
    """

    def __init__(self, store: Cached, key: str, remote: ByteSource) -> None:
        """Name the object."""
        name = store.name(key)
        if name is None:
            msg = f"{key} is not content-addressed and so never cached: read it from the store below the tiers"
            raise ArgumentError(msg)
        self._cache = store.cache
        self._name = name
        self._remote = remote
        self._used = False

    @property
    def url(self) -> str:
        """The object's address on the remote."""
        return self._remote.url

    @property
    def size(self) -> int | None:
        """Length of the object, once anybody's read has told it."""
        return self._cache.size(self._name, recent=True) or self._remote.size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end``, each from the nearest tier that has it, as they arrive."""
        clamp_range(start, end, 0)
        self._use()
        read = _Read(start, end, sink)
        while True:
            match self._cache.step(self._name, read.position, end, self):
                case None:
                    if read.is_done or end is None or not self._cache.doubt(self._name):
                        return
                case Hit(data):
                    read.give(data, self.on_local)
                case DiskHit(extent):
                    await self._load(extent, read)
                case Wait(flight) if flight.owner is self:
                    await self._hedge(flight, read)
                case Wait(flight):
                    await self._wait(flight, read)
                case Fetch(flight):
                    await self._lead(flight, read)
                    if read.position < flight.end:  # the object ends here
                        return

    def distrust(self, start: int, end: int) -> None:
        """Forget the bytes of a range in all tiers: the next read of them asks the remote."""
        self._cache.drop(self._name, start, end)
        self._remote.distrust(start, end)

    async def close(self) -> None:
        """Close the remote's source; what was read stays in the tiers."""
        await self._remote.close()

    def _use(self) -> None:
        """Count one use, however many reads there are."""
        if not self._used:
            self._used = True
            self._cache.use(self._name)

    async def _load(self, extent: Extent[StoredFile], read: _Read) -> None:
        """Give bytes from the disk; none where it is too slow or damaged."""
        loading = asyncio.wrap_future(self._cache.loading(self._name, extent))
        await asyncio.wait({loading}, timeout=self._cache.stall_s)
        if not loading.done():
            loading.cancel()  # this reader's view of it alone
            self._cache.skip_disk()
        elif (data := loading.result()) is not None:
            read.give(memoryview(data)[read.position - extent.start :], self.on_local)

    async def _lead(self, flight: InflightRead, read: _Read) -> None:
        """Fetch for all who wait."""

        def take(data: Data) -> None:
            if flight.position + len(data) > flight.end:
                msg = f"{self.url}: more bytes came than were asked for; the ranges of that store are broken"
                raise StorageError(msg)
            flight.feed(data)
            read.give(data)

        try:
            await self._remote.read(flight.start, flight.end, take)
            self._check_end(flight)
        except BaseException as error:
            self._cache.fail(flight, error)
            is_empty = isinstance(error, KvwireError) and flight.position == flight.start
            if is_empty and self._cache.believe(self._name, flight.start):
                return  # as the disk remembers, the object ends here
            raise
        self._cache.finish(flight, self._remote.size)

    def _check_end(self, flight: InflightRead) -> None:
        size = self._remote.size
        if size is not None and flight.position < min(size, flight.end):
            msg = f"{self.url}: fewer bytes came than the object has; try again"
            raise StorageError(msg)

    async def _wait(self, flight: InflightRead, read: _Read) -> None:
        """Pass on what another reader fetches."""
        loop = asyncio.get_running_loop()
        landed = asyncio.wrap_future(flight.done)
        began, seen, seen_at = read.position, flight.position, loop.time()
        try:
            while not (landed.done() or read.is_done):
                await asyncio.wait({landed}, timeout=min(_LOOK_S, flight.limit_s))
                for data in flight.since(read.position):
                    read.give(data)
                if flight.position > seen:
                    seen, seen_at = flight.position, loop.time()
                elif not landed.done() and loop.time() - seen_at >= flight.limit_s:
                    self._cache.leave(flight)
                    break
        finally:
            landed.cancel()  # this reader's view of it alone
        if read.position == began and flight.error is not None:
            read.failures += 1
            if error := flight.verdict(read.failures):
                raise error

    async def _hedge(self, flight: InflightRead, read: _Read) -> None:
        """Fetch what this source is fetching already, and keep whatever comes first."""
        pieces: list[Data] = []
        start, end = read.position, flight.end if read.end is None else min(read.end, flight.end)

        def take(data: Data) -> None:
            pieces.append(data)
            read.give(data)

        try:
            await self._remote.read(start, end, take)
        finally:  # also where the other request was faster, and this one is cancelled
            data = b"".join(pieces)
            self._cache.fetched(len(data))
            if data and not flight.stale:
                self._cache.keep(self._name, start, data[: end - start], self._remote.size)
        if not data:  # the object ends here, as the other request is about to tell
            await self._wait(flight, read)


@dataclass
class _Read:
    """One call of ``read``: how far it is. failures: of requests that it waited for."""

    position: int
    end: int | None
    sink: Sink
    failures: int = 0

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.position >= self.end

    def give(self, data: Data, on_local: Callable[[int], None] | None = None) -> None:
        """Pass on the next bytes, as far as they are wanted; on_local: told of those that a tier had."""
        if self.end is not None and len(data) > self.end - self.position:
            data = memoryview(data)[: max(0, self.end - self.position)]
        if data:
            self.position += len(data)
            if on_local is not None:
                on_local(len(data))
            self.sink(data)
