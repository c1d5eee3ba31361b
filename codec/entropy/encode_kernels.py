"""numba kernel that encodes a stream; see ``kernels`` for the rules of all kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.extending import register_jitable
from numpy import uint16, uint32, uint64, uintp

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import U8, U16, U32


@register_jitable
def _put(x: uint32, entry: uint32, reciprocal: uint64, buffer: U16, end: uintp) -> tuple[uint32, uintp]:
    """Encode one symbol of a lane; return its state and the place of its next word.

    A word is always stored, and overwritten where none was due. The quotient is exact: x is below f * 2^20, so
    x * (floor(2^44 / f) + 1) fits 64 bits and exceeds x * 2^44 / f by less than 2^44 / f.
    """
    f = entry & uint32(65535)
    over = (x >> uint32(20)) >= f
    buffer[end] = uint16(x & uint32(65535))
    x = (x >> uint32(16)) if over else x
    quotient = uint32((uint64(x) * reciprocal) >> uint64(44))
    return x + quotient * (uint32(4096) - f) + (entry >> uint32(16)), end - uintp(over)


@jit
def encode(
    symbols: U8,
    classes: NDArray[int64],
    symbols_of_class: int,
    packed: U32,
    reciprocals: NDArray[uint64],
    room: int,
    buffer: U16,
    states: U32,
    counts: NDArray[int64],
) -> None:
    """Encode a stream; all words, lane after lane, end up at the beginning of the buffer.

    Two lanes run at a time with states in registers: in one lane each symbol would wait for the one before, and in
    memory for the store. Lanes fill their room from the end, since the last word written is read first.
    """
    tokens, columns, lanes = uintp(symbols.shape[0]), uintp(symbols.shape[1]), uintp(states.shape[0])
    steps, size = (columns + lanes - uintp(1)) // lanes, uintp(room)
    for a in range(uintp(0), lanes, uintp(2)):
        last_a = (a + uintp(1)) * size - uintp(1)
        last_b = last_a + size
        x, y, end_a, end_b = uint32(65536), uint32(65536), last_a, last_b
        for step in range(steps):
            c = (steps - uintp(1) - step) * lanes + a
            if c + uintp(1) < columns and a + uintp(1) < lanes:
                row_a = uint32((classes[c] - 1) * symbols_of_class)
                row_b = uint32((classes[c + uintp(1)] - 1) * symbols_of_class)
                for back in range(tokens):
                    t = tokens - uintp(1) - back
                    at_a, at_b = row_a + uint32(symbols[t, c]), row_b + uint32(symbols[t, c + uintp(1)])
                    x, end_a = _put(x, packed[at_a], reciprocals[at_a], buffer, end_a)
                    y, end_b = _put(y, packed[at_b], reciprocals[at_b], buffer, end_b)
            elif c < columns:
                row_a = uint32((classes[c] - 1) * symbols_of_class)
                for back in range(tokens):
                    at_a = row_a + uint32(symbols[tokens - uintp(1) - back, c])
                    x, end_a = _put(x, packed[at_a], reciprocals[at_a], buffer, end_a)
        states[a], counts[a] = x, last_a - end_a
        if a + uintp(1) < lanes:
            states[a + uintp(1)], counts[a + uintp(1)] = y, last_b - end_b
    at = uintp(0)
    for lane in range(lanes):
        count = uintp(counts[lane])
        begin = (lane + uintp(1)) * size - count
        for word in range(count):
            buffer[at + word] = buffer[begin + word]
        at += count
