"""How long transfers that run side by side keep a link busy together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf

_MOST_INTERVALS = 1024


class BusyTime:
    """Seconds that transfers cover together; amortised O(1) for intervals that come about in order."""

    def __init__(self, memory_s: float) -> None:
        """Start without transfers.

        Args:
            memory_s: Seconds of the past that are remembered.
        """
        self._memory_s = memory_s
        # Disjoint intervals in order.
        self._starts: list[float] = []
        self._ends: list[float] = []

    def claim(self, started: float, ended: float) -> float:
        """Mark an interval as busy.

        Args:
            started: Its beginning, in seconds of any one clock.
            ended: Its end.

        Returns:
            Seconds of it that were not busy yet.
        """
        last = self._ends[-1] if self._ends else -inf
        if started <= last and self._starts[-1] <= started:  # the usual case
            if ended <= last:
                return 0.0
            self._ends[-1] = ended
            return ended - last
        if started > last:  # after a pause
            self._starts.append(started)
            self._ends.append(ended)
            self._forget()
            return ended - started
        first = bisect_left(self._ends, started)
        stop = bisect_right(self._starts, ended, first)
        covered = sum(
            min(high, ended) - max(low, started)
            for low, high in zip(self._starts[first:stop], self._ends[first:stop], strict=True)
        )
        if first < stop:
            low, high = min(started, self._starts[first]), max(ended, self._ends[stop - 1])
        else:
            low, high = started, ended
        self._starts[first:stop], self._ends[first:stop] = [low], [high]
        self._forget()
        return max(0.0, ended - started - covered)

    def _forget(self) -> None:
        """Drop what is old, many at a time, so that dropping costs nothing on average."""
        if len(self._ends) > _MOST_INTERVALS:
            old = bisect_left(self._ends, self._ends[-1] - self._memory_s)
            old = max(old, _MOST_INTERVALS // 2)
            del self._starts[:old], self._ends[:old]
