"""Rates of a simulated link: common ways to make them, and texts of two published formats of recordings."""

from __future__ import annotations

from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types.rates import RateTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MOST_SIGMA = 10.0  # larger ones leave the range of numbers
_MAX_CHARACTERS = 16 << 20
_MAX_PIECES = 200_000
"""Two days of a sample a second; what is longer is not one trace."""
_FIELDS = 2
_MBIT = 125_000.0
"""Bytes per second in a megabit per second."""
_LOG_KEYS = {"duration_ms", "bandwidth_kbps", "latency_ms"}


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


def parse_mbit_lines(text: str) -> RateTrace:
    """Read lines of ``seconds Mbit/s``: the format of the FCC, HSDPA, Oboe and Puffer collections.

    A line's rate holds until the next line's time; the last one's as long as the one before. The first line becomes
    second 0, and the trace repeats. Empty lines are passed over.

    Args:
        text: Content of the file.

    Returns:
        The trace, which repeats.

    Raises:
        CorruptError: A line is none of this format; the message names it.
    """
    _check_size(text)
    times: list[float] = []
    rates: list[float] = []
    for number, line in enumerate(text.splitlines(), 1):
        if fields := line.split():
            where = f"line {number}"
            if len(fields) != _FIELDS:
                _refuse(where, "it needs two columns, seconds and Mbit/s")
            time, mbit = (_number(field, where) for field in fields)
            if times and time <= times[-1]:
                _refuse(where, "times must grow")
            times.append(time)
            rates.append(mbit * _MBIT)
    if not times:
        _refuse("the text", "it holds no line")
    last_s = times[-1] - times[-2] if len(times) > 1 else 1.0
    starts = [time - times[0] for time in times]
    return _trace(starts, rates, starts[-1] + last_s)


def parse_log_json(text: str) -> RateTrace:
    """Read a JSON list of ``{"duration_ms", "bandwidth_kbps", "latency_ms"}``: the format of Ghent's 4G logs.

    The trace repeats; latencies are checked and left out.

    Args:
        text: Content of the file.

    Returns:
        The trace, which repeats.

    Raises:
        CorruptError: An entry is none of this format; the message names it, counted from 1.
    """
    _check_size(text)
    try:
        entries = strict_json(text)
    except ArgumentError as error:
        raise CorruptError(f"the trace is {error}; copy it again") from error
    if not isinstance(entries, list) or not entries:
        _refuse("the text", "it must be a list that is not empty")
    times, rates = [0.0], []
    for number, entry in enumerate(entries, 1):
        duration_ms, kbit = _log_entry(entry, f"entry {number}")
        times.append(times[-1] + duration_ms / 1000)
        rates.append(kbit * _MBIT / 1000)
    return _trace(times[:-1], rates, times[-1])


def _log_entry(entry: Any, where: str) -> tuple[float, float]:  # noqa: ANN401 - whatever JSON held
    if not isinstance(entry, dict) or entry.keys() != _LOG_KEYS:
        _refuse(where, f"it must hold exactly {', '.join(sorted(_LOG_KEYS))}")
    values = {}
    for key, value in entry.items():
        if type(value) not in (int, float):
            _refuse(where, f"{key} must be a number")
        values[key] = _number(value, where)
    if not values["duration_ms"]:
        _refuse(where, "duration_ms must be above 0")
    return values["duration_ms"], values["bandwidth_kbps"]


def _number(value: str | float, where: str) -> float:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = -1.0
    if not (isfinite(number) and number >= 0):
        _refuse(where, f"{str(value)[:40]!r} is no finite number of at least 0")
    return number


def _trace(times: list[float], rates: list[float], period_s: float) -> RateTrace:
    if len(times) > _MAX_PIECES:
        _refuse("the text", f"it holds {len(times)} samples, more than {_MAX_PIECES}")
    try:
        return RateTrace(tuple(times), tuple(rates), period_s)
    except ValueError as error:  # sums that rounding or overflow spoils
        raise CorruptError(f"the trace's numbers do not go together ({error}); copy it again") from error


def _check_size(text: str) -> None:
    if len(text) > _MAX_CHARACTERS:
        _refuse("the text", f"it has {len(text)} characters, more than {_MAX_CHARACTERS}")


def _refuse(where: str, why: str) -> NoReturn:
    raise CorruptError(f"{where} of the trace cannot be used: {why}; copy the trace again or mend it")
