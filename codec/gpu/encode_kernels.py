"""Triton kernels that encode; the tests have readable twins.

Quantised values are split into a one-byte symbol for every level, ``[tokens, levels, columns]``: the base symbol at
level 0, three times the context plus the refinement at later ones. One kernel codes both: a byte and its column's row
select the entry in one array of starts and frequencies.

No kernel checks an index. ``gpu.encode`` computes columns and rows from the values, symbols are below 256 at level 0
and below 9 above it, and every lane has room for one word per symbol.
"""
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, PLR2004
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

STREAM_FIELDS = tl.constexpr(7)
"""Fields of a stream, int64: first symbol, tokens, first of its entries, columns, lanes, first lane, first word."""


@triton.jit
def _third(q):
    """Divide by three and round to nearest. The dividend is made positive, where all integer divisions agree."""
    return (q + 805306369) // 3 - 268435456


@triton.jit
def measure(coefficients, bounds, magnitudes, squares, columns, BLOCK: tl.constexpr):
    """Sum ``|c|`` and ``c * c`` of a block of columns of one chunk, token by token."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    magnitude = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for t in range(tl.load(bounds + chunk), tl.load(bounds + chunk + 1)):
        c = tl.load(coefficients + (t * columns + column), mask=inside, other=0.0)
        magnitude += tl.abs(c)
        square += c * c
    at = chunk.to(tl.int64) * columns + column
    tl.store(magnitudes + at, magnitude, mask=inside)
    tl.store(squares + at, square, mask=inside)


@triton.jit
def split(values, bounds, symbols, widest, columns, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write symbols of all levels of a block of columns of one chunk, and each column's largest size."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    largest = tl.zeros([ROWS, BLOCK], tl.int32)
    stop = tl.load(bounds + chunk + 1)
    for first in range(tl.load(bounds + chunk), stop, ROWS):
        t = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        valid = (t < stop) & inside[None, :]
        fine = tl.load(values + (t * columns + column[None, :]), mask=valid, other=0)
        largest = tl.maximum(largest, tl.abs(fine))
        at = symbols + (t * (LEVELS * columns) + column[None, :])
        for below in tl.static_range(LEVELS - 1):
            coarse = _third(fine)
            r = fine - 3 * coarse
            context = tl.minimum(tl.abs(coarse), 2)
            symbol = 3 * context + 1 + tl.where(coarse < 0, -r, r)
            tl.store(at + (LEVELS - 1 - below) * columns, symbol.to(tl.uint8), mask=valid)
            fine = coarse
        tl.store(at, tl.where(tl.abs(fine) < 128, fine + 128, 0).to(tl.uint8), mask=valid)
    tl.store(widest + (chunk.to(tl.int64) * columns + column), tl.max(largest, axis=0), mask=inside)


@triton.jit
def escape(symbols, bounds, rows, packed, escapes, columns, levels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace base symbols without a slot in their table by 0, and count the zeros of each column."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_chunk = chunk.to(tl.int64) * columns + column
    row = tl.load(rows + of_chunk, mask=column < columns, other=-1)
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    stop = tl.load(bounds + chunk + 1)
    for first in range(tl.load(bounds + chunk), stop, ROWS):
        t = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        coded = (t < stop) & (row >= 0)[None, :]
        at = symbols + (t * (levels * columns) + column[None, :])
        symbol = tl.load(at, mask=coded, other=0).to(tl.int32)
        frequency = tl.load(packed + (row[None, :] + symbol), mask=coded, other=0) & 65535
        escaped = coded & ((frequency == 0) | (symbol == 0))
        tl.store(at, tl.zeros([ROWS, BLOCK], tl.uint8), mask=escaped)
        count += escaped.to(tl.int32)
    tl.store(escapes + of_chunk, tl.sum(count, axis=0), mask=column < columns)


@triton.jit
def squared_errors(
    coefficients,
    values,
    bounds,
    classes,
    sizes,
    steps,
    missed,
    columns,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squared errors of a block of columns of one chunk decoded at one level."""
    chunk, level = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    of_level = (chunk * LEVELS + level).to(tl.int64) * columns + column
    own = 3 * tl.load(classes + of_level, mask=inside, other=0).to(tl.int32)
    one, two = tl.load(sizes + own + 1)[None, :], tl.load(sizes + own + 2)[None, :]
    step = tl.load(steps + level)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    stop = tl.load(bounds + chunk + 1)
    for first in range(tl.load(bounds + chunk), stop, ROWS):
        t = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        valid = (t < stop) & inside[None, :]
        at = t * columns + column[None, :]
        q = tl.load(values + at, mask=valid, other=0)
        for _ in range(level, LEVELS - 1):
            q = _third(q)
        q = tl.abs(q)
        size = tl.where(q == 1, one, tl.where(q == 2, two, q.to(tl.float32)))
        c = tl.load(coefficients + at, mask=valid, other=0.0)
        difference = tl.abs(c) - step * size
        total += difference * difference
    tl.store(missed + of_level, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["lanes"])
def encode_lanes(
    symbols,
    stride,
    streams,
    stream_of,
    columns,
    rows,
    packed,
    words,
    states,
    begins,
    counts,
    lanes,
    BLOCK: tl.constexpr,
):
    """Encode the lanes of all streams, one thread each, from the last symbol to the first."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < lanes
    described = streams + tl.load(stream_of + index, mask=exists, other=0).to(tl.int64) * STREAM_FIELDS
    first = symbols + tl.load(described)
    tokens = tl.load(described + 1).to(tl.int32)
    entry = tl.load(described + 2)
    coded = tl.load(described + 3).to(tl.int32)
    of_stream = tl.load(described + 4).to(tl.int32)
    lane = index - tl.load(described + 5).to(tl.int32)
    room = tokens * ((coded + of_stream - 1) // of_stream)
    end = tl.load(described + 6) + (lane + 1).to(tl.int64) * room
    deals = tl.where(exists & (lane < coded), (coded - lane + of_stream - 1) // of_stream, 0)
    longest = tl.max(tl.where(deals > 0, tokens, 0), axis=0)
    state = tl.full([BLOCK], 65536, tl.uint32)
    low = tl.full([BLOCK], 65535, tl.uint32)
    whole = tl.full([BLOCK], 4096, tl.uint32)
    begin = end
    for deal in range(tl.max(deals, axis=0)):
        walking = deal < deals
        at = entry + lane + (deals - 1 - deal) * of_stream
        column = tl.load(columns + at, mask=walking, other=0)
        row = tl.load(rows + at, mask=walking, other=0)
        place = first + ((tokens - 1).to(tl.int64) * stride + column)
        symbol = tl.load(place, mask=walking, other=0).to(tl.int32)
        following = tl.load(packed + (row + symbol), mask=walking, other=1).to(tl.uint32, bitcast=True)
        for done in range(longest):
            live, both = walking & (done < tokens), following
            place -= stride
            # The next symbol's entry loads while this one's quotient is computed.
            more = walking & (done + 1 < tokens)
            symbol = tl.load(place, mask=more, other=0).to(tl.int32)
            following = tl.load(packed + (row + symbol), mask=more, other=1).to(tl.uint32, bitcast=True)
            frequency = both & low
            over = live & ((state >> 20) >= frequency)
            begin -= over.to(tl.int64)
            tl.store(words + begin, (state & low).to(tl.int16), mask=over)
            shifted = tl.where(over, state >> 16, state)
            coded_state = shifted + (shifted // frequency) * (whole - frequency) + (both >> 16)
            state = tl.where(live, coded_state, state)
    tl.store(states + index, state.to(tl.int32, bitcast=True), mask=exists)
    tl.store(counts + index, (end - begin).to(tl.int32), mask=exists)
    tl.store(begins + index, begin, mask=exists)


@triton.jit
def gather_words(words, begins, counts, targets, out, BLOCK: tl.constexpr):
    """Copy the words of one lane."""
    lane = tl.program_id(0)
    count = tl.load(counts + lane)
    source, target = words + tl.load(begins + lane), out + tl.load(targets + lane)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)
