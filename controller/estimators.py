"""Causal estimates of a link: bytes per second while it is busy, and the time to the first byte.

Only what has already been measured goes in; there is no clock here. Methods: the smaller of a fast and a slow moving
average, with tiny samples kept back (dash.js, Shaka, hls.js), and a lower bound that recent errors of prediction widen
(RobustMPC: Yin et al., SIGCOMM 2015). Unlike players, loads last a second or less: see ``Memory``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp2, inf
from statistics import NormalDist, median

from kvwire.errors import ArgumentError

from .horizons import HorizonErrors
from .workers import NOTICED

_MOST_ERROR = 9.0  # a silent link is infinitely slower than expected
_ERROR_KEPT = 0.75  # of the largest recent error, after one more sample: 5 % of it is left after ten
_SHARE = 0.25  # of times at which less comes than plans rely on
MOST_KNOWN = 8
"""Measurements that are enough to trust a quantity; more of them change nothing."""
UNKNOWN = 0.5
"""Relative 1-sigma error expected of a prior of which nothing is known."""


@dataclass(frozen=True)
class Memory:
    """What a moving average looks back on: its half-life in busy seconds or in bytes, whichever is over sooner."""

    seconds: float  # half-life in busy seconds
    size: float = inf  # half-life in bytes
    # least number of samples in a half-life that is over by bytes, so that no single sample of a fast link turns the
    # average; time counts whatever the number of samples
    samples: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an average that would never or at once forget."""
        if not (0 < self.seconds < inf and self.size > 0 and self.samples > 0):
            raise ArgumentError(f"a memory needs seconds, bytes and samples above 0, got {self}")

    def half_lives(self, size: int, seconds: float) -> float:
        """Measure a sample."""
        return seconds / self.seconds + min(size / self.size, 1 / self.samples)


@dataclass(frozen=True)
class BandwidthSettings:
    """How quickly a bandwidth estimate follows the link.

    Attributes:
        fast: Memory of the quick average. Players use 2 and 5 seconds; a prompt loads within a second or so, on fast
            links within a few hundredths, hence less, and bytes besides.
        slow: Memory of the slow average.
        usual: Memory of the average that a later load starts from.
        prior_error: Expected relative error of a prior of which nothing is known.
        min_bytes: A sample is kept back until it holds so many bytes.
        min_busy_s: And until it lasts so many busy seconds.
        max_hold_s: Busy seconds after which it counts whatever its bytes, so that a dead link shows.
    """

    fast: Memory = Memory(0.15, 4e6, 1.5)
    slow: Memory = Memory(0.6, 16e6, 6.0)
    usual: Memory = Memory(5.0)
    prior_error: float = UNKNOWN
    min_bytes: int = 16_000
    min_busy_s: float = 0.001
    max_hold_s: float = 0.05

    def __post_init__(self) -> None:
        """Refuse settings under which no estimate would follow anything."""
        positive = min(self.min_busy_s, self.max_hold_s) > 0
        if not (positive and self.min_bytes >= 0 and 0 <= self.prior_error < inf):
            msg = "min_busy_s and max_hold_s must be above 0, min_bytes and prior_error at least 0"
            raise ArgumentError(msg)


class _Average:
    """Bytes over seconds, both fading at the same pace, so that however samples are cut they weigh by their time."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._size = 0.0
        self._seconds = 0.0

    def add(self, size: int, seconds: float, shed: float = 0.0) -> None:
        """Take in a sample; ``shed``: half-lives by which the past fades besides."""
        keep = exp2(-self._memory.half_lives(size, seconds) - shed)
        self._size = keep * self._size + size
        self._seconds = keep * self._seconds + seconds

    def value(self, silent_s: float = 0.0) -> float:
        """Bytes per second, were so many more busy seconds to bring nothing."""
        keep = exp2(-silent_s / self._memory.seconds)
        return keep * self._size / (keep * self._seconds + silent_s) if self._seconds > 0 else 0.0


class BandwidthEstimator:
    """Bytes per busy second of a link, from transfers that may run side by side.

    A second in which four requests are open counts once: the estimate is of the link, not of a request. What came from
    a copy on this side of the link says nothing about it and must not be added.

    Attributes:
        horizons: How far it was off over times as long as plans look ahead.
    """

    def __init__(
        self,
        prior: float,
        settings: BandwidthSettings | None = None,
        *,
        prior_error: float | None = None,
        horizons: HorizonErrors | None = None,
    ) -> None:
        """Start from a prior."""
        self._settings = settings or BandwidthSettings()
        error = self._settings.prior_error if prior_error is None else prior_error
        if not (0 <= prior < inf and 0 <= error < inf):
            msg = f"a bandwidth prior and its error must be finite numbers, at least 0, got {prior} and {error}"
            raise ArgumentError(msg)
        self._prior = prior
        self._fast, self._slow = _Average(self._settings.fast), _Average(self._settings.slow)
        self._long = _Average(self._settings.usual)
        self._busy_until = -inf
        self._held_bytes = 0
        self._held_s = 0.0
        self._samples = 0
        self._streak = 0  # samples in a row that were far below the estimate, negative, or far above it
        self._below = error
        self._measured = 0.0
        self.horizons = horizons or HorizonErrors()

    def add(self, size: int, started: float, ended: float) -> None:
        """Take in bytes that arrived between two instants, in seconds of any one clock."""
        if size < 0 or not -inf < started <= ended < inf:
            msg = f"a transfer needs at least 0 bytes and must not end before it starts, got {size}, {started}..{ended}"
            raise ArgumentError(msg)
        self._held_bytes += size
        # Reports come about in the order of their ends.
        self._held_s += max(0.0, ended - max(started, self._busy_until))
        self._busy_until = max(self._busy_until, ended)
        large = self._held_bytes >= self._settings.min_bytes
        if self._held_s >= (self._settings.min_busy_s if large else self._settings.max_hold_s):
            self._take(self._held_bytes, self._held_s)
            self._held_bytes, self._held_s = 0, 0.0

    def _take(self, size: int, seconds: float) -> None:
        shed = 0.0
        self._below *= _ERROR_KEPT
        if self._samples:
            # Errors are the measurements' own: that the prior was wrong does not make the link unsteady.
            expected, rate = max(self._measured, 1.0), max(size / seconds, 1.0)
            side = (rate > NOTICED * expected) - (expected > NOTICED * rate)
            self._streak = side and (self._streak + side if self._streak * side > 0 else side)
            self.horizons.add(size, seconds, expected)
            # Two samples in a row bear each other out, and the link has changed; what nothing bears out is half noise.
            shed, share = (1.0, 1.0) if abs(self._streak) > 1 else (0.0, 0.5)
            self._below = max(self._below, share * min(expected / rate - 1, _MOST_ERROR))
        self._fast.add(size, seconds, shed)
        self._slow.add(size, seconds, shed)
        self._long.add(size, seconds)
        self._samples += 1
        self._measured = min(self._fast.value(), self._slow.value())

    @property
    def is_measured(self) -> bool:
        """Whether any sample has counted yet."""
        return self._samples > 0

    @property
    def is_guess(self) -> bool:
        """Whether the estimate is a prior that nothing measured, or that says little by now."""
        return not self._samples and self._below >= self._settings.prior_error > 0

    @property
    def value(self) -> float:
        """Expected bytes per second."""
        if self._samples:
            return self._measured
        # Of what came too soon to be timed, only that the link is not slower is known.
        burst = self._held_bytes / max(self._held_s, self._settings.min_busy_s)
        return max(self._prior, burst) if self._held_bytes >= self._settings.min_bytes else self._prior

    def share_after(self, silent_s: float) -> float:
        """Share of the estimate that is left once so many busy seconds have brought nothing."""
        if not self._measured:
            return 1.0
        return min(self._fast.value(silent_s), self._slow.value(silent_s)) / self._measured

    @property
    def low(self) -> float:
        """Bytes per second to plan with: what there would be if the estimate erred as much as it lately did."""
        return self.value / (1 + self.error)

    def low_over(self, horizon_s: float) -> float:
        """Tell what to plan with by what such plans met before."""
        return self.value * self.horizons.low(horizon_s, _SHARE, 1 / (1 + self.error))

    @property
    def error(self) -> float:
        """Relative error by which the estimate was lately too high, decaying from the largest; 0 to 9."""
        return self._below

    @property
    def usual(self) -> float:
        """Bytes per second over the last busy seconds: what a later load starts from, a stall at the end or not."""
        return self._long.value() if self._samples else self._prior


class RecentMedian:
    """Median of the last few measurements of a quantity, the prior the first: no single outlier moves it."""

    def __init__(self, prior: float, spread: float = UNKNOWN) -> None:
        """Start at a prior."""
        if not (0 <= prior < inf and 0 <= spread < inf):
            raise ArgumentError(f"a prior and its spread must be finite numbers, at least 0, got {prior} and {spread}")
        self._spread, self._count = spread, 0
        self._recent = deque([prior], maxlen=1 + MOST_KNOWN)
        self.value = prior  # expected value
        self._deviation: float | None = None  # worked out where it is asked for

    def add(self, measured: float) -> None:
        """Take in one measurement."""
        if not 0 <= measured < inf:
            raise ArgumentError(f"a measurement must be a finite number, at least 0, got {measured}")
        self._recent.append(measured)
        self._count += 1
        self.value, self._deviation = median(self._recent), None

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured yet."""
        return self._count > 0

    @property
    def deviation(self) -> float:
        """One standard deviation: of the measurements, and at least what so few of them cannot rule out."""
        if self._deviation is None:
            value = self.value
            # Half of what is normally distributed lies within so much of a standard deviation.
            measured = median(abs(taken - value) for taken in self._recent) / NormalDist().inv_cdf(0.75)
            self._deviation = max(measured, self._spread * value / (1 + min(self._count, MOST_KNOWN)))
        return self._deviation

    @property
    def high(self) -> float:
        """What most measurements do not exceed: two standard deviations more."""
        return self.value + 2 * self.deviation
