"""Threads of a session: one for each lane of compute, some for decoding side by side, some that wait for stores."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvwire.codec.workers import cores, stay_on_one_core

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
LOOK_UPS = 16
"""In stores at a time."""
_BLOCKING = 3 * LOOK_UPS
"""Threads that wait for stores: look-ups, and what these and fetches read in threads; more than all look-ups together,
which may wait for such reads."""
_JOIN_S = 2.0
_MOST_THREADS = 8
_Job = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...], dict[str, Any]]


def usual_threads(given: int | None = None) -> int:
    """How many chunks the processor decodes side by side."""
    return given or min(cores(), _MOST_THREADS)


class DaemonThreads(ThreadPoolExecutor):
    """An executor whose threads no process waits for: what they do may block for minutes, as a dead disk does."""

    def __init__(self, most: int, name: str, join_s: float = _JOIN_S) -> None:
        """Start no thread yet."""
        super().__init__(most, name)
        self._most, self._name, self._join_s = most, name, join_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._guard = threading.RLock()  # an owner that is collected shuts down, maybe within this thread's submit
        self._is_closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401 - the job's
        """Run ``fn(*args, **kwargs)`` in a thread; raises RuntimeError after ``shutdown``."""
        future: Future[T] = Future()
        with self._guard:
            if self._is_closed:
                msg = "these threads have ended"
                raise RuntimeError(msg)
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
            del job, future, fn, args, kwargs  # nothing is kept alive by a thread that waits
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as inherited
        """End the threads; jobs that wait are cancelled, a thread that is blocked in one is left behind."""
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
    """Work that reads a store, to be called in a thread. Once nobody waits for it, the thread waits for nothing."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Begin nothing yet."""
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

    def waits_for(self, future: Future[Any]) -> None:
        """Hear from the work what it is about to wait for."""
        self._waits_for = future
        if self._is_left:  # looked at after the future is told: ``leave`` does it the other way round
            future.cancel()

    def leave(self) -> None:
        """Cancel what the work waits for now or later."""
        self._is_left = True
        if self._waits_for is not None:
            self._waits_for.cancel()


_LOOK_UP: ContextVar[LookUp[Any] | None] = ContextVar("look_up", default=None)


def look_up_here() -> LookUp[Any] | None:
    """The look-up whose work this thread is at."""
    return _LOOK_UP.get()


class Threads:
    """Threads for all loads of a session: they start when they are needed and end with it.

    Attributes:
        compute: One, for forward passes.
        decode: One for decoding; the same where ``workers`` is 1.
        decode_threads: How many chunks are decoded at once.
        side_by_side: For chunks that the processor decodes at once, each on one core.
        blocking: For whatever waits for a disk or a network.
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
