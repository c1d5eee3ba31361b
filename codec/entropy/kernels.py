"""numba kernels of the entropy decoder and of symbols; the tests have readable twins.

No kernel checks an index, so every index must be in range by construction, whatever the stream holds: columns come from
``SegmentState.columns`` and index its own values; classes are clipped to those with a table; contexts are at most 2;
slots are masked to 12 bits; and reads of words stop at ``limit``. The tests also run under ``NUMBA_BOUNDSCHECK=1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.extending import register_jitable
from numpy import empty, float64, int32, uint8, uint32, uintp

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import F32, I32, U8, U16, U32


@jit
def decode_lookup(
    words: U16, limit: uint32, states: U32, pointers: U32, tables: U32, lookup: U32, begin: int, out: U8
) -> None:
    """Decode base symbols in a vectorised loop over lanes."""
    tokens, columns = out.shape
    lanes = states.shape[0]
    for first in range(begin, columns, lanes):
        width = min(lanes, columns - first)
        base = tables[first : first + width]
        for t in range(tokens):
            row = out[t, first : first + width]
            for lane in range(width):
                x = states[lane]
                entry = lookup[base[lane] + (x & uint32(4095))]
                x = ((entry & uint32(4095)) + uint32(1)) * (x >> uint32(12)) + ((entry >> uint32(12)) & uint32(4095))
                p = pointers[lane]
                word = uint32(words[min(p, limit)])
                refill = x < uint32(65536)
                states[lane] = (x << uint32(16)) | word if refill else x
                pointers[lane] = p + uint32(refill)
                row[lane] = entry >> uint32(24)


@register_jitable
def _next(x: uint32, p: uint32, base: uint32, words: U16, limit: uint32, lookup: U32) -> tuple[uint32, uint32, uint32]:
    """Decode one base symbol of a lane; return state, pointer and symbol."""
    entry = lookup[base + (x & uint32(4095))]
    x = ((entry & uint32(4095)) + uint32(1)) * (x >> uint32(12)) + ((entry >> uint32(12)) & uint32(4095))
    word = uint32(words[min(p, limit)])
    refill = x < uint32(65536)
    return (x << uint32(16)) | word if refill else x, p + uint32(refill), entry >> uint32(24)


@jit
def decode_quads(words: U16, limit: uint32, states: U32, pointers: U32, tables: U32, lookup: U32, out: U8) -> None:
    """Decode base symbols of few lanes, four at a time: too few for vectors, enough to fill a core's pipeline.

    States stay in registers; in memory, each symbol would wait for the previous store.
    """
    tokens, columns, lanes = uintp(out.shape[0]), uintp(out.shape[1]), uintp(states.shape[0])
    for a in range(uintp(0), lanes, uintp(4)):
        b, c, d = a + uintp(1), a + uintp(2), a + uintp(3)
        xa, xb, xc, xd = states[a], states[b], states[c], states[d]
        pa, pb, pc, pd = pointers[a], pointers[b], pointers[c], pointers[d]
        for turn in range(columns // lanes):
            at = turn * lanes
            ta, tb, tc, td = tables[at + a], tables[at + b], tables[at + c], tables[at + d]
            for t in range(tokens):
                xa, pa, symbol_a = _next(xa, pa, ta, words, limit, lookup)
                xb, pb, symbol_b = _next(xb, pb, tb, words, limit, lookup)
                xc, pc, symbol_c = _next(xc, pc, tc, words, limit, lookup)
                xd, pd, symbol_d = _next(xd, pd, td, words, limit, lookup)
                out[t, at + a], out[t, at + b] = symbol_a, symbol_b
                out[t, at + c], out[t, at + d] = symbol_c, symbol_d
        states[a], states[b], states[c], states[d] = xa, xb, xc, xd
        pointers[a], pointers[b], pointers[c], pointers[d] = pa, pb, pc, pd


@jit
def decode_ternary(
    words: U16, limit: uint32, states: U32, pointers: U32, tables: U32, thresholds: U32, contexts: U8, out: U8
) -> None:
    """Decode refinement symbols 0, 1, 2."""
    tokens, columns = out.shape
    lanes = states.shape[0]
    for first in range(0, columns, lanes):
        width = min(lanes, columns - first)
        base = tables[first : first + width]
        for t in range(tokens):
            row = out[t, first : first + width]
            context = contexts[t, first : first + width]
            for lane in range(width):
                x = states[lane]
                both = thresholds[base[lane] + uint32(context[lane])]
                low, high = both & uint32(65535), both >> uint32(16)
                slot = x & uint32(4095)
                above_low, above_high = slot >= low, slot >= high
                start = high if above_high else (low if above_low else uint32(0))
                end = uint32(4096) if above_high else (high if above_low else low)
                x = (end - start) * (x >> uint32(12)) + slot - start
                p = pointers[lane]
                word = uint32(words[min(p, limit)])
                refill = x < uint32(65536)
                states[lane] = (x << uint32(16)) | word if refill else x
                pointers[lane] = p + uint32(refill)
                row[lane] = uint8(above_low) + uint8(above_high)


@register_jitable
def _first_words(counts: U16) -> U32:
    """Return the index of each lane's first word."""
    pointers = empty(counts.shape[0], uint32)
    at = uint32(0)
    for lane in range(counts.shape[0]):
        pointers[lane] = at
        at += uint32(counts[lane])
    return pointers


@register_jitable
def _unfinished(counts: U16, states: U32, pointers: U32) -> uint32:
    """Count the lanes that do not end in the first state with all words read."""
    at, wrong = uint32(0), uint32(0)
    for lane in range(counts.shape[0]):
        at += uint32(counts[lane])
        wrong += uint32(states[lane] != uint32(65536) or pointers[lane] != at)
    return wrong


@jit
def decode_base(
    words: U16, counts: U16, states: U32, classes: NDArray[int64], lookup: U32, out: U8, wrong: U32
) -> None:
    """Decode a stream of base symbols."""
    columns, lanes = out.shape[1], states.shape[0]
    limit, pointers, rows, begin = uint32(words.shape[0] - 1), _first_words(counts), empty(columns, uint32), 0
    for c in range(columns):
        rows[c] = uint32((classes[c] - 1) << 12)
    if lanes == 4 or lanes == 8:  # noqa: PLR1714, PLR2004 - faster than vectors here
        decode_quads(words, limit, states, pointers, rows, lookup, out)
        begin = columns // lanes * lanes
    decode_lookup(words, limit, states, pointers, rows, lookup, begin, out)
    wrong[0] = _unfinished(counts, states, pointers)


@jit
def decode_refinement(
    words: U16,
    counts: U16,
    states: U32,
    classes: NDArray[int64],
    thresholds: U32,
    contexts: U8,
    out: U8,
    wrong: U32,
) -> None:
    """Decode a stream of refinement symbols."""
    limit, pointers, rows = uint32(words.shape[0] - 1), _first_words(counts), empty(out.shape[1], uint32)
    for c in range(out.shape[1]):
        rows[c] = uint32((classes[c] - 1) * 3)
    decode_ternary(words, limit, states, pointers, rows, thresholds, contexts, out)
    wrong[0] = _unfinished(counts, states, pointers)


@jit
def contexts_of(quantised: I32, columns: U32, out: U8) -> None:
    """Set ``out[t, i] = min(|quantised[t, columns[i]]|, 2)``."""
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = min(abs(quantised[t, columns[i]]), 2)


@jit
def refine(quantised: I32, columns: U32, symbols: U8) -> None:
    """Set ``q -> 3 q + r`` for the coded columns; symbol 2 moves away from zero where q is not zero."""
    for t in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            q = quantised[t, columns[i]]
            r = int(symbols[t, i]) - 1
            quantised[t, columns[i]] = 3 * q + (-r if q < 0 else r)


@jit
def place(quantised: I32, columns: U32, symbols: U8) -> None:
    """Scatter base symbols (biased by 128) into their columns."""
    for t in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            quantised[t, columns[i]] = int(symbols[t, i]) - 128


@jit
def coarsen(fine: I32, coarse: I32, symbols: U8) -> None:
    """Split ``fine = 3 * coarse + r``, r in -1, 0, 1.

    The division is unsigned, which LLVM turns into a product; ``|fine|`` is below 2^28.
    """
    for t in range(fine.shape[0]):
        for c in range(fine.shape[1]):
            q = int32(uint32(fine[t, c] + int32(3 * 268435456 + 1)) // uint32(3)) - int32(268435456)
            r = fine[t, c] - int32(3) * q
            coarse[t, c] = q
            symbols[t, c] = uint8(1 - r if q < 0 else 1 + r)


@jit
def count_base(values: I32, classes: I32, counts: NDArray[int64]) -> None:
    """Count each value's base symbol in its class's row; class 0 skips a column."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            if classes[c] > 0:
                value = values[t, c]
                counts[classes[c] - 1, value + 128 if abs(value) <= 127 else 0] += 1  # noqa: PLR2004 - the alphabet


@jit
def count_ternary(below: I32, symbols: U8, classes: I32, counts: NDArray[int64]) -> None:
    """Count each refinement symbol in its class's and context's row; class 0 skips a column."""
    for t in range(below.shape[0]):
        for c in range(below.shape[1]):
            if classes[c] > 0:
                counts[classes[c] - 1, min(abs(below[t, c]), 2), symbols[t, c]] += 1


@jit
def count_points(coefficients: F32, values: I32, classes: I32, step: float, counts: NDArray[float64]) -> None:
    """Count values of size 1 and 2, and sum how far their coefficients lie below, in steps."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            size = abs(values[t, c])
            if classes[c] > 0 and 1 <= size <= 2:  # noqa: PLR2004 - the sizes that have points
                counts[classes[c] - 1, size - 1, 0] += 1
                counts[classes[c] - 1, size - 1, 1] += size - abs(coefficients[t, c]) / step
