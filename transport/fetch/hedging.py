"""How long requests usually take, to tell one that is late for no good reason (Dean and Barroso, The Tail at Scale).

A request is overdue when it has taken several times what the median of the latest ones would have taken for its size.
Medians are taken under the load as it is, so requests that share a slow link are slow together and none is overdue.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_REMEMBERED = 64
_LEAST_SAMPLES = 4  # fewer say nothing about what is usual


class Pace:
    """Latest requests over one link, and how many second requests there were among them."""

    def __init__(self) -> None:
        """Know nothing: nothing is overdue."""
        self._first_byte_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._body_s: deque[float] = deque(maxlen=_REMEMBERED)  # seconds for each byte after the first piece
        self._requests = 0
        self._hedges = 0

    def completed(self, first_byte_s: float, total_s: float, size: int) -> None:
        """Note a request that brought all of its bytes."""
        self._first_byte_s.append(first_byte_s)
        self._body_s.append(max(0.0, total_s - first_byte_s) / max(1, size))
        self._requests += 1

    def expected_s(self, size: int) -> float | None:
        """What a request usually takes."""
        if len(self._first_byte_s) < _LEAST_SAMPLES:
            return None
        return median(self._first_byte_s) + size * median(self._body_s)

    def is_overdue(self, age_s: float, size: int, *, factor: float, least_s: float) -> bool:
        """Whether a request takes longer than usual."""
        if age_s <= least_s:
            return False
        expected_s = self.expected_s(size)
        return expected_s is not None and age_s > factor * expected_s

    def may_hedge(self, share: float) -> bool:
        """Take one second request from the budget."""
        if self._hedges >= max(1.0, share * self._requests):
            return False
        self._hedges += 1
        return True
