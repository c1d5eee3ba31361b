"""Recorded links: texts of two published formats into traces."""

from __future__ import annotations

from math import isfinite
from typing import Any, NoReturn

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types.rates import RateTrace

_MAX_CHARACTERS = 16 << 20
_MAX_PIECES = 200_000
"""Two days of a sample a second; what is longer is not one trace."""
_FIELDS = 2
_MBIT = 125_000.0
"""Bytes per second in a megabit per second."""
_LOG_KEYS = {"duration_ms", "bandwidth_kbps", "latency_ms"}


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
