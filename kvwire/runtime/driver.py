"""Drives a session's controller: passes it events, and its instructions to the loads.

It decides nothing. A controller starts at most one job per lane over all of its loads, so one thread per lane is
enough.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvwire.controller import events as ev
from kvwire.errors import StorageError
from kvwire.transport import LinkMeter

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from concurrent.futures import Executor

    from kvwire.controller import Controller
    from kvwire.runtime.threads import Threads
    from kvwire.transport import LinkSample

T = TypeVar("T")
U = TypeVar("U")
_LEAST_WAIT_S = 0.001  # resolution of event loops' timers
_LATE_S = 0.02  # a timer this late means that the loop was blocked
_GRACE_S = 0.01


class Handler(Protocol):
    """Executes a load's instructions.

    Attributes:
        work: The load's ``PromptWorker``, for other loads' passes.
    """

    work: Any

    def execute(self, instruction: ev.Instruction) -> None:
        """Start an instruction; report its outcome later with ``ControllerDriver.tell``."""

    def fail(self, error: BaseException) -> None:
        """End the load: the controller failed and will send nothing more."""


class ControllerDriver:
    """One controller for all loads of a session, on the session's event loop.

    Attributes:
        clock: ``time.monotonic``, in seconds.
        meter: Measures transfers over the link for the controller.
        broken: Why it takes no more loads; None if it does.
        loads: Loads under way, by number.
    """

    def __init__(self, controller: Controller, lock: threading.RLock, threads: Threads) -> None:
        """Call it on the event loop."""
        self._controller, self._lock, self._threads = controller, lock, threads
        self.clock = time.monotonic
        self._samples: list[LinkSample] = []
        self.meter = LinkMeter(self._samples.append, self.clock)
        self._numbers = count()
        self.loads: dict[int, Handler] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf  # time of the timer
        self._paused_s = 0.0  # how long the loop was blocked, until the controller knows
        self._lane_jobs = 0  # running or queued in the decode lane's thread
        self._is_idle = asyncio.Event()
        self._stepping = asyncio.Semaphore(threads.decode_threads)
        self.broken: StorageError | None = None

    async def close(self) -> None:
        """Stop the timer, and wait for the jobs that still run."""
        if self._timer:
            self._timer.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def begin(self, handler: Handler, request: Callable[[int], ev.LoadRequested]) -> int:
        """Request a load."""
        if self.broken:
            raise self.broken
        number = next(self._numbers)
        self.loads[number] = handler
        self.tell(request(number))
        return number

    def leave(self, number: int) -> None:
        """Abandon a load, or forget a finished one."""
        if self._controller.is_under_way(number):
            self.tell(ev.LoadAbandoned(number))
        self.loads.pop(number, None)

    def predicted_s(self, number: int) -> float | None:
        """Time to first token planned when all documents were known."""
        load = self._controller.loads.get(number)
        return load.first_s if load else None

    def tell(self, event: ev.Event) -> None:
        """Pass an event to the controller, and its instructions to the loads."""
        if self.broken:
            return  # all loads have failed
        try:
            instructions, wake_at = self._handled(event)
            for instruction in instructions:
                if load := self.loads.get(_load_of(instruction)):
                    load.execute(instruction)
            self._wake(wake_at)
        except Exception as error:  # noqa: BLE001 - no load may wait for what never comes
            self._break(error)

    def _handled(self, event: ev.Event) -> tuple[list[ev.Instruction], float]:
        """Pass an event to the controller, after the measurements before it."""
        self._is_late(self.clock())
        events: list[ev.Event] = [ev.DriverPaused(self._paused_s)] if self._paused_s else []
        begun, paused_s = self.clock() - self._paused_s, self._paused_s
        events += [each for sample in self._samples for each in _measured(_listened(sample, begun, paused_s))]
        self._samples.clear()
        self._paused_s = 0.0
        with self._lock:
            now = self.clock()
            instructions = [each for known in (*events, event) for each in self._controller.handle(known, now)]
            return instructions, self._controller.wake_at

    def _wake(self, at: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._due = None, inf
        if at < inf:
            self._call_at(at, self._tick)

    def _call_at(self, at: float, work: Callable[[], object]) -> None:
        now = self.clock()
        self._due = max(at, now + _LEAST_WAIT_S)
        self._timer = asyncio.get_running_loop().call_later(self._due - now, work)

    def _is_late(self, now: float) -> bool:
        """Whether the timer is late because the loop was blocked; records for how long."""
        late_s = now - self._due
        if late_s <= _LATE_S:
            return False
        self._paused_s, self._due = self._paused_s + late_s, inf
        return True

    def _tick(self) -> None:
        """Pass on that time has passed; if the loop was blocked, what arrived meanwhile goes first."""
        now = self.clock()
        if self._is_late(now):
            self._call_at(now + _GRACE_S, self._tick_now)
        else:
            self._tick_now()

    def _tick_now(self) -> None:
        self._is_late(self.clock())  # again, after other events had their turn
        self._due = inf
        self.meter.flush()
        self.tell(ev.Tick())

    def _break(self, error: Exception) -> None:
        """Fail all loads after an unexpected error."""
        msg = f"steering loads failed ({type(error).__name__}: {error}); ask again, and report this"
        self.broken = StorageError(msg)
        self.broken.__cause__ = error
        for load in self.loads.values():
            load.fail(self.broken)

    def run(self, job: Coroutine[None, None, None]) -> None:
        """Run a lane's job, which reports its end even if its load is over."""
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._break(error)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run work in the compute thread."""
        return await self._in_lane(self._threads.compute, work)

    async def decode(self, work: Callable[[], T]) -> T:
        """Run work in the decode thread."""
        return await self._in_lane(self._threads.decode, work)

    async def in_steps(self, steps: Iterator[None], goes_on: Callable[[], bool]) -> None:
        """Prepare decoding while its lane is idle: at most one step per thread."""
        loop, is_over = asyncio.get_running_loop(), object()
        while True:
            async with self._stepping:
                while self._lane_jobs:
                    await self._is_idle.wait()
                if not goes_on():
                    return
                if await loop.run_in_executor(self._threads.side_by_side, next, steps, is_over) is is_over:
                    return

    async def _in_lane(self, lane: Executor, work: Callable[[], T]) -> T:
        """Run work in a thread; counted where it is the decode lane's, or one that decoding waits for."""
        is_counted = lane is self._threads.decode
        self._lane_jobs += is_counted
        if is_counted:
            self._is_idle.clear()
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, work)
        finally:
            self._lane_jobs -= is_counted
            if not self._lane_jobs:
                self._is_idle.set()

    def side_by_side(self, work: Callable[[U], T], items: Iterable[U]) -> list[T]:
        """``[work(item) for item in items]`` in parallel, each on one core; call it in a lane's thread."""
        return list(self._threads.side_by_side.map(work, items))


def _listened(sample: LinkSample, begun: float, paused_s: float) -> LinkSample:
    """Remove from a sample a pause of the loop: bytes arrived meanwhile, unobserved."""
    if not sample.started <= begun < sample.ended:
        return sample
    return sample._replace(started=min(sample.started + paused_s, sample.ended))


def _measured(sample: LinkSample) -> Iterator[ev.Event]:
    if sample.first_byte_s is not None:
        yield ev.FirstByte(sample.first_byte_s)
    if sample.timed_bytes:
        yield ev.TransferProgress(sample.timed_bytes, sample.started, sample.ended)


def _load_of(instruction: ev.Instruction) -> int:
    match instruction:
        case ev.Fetch() | ev.Cancel() | ev.Release():
            return instruction.chunk.load
        case ev.Recompute() | ev.Interrupt():
            return instruction.first.load
        case ev.Decode():
            return instruction.chunks[0].load
        case ev.RecomputeTogether():
            return instruction.passes[0].first.load
        case _:
            return instruction.load
