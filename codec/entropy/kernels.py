"""numba kernels of the codec. Every kernel's readable twin stands in ``rans_naive`` or ``quantiser``.

All kernels release the GIL and cache their machine code. LLVM vectorises the lane loops under two conditions: indices
stay unsigned, so that numba leaves out the test for negative ones; and no two arguments overlap, which every caller
keeps to and ``_jit`` tells the compiler. It cannot find that out by itself where a loop gathers from tables.

No kernel checks an index, so each must be in range by construction, whatever the stream holds: columns come from
``SegmentState.columns`` and index its own values; classes are clipped to those that have a table; contexts are at most
2; slots are masked to 12 bits; and reads of words stop at ``limit``. The tests run under ``NUMBA_BOUNDSCHECK=1`` as
well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from numba import njit
from numpy import empty, float32, float64, int32, intp, uint8, uint16, uint32

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy import int64
    from numpy.typing import NDArray

    U8: TypeAlias = NDArray[uint8]
    U16: TypeAlias = NDArray[uint16]
    U32: TypeAlias = NDArray[uint32]
    I32: TypeAlias = NDArray[int32]
    F32: TypeAlias = NDArray[float32]

_Kernel = TypeVar("_Kernel", bound="Callable[..., None]")


def _jit(kernel: _Kernel) -> _Kernel:
    """Compile on first use. Arguments are declared not to alias, which doubles the speed of the decoders."""
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(kernel)
    # numba has the flag and sets it for its own parallel loops, but gives njit no option for it. Where its compiler
    # should lose this hook, the kernels only get slower.
    if hasattr(getattr(dispatcher, "_compiler", None), "_customize_flags"):
        dispatcher._compiler._customize_flags = _without_aliases  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("_Kernel", dispatcher)


def _without_aliases(flags: Any) -> Any:  # noqa: ANN401 - numba's, untyped
    flags.noalias = True
    return flags


@_jit
def encode(symbols: U8, tables: U32, packed: U32, buffer: U16, states: U32, counts: NDArray[int64]) -> None:
    """Fill ``buffer[lane]`` from its end with the lane's words; symbols and tables uint8/uint32 ``[tokens, columns]``.

    tables[t, c] is the flat index of the first entry of the symbol's table in ``packed``: start in the upper 16 bits,
    frequency in the lower ones. buffer: uint16 ``[lanes, room + 1]`` with room for a word a symbol. A word is stored
    whether it counts or not; only then is the division, which is exact in float64, all that a lane waits for.
    """
    tokens, columns = symbols.shape
    lanes, room = buffer.shape
    flat = buffer.reshape(-1)
    words, emitted, ends = empty(lanes, uint16), empty(lanes, uint8), empty(lanes, intp)
    for lane in range(lanes):
        states[lane] = 65536
        ends[lane] = (lane + 1) * room
    for first in range((columns - 1) // lanes * lanes, -1, -lanes):
        width = min(lanes, columns - first)
        for t in range(tokens - 1, -1, -1):
            row = symbols[t, first : first + width]
            base = tables[t, first : first + width]
            for lane in range(width):
                both = packed[base[lane] + uint32(row[lane])]
                f, start = both & uint32(65535), both >> uint32(16)
                x = states[lane]
                over = (x >> uint32(20)) >= f
                words[lane] = uint16(x & uint32(65535))
                emitted[lane] = uint8(over)
                x = (x >> uint32(16)) if over else x
                quotient = uint32(float64(x) / float64(f))
                states[lane] = (quotient << uint32(12)) + (x - quotient * f) + start
            for lane in range(width):
                flat[ends[lane] - 1] = words[lane]
                ends[lane] -= emitted[lane]
    for lane in range(lanes):
        counts[lane] = (lane + 1) * room - ends[lane]


@_jit
def decode_lookup(words: U16, limit: uint32, states: U32, pointers: U32, tables: U32, lookup: U32, out: U8) -> None:
    """Decode base symbols into ``out`` uint8 ``[tokens, columns]``; ``tables[c]`` is the column's start in ``lookup``.

    words: uint16, the last at index ``limit``: a damaged stream that runs out of words reads that one for ever.
    """
    tokens, columns = out.shape
    lanes = states.shape[0]
    for first in range(0, columns, lanes):
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


@_jit
def decode_ternary(
    words: U16, limit: uint32, states: U32, pointers: U32, tables: U32, thresholds: U32, contexts: U8, out: U8
) -> None:
    """Decode refinement symbols 0, 1, 2 into ``out``; ``thresholds[tables[c] + contexts[t, c]]`` packs their starts."""
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


@_jit
def contexts_of(quantised: I32, columns: U32, out: U8) -> None:
    """``out[t, i] = min(|quantised[t, columns[i]]|, 2)`` as uint8."""
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = min(abs(quantised[t, columns[i]]), 2)


@_jit
def refine(quantised: I32, columns: U32, symbols: U8) -> None:
    """In place ``q -> 3 q + r`` for the coded columns; symbol 2 moves away from zero where q is not zero."""
    for t in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            q = quantised[t, columns[i]]
            r = int(symbols[t, i]) - 1
            quantised[t, columns[i]] = 3 * q + (-r if q < 0 else r)


@_jit
def place(quantised: I32, columns: U32, symbols: U8) -> None:
    """Scatter base symbols (biased by 128) into their columns."""
    for t in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            quantised[t, columns[i]] = int(symbols[t, i]) - 128


@_jit
def coarsen(fine: I32, coarse: I32, symbols: U8) -> None:
    """Split ``fine = 3 * coarse + r``, r in -1, 0, 1; ``symbols`` gets 1 + r, or 1 - r where coarse is negative.

    The quotient is taken of unsigned numbers, which LLVM turns into a product: fine is below 2^28 in size.
    """
    for t in range(fine.shape[0]):
        for c in range(fine.shape[1]):
            q = int32(uint32(fine[t, c] + int32(3 * 268435456 + 1)) // uint32(3)) - int32(268435456)
            r = fine[t, c] - int32(3) * q
            coarse[t, c] = q
            symbols[t, c] = uint8(1 - r if q < 0 else 1 + r)


@_jit
def count_base(values: I32, classes: I32, counts: NDArray[int64]) -> None:
    """Add each value's byte (128 more, 0 beyond the alphabet) to its class's row; class 0 leaves a column out."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            if classes[c] > 0:
                value = values[t, c]
                counts[classes[c] - 1, value + 128 if abs(value) <= 127 else 0] += 1  # noqa: PLR2004 - the alphabet


@_jit
def count_ternary(below: I32, symbols: U8, classes: I32, counts: NDArray[int64]) -> None:
    """Add each refinement symbol to its class's and context's row; columns of class 0 are left out."""
    for t in range(below.shape[0]):
        for c in range(below.shape[1]):
            if classes[c] > 0:
                counts[classes[c] - 1, min(abs(below[t, c]), 2), symbols[t, c]] += 1


@_jit
def count_points(coefficients: F32, values: I32, classes: I32, step: float, counts: NDArray[float64]) -> None:
    """Add to ``counts[class - 1, size - 1]`` the number of values of size 1 and 2 and how far below they lay."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            size = abs(values[t, c])
            if classes[c] > 0 and 1 <= size <= 2:  # noqa: PLR2004 - the sizes that have points
                counts[classes[c] - 1, size - 1, 0] += 1
                counts[classes[c] - 1, size - 1, 1] += size - abs(coefficients[t, c]) / step


@_jit
def dequantise(quantised: I32, sizes: F32, step: float, out: F32) -> None:
    """``out = step * size`` with the sign of the value; ``sizes[c]`` holds those of values 0, 1 and 2."""
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            q = quantised[t, c]
            size = float32(abs(q))
            size = sizes[c, 1] if abs(q) == 1 else size
            size = sizes[c, 2] if abs(q) == 2 else size  # noqa: PLR2004 - the sizes that have points
            out[t, c] = float32(step) * (-size if q < 0 else size)


@_jit
def squared_error(coefficients: F32, quantised: I32, sizes: F32, step: float, out: F32) -> None:
    """Add to ``out[c]`` each column's squared difference between coefficients and what they dequantise to."""
    for t in range(coefficients.shape[0]):
        for c in range(coefficients.shape[1]):
            q = quantised[t, c]
            size = float32(abs(q))
            size = sizes[c, 1] if abs(q) == 1 else size
            size = sizes[c, 2] if abs(q) == 2 else size  # noqa: PLR2004 - the sizes that have points
            difference = float32(abs(coefficients[t, c])) - float32(step) * size
            out[c] += difference * difference


@_jit
def to_bfloat16(quantised: I32, sizes: F32, out: U16, widest: U32) -> None:
    """Dequantised at step 1, as bfloat16 bits; exact for whole numbers up to 256. ``widest[c]``: largest size met."""
    columns = out.shape[1]
    row = empty(columns, float32)
    bits = row.view(uint32)
    for c in range(columns):
        widest[c] = 0
    for t in range(out.shape[0]):
        for c in range(columns):
            q = quantised[t, c]
            size = float32(abs(q))
            size = sizes[c, 1] if abs(q) == 1 else size
            size = sizes[c, 2] if abs(q) == 2 else size  # noqa: PLR2004 - the sizes that have points
            row[c] = -size if q < 0 else size
            widest[c] = max(widest[c], uint32(abs(q)))
        for c in range(columns):
            out[t, c] = uint16((bits[c] + uint32(0x7FFF) + ((bits[c] >> uint32(16)) & uint32(1))) >> uint32(16))


@_jit
def place_elements(
    product: NDArray[Any],
    expand: bool,
    scale: float,
    rows: F32,
    of_token: U32,
    at: int,
    cosines: F32,
    sines: F32,
    interleaved: bool,
    rotary_start: int,
    out: NDArray[Any],
    shrink: bool,
    first: int,
) -> None:
    """Write ``rows[of_token] + scale * product`` of one plane into ``out`` ``[heads, tokens, dim]``, rotated.

    product: float32, or bfloat16 bits where ``expand`` is set; its columns from ``at`` on are the plane's. rows:
    float32 with the same columns. cosines, sines: float32 ``[tokens, pairs]``, no pairs where nothing is rotated; pairs
    begin at ``rotary_start``. out: float32, or bfloat16 bits where ``shrink`` is set; tokens from ``first`` on.
    """
    heads, _, dim = out.shape
    pairs = cosines.shape[1]
    row, rotated = empty(dim, float32), empty(dim, float32)
    bits, rotated_bits = row.view(uint32), rotated.view(uint32)
    factor = float32(scale)
    for t in range(of_token.shape[0]):
        expected = rows[of_token[t]]
        for head in range(heads):
            begin = at + head * dim
            part = product[t, begin : begin + dim]
            if expand:
                for d in range(dim):
                    bits[d] = uint32(part[d]) << uint32(16)
            else:
                for d in range(dim):
                    row[d] = float32(part[d])
            for d in range(dim):
                rotated[d] = expected[begin + d] + factor * row[d]
            if interleaved:
                for j in range(pairs):
                    one, other = rotary_start + 2 * j, rotary_start + 2 * j + 1
                    a, b = rotated[one], rotated[other]
                    rotated[one] = a * cosines[t, j] - b * sines[t, j]
                    rotated[other] = b * cosines[t, j] + a * sines[t, j]
            else:
                for j in range(pairs):
                    a, b = rotated[rotary_start + j], rotated[rotary_start + pairs + j]
                    rotated[rotary_start + j] = a * cosines[t, j] - b * sines[t, j]
                    rotated[rotary_start + pairs + j] = b * cosines[t, j] + a * sines[t, j]
            target = out[head, first + t]
            if shrink:
                for d in range(dim):
                    u = rotated_bits[d]
                    target[d] = (u + uint32(0x7FFF) + ((u >> uint32(16)) & uint32(1))) >> uint32(16)
            else:
                for d in range(dim):
                    target[d] = rotated[d]


@_jit
def enter_level(codes: U8, spread: NDArray[int64], shift: int, below: U8, classes: U8) -> None:
    """Classes of all columns at a level from those of the level below and the codes of the columns that were open.

    below, classes: uint8 ``[columns]``, 0 while a column is not coded. codes: 0 for what stays open, else one more than
    the zigzag of what its class differs by from the profile's.
    """
    at = 0
    for c in range(classes.shape[0]):
        if below[c] > 0:
            classes[c] = min(below[c] + 6, 42)
        else:
            code = int(codes[at]) - 1
            at += 1
            delta = code // 2 if code % 2 == 0 else -(code + 1) // 2
            own = min(max(spread[c] - shift, 1), 42)
            classes[c] = min(max(own + delta, 1), 42) if code >= 0 else 0


@_jit
def entries_of(classes: U8, below: U8, slots: U32, entries: U32) -> None:
    """What GPU kernels read of a coded column: its slot, class - 1 from bit 23 on, whether it is fresh at bit 29."""
    at = 0
    for c in range(classes.shape[0]):
        if classes[c] > 0:
            fresh = uint32(below[c] == 0)
            entries[at] = slots[c] | ((uint32(classes[c]) - uint32(1)) << uint32(23)) | (fresh << uint32(29))
            at += 1


@_jit
def assign_slots(classes: U8, firsts: NDArray[int64], align: int, slots: U32, group_slots: NDArray[int32]) -> None:
    """Places of the coded columns, group by group, each group's first at a multiple of ``align``.

    firsts: int64 ``[groups + 1]``, each group's first column. group_slots: int32 ``[groups, 2]``, begin and end.
    """
    at = 0
    for group in range(group_slots.shape[0]):
        group_slots[group, 0] = at
        for c in range(firsts[group], firsts[group + 1]):
            if classes[c] > 0:
                slots[c] = at
                at += 1
        group_slots[group, 1] = at
        at = (at + align - 1) // align * align


@_jit
def describe_slots(
    classes: U8, slots: U32, firsts: NDArray[int64], sizes: F32, rows: NDArray[int32], sizes_out: F32
) -> None:
    """Each slot's row of its group's basis, and the sizes of its values 1 and 2; sizes: float32 ``[classes, 3]``."""
    for group in range(firsts.shape[0] - 1):
        for c in range(firsts[group], firsts[group + 1]):
            if classes[c] > 0:
                rows[slots[c]] = c - firsts[group]
                sizes_out[slots[c], 0] = sizes[classes[c], 1]
                sizes_out[slots[c], 1] = sizes[classes[c], 2]
