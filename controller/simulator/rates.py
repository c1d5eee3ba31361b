"""Common ways to make the rates of a simulated link."""

from __future__ import annotations

from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MOST_SIGMA = 10.0  # larger ones leave the range of numbers


def constant(bytes_s: float) -> RateTrace:
    """The same rate for ever."""
    return RateTrace((0.0,), (bytes_s,))


def steps(pieces: Iterable[tuple[float, float]], period_s: float | None = None) -> RateTrace:
    """Make a trace from its pieces.

    Args:
        pieces: Starts in seconds, and rates in bytes per second.
        period_s: Seconds after which the trace starts again; None: the last rate lasts.

    Returns:
        The trace.
    """
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

    Args:
        rng: Source of the noise.
        mean_bytes_s: Mean of the trace, exactly.
        sigma: Standard deviation of the natural logarithm, at most 10.
        correlation: Of the logarithms of neighbouring steps, 0 to below 1.
        step_s: Seconds of a piece.
        length_s: Seconds before it repeats.

    Returns:
        The trace, which repeats.

    Raises:
        ArgumentError: Steps, sigma or correlation are out of range.
    """
    count = round(length_s / step_s) if step_s > 0 and isfinite(length_s) else 0
    if not (count >= 1 and 0 <= sigma <= _MOST_SIGMA and 0 <= correlation < 1):
        raise ArgumentError(
            f"step_s must be above 0 and fit length_s, sigma lie between 0 and {_MOST_SIGMA:g} and correlation between "
            "0 and below 1"
        )
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

    Args:
        peak_bytes_s: Rate while the bucket is not empty.
        sustained_bytes_s: Rate afterwards.
        bucket_bytes: Size of the bucket.

    Returns:
        The trace, which starts with a full bucket.

    Raises:
        ArgumentError: The peak is not above the sustained rate, or the bucket is empty.
    """
    if not (0 <= sustained_bytes_s < peak_bytes_s and bucket_bytes > 0):
        raise ArgumentError("a token bucket needs a peak above the sustained rate, and a bucket above 0 bytes")
    burst_s = bucket_bytes / (peak_bytes_s - sustained_bytes_s)
    return RateTrace((0.0, burst_s), (peak_bytes_s, sustained_bytes_s))


def with_outages(trace: RateTrace, outages: Sequence[tuple[float, float]]) -> RateTrace:
    """Set the rate to 0 in some intervals.

    Args:
        trace: Any.
        outages: Starts and lengths in seconds; in a trace that repeats they lie within its period.

    Returns:
        The trace with the outages.

    Raises:
        ArgumentError: An outage lies outside.
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
