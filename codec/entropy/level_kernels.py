"""numba kernels from coefficients to a level's symbols; see ``kernels`` for the rules of all kernels.

They quantise a row again for each level: this costs less than storing it and touches only the columns that the level
codes. Callers have checked with ``survey`` that all values are below 2^28 in size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba.extending import register_jitable
from numpy import empty, float32, float64, int32, uint8, uint32

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import F32, U8, U16, U32

_TILE = 512
"""Columns whose sums fit the L1 cache."""


@jit
def survey(coefficients: F32, sums: F32, peaks: F32, squares: F32, energies: NDArray[float64]) -> None:
    """Compute each column's sum and peak of sizes, and its sum of squares in float32 and float64."""
    tokens, columns = coefficients.shape
    for first in range(0, columns, _TILE):
        width = min(_TILE, columns - first)
        sums_of, peaks_of = sums[first : first + width], peaks[first : first + width]
        squares_of, energies_of = squares[first : first + width], energies[first : first + width]
        for t in range(tokens):
            row = coefficients[t, first : first + width]
            for c in range(width):
                size = abs(row[c])
                square = size * size
                sums_of[c] += size
                peaks_of[c] = size if size > peaks_of[c] else peaks_of[c]  # noqa: FURB136 - max() is not vectorised
                squares_of[c] += square
                energies_of[c] += float64(square)


@register_jitable
def _sizes_of(classes: NDArray[int64], sizes: F32) -> tuple[F32, F32]:
    ones, twos = empty(classes.shape[0], float32), empty(classes.shape[0], float32)
    for i in range(classes.shape[0]):
        ones[i], twos[i] = sizes[classes[i], 1], sizes[classes[i], 2]
    return ones, twos


@register_jitable
def _third(q: int32) -> int32:
    """The value of the next coarser level, see ``kernels.coarsen``."""
    return int32(uint32(q + int32(3 * 268435456 + 1)) // uint32(3)) - int32(268435456)


@register_jitable
def _quantise(row: F32, runs: U32, inverse: float, descents: int, picked: F32, values: NDArray[int32]) -> None:
    """Pick a token's coded coefficients, and quantise them at some levels below the finest."""
    at = uint32(0)
    for run in range(runs.shape[0]):
        for c in range(runs[run, 0], runs[run, 1]):
            picked[at] = row[c]
            at += uint32(1)
    for i in range(picked.shape[0]):
        values[i] = int32(np.rint(picked[i] * float32(inverse)))
    for _ in range(descents):
        for i in range(picked.shape[0]):
            values[i] = _third(values[i])


@register_jitable
def _add_errors(picked: F32, values: NDArray[int32], ones: F32, twos: F32, step: float, missed: F32) -> None:
    """Add the squared errors of a token's quantised coefficients."""
    for i in range(picked.shape[0]):
        q, one, two = abs(values[i]), ones[i], twos[i]
        size = float32(q)
        size = one if q == 1 else size
        size = two if q == 2 else size  # noqa: PLR2004 - the sizes that have points
        difference = abs(picked[i]) - float32(step) * size
        missed[i] += difference * difference


@jit
def enter_level(
    unit: NDArray[int64],
    enters: NDArray[int64],
    spread: NDArray[int64],
    level: int,
    shift: int,
    classes: NDArray[int64],
    listed: U8,
    columns: U32,
    own: NDArray[int64],
    runs: U32,
    found: NDArray[int64],
) -> None:
    """Advance columns to the next level as ``segment.enter_level`` does, and list the columns that it codes."""
    open_columns, coded, ranges, inside = 0, 0, 0, False
    for c in range(classes.shape[0]):
        if classes[c] > 0:
            classes[c] = min(classes[c] + 6, 42)
        else:
            code = 0
            if enters[c] == level:
                classes[c] = min(max(unit[c] - shift, 1), 42)
                delta = classes[c] - min(max(spread[c] - shift, 1), 42)
                code = 2 * delta + 1 if delta >= 0 else -2 * delta
            listed[open_columns] = uint8(code)
            open_columns += 1
        if classes[c] > 0:
            columns[coded], own[coded] = c, classes[c]
            coded += 1
            if not inside:
                runs[ranges, 0] = c
                ranges += 1
            runs[ranges - 1, 1] = c + 1
        inside = classes[c] > 0
    found[0], found[1], found[2] = open_columns, coded, ranges


@jit
def base_symbols(
    coefficients: F32,
    runs: U32,
    inverse: float,
    descents: int,
    base: U16,
    classes: NDArray[int64],
    sizes: F32,
    step: float,
    symbols: U8,
    missed: F32,
) -> None:
    """Quantise a first level to base symbols and sum its squared errors."""
    count = missed.shape[0]
    picked, values, rows = empty(count, float32), empty(count, int32), empty(count, uint32)
    ones, twos = _sizes_of(classes, sizes)
    for i in range(count):
        rows[i] = uint32((classes[i] - 1) * 256)
    for t in range(symbols.shape[0]):
        _quantise(coefficients[t], runs, inverse, descents, picked, values)
        for i in range(count):
            q = values[i]
            symbol = uint32(q + int32(128)) if -128 < q < 128 else uint32(0)  # noqa: PLR2004 - the alphabet
            symbols[t, i] = uint8(symbol) if base[rows[i] + symbol] > 0 else uint8(0)
        _add_errors(picked, values, ones, twos, step, missed)


@jit
def refinement_codes(
    coefficients: F32,
    runs: U32,
    inverse: float,
    descents: int,
    classes: NDArray[int64],
    sizes: F32,
    step: float,
    codes: U8,
    missed: F32,
) -> None:
    """Quantise a level and the one below to refinement codes, and sum the level's squared errors."""
    count = missed.shape[0]
    picked, values = empty(count, float32), empty(count, int32)
    ones, twos = _sizes_of(classes, sizes)
    for t in range(codes.shape[0]):
        _quantise(coefficients[t], runs, inverse, descents, picked, values)
        for i in range(count):
            q = values[i]
            below = _third(q)
            r = q - int32(3) * below
            codes[t, i] = uint8(int32(3) * min(abs(below), int32(2)) + int32(1) + (-r if below < 0 else r))
        _add_errors(picked, values, ones, twos, step, missed)
