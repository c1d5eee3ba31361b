"""What a link carries over time: piecewise constant rates, and the common ways to make some."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MOST_SIGMA = 10.0  # larger ones leave the range of numbers


@dataclass(frozen=True)
class RateTrace:
    """Bytes per second over time, constant in pieces; a rate of 0 is an outage.

    times: seconds at which the pieces start, the first one 0. rates: bytes per second of each piece. period_s: seconds
    after which the trace starts again; None: the last rate lasts.
    """

    times: tuple[float, ...]
    rates: tuple[float, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse pieces that are not in order and rates that cannot be."""
        if not self.times or len(self.times) != len(self.rates):
            msg = f"a trace needs a rate for every time and at least one, got {len(self.times)} and {len(self.rates)}"
            raise ArgumentError(msg)
        ends = self.times if self.period_s is None else (*self.times, self.period_s)
        ordered = all(before < after for before, after in pairwise(ends))
        if self.times[0] != 0 or not ordered or not all(map(isfinite, ends)):
            msg = "times must start at 0 and grow, and the period must lie beyond the last one"
            raise ArgumentError(msg)
        if not all(isfinite(rate) and rate >= 0 for rate in self.rates):
            msg = "rates must be finite and at least 0 bytes per second"
            raise ArgumentError(msg)

    def at(self, t: float) -> float:
        """Bytes per second at second ``t``."""
        return self.rates[self._piece(self._split(t)[1])]

    def bytes_between(self, a: float, b: float) -> float:
        """Bytes that the link carries from second ``a`` to second ``b``."""
        if not a <= b:
            msg = f"an interval must not end before it begins, got {a} to {b}"
            raise ArgumentError(msg)
        (first, since), (last, until) = self._split(a), self._split(b)
        return (last - first) * self._starts[-1] + self._carried(until) - self._carried(since)

    def time_to(self, size: float, start: float) -> float:
        """The second at which ``size`` more bytes than at second ``start`` are through; infinity if never."""
        if not (isfinite(size) and size >= 0):
            msg = f"a size must be finite and at least 0, got {size}"
            raise ArgumentError(msg)
        if not size:
            return start
        turns, since = self._split(start)
        wanted, whole = self._carried(since) + size, self._starts[-1]
        if self.period_s is not None and wanted > whole:
            if not whole:
                return inf
            more, wanted = divmod(wanted, whole)
            # Exactly a whole number of periods: through when the last byte of the last one is.
            turns, wanted = (turns + more, wanted) if wanted else (turns + more - 1, whole)
        piece = bisect_left(self._starts, wanted) - 1
        if not self.rates[piece]:
            return inf
        found = self.times[piece] + (wanted - self._starts[piece]) / self.rates[piece]
        return max(start, turns * (self.period_s or 0.0) + found)

    @property
    def mean_bytes_s(self) -> float:
        """Mean bytes per second in the long run: of a period, or the last rate where nothing repeats."""
        return self.rates[-1] if self.period_s is None else self._starts[-1] / self.period_s

    def scaled(self, mean_bytes_s: float) -> RateTrace:
        """The same course with another mean, see ``mean_bytes_s``."""
        if not (self.mean_bytes_s and isfinite(mean_bytes_s) and mean_bytes_s >= 0):
            msg = f"a trace whose mean is {self.mean_bytes_s} bytes/s cannot be scaled to {mean_bytes_s}"
            raise ArgumentError(msg)
        ratio = mean_bytes_s / self.mean_bytes_s
        return replace(self, rates=tuple(rate * ratio for rate in self.rates))

    def stretched(self, factor: float) -> RateTrace:
        """The same rates, each for ``factor`` times as long; below 1 the link changes faster."""
        if not (isfinite(factor) and factor > 0):
            msg = f"a trace is stretched by a finite factor above 0, got {factor}"
            raise ArgumentError(msg)
        times = tuple(time * factor for time in self.times)
        return RateTrace(times, self.rates, None if self.period_s is None else self.period_s * factor)

    def shifted(self, start_s: float) -> RateTrace:
        """The trace as who comes at second ``start_s`` sees it: that second is its 0."""
        since = self._split(start_s)[1]
        piece = self._piece(since)
        times = [0.0, *(time - since for time in self.times[piece + 1 :])]
        rates = list(self.rates[piece:])
        if self.period_s is not None:
            rest = [(time + self.period_s - since, rate) for time, rate in zip(self.times, self.rates, strict=True)]
            again = [(time, rate) for time, rate in rest[: piece + 1] if times[-1] < time < self.period_s]
            times += [time for time, _ in again]
            rates += [rate for _, rate in again]
        return RateTrace(tuple(times), tuple(rates), self.period_s)

    def _split(self, t: float) -> tuple[float, float]:
        """Whole periods before second ``t``, and the seconds since the last one began."""
        if not (isfinite(t) and t >= 0):
            msg = f"a trace is known from second 0 on, got {t}"
            raise ArgumentError(msg)
        return (0.0, t) if self.period_s is None else divmod(t, self.period_s)

    def _piece(self, since: float) -> int:
        return bisect_right(self.times, since) - 1

    def _carried(self, since: float) -> float:
        piece = self._piece(since)
        return self._starts[piece] + self.rates[piece] * (since - self.times[piece])

    @cached_property
    def _starts(self) -> list[float]:
        """Bytes carried before each piece, and, in a trace that repeats, in a whole period."""
        ends = self.times if self.period_s is None else (*self.times, self.period_s)
        seconds = (after - before for before, after in pairwise(ends))
        return [0.0, *accumulate(rate * length for rate, length in zip(self.rates, seconds, strict=False))]


def constant(bytes_s: float) -> RateTrace:
    """The same rate for ever."""
    return RateTrace((0.0,), (bytes_s,))


def steps(pieces: Iterable[tuple[float, float]], period_s: float | None = None) -> RateTrace:
    """A trace from pairs of start, in seconds, and rate, in bytes per second."""
    times, rates = zip(*pieces, strict=True)
    return RateTrace(tuple(times), tuple(rates), period_s)


def ar1(
    rng: np.random.Generator,
    mean_bytes_s: float,
    *,
    sigma: float,
    correlation: float,
    step_s: float = 0.1,
    length_s: float = 60.0,
) -> RateTrace:
    """A link whose logarithmic rate is a first-order autoregression.

    mean_bytes_s: mean of the trace, exactly. sigma: standard deviation of the natural logarithm, at most 10.
    correlation: of the logarithms of neighbouring steps, 0 to below 1. step_s: seconds of a piece. length_s: seconds
    before it repeats.
    """
    count = round(length_s / step_s) if step_s > 0 and isfinite(length_s) else 0
    if not (count >= 1 and 0 <= sigma <= _MOST_SIGMA and 0 <= correlation < 1):
        msg = (
            f"step_s must be above 0 and fit length_s, sigma lie between 0 and {_MOST_SIGMA:g} and correlation between "
            "0 and below 1"
        )
        raise ArgumentError(msg)
    noise = rng.standard_normal(count)
    level, levels = noise[0], [noise[0]]
    for shock in noise[1:]:
        level = correlation * level + sqrt(1 - correlation**2) * shock
        levels.append(level)
    rates = np.exp(sigma * np.array(levels))
    times = tuple(index * step_s for index in range(count))
    return RateTrace(times, tuple(rates.tolist()), count * step_s).scaled(mean_bytes_s)


def token_bucket(peak_bytes_s: float, sustained_bytes_s: float, bucket_bytes: float) -> RateTrace:
    """A shaped link, as a reader sees it who is always busy: the peak until the full bucket is empty, then less.

    The bucket fills at the sustained rate while it is drained at the peak.
    """
    if not (0 <= sustained_bytes_s < peak_bytes_s and bucket_bytes > 0):
        msg = "a token bucket needs a peak above the sustained rate, and a bucket above 0 bytes"
        raise ArgumentError(msg)
    burst_s = bucket_bytes / (peak_bytes_s - sustained_bytes_s)
    return RateTrace((0.0, burst_s), (peak_bytes_s, sustained_bytes_s))


def with_outages(trace: RateTrace, outages: Sequence[tuple[float, float]]) -> RateTrace:
    """The trace with rate 0 in some intervals.

    outages: pairs of start and length in seconds; in a trace that repeats they must lie within its period.
    """
    end = inf if trace.period_s is None else trace.period_s
    silent = [(start, start + length) for start, length in outages]
    if not all(0 <= start < stop <= end and isfinite(stop) for start, stop in silent):
        msg = f"an outage must start at second 0 or later, last some time and end within the period, got {outages}"
        raise ArgumentError(msg)
    cuts = {time for time in (*trace.times, *(edge for pair in silent for edge in pair)) if time < end}
    times = tuple(sorted(cuts))
    rates = tuple(0.0 if any(a <= time < b for a, b in silent) else trace.at(time) for time in times)
    return RateTrace(times, rates, trace.period_s)
