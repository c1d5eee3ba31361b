"""How far predictions of a link's bytes were off, over times as long as plans look ahead.

A link that is predicted well for the next few milliseconds may be far off over the next second. So what was predicted
is compared with the bytes that came over several horizons of busy time, and the ratios are counted in a few bins,
whose counts fade.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, exp2, isfinite, log

from kvwire.errors import ArgumentError

HORIZONS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Busy seconds over which predictions are checked; loads with a deadline rarely look further ahead."""
EDGES = (0.0, 0.0625, 0.125, 0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.98, 1.0)
"""Lower ends of the bins of bytes that came over bytes that were predicted; whatever is 1 or more is in the last."""
MOST_COUNTED = 48.0
"""What the counts of a horizon never exceed together."""
_TRUSTED = 4.0  # checks that weigh as much as what is assumed without any
_USUAL_RISK = 0.05  # of a link of which nothing is known


_Prediction = tuple[float, float, float]
"""Seconds for which the link had been busy, bytes that it had brought by then, and bytes per second predicted then."""


class HorizonErrors:
    """Counts of ratios for each horizon, amortised O(horizons) for each sample."""

    def __init__(self, counts: tuple[tuple[float, ...], ...] | None = None) -> None:
        """Start with what is known."""
        self._counts = [[0.0] * len(EDGES) for _ in HORIZONS_S] if counts is None else [list(row) for row in counts]
        right = [len(row) == len(EDGES) and all(isfinite(c) and c >= 0 for c in row) for row in self._counts]
        if len(right) != len(HORIZONS_S) or not all(right):
            raise ArgumentError(f"errors need {len(HORIZONS_S)} horizons of {len(EDGES)} finite counts of at least 0")
        self._busy_s = self._brought = 0.0
        self._open: list[_Prediction | None] = [None] * len(HORIZONS_S)

    @property
    def counts(self) -> tuple[tuple[float, ...], ...]:
        """Of each bin, for each horizon."""
        return tuple(tuple(row) for row in self._counts)

    def add(self, size: int, seconds: float, rate: float) -> None:
        """Take in a sample."""
        busy_s, brought = self._busy_s, self._brought
        self._busy_s, self._brought = busy_s + seconds, brought + size
        for number, horizon_s in enumerate(HORIZONS_S):
            began_s, had, expected = self._open[number] = self._open[number] or (busy_s, brought, rate)
            if began_s + horizon_s <= self._busy_s:
                came = brought + size * (began_s + horizon_s - busy_s) / seconds - had
                self._count(number, came / (horizon_s * expected))
                self._open[number] = None

    def _count(self, number: int, ratio: float) -> None:
        row = [count * (1 - 1 / MOST_COUNTED) for count in self._counts[number]]
        row[bisect_right(EDGES, max(ratio, 0.0)) - 1] += 1.0
        self._counts[number] = row

    def _row(self, horizon_s: float) -> list[float]:
        """Counts of the longest horizon that is not longer, and of the shortest where all are."""
        return self._counts[max(0, bisect_right(HORIZONS_S, horizon_s) - 1)]

    def low(self, horizon_s: float, share: float, assumed: float) -> float:
        """Tell how much of what is predicted comes at least, but for a share of all times."""
        row = self._row(horizon_s)
        known = sum(row)
        if not known:
            return min(assumed, 1.0)
        trust = known / (known + _TRUSTED)
        return min(1.0, exp(trust * log(_quantile(row, share * known)) + (1 - trust) * log(assumed)))

    def risk(self, horizon_s: float) -> float:
        """Tell how often less than half of what is predicted comes."""
        row = self._row(horizon_s)
        return (sum(row[: EDGES.index(0.5)]) + _TRUSTED * _USUAL_RISK) / (sum(row) + _TRUSTED)


def _quantile(row: list[float], wanted: float) -> float:
    """The ratio below which so many counts lie, each bin's spread evenly; the lowest bin's upper end stands for it."""
    for number, count in enumerate(row):
        if count > 0 and wanted <= count:
            low, high = EDGES[number], EDGES[min(number + 1, len(EDGES) - 1)]
            return max(low + (high - low) * wanted / count, EDGES[1])
        wanted -= count
    return EDGES[-1]


def faded(counts: tuple[tuple[float, ...], ...], half_lives: float) -> tuple[tuple[float, ...], ...]:
    """Trust what was counted less."""
    left = exp2(-half_lives)
    return tuple(tuple(count * left for count in row) for row in counts)
