"""Work that no load has asked for yet, done while none is under way."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvwire.runtime.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Iterator


_log = logging.getLogger("kvwire.runtime")
_BEGUN: set[DaemonThreads] = set()
"""Threads that may be in a step: one that the interpreter's end cuts off inside torch takes the process down."""
_STEP_S = 60.0
"""Longest wait for a step then."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BEGUN.clear)  # the child has none of these threads


@atexit.register
def _end_all() -> None:
    for threads in tuple(_BEGUN):
        threads.shutdown()


class Warming:
    """Runs short steps in a thread of its own, which ends with the last one; loads that begin wait for none."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._threads = _thread()
        self._lock = threading.RLock()  # an owner that is collected closes, in whichever thread and wherever that is
        self._steps: Iterator[None] | None = None
        self._loads = 0
        self._is_running = self._is_closed = False

    def begin(self, steps: Iterator[None]) -> None:
        """Do some work while no loads are under way. Work that is not done yet is done first, and then nothing else."""
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
        """Begin no further step inside."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
            self._go_on()

    def close(self) -> None:
        """Leave undone what is not done, and begin nothing more."""
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
            _log.warning("what loads will need could not be prepared; they prepare it themselves", exc_info=True)
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
