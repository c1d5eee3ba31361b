"""One fetch: requests in parallel, segments out as they complete, failed ones asked for again, slow ones hedged.

Which segments a failure concerns:
- a wrong CRC-32: that segment alone;
- an answer that breaks off: the segment that was coming in; those behind it are asked for again without blame;
- no answer, or one that stalls: all that were to come. Unless it stalled, the last attempt asks for each by itself,
  so that one bad spot in the object cannot take its neighbours along.
A replaced or missing object, or refused credentials, end the whole fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from kvwire.errors import AuthError, CorruptError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.transport.errors import RejectedError, ReplacedError, SegmentError, StalledError, segment_error
from kvwire.transport.fetch.ranges import Cutter, Range, WantedRange, coalesce, split
from kvwire.transport.fetch.types import FetchedSegment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from kvwire.store import Data
    from kvwire.transport.fetch.metering import LinkMeter, Transfer
    from kvwire.transport.fetch.types import FetchCounts, FetchSettings
    from kvwire.transport.sources.base import ByteSource
    from kvwire.types import SegmentInfo

FATAL = (ReplacedError, RejectedError, NotFoundError, AuthError)
_LOOK_S = 0.05  # how often running requests are looked at, at most


@dataclass(eq=False, slots=True)
class Want:
    """A segment that is wanted."""

    segment: SegmentInfo
    failures: dict[tuple[int, int], int] = field(default_factory=dict)  # of its parts, by offset and length
    spent_bytes: int = 0
    done: bool = False  # it has come, or was given up
    parts: dict[int, bytes] = field(default_factory=dict)  # that are in, by offset

    @property
    def failed(self) -> int:
        """Attempts that failed, of the part that failed most often."""
        return max(self.failures.values(), default=0)

    def fail(self, piece: WantedRange[Want]) -> int:
        """Count a failed attempt at a part."""
        place = (piece.offset, piece.length)
        self.failures[place] = self.failures.get(place, 0) + 1
        return self.failures[place]

    @property
    def piece(self) -> WantedRange[Want]:
        """The segment's place in the blob."""
        return WantedRange(self.segment.offset, self.segment.stored, self)

    def whole(self, piece: WantedRange[Want], body: bytes) -> bytes | None:
        """Take in a piece."""
        if piece.length == self.segment.stored:
            return body
        self.parts[piece.offset] = body
        if sum(map(len, self.parts.values())) < self.segment.stored:
            return None
        return b"".join(self.parts[offset] for offset in sorted(self.parts))


def _is_wanted(piece: WantedRange[Want]) -> bool:
    """Whether bytes are still missing: neither their segment is settled nor this part of it in."""
    return not piece.tag.done and piece.offset not in piece.tag.parts


@dataclass(eq=False, slots=True)
class _Attempt:
    """One request under way. twin: another for the same bytes. verdict: why it was broken off from outside."""

    wanted: Range[Want]
    cutter: Cutter[Want]
    transfer: Transfer
    task: asyncio.Task[None]
    position: int  # end of what has been handed over
    is_hedge: bool = False
    twin: _Attempt | None = None
    verdict: KvwireError | None = None

    def break_off(self, verdict: KvwireError) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.task.cancel()


class FetchHooks(NamedTuple):
    """What a run asks of its fetcher: content of a segment, bytes counted, a number from 0 to 1, a wait.

    faults: see ``BlobFetcher``; words, since errors would keep the bytes alive that they were raised over.
    """

    check: Callable[[SegmentInfo, bytes], bytes]
    received: Callable[[Transfer, int], None]
    jitter: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]
    faults: dict[int, str]


class _SupersededError(KvwireError):
    """The twin was first."""


class FetchRun:
    """The machinery behind ``BlobFetcher.fetch``; ``close`` it, whatever happened."""

    def __init__(
        self,
        source: ByteSource,
        settings: FetchSettings,
        meter: LinkMeter,
        counts: FetchCounts,
        hooks: FetchHooks,
        deadline: float | None = None,
    ) -> None:
        """Prepare; nothing is asked yet."""
        self._source = source
        self._settings = settings
        self._meter = meter
        self._counts = counts
        self._check, self._received, self._jitter, self._sleep, self._faults = hooks
        self._deadline = deadline
        self._wants: list[Want] = []
        self._queue: deque[Range[Want]] = deque()
        self._running: set[_Attempt] = set()
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: deque[FetchedSegment | SegmentError] = deque()
        self._held_bytes = 0
        self._left = 0
        self._fatal: BaseException | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._look: asyncio.TimerHandle | None = None

    def start(self, segments: Sequence[SegmentInfo]) -> None:
        """Send the requests."""
        self._left = len(segments)
        self._wants = [Want(segment) for segment in segments]
        self._ask([want.piece for want in self._wants])
        self._look_later()

    async def wait(self) -> bool:
        """Wait for results to take."""
        while self._left and not self._results:
            if self._fatal:
                raise self._fatal
            self._news.clear()
            await self._news.wait()
        return self._left > 0

    def take(self) -> Iterator[FetchedSegment | SegmentError]:
        """Hand over the results that are in."""
        while self._results:
            result = self._results.popleft()
            self._hold(-len(result.data) if isinstance(result, FetchedSegment) else 0)
            self._left -= 1
            yield result

    async def close(self) -> None:
        """Break off the requests that still run."""
        if self._look:
            self._look.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests.

    def _ask(self, pieces: Sequence[WantedRange[Want]], *, apart: bool = False) -> None:
        settings = self._settings
        parts = split(pieces, max_bytes=settings.max_bytes)
        if apart:
            ranges = [Range(part.offset, part.end, (part,)) for part in parts]
        else:
            ranges = coalesce(parts, gap_bytes=settings.gap_bytes, max_bytes=settings.max_bytes)
        self._queue.extend(ranges)
        for _ in range(min(len(ranges), settings.concurrency - self._workers)):
            self._workers += 1
            self._spawn(self._work())

    async def _ask_later(self, pieces: Sequence[WantedRange[Want]], delay_s: float, *, apart: bool = False) -> None:
        await self._sleep(delay_s)
        self._ask([piece for piece in pieces if _is_wanted(piece)], apart=apart)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fatal = self._fatal or error
            self._news.set()

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._room.wait()
                wanted = self._queue.popleft() if self._queue else None
                if wanted and any(map(_is_wanted, wanted.pieces)):
                    await self._attempt(wanted)
        finally:
            self._workers -= 1

    async def _attempt(self, wanted: Range[Want], slow: _Attempt | None = None) -> None:
        """Ask for a range; ``slow``: beside this request, which takes too long."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        attempt = _Attempt(wanted, Cutter(wanted), self._meter.begin(), task, wanted.start, slow is not None, slow)
        if slow:
            slow.twin = attempt
        self._running.add(attempt)
        self._counts.requests += 1
        error: KvwireError | None = None
        try:
            await self._source.read(wanted.start, wanted.end, lambda data: self._take(attempt, data))
            if attempt.cutter.pending:
                msg = f"{self._source.url} ends before byte {wanted.end}: the object was cut short; write it again"
                error = CorruptError(msg)
                self._source.distrust(attempt.cutter.pending[0].offset, wanted.end)  # a copy's length may be old
        except asyncio.CancelledError:
            if attempt.verdict is None or task.uncancel() > 0:
                raise
            error = attempt.verdict
        except FATAL:
            raise
        except (StorageError, CorruptError) as failed:
            error = failed
        finally:
            self._ended(attempt, silent=isinstance(error, StalledError))
        if error and not isinstance(error, _SupersededError):
            self._failed(attempt, error)

    def _ended(self, attempt: _Attempt, *, silent: bool) -> None:
        self._running.discard(attempt)
        transfer = attempt.transfer
        transfer.end(silent=silent)
        if transfer.first_byte_s is not None and not attempt.cutter.pending and not transfer.local_bytes:
            self._meter.pace.completed(transfer.first_byte_s, transfer.last_at - transfer.asked_at, transfer.bytes)

    # What comes in.

    def _take(self, attempt: _Attempt, data: Data) -> None:
        self._received(attempt.transfer, len(data))
        for piece, body in attempt.cutter.feed(data):
            self._deliver(attempt, piece, body)
            attempt.position = piece.end
        twin = attempt.twin
        if twin in self._running and not any(_is_wanted(piece) for piece in twin.cutter.pending):
            self._counts.hedges_won += attempt.is_hedge
            twin.break_off(_SupersededError())

    def _deliver(self, attempt: _Attempt, piece: WantedRange[Want], body: bytes) -> None:
        want, transfer = piece.tag, attempt.transfer
        if want.done:
            return
        want.spent_bytes += piece.end - attempt.position
        whole = want.whole(piece, body)
        if whole is None:
            return
        segment = want.segment
        try:
            data = self._check(segment, whole)
        except CorruptError as error:
            self._counts.corrupt += 1
            self._source.distrust(segment.offset, segment.end)
            want.parts.clear()
            self._again([want.piece], error)
            return
        want.done = True
        want.parts.clear()
        self._faults.pop(segment.offset, None)
        self._counts.used_bytes += segment.stored
        elapsed_s = transfer.last_at - transfer.asked_at
        first_byte_s = transfer.first_byte_s or 0.0
        self._give(FetchedSegment(segment, data, elapsed_s, first_byte_s, want.spent_bytes, want.failed + 1))

    def _give(self, result: FetchedSegment | SegmentError) -> None:
        self._hold(len(result.data) if isinstance(result, FetchedSegment) else 0)
        self._results.append(result)
        self._news.set()

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        has_room = self._held_bytes <= self._settings.buffer_bytes
        if has_room != self._room.is_set():
            (self._room.set if has_room else self._room.clear)()

    # What goes wrong.

    def _failed(self, attempt: _Attempt, error: KvwireError) -> None:
        self._counts.stalled += isinstance(error, StalledError)
        pieces = [piece for piece in attempt.cutter.pending if _is_wanted(piece)]
        if not pieces:  # all had arrived before the answer broke
            return
        pieces[0].tag.spent_bytes += attempt.cutter.buffered_bytes
        if attempt.twin in self._running:  # which asks for the same bytes
            return
        if attempt.transfer.first_byte_s is None or isinstance(error, StalledError):
            self._again(pieces, error)
            return
        self._again(pieces[:1], error)
        if pieces[1:]:
            self._spawn(self._ask_later(pieces[1:], self._settings.backoff(1, self._jitter())))

    def _again(self, pieces: Sequence[WantedRange[Want]], error: KvwireError) -> None:
        """Ask for these once more, or give them up. They may have failed different numbers of times."""
        settings = self._settings
        by_failures: dict[int, list[WantedRange[Want]]] = {}
        for piece in pieces:
            self._faults[piece.tag.segment.offset] = str(error)
            by_failures.setdefault(piece.tag.fail(piece), []).append(piece)
        for failed, group in by_failures.items():
            delay_s = settings.backoff(failed, self._jitter(), error)
            is_late = self._deadline is not None and self._meter.now() + delay_s >= self._deadline
            if settings.is_over(failed, error) or is_late:
                self._give_up([piece.tag for piece in group], error)
                continue
            self._counts.retried += len(group)
            apart = failed == settings.retries and not isinstance(error, StalledError)
            self._spawn(self._ask_later(group, delay_s, apart=apart))

    def _give_up(self, wants: Sequence[Want], error: KvwireError) -> None:
        for want in wants:
            if not want.done:
                want.done = True
                self._counts.given_up += 1
                self._give(segment_error(want.segment, max(1, want.failed), error))

    # What takes too long.

    def _look_later(self) -> None:
        patience = self._settings.patience
        delay_s = min(_LOOK_S, max(0.001, min(patience.first_byte_s, patience.stall_s) / 8))
        if self._deadline is not None:
            delay_s = min(delay_s, max(0.0, self._deadline - self._meter.now()))
        self._look = asyncio.get_running_loop().call_later(delay_s, self._look_around)

    def _look_around(self) -> None:
        now, patience = self._meter.now(), self._settings.patience
        if self._deadline is not None and now >= self._deadline:
            self._too_late()
            return
        for attempt in list(self._running):
            transfer = attempt.transfer
            began = transfer.first_byte_s is not None
            if now - transfer.last_at >= (patience.stall_s if began else patience.first_byte_s):
                attempt.break_off(patience.stalled(self._source.url, began=began))
            elif attempt.twin is None and (factor := self._settings.hedge_factor):
                size, age_s = attempt.wanted.end - attempt.wanted.start, now - transfer.asked_at
                least_s = self._settings.hedge_least_s
                if self._meter.pace.is_overdue(age_s, size, factor=factor, least_s=least_s):
                    self._hedge(attempt)
        self._look_later()

    def _too_late(self) -> None:
        undone = [want for want in self._wants if not want.done]
        self._counts.late += len(undone)
        self._queue.clear()
        self._give_up(undone, DeadlineError("the deadline has passed"))
        for attempt in self._running:
            attempt.break_off(_SupersededError())

    def _hedge(self, slow: _Attempt) -> None:
        pieces = [piece for piece in slow.cutter.pending if _is_wanted(piece)]
        if pieces and self._meter.pace.may_hedge(self._settings.hedge_share):
            self._counts.hedges += 1
            wanted = Range(pieces[0].offset, pieces[-1].end, tuple(pieces))
            self._spawn(self._attempt(wanted, slow))
