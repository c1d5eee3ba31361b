"""One fetch: requests in parallel, segments out as they complete, failed ones asked for again.

Which segments a failure concerns:
- a wrong CRC-32: that segment alone;
- an answer that breaks off: the segment that was coming in; those behind it are asked for again without blame;
- no answer, or one that stalls: all that were to come. Unless it stalled, the last attempt asks for each by itself,
  so that one bad spot in the object cannot take its neighbours along.
A replaced or missing object, or refused credentials, end the whole fetch.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, CorruptError, KvwireError, NotFoundError, StorageError
from kvwire.transport._cutter import Cutter
from kvwire.transport.arrival import Arrival
from kvwire.transport.errors import ReplacedError, SegmentError, StalledError, segment_error
from kvwire.transport.ranges import Piece, Range, coalesce
from kvwire.transport.sources import timed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from kvwire.transport.arrival import FetchSettings
    from kvwire.transport.metering import LinkMeter, Transfer
    from kvwire.transport.sources import ByteSource
    from kvwire.types import SegmentInfo

FATAL = (ReplacedError, NotFoundError, AuthError)


@dataclass
class Want:
    """A segment that has not arrived yet: attempts that failed, and bytes that they cost."""

    segment: SegmentInfo
    failed: int = 0
    spent_bytes: int = 0

    @property
    def piece(self) -> Piece[Want]:
        """The segment's place in the blob."""
        return Piece(self.segment.offset, self.segment.stored, self)


class FetchRun:
    """The machinery behind ``BlobFetcher.fetch``; ``close`` it, whatever happened."""

    def __init__(
        self,
        source: ByteSource,
        settings: FetchSettings,
        meter: LinkMeter,
        jitter: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        """Prepare; nothing is asked yet."""
        self._source = source
        self._settings = settings
        self._meter = meter
        self._jitter = jitter
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: deque[Arrival | SegmentError] = deque()
        self._held_bytes = 0
        self._left = 0
        self._fatal: BaseException | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def start(self, segments: Sequence[SegmentInfo]) -> None:
        """Send the requests, most important first."""
        self._left = len(segments)
        self._ask([Want(segment) for segment in segments], delay_s=0.0)

    async def results(self) -> AsyncGenerator[Arrival | SegmentError, None]:
        """Give what comes, until each segment has come or failed."""
        while self._left:
            await self._news.wait()
            self._news.clear()
            while self._results:
                result = self._results.popleft()
                self._hold(-len(result.data) if isinstance(result, Arrival) else 0)
                self._left -= 1
                yield result
            if self._left and self._fatal:
                raise self._fatal

    async def close(self) -> None:
        """Break off the requests that still run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, wants: Sequence[Want], *, delay_s: float, apart: bool = False) -> None:
        settings = self._settings
        pieces = [want.piece for want in wants]
        if apart:
            ranges = [Range(piece.offset, piece.end, (piece,)) for piece in pieces]
        else:
            ranges = coalesce(pieces, gap_bytes=settings.gap_bytes, max_bytes=settings.max_bytes)
        for wanted in ranges:
            task = asyncio.create_task(self._run(wanted, delay_s))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fatal = self._fatal or error
            self._news.set()

    async def _run(self, wanted: Range[Want], delay_s: float) -> None:
        if delay_s:
            await self._sleep(delay_s)
        async with self._slots:
            await self._room.wait()
            cutter = Cutter(wanted)
            transfer = self._meter.begin()
            silent = False
            try:
                await self._receive(wanted, cutter, transfer)
            except FATAL:
                raise
            except (StorageError, CorruptError) as error:
                silent = isinstance(error, StalledError)
                self._failed(cutter, error, began=transfer.first_byte_s is not None)
            finally:
                transfer.end(silent=silent)

    async def _receive(self, wanted: Range[Want], cutter: Cutter[Want], transfer: Transfer) -> None:
        pieces = self._source.read(wanted.start, wanted.end)
        position = wanted.start
        async with aclosing(timed(pieces, self._settings.patience, self._source.url)) as answer:
            async for data in answer:
                transfer.received(len(data))
                for piece, body in cutter.feed(data):
                    self._deliver(piece.tag, body, piece.end - position, transfer)
                    position = piece.end
        if cutter.pending:
            msg = f"{self._source.url} ends before byte {wanted.end}: the object was cut short; write it again"
            raise CorruptError(msg)

    def _deliver(self, want: Want, body: bytes, wire_bytes: int, transfer: Transfer) -> None:
        segment = want.segment
        want.spent_bytes += wire_bytes
        if zlib.crc32(body) != segment.crc32:
            msg = f"the CRC-32 of bytes {segment.offset} to {segment.end} is wrong"
            self._again([want], CorruptError(msg))
            return
        elapsed_s = self._meter.now() - transfer.asked_at
        self._give(Arrival(segment, body, elapsed_s, transfer.first_byte_s or 0.0, want.spent_bytes, want.failed + 1))

    def _failed(self, cutter: Cutter[Want], error: KvwireError, *, began: bool) -> None:
        wants = [piece.tag for piece in cutter.pending]
        if not wants:  # all had arrived before the answer broke
            return
        wants[0].spent_bytes += cutter.buffered_bytes
        if not began or isinstance(error, StalledError):
            self._again(wants, error)
            return
        self._again(wants[:1], error)
        self._ask(wants[1:], delay_s=self._settings.backoff(1, self._jitter()))

    def _again(self, wants: Sequence[Want], error: KvwireError) -> None:
        """Ask for these once more, or give them up. They may have failed different numbers of times."""
        retries = self._settings.retries
        by_failures: dict[int, list[Want]] = {}
        for want in wants:
            want.failed += 1
            by_failures.setdefault(want.failed, []).append(want)
        for failed, group in by_failures.items():
            if failed > retries:
                for want in group:
                    self._give(segment_error(want.segment, failed, error))
                continue
            apart = failed == retries and not isinstance(error, StalledError)
            self._ask(group, delay_s=self._settings.backoff(failed, self._jitter()), apart=apart)

    def _give(self, result: Arrival | SegmentError) -> None:
        self._hold(len(result.data) if isinstance(result, Arrival) else 0)
        self._results.append(result)
        self._news.set()

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        if self._held_bytes > self._settings.buffer_bytes:
            self._room.clear()
        else:
            self._room.set()
