"""Rates of a link over time, piecewise constant, for the simulator and the emulated link."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, inf, isfinite

from kvwire.errors import ArgumentError

_ROUNDING = 1e-12  # of a sum of bytes, relative
_INSTANT_ROUNDING = 2.0**-50  # of a sum of seconds, relative: a few units in the last place


@dataclass(frozen=True)
class RateTrace:
    """Bytes per second over time, constant in pieces; a rate of 0 is an outage.

    Sums of bytes are rounded, so a transfer that ends as an outage begins may exceed what the link has carried by a
    rounding error. That excess does not wait for the end of the outage.

    Attributes:
        times: Seconds at which the pieces start; the first is 0.
        rates: Bytes per second of each piece.
        period_s: Seconds after which the trace starts again; None: the last rate lasts.

    Raises:
        ArgumentError: The times do not rise from 0, or a rate or the period is invalid.
    """

    times: tuple[float, ...]
    rates: tuple[float, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        """Check pieces, rates and the period."""
        if not self.times or len(self.times) != len(self.rates):
            msg = f"a trace needs a rate for every time and at least one, got {len(self.times)} and {len(self.rates)}"
            raise ArgumentError(msg)
        ordered = all(before < after for before, after in pairwise(self._edges))
        if self.times[0] != 0 or not ordered or not all(map(isfinite, self._edges)):
            raise ArgumentError("times must start at 0 and grow, and the period must lie beyond the last one")
        if not all(isfinite(rate) and rate >= 0 for rate in self.rates):
            raise ArgumentError("rates must be finite and at least 0 bytes per second")

    def at(self, t: float) -> float:
        """Bytes per second at second ``t``."""
        return self.rates[self._piece(self._split(t)[1])]

    def bytes_by(self, t: float) -> float:
        """Bytes carried from second 0 to second ``t``; 0 before the beginning."""
        if t <= 0:
            return 0.0
        turns, since = self._split(t)
        return turns * self._starts[-1] + self._carried(since) if turns else self._carried(since)

    def bytes_between(self, a: float, b: float) -> float:
        """Add up what the link carries in an interval.

        Args:
            a: Its start, in seconds.
            b: Its end, in seconds.

        Returns:
            Bytes.

        Raises:
            ArgumentError: The interval ends before it begins, or begins before second 0.
        """
        if not a <= b:
            raise ArgumentError(f"an interval must not end before it begins, got {a} to {b}")
        (first, since), (last, until) = self._split(a), self._split(b)
        return (last - first) * self._starts[-1] + self._carried(until) - self._carried(since)

    def moment_of(self, carried: float) -> float:
        """First second by which ``carried`` bytes are transferred; infinity if never."""
        return 0.0 if carried <= 0 else self._moment(0.0, carried, _ROUNDING * carried)

    def time_to(self, size: float, start: float) -> float:
        """Find when a transfer ends that has the link to itself.

        Args:
            size: Bytes, at least 0.
            start: Second at which it begins.

        Returns:
            The first second by which ``size`` more bytes than at ``start`` are transferred; infinity if never.

        Raises:
            ArgumentError: The size is below 0 or infinite, or the start lies before second 0.
        """
        if not (isfinite(size) and size >= 0):
            raise ArgumentError(f"a size must be finite and at least 0, got {size}")
        if not size:
            return start
        turns, since = self._split(start)
        wanted = self._carried(since) + size
        slack = _ROUNDING * wanted + _INSTANT_ROUNDING * start * max(self.rates)
        return max(start, self._moment(turns, wanted, slack))

    @property
    def slowest(self) -> float:
        """Lowest rate above 0, in bytes per second; 0 if all are 0."""
        return min((rate for rate in self.rates if rate), default=0.0)

    @property
    def delivers(self) -> bool:
        """Whether a transfer of any size ends."""
        return bool(self.rates[-1] if self.period_s is None else max(self.rates))

    @property
    def mean_bytes_s(self) -> float:
        """Long-run mean in bytes per second: of a period, or else the last rate."""
        return self.rates[-1] if self.period_s is None else self._starts[-1] / self.period_s

    def scaled(self, mean_bytes_s: float) -> RateTrace:
        """Scale all rates.

        Args:
            mean_bytes_s: The new ``mean_bytes_s``.

        Returns:
            The same shape over time with that mean.

        Raises:
            ArgumentError: The mean of this trace is 0, or the new one is invalid.
        """
        if not (self.mean_bytes_s and isfinite(mean_bytes_s) and mean_bytes_s >= 0):
            raise ArgumentError(f"a trace whose mean is {self.mean_bytes_s} bytes/s cannot be scaled to {mean_bytes_s}")
        ratio = mean_bytes_s / self.mean_bytes_s
        return replace(self, rates=tuple(rate * ratio for rate in self.rates))

    def stretched(self, factor: float) -> RateTrace:
        """Multiply the length of every piece; rates stay.

        Args:
            factor: Of all lengths; below 1 the link changes faster.

        Returns:
            The stretched trace.

        Raises:
            ArgumentError: The factor is not finite and above 0.
        """
        if not (isfinite(factor) and factor > 0):
            raise ArgumentError(f"a trace is stretched by a finite factor above 0, got {factor}")
        times = tuple(time * factor for time in self.times)
        return RateTrace(times, self.rates, None if self.period_s is None else self.period_s * factor)

    def shifted(self, start_s: float) -> RateTrace:
        """Cut off the beginning: second ``start_s`` becomes second 0."""
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

    def _moment(self, turns: float, wanted: float, slack: float) -> float:
        """Second by which ``wanted`` bytes, less ``slack``, are transferred after ``turns`` periods."""
        whole = self._starts[-1]
        if self.period_s is not None:
            if not whole:
                return inf
            more = max(0, ceil(wanted / whole) - 1)
            turns, wanted = turns + more, min(wanted - more * whole, whole)
        if wanted <= slack:  # the end of a period is where its last byte is carried
            if not turns:
                return 0.0
            turns, wanted = turns - 1, whole
        piece = max(0, bisect_left(self._starts, wanted - slack) - 1)
        if not self.rates[piece]:
            return inf
        second = self.times[piece] + (wanted - self._starts[piece]) / self.rates[piece]
        if piece + 1 < len(self._edges):
            second = min(second, self._edges[piece + 1])  # rounding could otherwise pass the piece's end
        return turns * (self.period_s or 0.0) + second

    def _split(self, t: float) -> tuple[float, float]:
        """Whole periods before second ``t``, and the seconds since the last one began."""
        if not (isfinite(t) and t >= 0):
            raise ArgumentError(f"a trace starts at second 0, got {t}")
        return (0.0, t) if self.period_s is None else divmod(t, self.period_s)

    def _piece(self, since: float) -> int:
        return bisect_right(self.times, since) - 1

    def _carried(self, since: float) -> float:
        piece = self._piece(since)
        return self._starts[piece] + self.rates[piece] * (since - self.times[piece])

    @cached_property
    def _edges(self) -> tuple[float, ...]:
        """Bounds of pieces: each start and, if the trace repeats, the end of the period."""
        return self.times if self.period_s is None else (*self.times, self.period_s)

    @cached_property
    def _starts(self) -> list[float]:
        """Bytes carried before each piece and, if the trace repeats, in a whole period."""
        seconds = (after - before for before, after in pairwise(self._edges))
        return [0.0, *accumulate(rate * length for rate, length in zip(self.rates, seconds, strict=False))]
