"""Links of a simulation, as the command line names them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvwire.cli.inputs import read_file, read_link
from kvwire.controller.simulator import (
    ar1,
    constant,
    parse_log_json,
    parse_mbit_lines,
    steps,
    token_bucket,
    with_outages,
)
from kvwire.errors import ArgumentError, CorruptError
from kvwire.store import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller.simulator import RateTrace

LEAD_S = 20.0
"""Seconds at its mean that precede a link which does not repeat, so that there is time for an earlier load."""
_MOST_CHARACTERS = 16 << 20
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:e-?[0-9]{1,2})?")


@dataclass(frozen=True)
class NamedLink:
    """A link."""

    name: str  # as it was typed
    rate: RateTrace  # of the link
    rtt_s: float | None = None  # seconds of a round trip, where the name says so
    start_s: float | None = None  # where loads begin; None: anywhere


def steady_link(text: str) -> NamedLink:
    """Make a link of a constant rate, with a round trip if it is told."""
    link = read_link(text)
    return NamedLink(text, constant(link.bandwidth_bytes_s), link.rtt_s if "," in text else None)


def recorded_link(path: str, mean_bytes_s: float | None, stretch: float) -> NamedLink:
    """Read a recorded trace: .json is a log of durations and kbit/s, anything else lines of seconds and Mbit/s."""
    file = Path(path)
    data = read_file(file, "--trace takes recorded links, .json or lines of seconds and Mbit/s", _MOST_CHARACTERS)
    if len(data) > _MOST_CHARACTERS:
        raise CorruptError(f"{path} is larger than any trace; cut it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is not text; name a trace, or copy it again") from error
    try:
        rate = parse_log_json(text) if file.suffix == ".json" else parse_mbit_lines(text)
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}") from error
    if mean_bytes_s is not None:
        rate = rate.scaled(mean_bytes_s)
    return NamedLink(file.name, rate.stretched(stretch))


def made_link(text: str, seed: int) -> NamedLink:
    """A link from a formula.

    ``ar1:MEAN,SIGMA,CORRELATION``: a wandering rate, see ``ar1``. ``steps:0=RATE,SECOND=RATE,...``: the load begins at
    second 0, and the last rate lasts. ``bucket:PEAK,SUSTAINED,SIZE``: a full token bucket.
    """
    kind, _, rest = text.partition(":")
    parts = rest.split(",")
    try:
        match kind, parts:
            case "ar1", [mean, sigma, correlation]:
                rng = np.random.default_rng(seed)
                made = ar1(rng, _rate(mean), sigma=number(sigma), correlation=number(correlation))
                return NamedLink(text, made)
            case "steps", [_, *_]:
                pairs = [part.partition("=") for part in parts]
                return _led(text, steps([(number(second), _rate(rate)) for second, _, rate in pairs]))
            case "bucket", [peak, sustained, size]:
                return _led(text, token_bucket(_rate(peak), _rate(sustained), parse_size(size)))
    except ArgumentError as error:
        raise ArgumentError(f"{text!r}: {error}") from error
    msg = f"{text!r} is no made link: write ar1:1gbit,0.5,0.9, steps:0=1gbit,0.5=100mbit or bucket:10gbit,1gbit,100MB"
    raise ArgumentError(msg)


def with_outage(link: NamedLink, text: str) -> NamedLink:
    """Add an outage to a link."""
    start, comma, length = text.partition(",")
    if not comma:
        raise ArgumentError(f"{text!r} is no outage: write its start and its length in seconds, such as 0.3,0.5")
    led = link if link.rate.period_s is not None or link.start_s is not None else _led(link.name, link.rate)
    begins, lasts, period_s = number(start), number(length), led.rate.period_s
    if not lasts or (period_s is not None and begins + lasts > period_s):
        within = "" if period_s is None else f" and ends within the {period_s:g} s after which {link.name} repeats"
        msg = f"{text!r} is no outage: it lasts some time{within}; write its start and its length, such as 0.3,0.5"
        raise ArgumentError(msg)
    rate = with_outages(led.rate, [(begins + (led.start_s or 0.0), lasts)])
    return replace(link, name=f"{link.name}, out at {text}", rate=rate, start_s=led.start_s)


def number(text: str) -> float:
    """Read a number of at least 0."""
    if not _NUMBER.fullmatch(text.strip()):
        raise ArgumentError(f"{text[:40]!r} is not a number of at least 0, such as 0.25")
    return float(text)


def _rate(text: str) -> float:
    return read_link(text).bandwidth_bytes_s


def _led(name: str, rate: RateTrace) -> NamedLink:
    """A link that does not repeat, behind a stretch at its mean."""
    pieces = zip(rate.times, rate.rates, strict=True)
    led = steps([(0.0, rate.mean_bytes_s), *((LEAD_S + time, value) for time, value in pieces)])
    return NamedLink(name, led, start_s=LEAD_S)


def number_pairs(text: str, names: Sequence[str], option: str) -> dict[str, float]:
    """Read ``NAME=NUMBER,...``, of names that are known, each once."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in names or name.strip() in found:
            msg = f"{option} takes {', '.join(f'{each}=NUMBER' for each in names)}, each once; got {part[:40]!r}"
            raise ArgumentError(msg)
        found[name.strip()] = number(value)
    return found
