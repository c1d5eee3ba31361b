"""A store behind a slow link."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.store.testing.wrapping import Request, StoreWrapper, T

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store import Data, Store


class SlowStore(StoreWrapper):
    """Every call waits for a round trip, and its bytes wait for their turn on a link that all threads share.

    latency_s: seconds of each call. bandwidth: bytes/s of payload in both directions together. sleep, clock: seconds;
    for tests that do not want to wait.
    """

    def __init__(
        self,
        inner: Store,
        *,
        latency_s: float = 0.0,
        bandwidth: float = math.inf,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over the inner store. Raises ArgumentError where nothing would ever arrive."""
        if not (latency_s >= 0 and bandwidth > 0):
            msg = f"latency_s must be 0 or more and bandwidth above 0, got {latency_s} and {bandwidth}"
            raise ArgumentError(msg)
        super().__init__(inner)
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        self._wait(self._latency_s, memoryview(request.data).nbytes)
        result = call(request.data)
        if isinstance(result, bytes):
            self._wait(0.0, len(result))
        return result

    def _wait(self, latency_s: float, size: int) -> None:
        now = self._clock()
        with self._lock:
            self._free_at = max(now, self._free_at) + size / self._bandwidth if size else self._free_at
            until = max(now, self._free_at) if size else now
        pause_s = until - now + latency_s
        if pause_s > 0:
            self._sleep(pause_s)
