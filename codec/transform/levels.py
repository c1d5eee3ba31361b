"""Encode a chunk's coefficients into the segments of all levels, each level straight from the coefficients.

A level's values are the finest level's, rounded from level to level. A column's largest coefficient determines its
first coded level, so columns that no level codes are never quantised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvwire.codec.entropy import kernels, level_kernels
from kvwire.codec.entropy.rans import encode_base, encode_refinement, lanes_for
from kvwire.codec.entropy.tables import ESCAPE, GRID_PER_LEVEL, LARGEST, class_of
from kvwire.codec.format.codecs import MAX_LEVELS
from kvwire.codec.format.segment import pack_segment
from kvwire.errors import ArgumentError, CacheValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.entropy.rans import Lanes
    from kvwire.codec.entropy.tables import Tables

    CodedLevel = tuple[bytes, int, float]
    """A segment, its number of symbols, and the level's squared error."""


RATIO = 3
MAX_STEP = 2.0**40
"""Largest step of a ladder, and one over the smallest: far beyond any need."""


@dataclass(frozen=True)
class Ladder:
    """The quality levels of a blob, coarsest first.

    Attributes:
        step: Quantiser step of level 0 in the profile's unit, in which ``fit_profile`` gives elements a mean energy
            of 1; calibration adapts the unit to the default levels. Level k has step ``step / 3^k``.
        names: The name of each level.
    """

    step: float = 3.6
    names: tuple[str, ...] = ("coarse", "standard", "fine", "finer", "finest")

    def __post_init__(self) -> None:
        """Check the number of levels and the step."""
        if not 1 <= len(self.names) <= MAX_LEVELS or not 1 / MAX_STEP <= self.step <= MAX_STEP:
            msg = f"a ladder needs 1 to {MAX_LEVELS} level names and a step within 2^-40 to 2^40, got {self}"
            raise ArgumentError(msg)

    @property
    def steps(self) -> tuple[float, ...]:
        """The step of each level."""
        return tuple(self.step / RATIO**level for level in range(len(self.names)))

    @property
    def shifts(self) -> tuple[int, ...]:
        """Classes to subtract from a column's class at unit step, for each level."""
        first = round(GRID_PER_LEVEL * math.log(self.step, 3))
        return tuple(first - GRID_PER_LEVEL * level for level in range(len(self.names)))


def ladder_for(levels: Ladder | int | None) -> Ladder:
    """Return the ladder that ``encode``'s ``levels`` means."""
    if isinstance(levels, Ladder):
        return levels
    default = Ladder()
    if levels is None:
        return default
    if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
        raise ArgumentError(f"levels must be a Ladder or a number from 1 to {MAX_LEVELS}, got {levels!r}")
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
    """Raise CacheValueError for a size in steps that cannot be quantised, or NaN."""
    if not steps < LARGEST:
        msg = "the cache holds values too large to quantise; check the model's dtype and the profile it was fitted with"
        raise CacheValueError(msg)


def split_levels(finest: NDArray[np.int32], levels: int) -> tuple[list[NDArray[np.int32]], list[NDArray[np.uint8]]]:
    """Split quantised values into each level's values and refinement symbols."""
    values: list[NDArray[np.int32]] = [finest]
    symbols: list[NDArray[np.uint8]] = []
    for _ in range(levels - 1):
        coarse, refinement = np.empty_like(finest), np.empty(finest.shape, np.uint8)
        kernels.coarsen(values[0], coarse, refinement)
        values.insert(0, coarse)
        symbols.insert(0, refinement)
    return values, symbols


class _CodedColumns(NamedTuple):
    """The columns that a level codes.

    Attributes:
        columns: uint32 ``[n]``, ascending indices.
        classes: int64 ``[n]``.
        runs: uint32 ``[runs, 2]``, the same columns as ranges.
    """

    columns: NDArray[np.uint32]
    classes: NDArray[np.int64]
    runs: NDArray[np.uint32]


class ChunkLevels:
    """Encodes one chunk, coarsest level first.

    Attributes:
        energy: Sum of the coefficients' squares.
    """

    def __init__(
        self, coefficients: NDArray[np.float32], ladder: Ladder, spread: NDArray[np.int64], tables: Tables
    ) -> None:
        """Measure every column and find the first level that codes it."""
        tokens, columns = coefficients.shape
        sums, peaks, self._squares = np.zeros((3, columns), np.float32)
        energies = np.zeros(columns, np.float64)
        level_kernels.survey(coefficients, sums, peaks, self._squares, energies)
        self.energy = float(energies.sum())
        self._coefficients, self._ladder, self._inverse = coefficients, ladder, 1.0 / ladder.steps[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            peaks *= np.float32(self._inverse)
            check_largest(float(peaks.max(initial=0.0)) + 0.0 * float(sums.sum()))  # peaks skip NaN, sums do not
        self._unit = class_of(sums / np.float32(tokens) * np.sqrt(2))
        self._enters = _first_levels(np.rint(peaks), len(ladder.steps))
        self._spread, self._tables, self._classes = spread, tables, np.zeros(columns, np.int64)

    def encode(self, level: int) -> CodedLevel:
        """Encode a level; levels must be encoded in order."""
        listed, coded = self._enter(level)
        missed = np.zeros(len(coded.columns), np.float32)
        symbols = np.empty((len(self._coefficients), len(coded.columns)), np.uint8)
        stream, escapes = (self._refine if level else self._begin)(level, coded, symbols, missed)
        every = self._squares.copy()
        every[coded.columns] = missed
        return pack_segment(listed, escapes, stream), symbols.size, float(every.sum(dtype=np.float64))

    def _enter(self, level: int) -> tuple[bytes, _CodedColumns]:
        """Return the class list of the next level and the columns that it codes."""
        every = len(self._classes)
        listed, columns, runs = np.empty(every, np.uint8), np.empty(every, np.uint32), np.empty((every, 2), np.uint32)
        own, found = np.empty(every, np.int64), np.empty(3, np.int64)
        level_kernels.enter_level(
            self._unit, self._enters, self._spread, level, self._ladder.shifts[level],
            self._classes, listed, columns, own, runs, found,
        )  # fmt: skip
        open_columns, coded, ranges = found.tolist()
        return listed[:open_columns].tobytes(), _CodedColumns(columns[:coded], own[:coded], runs[:ranges])

    def _begin(
        self, level: int, coded: _CodedColumns, symbols: NDArray[np.uint8], missed: NDArray[np.float32]
    ) -> tuple[Lanes, bytes]:
        """Encode the first level's stream and escapes."""
        ladder, tables, classes = self._ladder, self._tables, coded.classes
        descents = len(ladder.steps) - 1 - level
        level_kernels.base_symbols(
            self._coefficients, coded.runs, self._inverse, descents, tables.base.reshape(-1), classes, tables.sizes,
            ladder.steps[level], symbols, missed,
        )  # fmt: skip
        tokens, index = np.nonzero(symbols == ESCAPE)
        escaped = np.rint(self._coefficients[tokens, coded.columns[index]] * np.float32(self._inverse)).astype(np.int64)
        escaped = (escaped + (RATIO**descents - 1) // 2) // RATIO**descents
        stream = encode_base(symbols, classes, tables, lanes_for(symbols.size))
        return stream, escaped.astype("<i4").tobytes()

    def _refine(
        self, level: int, coded: _CodedColumns, codes: NDArray[np.uint8], missed: NDArray[np.float32]
    ) -> tuple[Lanes, bytes]:
        """Encode a later level's stream, which has no escapes."""
        ladder, tables, classes = self._ladder, self._tables, coded.classes
        descents = len(ladder.steps) - 1 - level
        level_kernels.refinement_codes(
            self._coefficients, coded.runs, self._inverse, descents, classes, tables.sizes,
            ladder.steps[level], codes, missed,
        )  # fmt: skip
        return encode_refinement(codes, classes, tables, lanes_for(codes.size)), b""


def _first_levels(peaks: NDArray[np.float32], levels: int) -> NDArray[np.int64]:
    """Return the first level that codes a column, given its largest value; the number of levels for never."""
    least, found = 1, np.zeros(len(peaks), np.int64)
    for _ in range(levels):  # from the finest level down; ``least`` is the least value not rounded to zero
        found += peaks < least
        least = RATIO * least - 1
    return found
