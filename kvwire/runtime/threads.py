"""Threads of a session: one per lane of compute, some for parallel decoding, some that wait for stores.

A further one prepares for later loads while none is running.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvwire.codec.workers import cores, stay_on_one_core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")
LOOK_UPS = 16
"""Concurrent look-ups in stores."""
_BLOCKING = 3 * LOOK_UPS
"""Threads that wait for stores: for look-ups, and for their reads and fetches'; more than all look-ups, which may wait
for such reads."""
_JOIN_S = 2.0
_MOST_THREADS = 8
_Job = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...], dict[str, Any]]


def usual_threads(given: int | None = None) -> int:
    """Number of chunks that the processor decodes in parallel."""
    return given or min(cores(), _MOST_THREADS)


class DaemonThreads(ThreadPoolExecutor):
    """An executor whose threads do not delay the process's end: their jobs may block for minutes, on a dead disk."""

    def __init__(self, most: int, name: str, join_s: float = _JOIN_S) -> None:
        """Start no thread yet."""
        super().__init__(most, name)
        self._most, self._name, self._join_s = most, name, join_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._guard = threading.RLock()  # reentrant: garbage collection may shut down within this thread's submit
        self._is_closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401 - the job's
        """Run ``fn(*args, **kwargs)`` in a thread; raises RuntimeError after ``shutdown``."""
        future: Future[T] = Future()
        with self._guard:
            if self._is_closed:
                raise RuntimeError("these threads have ended")
            self._jobs.put((future, fn, args, kwargs))
            if not self._idle.acquire(blocking=False) and len(self._started) < self._most:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._started)}", daemon=True)
                self._started.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, fn, args, kwargs = job
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - it is whose future it is
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del job, future, fn, args, kwargs  # a waiting thread keeps nothing alive
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as inherited
        """End the threads; queued jobs are cancelled, a thread blocked in one is left behind."""
        with self._guard:
            self._is_closed = True
            while True:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None:
                    job[0].cancel()
            for _ in self._started:
                self._jobs.put(None)
        until = time.monotonic() + self._join_s
        for thread in self._started if wait else ():
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


class LookUp(Generic[T]):
    """Work that reads a store, to be called in a thread. When its caller leaves, it stops waiting."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Start nothing yet."""
        self._work = work
        self._waits_for: Future[Any] | None = None
        self._is_left = False

    def __call__(self) -> T:
        """Run the work."""
        token = _LOOK_UP.set(self)
        try:
            return self._work()
        finally:
            _LOOK_UP.reset(token)
            self._waits_for = None  # an error of it has this frame in its traceback: it would be a cycle

    def waits_for(self, future: Future[Any]) -> None:
        """Register a future that the work is about to wait for."""
        self._waits_for = future
        if self._is_left:  # checked after the future is set: ``leave`` works in the opposite order
            future.cancel()

    def leave(self) -> None:
        """Cancel what the work waits for, now or later."""
        self._is_left = True
        if (future := self._waits_for) is not None:
            future.cancel()


_LOOK_UP: ContextVar[LookUp[Any] | None] = ContextVar("look_up", default=None)


def look_up_here() -> LookUp[Any] | None:
    """The look-up that this thread runs; None if it runs none."""
    return _LOOK_UP.get()


class Threads:
    """Threads for all loads of a session, started on demand.

    Attributes:
        compute: One thread for forward passes.
        decode: One thread for decoding; the same if ``workers`` is 1.
        decode_threads: Number of chunks decoded at once.
        side_by_side: Threads for chunks decoded at once, each on one core.
        blocking: Threads that wait for a disk or a network.
    """

    def __init__(self, workers: int, decode_threads: int = 1) -> None:
        """Start none yet."""
        self.compute = ThreadPoolExecutor(1, "kvwire-compute")
        self.decode = self.compute if workers == 1 else ThreadPoolExecutor(1, "kvwire-decode")
        self.decode_threads = decode_threads
        self.side_by_side = ThreadPoolExecutor(decode_threads, "kvwire-codec", initializer=stay_on_one_core)
        self.blocking = DaemonThreads(_BLOCKING, "kvwire-read")

    def close(self, *, wait: bool = True) -> None:
        """End all."""
        for pool in (self.compute, self.decode, self.side_by_side):
            pool.shutdown(wait=wait, cancel_futures=True)
        self.blocking.shutdown(wait=wait)


_log = logging.getLogger("kvwire.runtime")
_BEGUN: set[DaemonThreads] = set()
"""Threads that may be in a step: one cut off inside torch by the interpreter's end crashes the process."""
_STEP_S = 60.0
"""Longest wait for such a step."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BEGUN.clear)  # the child has none of these threads


@atexit.register
def _end_all() -> None:
    for threads in tuple(_BEGUN):
        threads.shutdown()


class Warming:
    """Runs short preparing steps in a thread of its own; loads never wait for it."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._threads = _thread()
        self._lock = threading.RLock()  # reentrant: garbage collection may close an owner in any thread, anywhere
        self._steps: Iterator[None] | None = None
        self._loads = 0
        self._is_running = self._is_closed = False

    def begin(self, steps: Iterator[None]) -> None:
        """Run steps while no loads are running; ignored while earlier steps are not done."""
        with self._lock:
            if self._is_closed or self._steps is not None:
                return
            self._steps = steps
            if self._threads not in _BEGUN:
                self._threads = _thread()
                _BEGUN.add(self._threads)
        self._go_on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Start no further step in this context."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
            self._go_on()

    def close(self) -> None:
        """Drop the remaining steps, and accept no more."""
        with self._lock:
            self._is_closed = True
            self._steps = None
            if not self._is_running:
                _BEGUN.discard(self._threads)
        self._threads.shutdown(wait=False)

    def _go_on(self) -> None:
        with self._lock:
            if self._loads or self._is_running or self._steps is None:
                return
            self._is_running = True
            with suppress(RuntimeError):  # closed just now
                self._threads.submit(self._step, self._steps)

    def _step(self, steps: Iterator[None]) -> None:
        try:
            is_over = next(steps, self) is self
        except Exception:  # noqa: BLE001 - loads do the same work when they need it, and tell what is wrong
            _log.warning("preparing for loads failed; they prepare it themselves", exc_info=True)
            is_over = True
        with self._lock:
            self._is_running = False
            if is_over or self._is_closed:
                self._steps = None
                self._threads.shutdown(wait=False)
                _BEGUN.discard(self._threads)
        self._go_on()


def _thread() -> DaemonThreads:
    return DaemonThreads(1, "kvwire-warming", _STEP_S)
