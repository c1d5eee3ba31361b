"""One object of a tiered store: what the tiers hold comes from there, gaps come from the remote and are kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, StorageError
from kvwire.store import clamp_range
from kvwire.store.tiers import Held, Leading, OnDisk, Waiting
from kvwire.transport.sources import ByteSource

if TYPE_CHECKING:
    from kvwire.store import Data, TieredStore
    from kvwire.store.tiers import Flight
    from kvwire.transport.sources import Sink

_LOOK_S = 1.0  # how often a reader that waits for another passes on what that one has got so far


class TieredSource(ByteSource):
    """Reads content through the tiers; readers that want the same bytes share one request.

    remote: a source for the same object below the tiers; closing this closes it. A reader that is cancelled in the
    middle of a request leaves what came, and one of those who waited asks for the rest. Where this source is asked for
    bytes that it is fetching already, it asks the remote a second time: that is how a fetcher hedges a slow request.
    """

    def __init__(self, store: TieredStore, key: str, remote: ByteSource) -> None:
        """Name the object. Raises ArgumentError where the key is not content-addressed."""
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
        return self._cache.size(self._name) or self._remote.size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end``, each from the nearest tier that has it, as they arrive."""
        clamp_range(start, end, 0)
        if not self._used:
            self._used = True
            self._cache.use(self._name)
        read = _Read(start, end, sink)
        while (step := self._cache.step(self._name, read.position, end, self)) is not None:
            match step:
                case Held(data):
                    read.give(data)
                case OnDisk(extent):
                    loaded = await asyncio.to_thread(self._cache.load, self._name, extent)
                    if loaded is not None:
                        read.give(memoryview(loaded)[read.position - extent.start :])
                case Waiting(flight) if flight.owner is self:
                    await self._hedge(flight, read)
                case Waiting(flight):
                    await self._wait(flight, read)
                case Leading(flight):
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

    async def _lead(self, flight: Flight, read: _Read) -> None:
        """Fetch for all who wait."""

        def take(data: Data) -> None:
            if flight.position + len(data) > flight.end:
                msg = f"{self.url}: more bytes came than were asked for; the ranges of that store are broken"
                raise StorageError(msg)
            flight.feed(data)
            read.give(data)

        try:
            await self._remote.read(flight.start, flight.end, take)
        except BaseException as error:
            self._cache.fail(flight, error)
            raise
        self._cache.finish(flight, self._remote.size)

    async def _wait(self, flight: Flight, read: _Read) -> None:
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

    async def _hedge(self, flight: Flight, read: _Read) -> None:
        """Fetch what this source is fetching already, and keep whatever comes first."""
        pieces: list[Data] = []

        def take(data: Data) -> None:
            pieces.append(data)
            read.give(data)

        start = read.position
        await self._remote.read(start, flight.end if read.end is None else min(read.end, flight.end), take)
        data = b"".join(pieces)
        self._cache.fetched(len(data))
        if not data:  # the object ends here, as the other request is about to tell
            await self._wait(flight, read)
        elif not flight.stale:
            self._cache.keep(self._name, start, data, self._remote.size)


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

    def give(self, data: Data) -> None:
        """Pass on the next bytes, as far as they are wanted."""
        if self.end is not None and len(data) > self.end - self.position:
            data = memoryview(data)[: max(0, self.end - self.position)]
        if data:
            self.position += len(data)
            self.sink(data)
