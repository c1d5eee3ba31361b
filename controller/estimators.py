"""Causal estimates of a link: bytes per second while it is busy, and the time to the first byte.

Only what has already been measured goes in; there is no clock here. Method of the adaptive players (dash.js, Shaka,
hls.js): the smaller of a fast and a slow moving average, tiny samples kept back, a safety factor on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2, isfinite

from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class BandwidthSettings:
    """How quickly a bandwidth estimate follows the link.

    fast_half_life_s, slow_half_life_s: busy seconds after which a sample weighs half. Players use 2 and 5; a prompt
    loads within a second or so, hence less.
    min_bytes, min_busy_s: a sample is kept back until it holds that many bytes over that many busy seconds.
    max_hold_s: busy seconds after which it counts whatever its bytes, so that a dead link shows.
    safety: factor between ``value`` and ``low``.
    prior_half_life_s: busy seconds after which the prior weighs half of what it did.
    memory_s: seconds of past transfers against which overlap is checked.
    """

    fast_half_life_s: float = 0.5
    slow_half_life_s: float = 2.0
    min_bytes: int = 16_000
    min_busy_s: float = 0.001
    max_hold_s: float = 0.05
    safety: float = 0.9
    prior_half_life_s: float = 0.1
    memory_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse settings under which no estimate would follow anything."""
        half_lives = (self.fast_half_life_s, self.slow_half_life_s, self.prior_half_life_s)
        if min(*half_lives, self.min_busy_s, self.max_hold_s) <= 0 or not 0 < self.safety <= 1:
            msg = "half-lives, min_busy_s and max_hold_s must be above 0 and safety must lie in (0, 1]"
            raise ArgumentError(msg)


class _Average:
    """Moving average of a rate, weighted by seconds, without the bias towards the 0 that it starts from."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._weight = 0.0

    def add(self, rate: float, seconds: float) -> None:
        keep = exp2(-seconds / self._half_life_s)
        self._sum = keep * self._sum + (1 - keep) * rate
        self._weight = keep * self._weight + (1 - keep)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight > 0 else 0.0


class BandwidthEstimator:
    """Bytes per busy second of a link, from transfers that may run side by side.

    A second in which four requests are open counts once: the estimate is of the link, not of a request.
    """

    def __init__(self, prior: float, settings: BandwidthSettings | None = None) -> None:
        """Start from ``prior`` bytes per second, which fades as measurements come in."""
        if not (isfinite(prior) and prior >= 0):
            msg = f"a bandwidth prior must be a finite number of bytes per second, at least 0, got {prior}"
            raise ArgumentError(msg)
        self._prior = prior
        self._settings = settings or BandwidthSettings()
        self._fast = _Average(self._settings.fast_half_life_s)
        self._slow = _Average(self._settings.slow_half_life_s)
        self._covered: list[tuple[float, float]] = []
        self._held_bytes = 0
        self._held_s = 0.0
        self._busy_s = 0.0

    def add(self, size: int, started: float, ended: float) -> None:
        """Take in ``size`` bytes that arrived between two instants, in seconds of any one clock.

        ``started`` is the first byte's arrival or the end of the request's previous read, never the sending of the
        request: waiting for the first byte is the other estimator's. 0 bytes say that the link was silent.
        """
        if size < 0 or not (isfinite(started) and isfinite(ended) and started <= ended):
            msg = f"a transfer needs at least 0 bytes and must not end before it starts, got {size}, {started}..{ended}"
            raise ArgumentError(msg)
        self._held_bytes += size
        self._held_s += self._claim(started, ended)
        ripe = self._held_bytes >= self._settings.min_bytes and self._held_s >= self._settings.min_busy_s
        if ripe or self._held_s >= self._settings.max_hold_s:
            self._take()

    def _claim(self, started: float, ended: float) -> float:
        """Mark an interval as busy; returns the seconds of it that were not yet."""
        fresh, at = 0.0, started
        for low, high in self._covered:
            if low > at:
                fresh += max(0.0, min(low, ended) - at)
            at = max(at, high)
        fresh += max(0.0, ended - at)
        self._covered = _merged([*self._covered, (started, ended)], ended - self._settings.memory_s)
        return fresh

    def _take(self) -> None:
        rate = self._held_bytes / self._held_s
        self._fast.add(rate, self._held_s)
        self._slow.add(rate, self._held_s)
        self._busy_s += self._held_s
        self._held_bytes, self._held_s = 0, 0.0

    @property
    def confidence(self) -> float:
        """Share of the estimate that is measured rather than prior, 0 to 1."""
        return 1.0 - exp2(-self._busy_s / self._settings.prior_half_life_s)

    @property
    def value(self) -> float:
        """Expected bytes per second."""
        measured = min(self._fast.value, self._slow.value)
        return self._prior + self.confidence * (measured - self._prior)

    @property
    def low(self) -> float:
        """Bytes per second to plan with: ``value`` under the safety factor."""
        return self._settings.safety * self.value


def _merged(intervals: list[tuple[float, float]], oldest: float) -> list[tuple[float, float]]:
    """Disjoint intervals in order, without those that ended before ``oldest``."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        elif high >= oldest:
            merged.append((low, high))
    return merged


class TtfbEstimator:
    """Seconds from a request to its first byte: a moving average that starts at a prior."""

    def __init__(self, prior_s: float, weight: float = 0.3) -> None:
        """Start at ``prior_s`` seconds; ``weight`` in (0, 1] is that of each new sample."""
        if not (isfinite(prior_s) and prior_s >= 0 and 0 < weight <= 1):
            msg = f"a prior must be at least 0 s and a weight in (0, 1], got {prior_s} and {weight}"
            raise ArgumentError(msg)
        self._value = prior_s
        self._weight = weight
        self._samples = 0

    def add(self, seconds: float) -> None:
        """Take in one measured time to first byte, in seconds."""
        if not (isfinite(seconds) and seconds >= 0):
            msg = f"a time to first byte must be a finite number of seconds, at least 0, got {seconds}"
            raise ArgumentError(msg)
        # The first measurements count more than the prior, which is only a guess.
        self._samples += 1
        weight = max(self._weight, 1 / (1 + self._samples))
        self._value += weight * (seconds - self._value)

    @property
    def value(self) -> float:
        """Expected seconds to the first byte."""
        return self._value
