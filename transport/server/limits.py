"""Limits that are counted: requests of one client in a while, bytes of all uploads together."""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .refusals import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .metrics import ServerMetrics

_MAX_BUCKETS = 16384


class RateLimiter:
    """A token bucket for each client, in bounded memory: the bucket that was used longest ago is forgotten first.

    rate: requests a second (0: no limit). burst: requests at once, at least 1.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no buckets; a client that is not known has a full one."""
        self._rate = rate
        self._burst = max(1.0, burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, at which time

    def take(self, client: str) -> float:
        """Take one token: 0, or the seconds to wait for one where there is none."""
        if not self._rate:
            return 0.0
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        wait_s = 0.0 if left >= 1 else (1 - left) / self._rate
        self._buckets[client] = (left if wait_s else left - 1, now)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        """Buckets kept."""
        return len(self._buckets)


class SpoolBudget:
    """Bytes that all running uploads may take together."""

    def __init__(self, limit: int, metrics: ServerMetrics) -> None:
        """Start empty."""
        self._limit = limit
        self._used = 0
        self._metrics = metrics

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Set ``size`` bytes aside; a RefusedError where they are not free now."""
        if self._used + size > self._limit:
            raise RefusedError(503, "too many uploads at a time: try again later", {"Retry-After": "5"}, reason="spool")
        self._used += size
        self._metrics.spool_bytes.set(self._used)
        try:
            yield
        finally:
            self._used -= size
            self._metrics.spool_bytes.set(self._used)
