"""Links that shake in ways which recordings of a sample a second do not show, each drawn anew from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from controller_parts.links import GBIT, SCALES, DrawnLink, drawn_gbit
from kvwire.controller.simulator import RateTrace, ar1

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Maker = Callable[[np.random.Generator], RateTrace]

_LENGTH_S, _STEP_S = 60.0, 0.01
_DRAWS = 3
"""Links of each kind."""


@dataclass(frozen=True)
class _Grid:
    """Rates of equal steps, to be written into."""

    rates: np.ndarray

    @classmethod
    def of(cls, rate: float = 1.0) -> _Grid:
        return cls(np.full(round(_LENGTH_S / _STEP_S), rate))

    def between(self, first_s: float, last_s: float) -> slice:
        return slice(round(first_s / _STEP_S), max(round(last_s / _STEP_S), round(first_s / _STEP_S) + 1))

    def trace(self) -> RateTrace:
        times = tuple(float(each) for each in np.arange(len(self.rates)) * _STEP_S)
        return RateTrace(times, tuple(self.rates.tolist()), _LENGTH_S)


def handover(rng: np.random.Generator) -> RateTrace:
    """A phone that moves: nothing for 0.05 to 0.5 s every second or three, then another cell's rate."""
    grid, at, rate = _Grid.of(), 0.0, 1.0
    while at < _LENGTH_S:
        stays_s, gone_s = rng.uniform(0.7, 3.0), rng.uniform(0.05, 0.5)
        grid.rates[grid.between(at, at + stays_s)] = rate
        grid.rates[grid.between(at + stays_s, at + stays_s + gone_s)] = 0.0
        at, rate = at + stays_s + gone_s, float(np.exp(rng.normal(0, 0.6)))
    return grid.trace()


def shaper(rng: np.random.Generator) -> RateTrace:
    """A token bucket that other traffic shares: bursts at 3 to 10 times the rate, the rate, or next to nothing."""
    grid, at, burst = _Grid.of(), 0.0, rng.uniform(3, 10)
    while at < _LENGTH_S:
        full_s, empty_s, rate = rng.uniform(0.02, 0.4), rng.uniform(0.2, 1.5), rng.choice((0.05, 0.5, 1.0))
        grid.rates[grid.between(at, at + full_s)] = burst
        grid.rates[grid.between(at + full_s, at + full_s + empty_s)] = rate
        at += full_s + empty_s
    return grid.trace()


def losses(rng: np.random.Generator) -> RateTrace:
    """One TCP connection: the rate climbs, halves at a loss, and starts at a fiftieth after a burst of them."""
    grid, rate, most = _Grid.of(), 1.0, 2.0
    for step in range(len(grid.rates)):
        rate = rate * 2**0.5 if rate < 0.5 else rate + 0.01  # doubling every 20 ms, then a hundredth a step
        if rate > most or rng.random() < 0.01:
            rate, most = (0.02, most) if rng.random() < 0.3 else (rate / 2, rng.uniform(1, 3))
        grid.rates[step] = rate
    return grid.trace()


def contention(rng: np.random.Generator) -> RateTrace:
    """A radio that many share: a share of 1/n of it for 20 to 150 ms at a time, n up to 40."""
    grid, at = _Grid.of(), 0.0
    while at < _LENGTH_S:
        turn_s = rng.uniform(0.02, 0.15)
        grid.rates[grid.between(at, at + turn_s)] = 1 / rng.choice((1, 1, 2, 3, 5, 10, 40))
        at += turn_s
    return grid.trace()


def bursts(rng: np.random.Generator) -> RateTrace:
    """Others come and go: what is left of the link is a quarter while they are there, for times with a heavy tail."""
    grid, at = _Grid.of(), 0.0
    while at < _LENGTH_S:
        free_s, busy_s = 0.1 * (1 + rng.pareto(1.5)), 0.05 * (1 + rng.pareto(1.3))
        grid.rates[grid.between(at, at + free_s)] = 1.0
        grid.rates[grid.between(at + free_s, at + free_s + busy_s)] = rng.uniform(0.02, 0.4)
        at += free_s + busy_s
    return grid.trace()


def throttled(rng: np.random.Generator) -> RateTrace:
    """A policer: after some time at full rate a twentieth, for longer."""
    grid, at = _Grid.of(), 0.0
    while at < _LENGTH_S:
        full_s, slow_s = rng.uniform(0.5, 4.0), rng.uniform(0.5, 3.0)
        grid.rates[grid.between(at, at + full_s)] = 1.0
        grid.rates[grid.between(at + full_s, at + full_s + slow_s)] = 0.05
        at += full_s + slow_s
    return grid.trace()


def satellites(rng: np.random.Generator) -> RateTrace:
    """Another satellite every second and a half: a gap of 30 to 120 ms, another rate, and noise on it."""
    grid = _Grid(np.array(ar1(rng, 1.0, sigma=0.3, correlation=0.7, step_s=_STEP_S, length_s=_LENGTH_S).rates))
    for at in np.arange(0.0, _LENGTH_S, 1.5):
        grid.rates[grid.between(at, at + 1.5)] *= np.exp(rng.normal(0, 0.5))
        grid.rates[grid.between(at, at + rng.uniform(0.03, 0.12))] = 0.0
    return grid.trace()


def falling(rng: np.random.Generator) -> RateTrace:
    """Away from the sender: the rate falls to a thousandth within a second or four, and is back at once."""
    grid, at = _Grid.of(), 0.0
    while at < _LENGTH_S:
        away_s = rng.uniform(1, 4)
        part = grid.rates[grid.between(at, at + away_s)]
        part[:] = 1e-3 ** np.linspace(0, 1, len(part))
        at += away_s
    return grid.trace()


MAKERS: tuple[Maker, ...] = (handover, shaper, losses, contention, bursts, throttled, satellites, falling)


def shaky_links(_folder: Path, seed: tuple[int, ...], scales: Sequence[str] = tuple(SCALES)) -> list[DrawnLink]:
    """Draw three links of each kind at all scales of time, each at a rate that is drawn log-uniformly.

    Args:
        _folder: Of recordings; none are used.
        seed: Of what is drawn.
        scales: Of time, names in ``SCALES``.

    Returns:
        The links.
    """
    out = []
    for number, make in enumerate(MAKERS):
        for scale in scales:
            rng = np.random.default_rng((*seed, number, list(SCALES).index(scale)))
            for _ in range(_DRAWS):
                gbit = drawn_gbit(rng)
                trace = make(rng).scaled(gbit * GBIT).stretched(SCALES[scale])
                out.append(DrawnLink(f"made/{make.__name__}", scale, gbit, trace))
    return out
