"""Streams of lanes, lossless segments and CacheGen segments, decoded as docs/format.md says and in no other way."""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch
import zstandard

FIELDS = {
    "float64": (11, 52, 5),
    "float32": (8, 23, 5),
    "bfloat16": (8, 7, 5),
    "float16": (5, 10, 5),
    "float8_e4m3fn": (4, 3, 4),
    "float8_e4m3fnuz": (4, 3, 4),
    "float8_e5m2": (5, 2, 5),
    "float8_e5m2fnuz": (5, 2, 5),
}
"""Exponent bits, mantissa bits and distance bits."""


def unframed(data):
    return zstandard.ZstdDecompressor().decompress(data) if data else b""


def starts_of(frequencies):
    """Sums of the frequencies before each symbol, and of all of them."""
    return [0, *accumulate(map(int, frequencies))]


def read_lane(state, words, walk, starts_at):
    """One lane of section 4.1: the symbols along its walk; starts_at gives the starts of a place's table."""
    out, words = [], iter(words)
    for place in walk:
        slot, starts = state % 4096, starts_at(*place)
        symbol = bisect_right(starts, slot) - 1
        state = (starts[symbol + 1] - starts[symbol]) * (state // 4096) + slot - starts[symbol]
        if state < 65536:
            state = 65536 * state + next(words)
        out.append(symbol)
    assert state == 65536
    assert next(words, None) is None
    return out


def read_lanes(stream, lanes, rows, columns, starts_at):
    """States, lengths and words of a stream: the symbol of each row and column."""
    states = struct.unpack_from(f"<{lanes}I", stream)
    lengths = struct.unpack_from(f"<{lanes}H", stream, 4 * lanes)
    words = np.frombuffer(stream, "<u2", sum(lengths), 6 * lanes).tolist()
    symbols = {}
    for lane, (state, length) in enumerate(zip(states, lengths, strict=True)):
        walk = [(row, column) for column in range(lane, columns, lanes) for row in range(rows)]
        symbols |= zip(walk, read_lane(state, words[:length], walk, starts_at), strict=True)
        words = words[length:]
    assert not words
    return symbols


def blocks_of(layers):
    """Side, layer, heads and dim of every block, keys of a layer before its values."""
    for number, (kind, heads, key_dim, value_dim, *_) in enumerate(layers):
        if kind != "none":
            yield "key", number, heads, key_dim
            yield "value", number, heads, value_dim


def in_planes(raw, size):
    """Entries whose lowest bytes come first, then the next ones."""
    count = len(raw) // size
    return [sum(raw[byte * count + i] << 8 * byte for byte in range(size)) for i in range(count)]


def own_rows(codes):
    """Row of each token, by the row list."""
    rows, count = [], 0
    for code in codes:
        rows.append(code - 1 if code else count)
        count += not code
    return rows


class Numbers:
    """How a dtype's numbers are taken apart."""

    def __init__(self, dtype):
        self.exponent, self.mantissa, self.distance = FIELDS[dtype]
        self.high = 7 - self.distance
        self.low = self.mantissa - self.high
        self.width = 1 + self.exponent + self.mantissa

    def number(self, symbol, flip, reference, escapes):
        """A number without its raw bits."""
        distance = symbol >> self.high & (1 << self.distance) - 1
        lost = self.exponent > self.distance and distance == (1 << self.distance) - 1
        exponent = next(escapes) if lost else (reference - distance) % (1 << self.exponent)
        upper = symbol & (1 << self.high) - 1
        return ((symbol >> 7) ^ flip) << self.width - 1 | exponent << self.mantissa | upper << self.low


def as_numbers(bits, size, dtype):
    """Numbers of a dtype in float64, which holds them all."""
    unsigned = torch.from_numpy(np.array(bits, f"<u{size}").view(np.uint8))
    return unsigned.view(getattr(torch, dtype)).double().numpy()


def read_lossless(data, tokens, layers, dtype):
    """Planes ``[tokens, heads, dim]`` in float64, which holds every number of all dtypes."""
    form, blocks = Numbers(dtype), list(blocks_of(layers))
    fixed, at = struct.unpack_from("<8I4H", data), 40
    lists = []
    for size in fixed[:6]:
        lists.append(unframed(data[at : at + size]))
        at += size
    rows = {0: list(range(tokens)), 1: own_rows(in_planes(lists[4], 4))}
    columns = [
        (block, h, d) for block, (_, _, heads, dim) in enumerate(blocks) for h in range(heads) for d in range(dim)
    ]
    symbols = {}
    for stream in (0, 1):
        mine = [index for index, (block, _, _) in enumerate(columns) if lists[3][block] >> 7 == stream]
        lanes = fixed[8 + stream]
        if mine:
            size = 6 * lanes + 2 * fixed[6 + stream]
            frequencies = np.array(in_planes(lists[0], 2)).reshape(fixed[10], 256)
            starts = [starts_of(row) for row in frequencies]
            tables = [starts[lists[1][index] & 127] for index in mine]
            own = read_lanes(data[at : at + size], lanes, max(rows[stream]) + 1, len(mine), lambda _, c, t=tables: t[c])
            symbols |= {(*columns[mine[column]], row): symbol for (row, column), symbol in own.items()}
            at += size
    references, escapes = dict(zip(columns, in_planes(lists[2], 2), strict=True)), iter(in_planes(lists[5], 2))
    flips = {column: byte >> 7 for column, byte in zip(columns, lists[1], strict=True)}
    numbers = {}
    for block, h, d, row in sorted(symbols, key=lambda place: (place[0], place[3], place[1], place[2])):
        symbol = symbols[block, h, d, row]
        numbers[block, h, row, d] = form.number(symbol, flips[block, h, d], references[block, h, d], escapes)
    raw, bit = int.from_bytes(data[at:], "little"), 0
    for block, h, row, d in sorted(numbers):
        spare = lists[3][block] & 127
        numbers[block, h, row, d] |= (raw >> bit & (1 << form.low - spare) - 1) << spare
        bit += form.low - spare
    assert len(data) - at == -(-bit // 8)
    assert next(escapes, None) is None
    planes = {}
    for block, (side, layer, heads, dim) in enumerate(blocks):
        places = rows[lists[3][block] >> 7]
        bits = [[[numbers[block, h, row, d] for d in range(dim)] for h in range(heads)] for row in places]
        planes[side, layer] = as_numbers(bits, form.width // 8, dtype)
    return planes


def read_range(words, counts_and_tables):
    """The range decoder, in Python's integers: symbols one after the other."""
    words = list(words)
    take = lambda: words.pop(0) if words else 0  # noqa: E731 - one line says it
    point, lower, size = (take() << 32) | take(), 0, 2**64 - 1
    for count, tables in counts_and_tables:
        for table in tables.tolist():
            starts = starts_of(table)
            for _ in range(count):
                unit = size >> 24
                slot = ((point - lower) % 2**64) // unit // 256
                assert slot < starts[-1]
                symbol = bisect_right(starts, slot) - 1
                lower = (lower + unit * 256 * starts[symbol]) % 2**64
                size = unit * 256 * table[symbol]
                if size < 2**32:
                    lower, size = lower << 32 & (2**64 - 1), size << 32
                    point = (point << 32 | take()) & (2**64 - 1)
                yield symbol
    assert not words
    assert (point - lower) % 2**64 < 2**33 - 1


def read_cachegen(data, tokens, layers, levels, level, arrays):
    """Un-rotated planes ``[tokens, heads, dim]``, float32 as the text computes them."""
    blocks = sorted(blocks_of(layers), key=lambda block: block[0] != "key")
    groups = -(-tokens // 10)
    escape_bytes, count = struct.unpack_from("<II", data)
    at = 8 + 2 * len(blocks) * groups
    scales = np.frombuffer(data, "<f2", len(blocks) * groups, 8).astype("f4").reshape(len(blocks), groups)
    escapes = iter(np.frombuffer(unframed(data[at : at + escape_bytes]), "<i4").tolist())
    words = np.frombuffer(data, "<u4", count, at + escape_bytes).tolist()
    assert len(data) == at + escape_bytes + 4 * count
    widths, parts, first = [heads * dim for *_, heads, dim in blocks], [], 0
    for width in widths:
        own = slice(first, first + width)
        parts += [(groups, arrays["anchors"][own]), (tokens - groups, arrays["deltas"][level, own])]
        first += width
    stream, planes = read_range(words, parts), {}
    for number, (side, layer, heads, dim) in enumerate(blocks):
        third = (0.5, 1.0, 1.5)[3 * layer // len(layers)]
        size = np.float32(np.float64(arrays["units"][number]) * third * levels[level][1])
        anchors = np.array([[next(stream) - 127 for _ in range(groups)] for _ in range(widths[number])], "f4")
        anchors = anchors * scales[number]
        out = np.empty((widths[number], tokens), "f4")
        for channel in range(widths[number]):
            for token in range(tokens):
                out[channel, token] = anchors[channel, token // 10]
                if token % 10:
                    symbol = next(stream)
                    value = np.float32(symbol - 32 if symbol else next(escapes))
                    out[channel, token] += value * size
        planes[side, layer] = out.T.reshape(tokens, heads, dim).astype(np.float64)
    assert next(stream, None) is None
    assert next(escapes, None) is None
    return planes
