"""numba kernels from quantised values to elements; see ``kernels`` for the rules of all kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba.extending import register_jitable
from numpy import empty, float32, float64, int8, uint32, uintp

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import F32, I8, I32, I64, U32


@register_jitable
def _dequantised(q: int, one: float32, two: float32) -> float32:
    """A value at step 1: sizes 1 and 2 have points of their own."""
    size = float32(abs(q))
    size = one if abs(q) == 1 else size
    size = two if abs(q) == 2 else size  # noqa: PLR2004 - the sizes that have points
    return -size if q < 0 else size


@jit
def dequantise(quantised: I32, sizes: F32, step: float, out: F32) -> None:
    """Set ``out = step * size`` with the sign of the value."""
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[t, c] = float32(step) * _dequantised(quantised[t, c], sizes[1, c], sizes[2, c])


@jit
def to_bytes(quantised: I32, sizes: F32, limit: int, points: int, out: I8) -> None:
    """Dequantise at step 1 to the nearest of ``points`` places between whole numbers, 0 for values beyond the limit."""
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            q = quantised[t, c]
            size = _dequantised(abs(q), sizes[1, c], sizes[2, c])
            near = int8(0) if abs(q) > limit else int8(size * float32(points) + float32(0.5))
            out[t, c] = -near if q < 0 else near


@jit
def add_product(product: I32, steps: F32, out: F32) -> None:
    """Add ``steps * product`` to ``out``."""
    for t in range(uintp(out.shape[0])):
        for j in range(uintp(out.shape[1])):
            out[t, j] += steps[j] * float32(product[t, j])


@jit
def count_values(quantised: I32, limit: int, nonzero: U32, beyond: U32) -> None:
    """Count each column's values that are not zero, and those beyond the limit."""
    for c in range(nonzero.shape[0]):
        nonzero[c] = beyond[c] = 0
    for t in range(quantised.shape[0]):
        for c in range(nonzero.shape[0]):
            size = abs(quantised[t, c])
            nonzero[c] += uint32(size != 0)
            beyond[c] += uint32(size > limit)


@jit
def list_values(quantised: I32, sizes: F32, dense: int, limit: int, ends: I64, tokens: U32, values: F32) -> None:
    """List values column by column: all of columns from ``dense`` on, and those beyond the limit before.

    ``ends`` holds the start of each column's list on entry and its end on return.
    """
    for t in range(quantised.shape[0]):
        for c in range(ends.shape[0]):
            q = quantised[t, c]
            if abs(q) > (limit if c < dense else 0):
                at = ends[c]
                tokens[at], values[at] = uint32(t), _dequantised(q, sizes[1, c], sizes[2, c])
                ends[c] = at + 1


@jit
def add_listed(ends: I64, tokens: U32, values: F32, rows: NDArray[Any], expand: bool, begin: int, out: F32) -> None:
    """Add ``value * rows[column, begin:]`` to the token of each listed value."""
    width = uintp(out.shape[1])
    row = empty(out.shape[1], float32)
    bits = row.view(uint32)
    first, at = uintp(begin), uintp(0)
    for c in range(uintp(ends.shape[0])):
        end = uintp(ends[c])
        if at == end:
            continue
        if expand:
            for j in range(width):
                bits[j] = uint32(rows[c, first + j]) << uint32(16)
        else:
            for j in range(width):
                row[j] = float32(rows[c, first + j])
        while at < end:
            t, value = uintp(tokens[at]), values[at]
            for j in range(width):
                out[t, j] += value * row[j]
            at += uintp(1)


@jit
def place_elements(
    product: NDArray[Any],
    expand: bool,
    scale: float,
    begin: int,
    rows: NDArray[Any],
    expand_rows: bool,
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
    """Write ``rows[of_token] + scale * product`` of one plane, rotated."""
    heads, tokens, dim = uintp(out.shape[0]), uintp(of_token.shape[0]), uintp(out.shape[2])
    pairs, low, first_token = uintp(cosines.shape[1]), uintp(rotary_start), uintp(first)
    high, factor = low + pairs, float32(scale)
    row, rotated, expected = empty(out.shape[2], float32), empty(out.shape[2], float32), empty(out.shape[2], float32)
    bits, rotated_bits, expected_bits = row.view(uint32), rotated.view(uint32), expected.view(uint32)
    for t in range(tokens):
        chosen = of_token[t]
        for head in range(heads):
            source, wanted = uintp(begin) + head * dim, uintp(at) + head * dim
            if expand:
                for d in range(dim):
                    bits[d] = uint32(product[t, source + d]) << uint32(16)
            else:
                for d in range(dim):
                    row[d] = float32(product[t, source + d])
            if expand_rows:
                for d in range(dim):
                    expected_bits[d] = uint32(rows[chosen, wanted + d]) << uint32(16)
            else:
                for d in range(dim):
                    expected[d] = float32(rows[chosen, wanted + d])
            for d in range(dim):
                row[d] = expected[d] + factor * row[d]
            for d in range(dim):
                rotated[d] = row[d]
            if interleaved:
                for j in range(pairs):
                    one, other = low + j + j, low + j + j + uintp(1)
                    rotated[one] = row[one] * cosines[t, j] - row[other] * sines[t, j]
                    rotated[other] = row[other] * cosines[t, j] + row[one] * sines[t, j]
            else:
                for j in range(pairs):
                    rotated[low + j] = row[low + j] * cosines[t, j] - row[high + j] * sines[t, j]
                for j in range(pairs):
                    rotated[high + j] = row[high + j] * cosines[t, j] + row[low + j] * sines[t, j]
            if shrink:
                for d in range(dim):
                    u = rotated_bits[d]
                    out[head, first_token + t, d] = (u + uint32(0x7FFF) + ((u >> uint32(16)) & uint32(1))) >> uint32(16)
            else:
                for d in range(dim):
                    out[head, first_token + t, d] = rotated[d]


@jit
def take_elements(
    source: NDArray[Any],
    expand: bool,
    first: int,
    rows: NDArray[Any],
    expand_rows: bool,
    of_token: U32,
    at: int,
    cosines: F32,
    sines: F32,
    interleaved: bool,
    rotary_start: int,
    out: F32,
) -> None:
    """Read one plane, rotate it back and subtract ``rows[of_token]``: the inverse of ``place_elements``."""
    heads, tokens, dim = uintp(source.shape[0]), uintp(of_token.shape[0]), uintp(source.shape[2])
    pairs, low = uintp(cosines.shape[1]), uintp(rotary_start)
    high, begin_plane, begin_source = low + pairs, uintp(at), uintp(first)
    row, expected = empty(source.shape[2], float32), empty(source.shape[2], float32)
    bits, expected_bits = row.view(uint32), expected.view(uint32)
    for t in range(tokens):
        chosen = of_token[t]
        for head in range(heads):
            begin = begin_plane + head * dim
            if expand:
                for d in range(dim):
                    bits[d] = uint32(source[head, begin_source + t, d]) << uint32(16)
            else:
                for d in range(dim):
                    row[d] = float32(source[head, begin_source + t, d])
            if expand_rows:
                for d in range(dim):
                    expected_bits[d] = uint32(rows[chosen, begin + d]) << uint32(16)
            else:
                for d in range(dim):
                    expected[d] = float32(rows[chosen, begin + d])
            if interleaved:
                for j in range(pairs):
                    a, b = row[low + j + j], row[low + j + j + uintp(1)]
                    row[low + j + j] = a * cosines[t, j] + b * sines[t, j]
                    row[low + j + j + uintp(1)] = float32(
                        float64(b * cosines[t, j]) - float64(a) * float64(sines[t, j])
                    )
                for d in range(dim):
                    out[t, begin + d] = row[d] - expected[d]
                continue
            for d in range(dim):
                out[t, begin + d] = row[d] - expected[d]
            for j in range(pairs):
                turned = row[low + j] * cosines[t, j] + row[high + j] * sines[t, j]
                out[t, begin + low + j] = turned - expected[low + j]
            for j in range(pairs):
                turned = float32(float64(row[high + j] * cosines[t, j]) - float64(row[low + j]) * float64(sines[t, j]))
                out[t, begin + high + j] = turned - expected[high + j]
