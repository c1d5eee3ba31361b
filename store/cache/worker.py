"""Work in the background: one queue, a few threads that are started with the first job."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Worker:
    """Does jobs in the order in which they came; with one thread, one after the other.

    The threads do not keep the process alive: whatever they do must bear being cut off.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        """Start nothing yet."""
        self._name = name
        self._limit = threads
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; after ``close`` it is dropped."""
        with self._changed:
            if self._closed:
                return
            self._jobs.append(job)
            if len(self._threads) < min(self._limit, self._running + len(self._jobs)):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._jobs)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun, and wait for what has."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        give_up_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._running += 1
            try:
                job()
            except Exception:  # noqa: BLE001 - one broken job must not end the thread that all others need
                _log.exception("%s: a job failed", self._name)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
