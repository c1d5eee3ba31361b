"""Segments written by docs/format.md from nothing: any that are legal, not only those that kvwire's encoders write."""

from __future__ import annotations

import struct
from bisect import bisect_right

import numpy as np
import zstandard

from kvwire.codec.entropy.range_coder import encode_rows

from ..streams_by_the_text import Numbers, blocks_of, starts_of

ESCAPES = (0, 1, -1, 127, -128, 255, -256, 257, 4000, -70_000, 2**20, 2**28 - 1, 1 - 2**28)
MOST_LANES = 12
LARGEST = 2**28
"""Values stay below this in size, or damage could lead beyond 32 bits."""


def frame(rng, raw):
    """One zstd frame that states its content's size, as any writer may make it; no bytes for nothing."""
    if not raw:
        return b""
    level, checksum = int(rng.choice([-5, 1, 3, 9])), bool(rng.random() < 0.2)
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=checksum).compress(raw)


def write_lane(symbols, tables):
    """State and words of one lane (section 4.1), its symbols in the order in which they are read."""
    x, words = 65536, []
    for symbol, starts in zip(reversed(symbols), reversed(tables), strict=True):
        start, frequency = starts[symbol], starts[symbol + 1] - starts[symbol]
        if x >> 20 >= frequency:
            words.append(x % 65536)
            x >>= 16
        x = 4096 * (x // frequency) + x % frequency + start
    return x, words[::-1]


def write_lanes(symbols, tables, lanes):
    """A stream; symbols and tables by row and column."""
    rows, columns = len(symbols), len(symbols[0]) if symbols else 0
    states, lengths, words = [], [], []
    for lane in range(lanes):
        walk = [(row, column) for column in range(lane, columns, lanes) for row in range(rows)]
        x, own = write_lane([symbols[r][c] for r, c in walk], [tables[r][c] for r, c in walk])
        states.append(x)
        lengths.append(len(own))
        words += own
    return states, lengths, words


def packed_lanes(states, lengths, words):
    return struct.pack(f"<{len(states)}I{len(lengths)}H{len(words)}H", *states, *lengths, *words)


def drawn(rng, starts, uniform):
    """A symbol that its table can code."""
    if not uniform:
        return bisect_right(starts, int(rng.integers(4096))) - 1
    coded = [s for s in range(len(starts) - 1) if starts[s + 1] > starts[s]]
    return int(coded[rng.integers(len(coded))])


class LayeredWriter:
    """Levels of one chunk (section 4), one after the other."""

    def __init__(self, rng, tokens, spread, tables, levels):
        self.rng, self.tokens, self.spread, self.tables = rng, tokens, spread, tables
        self.classes = [0] * len(spread)
        self.values = [[0] * len(spread) for _ in range(tokens)]
        self.most = LARGEST // 3**levels - 1
        self.share = rng.choice([0.0, 0.3, 0.9, 1.0])

    def enter(self, shift):
        """Some open columns become coded, at any class that a byte can say; the class list."""
        codes = []
        for column, cls in enumerate(self.classes):
            if cls:
                self.classes[column] = min(cls + 6, 42)
                continue
            far = 255 if self.rng.random() < 0.1 else 9
            code = int(self.rng.integers(1, far)) if self.rng.random() < self.share else 0
            codes.append(code)
            if code:
                difference = (code - 1) // 2 if code % 2 else -(code // 2)
                own = min(max(self.spread[column] - shift, 1), 42)
                self.classes[column] = min(max(own + difference, 1), 42)
        return bytes(codes)

    def segment(self, level, shift):
        """The next level: its bytes and its number of symbols."""
        rng, codes, escapes = self.rng, self.enter(shift), []
        coded = [column for column, cls in enumerate(self.classes) if cls]
        symbols, tables = [], []
        uniform = rng.random() < 0.3
        for row in self.values:
            starts = [self.starts(level, row, column) for column in coded]
            own = [drawn(rng, each, uniform) for each in starts]
            for column, symbol in zip(coded, own, strict=True):
                row[column] = self.next_value(level, row[column], symbol, escapes)
            symbols.append(own)
            tables.append(starts)
        lanes = int(rng.integers(1, MOST_LANES))
        states, lengths, words = write_lanes(symbols, tables, lanes)
        lists = frame(rng, codes), frame(rng, np.array(escapes, "<i4").tobytes())
        head = struct.pack("<IIIHH", len(words), len(lists[0]), len(lists[1]), lanes, int(rng.integers(2)))
        return head + b"".join(lists) + packed_lanes(states, lengths, words), self.tokens * len(coded)

    def starts(self, level, row, column):
        cls = self.classes[column] - 1
        return self.tables[1][cls][min(abs(row[column]), 2)] if level else self.tables[0][cls]

    def next_value(self, level, was, symbol, escapes):
        if level:
            return 3 * was + (symbol - 1 if was >= 0 else 1 - symbol)
        if symbol:
            return symbol - 128
        escapes.append(max(-self.most, min(self.most, int(self.rng.choice(ESCAPES)))))
        return escapes[-1]


def frequencies(rng, symbols, total, least):
    """A table that adds up: flat, steep or of few symbols."""
    weights = rng.random(symbols) ** float(rng.choice([1, 4, 40]))
    if not least and rng.random() < 0.3:
        weights *= rng.random(symbols) < 0.1
    weights[0] = max(weights[0], 1e-3)
    out = np.maximum(least, np.floor(weights / weights.sum() * (total - least * symbols)).astype(np.int64) + least)
    out[0] = max(1, out[0])
    out[int(out.argmax())] += total - int(out.sum())
    return out


def some_frequencies(rng, count, symbols, total, least):
    """So many tables, of which a few differ."""
    few = np.array([frequencies(rng, symbols, total, least) for _ in range(min(count, 4))])
    return few[rng.integers(0, len(few), count)]


def planes_of(numbers, size):
    """Lowest bytes first, then the next ones."""
    raw = np.array(numbers, f"<u{size}").view(np.uint8).reshape(-1, size)
    return raw.T.tobytes()


def lossless_segment(rng, tokens, layers, dtype):
    """Any numbers of a dtype, in any of the forms of section 6: its bytes and its number of symbols."""
    form, blocks = Numbers(dtype), list(blocks_of(layers))
    heads_dims = [(heads, dim) for _, _, heads, dim in blocks]
    shared = [bool(rng.random() < 0.4) for _ in blocks]
    spares = [int(rng.integers(form.low + 1)) if rng.random() < 0.3 else 0 for _ in blocks]
    codes = row_codes(rng, tokens) if any(shared) else []
    rows = [tokens, codes.count(0)]
    count = int(rng.integers(1, 4))
    tables = [frequencies(rng, 256, 4096, 0) for _ in range(count)]
    starts = [starts_of(table) for table in tables]
    widths = [heads * dim for heads, dim in heads_dims]
    classes = [int(rng.integers(count)) for _ in range(sum(widths))]
    flips = [int(rng.integers(2)) for _ in classes]
    references = [int(rng.integers(1 << form.exponent)) for _ in classes]
    streams, symbols = [], {}
    for stream in (0, 1):
        mine = [i for i, block in enumerate(np.repeat(np.arange(len(blocks)), widths)) if shared[block] == bool(stream)]
        own = [[starts[classes[column]] for column in mine] for _ in range(rows[stream])]
        drawn_ = [[drawn(rng, each, uniform=False) for each in row] for row in own]
        lanes = int(rng.integers(1, MOST_LANES)) if mine else 0
        streams.append(write_lanes(drawn_, own, lanes) if mine else ([], [], []))
        symbols |= {(column, row): drawn_[row][at] for at, column in enumerate(mine) for row in range(rows[stream])}
    lost = sum(is_lost(form, symbol) for symbol in symbols.values())
    escapes = [int(rng.integers(1 << form.exponent)) for _ in range(lost)]
    bits = sum((form.low - s) * w * rows[sh] for s, w, sh in zip(spares, widths, shared, strict=True))
    lists = [
        frame(rng, planes_of(np.array(tables), 2)),
        frame(rng, bytes(cls + 128 * flip for cls, flip in zip(classes, flips, strict=True))),
        frame(rng, planes_of(references, 2)),
        frame(rng, bytes(s + 128 * sh for s, sh in zip(spares, shared, strict=True))),
        frame(rng, planes_of(codes, 4)),
        frame(rng, planes_of(escapes, 2)),
    ]
    lanes, words = [len(stream[0]) for stream in streams], [len(stream[2]) for stream in streams]
    head = struct.pack("<8I4H", *map(len, lists), *words, *lanes, count, int(rng.integers(2)))
    raw = rng.bytes(-(-bits // 8))
    return head + b"".join(lists) + b"".join(packed_lanes(*stream) for stream in streams) + raw, len(symbols)


def row_codes(rng, tokens):
    """0 for a row of its own, k for row k - 1 of those before."""
    codes, own = [], 0
    for _ in range(tokens):
        codes.append(int(rng.integers(1, own + 1)) if own and rng.random() < 0.4 else 0)
        own += codes[-1] == 0
    return codes


def is_lost(form, symbol):
    distance = symbol >> form.high & (1 << form.distance) - 1
    return form.exponent > form.distance and distance == (1 << form.distance) - 1


def cachegen_segment(rng, tokens, layers, level, arrays):
    """Any symbols of a CacheGen level (section 7.2): its bytes and their number."""
    blocks = sorted(blocks_of(layers), key=lambda block: block[0] != "key")
    groups, parts, escapes, first = -(-tokens // 10), [], [], 0
    for _, _, heads, dim in blocks:
        own = slice(first, first + heads * dim)
        first = own.stop
        parts.append((rng.integers(0, 255, (heads * dim, groups)).astype(np.uint8), arrays["anchors"][own]))
        most = 64 if rng.random() < 0.5 else 2
        deltas = rng.integers(0, most, (heads * dim, tokens - groups)).astype(np.uint8)
        escapes += [int(rng.choice(ESCAPES)) for _ in range(int((deltas == 0).sum()))]
        parts.append((deltas, arrays["deltas"][level, own]))
    words = encode_rows([(symbols, tables.astype(np.uint16)) for symbols, tables in parts])
    scales = (rng.random((len(blocks), groups)) * 10.0 ** rng.integers(-6, 4)).astype("<f2")
    packed = frame(rng, np.array(escapes, "<i4").tobytes())
    head = struct.pack("<II", len(packed), len(words) // 4)
    return head + scales.tobytes() + packed + words, tokens * first
