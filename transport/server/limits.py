"""Limits that are counted: requests of one client in a while, bytes of all uploads together."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvwire.transport.server.http_errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.transport.server.metrics import ServerMetrics

_MAX_BUCKETS = 16384


class RateLimiter:
    """A token bucket for each client, in bounded memory: the bucket that was used longest ago is forgotten first."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no buckets; a client that is not known has a full one."""
        self._rate = rate
        self._burst = max(1.0, burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, at which time

    def take(self, client: str) -> float:
        """Take one token."""
        if not self._rate:
            return 0.0
        now = self._clock()
        left = self._left(client, now)
        wait_s = self._wait_s(left)
        self._buckets[client] = (left if wait_s else left - 1, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait_s

    def look(self, client: str) -> float:
        """What ``take`` would give, without taking."""
        return self._wait_s(self._left(client, self._clock())) if self._rate else 0.0

    def _left(self, client: str, now: float) -> float:
        left, since = self._buckets.get(client, (self._burst, now))
        return min(self._burst, left + (now - since) * self._rate)

    def _wait_s(self, left: float) -> float:
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def __len__(self) -> int:
        """Buckets kept."""
        return len(self._buckets)


class SpoolBudget:
    """Bytes that all running uploads hold together, and each client's share of them."""

    def __init__(self, limit: int, upload_bytes: int, metrics: ServerMetrics) -> None:
        """Start empty."""
        self._limit = limit
        self._client_limit = min(limit, max(limit // 2, upload_bytes))
        self._used = 0
        self._by_client: Counter[str] = Counter()
        self._metrics = metrics

    @contextmanager
    def share(self, client: str, announced: int) -> Iterator[SpoolShare]:
        """Bytes of one upload, given back at the end.

        What is announced takes no room from others: only what has come counts.
        """
        self._check(client, announced)
        share = SpoolShare(self, client)
        try:
            yield share
        finally:
            self._count(client, -share.taken)

    def take(self, client: str, size: int) -> None:
        """Count bytes that have come."""
        self._check(client, size)
        self._count(client, size)

    def _check(self, client: str, size: int) -> None:
        if self._used + size > self._limit or self._by_client[client] + size > self._client_limit:
            raise RefusedError(503, "too many uploads at a time: try again later", {"Retry-After": "5"}, reason="spool")

    def _count(self, client: str, size: int) -> None:
        self._used += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]
        self._metrics.spool_bytes.set(self._used)


class SpoolShare:
    """What one upload holds of the budget."""

    def __init__(self, budget: SpoolBudget, client: str) -> None:
        """Hold nothing yet."""
        self._budget = budget
        self._client = client
        self.taken = 0

    def take(self, size: int) -> None:
        """Hold more bytes."""
        self._budget.take(self._client, size)
        self.taken += size
