"""The layered quantiser: mid-tread, uniform, each level a third of the step of the one below.

A value quantised at step s/3 is three times the value quantised at step s plus a remainder of -1, 0 or 1, so a finer
level costs only the remainder and the whole ladder lies in one stream.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.entropy import kernels
from kvwire.codec.entropy.tables import GRID_PER_LEVEL, LARGEST
from kvwire.codec.format.limits import MAX_LEVELS
from kvwire.errors import ArgumentError, CacheValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATIO = 3
MAX_STEP = 2.0**40
"""Coarsest step of a ladder, and one over the finest: far beyond what normalised coefficients can use."""


@dataclass(frozen=True)
class Ladder:
    """The quality levels of a blob, coarsest first.

    Attributes:
        step: Quantiser step of level 0, in the profile's unit: of ``fit_profile`` the mean energy is then 1 for each
            element, of calibrated profiles what the default levels want. Level k has step ``step / 3^k``.
        names: One for each level.
    """

    step: float = 3.6
    names: tuple[str, ...] = ("coarse", "standard", "fine", "finer", "finest")

    def __post_init__(self) -> None:
        """Refuse ladders without levels, with too many, or with an impossible step."""
        if not 1 <= len(self.names) <= MAX_LEVELS or not 1 / MAX_STEP <= self.step <= MAX_STEP:
            msg = f"a ladder needs 1 to {MAX_LEVELS} level names and a step within 2^-40 to 2^40, got {self}"
            raise ArgumentError(msg)

    @property
    def steps(self) -> tuple[float, ...]:
        """Step of each level."""
        return tuple(self.step / RATIO**level for level in range(len(self.names)))

    @property
    def shifts(self) -> tuple[int, ...]:
        """Classes to subtract from a column's class at unit step, for each level."""
        first = round(GRID_PER_LEVEL * math.log(self.step, 3))
        return tuple(first - GRID_PER_LEVEL * level for level in range(len(self.names)))


def ladder_for(levels: Ladder | int | None) -> Ladder:
    """Read ``encode``'s ``levels``."""
    if isinstance(levels, Ladder):
        return levels
    default = Ladder()
    if levels is None:
        return default
    if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
        msg = f"levels must be a Ladder or a number from 1 to {MAX_LEVELS}, got {levels!r}"
        raise ArgumentError(msg)
    extra = tuple(f"level{index}" for index in range(len(default.names), levels))
    return Ladder(default.step, (default.names + extra)[:levels])


def quantise(coefficients: NDArray[np.float32], step: float) -> NDArray[np.int32]:
    """Round to the nearest multiples of a step, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = coefficients * np.float32(1.0 / step)
        check_largest(float(np.abs(scaled).max(initial=0.0)))
    quantised: NDArray[np.int32] = np.rint(scaled).astype(np.int32)
    return quantised


def check_largest(steps: float) -> None:
    """Refuse what cannot be quantised."""
    if not steps < LARGEST:
        msg = "the cache holds values too large to quantise; check the model's dtype and the profile it was fitted with"
        raise CacheValueError(msg)


def split_levels(finest: NDArray[np.int32], levels: int) -> tuple[list[NDArray[np.int32]], list[NDArray[np.uint8]]]:
    """Split quantised values into levels."""
    values: list[NDArray[np.int32]] = [finest]
    symbols: list[NDArray[np.uint8]] = []
    for _ in range(levels - 1):
        coarse, refinement = np.empty_like(finest), np.empty(finest.shape, np.uint8)
        kernels.coarsen(values[0], coarse, refinement)
        values.insert(0, coarse)
        symbols.insert(0, refinement)
    return values, symbols


def split_levels_naive(
    finest: NDArray[np.int32], levels: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.uint8]]]:
    """Split as ``split_levels`` does: its readable twin."""
    values = [finest]
    for _ in range(levels - 1):
        values.insert(0, np.rint(values[0] / RATIO).astype(np.int32))
    symbols = []
    for coarse, fine in itertools.pairwise(values):
        remainder = fine - RATIO * coarse
        symbols.append((1 + np.where(coarse < 0, -remainder, remainder)).astype(np.uint8))
    return values, symbols
