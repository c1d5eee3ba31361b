"""numba kernels of ``cachegen_fast``: quantising, distributions, and the streams of one head in lockstep.

One stream for each channel, as released; a head's streams advance together, token by token, so that the processor works
on all of them at once, which is what the released GPU kernels do with a thread for each stream. The coder is a range
coder of 32 bits that moves 16-bit words: at most one for each symbol, hence no loop and no branch. Symbols are found by
comparing with all 32 starts, which costs less than any search that looks up.

``encode_bitwise`` and ``decode_bitwise`` are torchac's coder, a bit at a time and a stream after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, prange
from numpy import float32, float64, int32, uint8, uint16, uint32, uint64

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SYMBOLS = 32
STREAM_TOKENS = 256
ROOM = STREAM_TOKENS + 2
"""Words that a stream may need: one for each symbol, and two to end it."""
_FULL = uint32(0xFFFFFFFF)
_LOW = uint32(0xFFFF)
_WORD = uint32(16)
_SHIFT = uint64(16)
_HALF, _QUARTER = uint64(1 << 31), uint64(1 << 30)


def _jit(kernel: Callable[..., Any]) -> Any:  # noqa: ANN401 - numba has no types
    """Compile on first use, arguments declared not to alias: only then are the lockstep loops vectorised."""
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(kernel)
    if hasattr(getattr(dispatcher, "_compiler", None), "_customize_flags"):
        dispatcher._compiler._customize_flags = _without_aliases  # noqa: SLF001 - njit has no option for it
    return dispatcher


def _without_aliases(flags: Any) -> Any:  # noqa: ANN401 - numba's, untyped
    flags.noalias = True
    return flags


_parallel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)


@_parallel
def largest(values: NDArray[uint16], out: NDArray[uint16]) -> None:
    """``out[t]``: the largest magnitude of token t; values bfloat16 bits ``[heads, tokens, dim]``, as is the result."""
    heads, tokens, dim = values.shape
    for t in prange(tokens):
        most = uint16(0)
        for h in range(heads):
            for d in range(dim):
                most = max(most, uint16(values[h, t, d] & uint16(0x7FFF)))
        out[t] = most


@_parallel
def encode_plane(
    values: NDArray[uint16],
    scale: NDArray[float32],
    most: int,
    chunk: int,
    bitwise: bool,  # noqa: FBT001 - kernels take arguments by position
    stored: NDArray[np.int16],
    lengths: NDArray[int32],
    words: NDArray[uint16],
) -> None:
    """Encode one layer's keys or values, bfloat16 bits ``[heads, tokens, dim]``, into one array of words a stream.

    scale: of each token, not 0. stored: ``[chunks, heads, dim, 33]``, lengths: words of each stream,
    ``[parts, heads, dim]``, words: ``[parts, heads, dim, ROOM]``; a part has 256 tokens, a chunk one or more parts.
    """
    heads, tokens, dim = values.shape
    chunks = stored.shape[0]
    for task in prange(chunks * heads):
        c, h = task // heads, task % heads
        first, last = c * chunk, min(c * chunk + chunk, tokens)
        symbols = np.empty((last - first, dim), np.uint8)
        _quantise(values[h, first:last], scale[first:last], float32(most), symbols)
        packed = np.empty(dim * SYMBOLS, np.uint32)
        _distribute(symbols, stored[c, h], packed)
        for start in range(first, last, STREAM_TOKENS):
            part = start // STREAM_TOKENS
            some = symbols[start - first : start - first + STREAM_TOKENS]
            if bitwise:
                encode_bitwise(some, packed, lengths[part, h], words[part, h])
            else:
                _encode_lockstep(some, packed, lengths[part, h], words[part, h])


@_jit
def _quantise(values: NDArray[uint16], scale: NDArray[float32], most: float32, out: NDArray[uint8]) -> None:
    """Symbols ``[tokens, dim]`` of a head: ``round(x * (M / scale) + M)``, ties to even, within 0 to 2 M.

    torch divides a number by a tensor as here: reciprocal first.
    """
    for t in range(out.shape[0]):
        factor = float32(float32(1) / scale[t]) * most
        for d in range(out.shape[1]):
            x = uint32(uint32(values[t, d]) << _WORD).view(float32)
            out[t, d] = uint8(int32(min(max(np.rint(x * factor + most), float32(0)), most + most)))


@_jit
def _distribute(symbols: NDArray[uint8], stored: NDArray[np.int16], packed: NDArray[uint32]) -> None:
    """Count a chunk's symbols; ``stored`` and ``packed`` get each channel's distribution (see ``unpack``)."""
    tokens, dim = symbols.shape
    counts = np.zeros(dim * SYMBOLS, np.uint32)
    for t in range(tokens):
        for d in range(dim):
            counts[(uint32(d) << uint32(5)) | uint32(symbols[t, d])] += uint32(1)
    for d in range(dim):
        total = 0
        stored[d, 0] = 0
        for s in range(SYMBOLS):
            total += counts[d * SYMBOLS + s]
            stored[d, s + 1] = np.int16(int32(np.rint(float64(total) / tokens * (65536 - SYMBOLS))) + s + 1)
    unpack(stored, packed)


@_jit
def unpack(stored: NDArray[np.int16], packed: NDArray[uint32]) -> None:
    """``packed[32 d + s]``: a symbol's start in the upper, its frequency less 1 in the lower half of the word."""
    for d in range(stored.shape[0]):
        for s in range(SYMBOLS):
            start = uint32(uint16(stored[d, s]))
            packed[d * SYMBOLS + s] = (start << _WORD) | ((uint32(uint16(stored[d, s + 1])) - start - uint32(1)) & _LOW)


@_jit
def _share(width: uint32, cumulative: uint32) -> uint32:
    """``width * cumulative / 2^16`` without leaving 32 bits, so that vectors hold twice as many."""
    low = uint32(uint32((width & _LOW) * cumulative) >> _WORD)
    return uint32(uint32((width >> _WORD) * cumulative) + low)


@_jit
def _encode_lockstep(
    symbols: NDArray[uint8], packed: NDArray[uint32], lengths: NDArray[int32], words: NDArray[uint16]
) -> None:
    """Encode a head's streams together. Words keep their carry in a 17th bit until the end, which spares a branch."""
    tokens, dim = symbols.shape
    digits = np.empty(dim * ROOM, np.uint32)
    low, width, at = np.zeros(dim, np.uint64), np.full(dim, _FULL, np.uint32), np.empty(dim, np.uint32)
    for d in range(dim):
        at[d] = uint32(d * ROOM)
    for t in range(tokens):
        for d in range(dim):
            entry = packed[(uint32(d) << uint32(5)) | uint32(symbols[t, d])]
            start = uint64(entry >> _WORD)
            end = start + uint64(entry & _LOW) + uint64(1)
            below = (uint64(width[d]) * start) >> _SHIFT
            narrow = ((uint64(width[d]) * end) >> _SHIFT) - below
            base = low[d] + below
            digits[at[d]] = uint32(base >> _SHIFT)
            full = narrow < uint64(65536)
            at[d] += uint32(full)
            low[d] = (base & uint64(_LOW)) << _SHIFT if full else base
            width[d] = uint32(narrow << _SHIFT) if full else uint32(narrow)
    for d in range(dim):
        lengths[d] = _finish(digits[d * ROOM : (d + 1) * ROOM], int(at[d]) - d * ROOM, low[d], width[d], words[d])


@_jit
def _finish(digits: NDArray[uint32], used: int, low: uint64, width: uint32, words: NDArray[uint16]) -> int:
    """End a stream with as few words as decode whatever follows them, and settle the carries; returns its words."""
    top = (low + uint64(_LOW)) >> _SHIFT
    if ((top + uint64(1)) << _SHIFT) <= low + uint64(width):
        digits[used] = uint32(top)
        used += 1
    else:
        digits[used] = uint32(low >> _SHIFT)
        digits[used + 1] = uint32(low & uint64(_LOW))
        used += 2
    carry = uint32(0)
    for i in range(used - 1, -1, -1):
        digit = digits[i] + carry
        words[i] = uint16(digit & _LOW)
        carry = uint32(digit >> _WORD)
    return used


@_parallel
def join(lengths: NDArray[int32], starts: NDArray[np.int64], words: NDArray[uint16], payload: NDArray[uint16]) -> None:
    """Copy each stream's words, ``[streams, ROOM]``, to where it starts in the payload."""
    for stream in prange(len(lengths)):
        at = starts[stream]
        for i in range(lengths[stream]):
            payload[at + i] = words[stream, i]


@_parallel
def decode_plane(
    payload: NDArray[uint16],
    starts: NDArray[np.int64],
    stored: NDArray[np.int16],
    scale: NDArray[float32],
    most: int,
    chunk: int,
    bitwise: bool,  # noqa: FBT001 - kernels take arguments by position
    out: NDArray[uint16],
) -> None:
    """The inverse of ``encode_plane``; starts: first word of each stream, ``[parts, heads, dim]``."""
    heads, tokens, dim = out.shape
    parts = starts.shape[0]
    for task in prange(parts * heads):
        part, h = task // heads, task % heads
        first, last = part * STREAM_TOKENS, min(part * STREAM_TOKENS + STREAM_TOKENS, tokens)
        packed = np.empty(dim * SYMBOLS, np.uint32)
        unpack(stored[first // chunk, h], packed)
        symbols = np.empty((last - first, dim), np.uint8)
        if bitwise:
            decode_bitwise(payload, starts[part, h], packed, symbols)
        else:
            _decode_lockstep(payload, starts[part, h], packed, symbols)
        _dequantise(symbols, scale[first:last], float32(most), out[h, first:last])


@_jit
def _dequantise(symbols: NDArray[uint8], scale: NDArray[float32], most: float32, out: NDArray[uint16]) -> None:
    """``(q - M) * (scale / M)`` in float32, rounded to bfloat16, ties to even."""
    for t in range(symbols.shape[0]):
        factor = scale[t] / most
        for d in range(symbols.shape[1]):
            bits = float32((float32(symbols[t, d]) - most) * factor).view(uint32)
            out[t, d] = uint16((bits + uint32(0x7FFF) + ((bits >> _WORD) & uint32(1))) >> _WORD)


@_jit
def _decode_lockstep(
    payload: NDArray[uint16], starts: NDArray[np.int64], packed: NDArray[uint32], symbols: NDArray[uint8]
) -> None:
    """Decode a head's streams together; past the payload's end its last word repeats."""
    tokens, dim = symbols.shape
    limit = uint32(len(payload) - 1)
    code, width, at = np.empty(dim, np.uint32), np.full(dim, _FULL, np.uint32), np.empty(dim, np.uint32)
    bounds = np.empty((SYMBOLS, dim), np.uint16)
    target, found = np.empty(dim, np.uint16), np.empty(dim, np.uint16)
    for d in range(dim):
        first = uint32(starts[d])
        code[d] = (uint32(payload[first]) << _WORD) | uint32(payload[min(first + uint32(1), limit)])
        at[d] = first + uint32(2)
        for s in range(SYMBOLS):
            bounds[s, d] = uint16(packed[d * SYMBOLS + s] >> _WORD)
    for t in range(tokens):
        _locate(code, width, target)
        _search(target, bounds, found)
        _advance(payload, limit, packed, found, code, width, at)
        for d in range(dim):
            symbols[t, d] = uint8(found[d])


@_jit
def _locate(code: NDArray[uint32], width: NDArray[uint32], target: NDArray[uint16]) -> None:
    """The 16-bit position of each code in its range; the quotient is exact, both numbers being below 2^53."""
    for d in range(len(code)):
        target[d] = uint16(uint32((float64(code[d]) * 65536.0 + 65535.0) / float64(width[d])))


@_jit
def _search(target: NDArray[uint16], bounds: NDArray[uint16], found: NDArray[uint16]) -> None:
    """The last symbol that starts at or below each target: how many starts do, less one."""
    for d in range(len(target)):
        x = target[d]
        found[d] = uint16(_sixteen(bounds, uint32(0), d, x) + _sixteen(bounds, uint32(16), d, x) - 1)


@_jit
def _sixteen(bounds: NDArray[uint16], s: uint32, d: int, x: uint16) -> int:
    """Unrolled by hand, so that the loop over channels becomes the vector and each count stays in a register."""
    left = _four(bounds, s, d, x) + _four(bounds, s + uint32(4), d, x)
    return left + (_four(bounds, s + uint32(8), d, x) + _four(bounds, s + uint32(12), d, x))


@_jit
def _four(bounds: NDArray[uint16], s: uint32, d: int, x: uint16) -> int:
    left = uint16(bounds[s, d] <= x) + uint16(bounds[s + uint32(1), d] <= x)
    return left + (uint16(bounds[s + uint32(2), d] <= x) + uint16(bounds[s + uint32(3), d] <= x))


@_jit
def _advance(
    payload: NDArray[uint16],
    limit: uint32,
    packed: NDArray[uint32],
    found: NDArray[uint16],
    code: NDArray[uint32],
    width: NDArray[uint32],
    at: NDArray[uint32],
) -> None:
    """Narrow each range to its symbol and take in a word where it became short."""
    for d in range(len(code)):
        entry = packed[(uint32(d) << uint32(5)) | uint32(found[d])]
        start = uint32(entry >> _WORD)
        below = _share(width[d], start)
        narrow = uint32(_share(width[d], uint32(start + (entry & _LOW) + uint32(1))) - below)
        rest = uint32(code[d] - below)
        word = uint32(payload[min(at[d], limit)])
        short = narrow < uint32(65536)
        at[d] += uint32(short)
        code[d] = (rest << _WORD) | word if short else rest
        width[d] = narrow << _WORD if short else narrow


@_jit
def encode_bitwise(
    symbols: NDArray[uint8], packed: NDArray[uint32], lengths: NDArray[int32], words: NDArray[uint16]
) -> None:
    """Encode as torchac: 32-bit bounds, one bit out at a time, undecided bits counted until they are known."""
    tokens, dim = symbols.shape
    for d in range(dim):
        low, high, pending, bits = uint64(0), uint64(_FULL), 0, 0
        for t in range(tokens):
            entry = packed[d * SYMBOLS + symbols[t, d]]
            start, span = uint64(entry >> _WORD), high - low + uint64(1)
            high = low + ((span * (start + uint64(entry & _LOW) + uint64(1))) >> _SHIFT) - uint64(1)
            low += (span * start) >> _SHIFT
            while True:
                if high < _HALF or low >= _HALF:
                    bits = _put(words[d], bits, low >= _HALF, pending)
                    pending = 0
                elif low >= _QUARTER and high < _HALF + _QUARTER:
                    pending += 1
                    low -= _QUARTER
                    high -= _QUARTER
                else:
                    break
                low = (low << uint64(1)) & uint64(_FULL)
                high = ((high << uint64(1)) & uint64(_FULL)) | uint64(1)
        bits = _put(words[d], bits, low >= _QUARTER, pending + 1)
        lengths[d] = (bits + 15) // 16


@_jit
def _put(words: NDArray[uint16], bits: int, one: bool, pending: int) -> int:  # noqa: FBT001 - as above
    """Append a bit and ``pending`` of its opposite; returns the number of bits."""
    for i in range(pending + 1):
        value = uint16(1) if one == (i == 0) else uint16(0)
        word = uint16(0) if bits % 16 == 0 else words[bits // 16]
        words[bits // 16] = word | (value << uint16(15 - bits % 16))
        bits += 1
    return bits


@_jit
def decode_bitwise(
    payload: NDArray[uint16], starts: NDArray[np.int64], packed: NDArray[uint32], symbols: NDArray[uint8]
) -> None:
    """Decode as torchac: a binary search in the distribution, one bit in at a time."""
    tokens, dim = symbols.shape
    end = 16 * len(payload)
    for d in range(dim):
        low, high, at = uint64(0), uint64(_FULL), 16 * starts[d]
        value = uint64(0)
        for _ in range(32):
            value = (value << uint64(1)) | _bit(payload, at, end)
            at += 1
        for t in range(tokens):
            span = high - low + uint64(1)
            x = ((value - low + uint64(1)) * uint64(65536) - uint64(1)) // span
            left, right = 0, SYMBOLS
            while left + 1 < right:
                middle = (left + right) // 2
                if uint64(packed[d * SYMBOLS + middle] >> _WORD) <= x:
                    left = middle
                else:
                    right = middle
            symbols[t, d] = left
            entry = packed[d * SYMBOLS + left]
            start = uint64(entry >> _WORD)
            high = low + ((span * (start + uint64(entry & _LOW) + uint64(1))) >> _SHIFT) - uint64(1)
            low += (span * start) >> _SHIFT
            while True:
                if low >= _HALF:
                    low -= _HALF
                    high -= _HALF
                    value -= _HALF
                elif low >= _QUARTER and high < _HALF + _QUARTER:
                    low -= _QUARTER
                    high -= _QUARTER
                    value -= _QUARTER
                elif high >= _HALF:
                    break
                low <<= uint64(1)
                high = (high << uint64(1)) | uint64(1)
                value = (value << uint64(1)) | _bit(payload, at, end)
                at += 1


@_jit
def _bit(payload: NDArray[uint16], at: int, end: int) -> uint64:
    return uint64((payload[at >> 4] >> uint16(15 - (at & 15))) & uint16(1)) if at < end else uint64(0)
