"""Classes of coefficients and the integer frequency tables that they select.

A coefficient's class is the scale of its Laplacian in quantiser steps, on a grid of ratio 3^(1/6). One refinement
divides the step by three and so raises every class by exactly six. Tables hold only integers and decode identically on
every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Entries = tuple[NDArray[np.uint32], NDArray[np.uint64]]
    """For each symbol of each table: start in the upper 16 bits and frequency in the lower 16; and
    floor(2^44 / frequency) + 1."""

CLASSES = 42
"""Scales from 0.05 to 91 steps: below, a column is all zeros; above, most values escape anyway."""
FINEST_SCALE = 0.05
GRID_PER_LEVEL = 6
"""Classes gained when the step is divided by three."""
ALPHABET = 256
"""Base symbols are bytes, value + 128; byte 0 is the escape, whose value is stored beside the stream."""
BIAS = 128
ESCAPE = 0
LARGEST = 2**28
"""Quantised values are below this at every level, so that all arithmetic fits 32 bits."""
CONTEXTS = 3
"""Contexts of a refinement: |q| of the level below, capped at 2."""
PROBABILITY_BITS = 12
"""Frequencies of a table add up to 2^12: its lookup takes 16 KiB, and the rounding costs 0.17 % of rate."""
_TOTAL = 1 << PROBABILITY_BITS
POINTS = 2
"""Sizes 1 and 2 have fitted reconstruction points; larger values are reconstructed as they are."""
_TOTAL_POINT = 1 << 16
_PRIOR_COUNT = 256.0
"""Weight of the Laplacian prior, in symbols."""


def class_of(scale: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the class nearest to a scale."""
    safe = np.maximum(np.asarray(scale, np.float64), 1e-30)
    steps: NDArray[np.int64] = np.rint(GRID_PER_LEVEL * np.log(safe / FINEST_SCALE) / np.log(3.0)).astype(np.int64)
    return steps + 1


def scale_of(classes: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the scale of a class."""
    return FINEST_SCALE * 3.0 ** ((classes - 1) / GRID_PER_LEVEL)


def column_classes(coefficients: NDArray[np.floating]) -> NDArray[np.int64]:
    """Choose every column's class at unit step."""
    return class_of(np.abs(coefficients).mean(0) * np.sqrt(2))


def clip_class(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Clip to the classes that have a table."""
    return np.clip(classes, 1, CLASSES)


_RECIPROCAL_BITS = 44
"""Bits of a state (32) plus bits of a frequency (12)."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Frequencies of every class; class ``k`` is row ``k - 1``.

    Attributes:
        base: uint16 ``[CLASSES, 256]``, rows add up to 4096, the escape is never 0.
        ternary: uint16 ``[CLASSES, 3, 3]`` = class, context, symbol; rows add up to 4096, no entry is 0.
        points: uint16 ``[CLASSES, 2]``, how much nearer to zero values of size 1 and 2 are reconstructed, in 2^-16
            steps.
    """

    base: NDArray[np.uint16]
    ternary: NDArray[np.uint16]
    points: NDArray[np.uint16]

    def check(self) -> None:
        """Raise CorruptError where a table is not usable."""
        shapes = self.base.shape == (CLASSES, ALPHABET) and self.ternary.shape == (CLASSES, CONTEXTS, 3)
        shapes = shapes and self.points.shape == (CLASSES, POINTS) and bool((self.points <= _TOTAL_POINT // 2).all())
        if not (
            shapes
            and (self.base.sum(axis=1, dtype=np.int64) == _TOTAL).all()
            and (self.ternary.sum(axis=2, dtype=np.int64) == _TOTAL).all()
            and self.base[:, ESCAPE].all()
            and self.ternary.all()
        ):
            raise CorruptError("the profile's frequency tables are damaged; fetch the profile again")

    @cached_property
    def base_starts(self) -> NDArray[np.uint32]:
        """Cumulative frequencies before each base symbol, flat."""
        return _starts(self.base)

    @cached_property
    def ternary_starts(self) -> NDArray[np.uint32]:
        """Cumulative frequencies before each refinement symbol, flat."""
        return _starts(self.ternary)

    @cached_property
    def base_entries(self) -> Entries:
        """The encoder's entries of base symbols."""
        return _entries(self.base, self.base_starts)

    @cached_property
    def ternary_entries(self) -> Entries:
        """The encoder's entries of refinement symbols."""
        return _entries(self.ternary, self.ternary_starts)

    @cached_property
    def sizes(self) -> NDArray[np.float32]:
        """Size in steps of values 0, 1 and 2 of every class, ``[CLASSES + 1, 3]``; row 0 is for uncoded columns."""
        out = np.tile(np.arange(POINTS + 1, dtype=np.float32), (CLASSES + 1, 1))
        out[1:, 1:] -= self.points.astype(np.float32) / _TOTAL_POINT
        return out

    def sizes_of(self, classes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Look up the sizes of some columns, ``[3, columns]``."""
        return np.ascontiguousarray(self.sizes[classes].T)

    @cached_property
    def lookup(self) -> NDArray[np.uint32]:
        """For each class and slot of 4096: symbol in 8 bits, slot - start in 12, frequency - 1 in 12."""
        entries = np.repeat(np.arange(self.base.size, dtype=np.uint32), self.base.ravel())
        bias = np.tile(np.arange(_TOTAL, dtype=np.uint32), len(self.base)) - self.base_starts[entries]
        frequency = self.base.ravel()[entries].astype(np.uint32) - np.uint32(1)
        packed = entries % np.uint32(ALPHABET) << np.uint32(24) | bias << np.uint32(PROBABILITY_BITS) | frequency
        return np.asarray(packed, np.uint32)

    @cached_property
    def thresholds(self) -> NDArray[np.uint32]:
        """For each class and context: start of symbol 1 in the low 16 bits, start of symbol 2 in the high ones."""
        frequencies = self.ternary.astype(np.uint32)
        low = frequencies[:, :, 0]
        return (low | (low + frequencies[:, :, 1]) << np.uint32(16)).ravel()


def fit_tables(
    base_counts: NDArray[np.number], ternary_counts: NDArray[np.number], excess: NDArray[np.float64] | None = None
) -> Tables:
    """Fit tables to counted symbols with a Laplacian prior."""
    base = np.zeros((CLASSES, ALPHABET), np.uint16)
    ternary = np.zeros((CLASSES, CONTEXTS, 3), np.uint16)
    for row in range(CLASSES):
        scale = FINEST_SCALE * 3.0 ** (row / GRID_PER_LEVEL)
        prior = _laplacian(scale)
        weight = base_counts[row] + _PRIOR_COUNT * prior
        allowed = (base_counts[row] > 0) | (prior * _TOTAL >= 0.5)  # noqa: PLR2004 - rounds to at least one slot
        allowed[ESCAPE] = True
        base[row] = normalise(weight, allowed)
        for context in range(CONTEXTS):
            centre = BIAS + 3 * context
            near = np.maximum(prior[centre - 1 : centre + 2], 1e-9)
            near = near / near.sum() * _PRIOR_COUNT
            ternary[row, context] = normalise(ternary_counts[row, context] + near, np.ones(3, bool))
    return Tables(base, ternary, _points(np.zeros((CLASSES, POINTS, 2)) if excess is None else excess))


def _points(excess: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return the mean excess of each class and size with a Laplacian prior, in 2^-16 steps."""
    scales = FINEST_SCALE * 3.0 ** (np.arange(CLASSES) / GRID_PER_LEVEL)
    rate = np.sqrt(2.0) / scales
    # Under a density proportional to exp(-rate x), the mean over a bin of width 1 lies this far below its middle.
    with np.errstate(over="ignore"):
        expected = 0.5 - 1 / rate + 1 / np.expm1(rate)
    mean = (excess[:, :, 1] + _PRIOR_COUNT * expected[:, None]) / (excess[:, :, 0] + _PRIOR_COUNT)
    points: NDArray[np.uint16] = np.rint(np.clip(mean, 0, 0.5) * _TOTAL_POINT).astype(np.uint16)
    return points


def _laplacian(scale: float) -> NDArray[np.float64]:
    """Return base symbols' probabilities under a Laplacian of mean size ``scale / sqrt 2``; escapes are its tails."""
    rate = float(np.sqrt(2.0)) / scale
    values = np.abs(np.arange(ALPHABET) - BIAS).astype(np.float64)
    probability: NDArray[np.float64] = np.exp(-rate * (values - 0.5)) * (1.0 - np.exp(-rate)) / 2.0
    probability[BIAS] = 1.0 - np.exp(-rate / 2.0)
    probability[ESCAPE] = np.exp(-rate * (BIAS - 0.5))
    return probability


def normalise(weight: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Scale weights to frequencies that add up to 4096, at least 1 where allowed and 0 elsewhere."""
    ideal = np.where(allowed, weight, 0.0) / weight[allowed].sum() * _TOTAL
    frequencies = np.where(allowed, np.maximum(1, np.floor(ideal)), 0).astype(np.int64)
    excess = int(frequencies.sum()) - _TOTAL
    while excess > 0:  # rare symbols were raised to 1: take the excess from the largest, where it costs least
        largest = int(frequencies.argmax())
        taken = min(excess, int(frequencies[largest]) // 8 + 1)
        frequencies[largest] -= taken
        excess -= taken
    # The rest after rounding down goes to the symbols that lost most, one each.
    frequencies[np.argsort(frequencies - ideal, kind="stable")[: -excess or 0]] += 1
    return frequencies.astype(np.uint16)


def _entries(frequencies: NDArray[np.uint16], starts: NDArray[np.uint32]) -> Entries:
    counts = frequencies.ravel().astype(np.uint32)
    reciprocals = np.uint64(1 << _RECIPROCAL_BITS) // np.maximum(counts, 1).astype(np.uint64) + np.uint64(1)
    return starts << np.uint32(16) | counts, reciprocals


def _starts(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    counts = frequencies.astype(np.uint32)
    return (np.cumsum(counts, axis=-1, dtype=np.uint32) - counts).ravel()
