"""Triton kernels that decode streams into values; the tests have readable twins.

They read the same streams as numba's kernels, symbol for symbol. One thread walks one lane. All levels of all chunks of
a batch are one launch: programs take tickets, level by level, and a refinement waits until the level below of its chunk
is done. Programs with smaller tickets already run, so one always makes progress; a wait that lasts impossibly long
gives up and is reported.

No kernel checks an index: ``staging`` makes the descriptors and has checked the segments. Slots of tables are masked,
reads of words stop at the stream's last one, and columns index only the chunk's own values.
"""

# ruff: noqa: ANN001, ANN202, PLR0913, PLR0915, PLR0917, PLR2004
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvwire.codec.gpu import streams as queues

STREAM_FIELDS = tl.constexpr(15)
"""Fields of a stream, int64: first word, last word, states, lane starts, lanes, columns, entries, values, slots,
tokens, whether it holds base symbols, blocks of the level below to await, chunk, first slot, escapes of the chunk."""
CHUNK_FIELDS = tl.constexpr(6)
"""Fields of a chunk, int64: values, slots of a token, tokens, first slot, first token in output and in batch."""
ESCAPE_FIELDS = tl.constexpr(9)
"""Fields of an escape list, int64: values, slots, tokens, columns, entries, first escape, count, chunk, first slot."""
CLASS_SHIFT = tl.constexpr(23)
"""A column's entry, uint32: slot from bit 0, class - 1 from bit 23, and bit 29 where it enters at this level."""
FRESH_SHIFT = tl.constexpr(29)
DAMAGED = tl.constexpr(queues.DAMAGED)
STALLED = tl.constexpr(queues.STALLED)
MISCOUNTED = tl.constexpr(queues.MISCOUNTED)


@triton.jit
def _word(x, symbol_end, words, p, last, inside):
    """Refill a state that fell below 2^16 with the lane's next word; always reading the word hides its latency."""
    word = tl.load(words + tl.minimum(p, last)).to(tl.uint32)
    refill = symbol_end < 65536
    after = tl.where(refill, (symbol_end << 16) | word, symbol_end)
    return tl.where(inside, after, x), p + (inside & refill).to(tl.uint32)


@triton.jit
def _base_step(x, p, row, lookup, words, last, inside):
    """Decode one base symbol of every lane; return states, pointers, values."""
    entry = tl.load(lookup + (row + (x & 4095)))
    after = ((entry & 4095) + 1) * (x >> 12) + ((entry >> 12) & 4095)
    x, p = _word(x, after, words, p, last, inside)
    return x, p, (entry >> 24).to(tl.int32) - 128


@triton.jit
def _ternary_step(x, p, q, zero, one, more, words, last, inside):
    """Decode one refinement of every lane by its context's thresholds; return states, pointers, values."""
    both = tl.where(q == 0, zero, tl.where((q == 1) | (q == -1), one, more))
    low, high = both & 65535, both >> 16
    slot = x & 4095
    above_low, above_high = slot >= low, slot >= high
    start = tl.where(above_high, high, tl.where(above_low, low, 0))
    end = tl.where(above_high, 4096, tl.where(above_low, high, low))
    x, p = _word(x, (end - start) * (x >> 12) + slot - start, words, p, last, inside)
    r = above_low.to(tl.int32) + above_high.to(tl.int32) - 1
    return x, p, 3 * q + tl.where(q < 0, -r, r)


@triton.jit(do_not_specialize=["patience"])
def decode_streams(
    streams,
    items,
    progress,
    flags,
    words16,
    words32,
    entries,
    lookup,
    thresholds,
    values,
    peaks,
    patience,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode one block of lanes of one stream into ``values``."""
    item = tl.atomic_add(progress, 1, sem="relaxed")
    stream = tl.load(items + 2 * item)
    block = tl.load(items + 2 * item + 1)
    described = streams + stream.to(tl.int64) * STREAM_FIELDS
    words = words16 + tl.load(described)
    last = tl.load(described + 1).to(tl.uint32)
    states = words32 + tl.load(described + 2)
    starts = words32 + tl.load(described + 3)
    lanes = tl.load(described + 4).to(tl.int32)
    columns = tl.load(described + 5).to(tl.int32)
    entry_at = entries + tl.load(described + 6)
    values_at = values + tl.load(described + 7)
    slots = tl.load(described + 8).to(tl.int32)
    tokens = tl.load(described + 9).to(tl.int32)
    is_base = tl.load(described + 10).to(tl.int32)
    needed = tl.load(described + 11).to(tl.int32)
    chunk = tl.load(described + 12).to(tl.int32)
    peak_at = peaks + tl.load(described + 13)
    escapes = tl.load(described + 14).to(tl.int32)

    # Polls are relaxed, since each acquire empties the multiprocessor's L1 cache; one acquire follows at the end.
    below = progress + 1 + tl.maximum(stream - 1, 0)
    done = needed
    if is_base == 0:
        done = tl.atomic_add(below, 0, sem="relaxed")
    polls = 0
    while (done < needed) & (polls < patience):
        done = tl.atomic_add(below, 0, sem="relaxed")
        polls += 1
    if is_base == 0:
        done = tl.atomic_add(below, 0, sem="acquire")
    tl.debug_barrier()

    lane = block * BLOCK + tl.arange(0, BLOCK)
    live = lane < lanes
    x = tl.load(states + lane, mask=live, other=65536)
    p = tl.load(starts + lane, mask=live, other=0)
    end = tl.load(starts + lane + 1, mask=live, other=0)
    widest = tl.zeros([BLOCK], tl.int32)
    if is_base == 1:
        for first in range(0, columns, lanes):
            column = first + lane
            inside = live & (column < columns)
            entry = tl.load(entry_at + column, mask=inside, other=0)
            row = ((entry >> CLASS_SHIFT) & 63) << 12
            slot = (entry & 0x7FFFFF).to(tl.int32)
            peak = tl.zeros([BLOCK], tl.int32)
            for t in range(tokens):
                x, p, q = _base_step(x, p, row, lookup, words, last, inside)
                tl.store(values_at + (t * slots + slot), q, mask=inside)
                peak = tl.maximum(peak, tl.abs(q))
            tl.store(peak_at + slot, peak, mask=inside)
            widest = tl.maximum(widest, tl.where(inside, peak, 0))
    else:
        for first in range(0, columns, lanes):
            column = first + lane
            inside = live & (column < columns)
            entry = tl.load(entry_at + column, mask=inside, other=0)
            row = ((entry >> CLASS_SHIFT) & 63) * 3
            slot = (entry & 0x7FFFFF).to(tl.int32)
            old = inside & ((entry >> FRESH_SHIFT) == 0)
            zero = tl.load(thresholds + row)
            one = tl.load(thresholds + row + 1)
            more = tl.load(thresholds + row + 2)
            peak = tl.zeros([BLOCK], tl.int32)
            # Four tokens at a time, so that their loads overlap.
            for t in range(0, tokens, 4):
                at = values_at + (t * slots + slot)
                left = tokens - t + tl.zeros([BLOCK], tl.int32)
                in1, in2, in3 = inside & (left > 1), inside & (left > 2), inside & (left > 3)
                q0 = tl.load(at, mask=old, other=0).to(tl.int32)
                q1 = tl.load(at + slots, mask=old & in1, other=0).to(tl.int32)
                q2 = tl.load(at + 2 * slots, mask=old & in2, other=0).to(tl.int32)
                q3 = tl.load(at + 3 * slots, mask=old & in3, other=0).to(tl.int32)
                x, p, q0 = _ternary_step(x, p, q0, zero, one, more, words, last, inside)
                tl.store(at, q0, mask=inside)
                x, p, q1 = _ternary_step(x, p, q1, zero, one, more, words, last, in1)
                tl.store(at + slots, q1, mask=in1)
                x, p, q2 = _ternary_step(x, p, q2, zero, one, more, words, last, in2)
                tl.store(at + 2 * slots, q2, mask=in2)
                x, p, q3 = _ternary_step(x, p, q3, zero, one, more, words, last, in3)
                tl.store(at + 3 * slots, q3, mask=in3)
                peak = tl.maximum(peak, tl.abs(q0))
                peak = tl.maximum(peak, tl.where(in1, tl.abs(q1), 0))
                peak = tl.maximum(peak, tl.where(in2, tl.abs(q2), 0))
                peak = tl.maximum(peak, tl.where(in3, tl.abs(q3), 0))
            tl.store(peak_at + slot, peak, mask=inside)

    flag = tl.where(done < needed, STALLED, 0)
    unlisted = (escapes == 0) & (tl.max(widest, axis=0) >= 128)
    flag = tl.maximum(flag, tl.where(unlisted, MISCOUNTED, 0))
    if CHECK:
        wrong = live & ((x != 65536) | (p != end))
        # The constant stays on the right: on the left, Triton 3.7's interpreter takes the product for a constant.
        flag = tl.maximum(flag, tl.max(wrong.to(tl.int32), axis=0) * DAMAGED)
    tl.atomic_max(flags + chunk, flag, sem="relaxed")
    tl.debug_barrier()
    tl.atomic_add(progress + 1 + stream, 1, sem="release")


@triton.jit
def _escaped(row, entry_at, first, columns, BLOCK: tl.constexpr):
    """Return slots of a token's columns, and 1 where the base symbol is an escape: only escapes are -128."""
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    slot = (tl.load(entry_at + column, mask=inside, other=0) & 0x7FFFFF).to(tl.int32)
    q = tl.load(row + slot, mask=inside, other=0).to(tl.int32)
    return slot, (q == -128).to(tl.int32)


@triton.jit
def count_escapes(escapes, entries, values, counts, BLOCK: tl.constexpr):
    """Count the escapes in a row of base symbols; a program takes one token of one chunk with escapes."""
    described = escapes + tl.program_id(1).to(tl.int64) * ESCAPE_FIELDS
    values_at = values + tl.load(described)
    slots, tokens = tl.load(described + 1).to(tl.int32), tl.load(described + 2).to(tl.int32)
    columns = tl.load(described + 3).to(tl.int32)
    entry_at = entries + tl.load(described + 4)
    t = tl.program_id(0)
    count = 0
    if t < tokens:
        for first in range(0, columns, BLOCK):
            _, escaped = _escaped(values_at + t * slots, entry_at, first, columns, BLOCK)
            count += tl.sum(escaped, axis=0)
    tl.store(counts + tl.program_id(1) * tl.num_programs(0) + t, count)


@triton.jit
def place_escapes(
    escapes,
    entries,
    words32,
    values,
    peaks,
    counts,
    flags,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write a row's escaped values where the stream has escapes; the list goes token by token, column by column."""
    described = escapes + tl.program_id(1).to(tl.int64) * ESCAPE_FIELDS
    values_at = values + tl.load(described)
    slots, tokens = tl.load(described + 1).to(tl.int32), tl.load(described + 2).to(tl.int32)
    columns = tl.load(described + 3).to(tl.int32)
    entry_at = entries + tl.load(described + 4)
    listed, known = words32 + tl.load(described + 5), tl.load(described + 6).to(tl.int32)
    chunk = tl.load(described + 7).to(tl.int32)
    peak_at = peaks + tl.load(described + 8)
    t = tl.program_id(0)
    rows = tl.arange(0, TOKENS)
    counted = tl.load(counts + tl.program_id(1) * tl.num_programs(0) + rows, mask=rows < tokens, other=0)
    at = tl.sum(tl.where(rows < t, counted, 0), axis=0)
    if t == 0:
        total = tl.sum(counted, axis=0)
        tl.atomic_max(flags + chunk, tl.where(total == known, 0, MISCOUNTED))
    if t < tokens:
        for first in range(0, columns, BLOCK):
            slot, escaped = _escaped(values_at + t * slots, entry_at, first, columns, BLOCK)
            rank = at + tl.cumsum(escaped, axis=0) - 1
            valid = (escaped == 1) & (rank < known)
            value = tl.load(listed + rank, mask=valid, other=0).to(tl.int32, bitcast=True)
            tl.store(values_at + (t * slots + slot), value, mask=valid)
            tl.atomic_max(peak_at + slot, tl.abs(value), mask=valid)
            at += tl.sum(escaped, axis=0)


@triton.jit(do_not_specialize=["most"])
def last_wide(group_slots, chunks, peaks, wide, most, BLOCK: tl.constexpr):
    """Find the end of a group's slots that hold a value above ``most``; a program takes one group of one chunk."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    groups = tl.num_programs(1)
    begin = tl.load(group_slots + 2 * (chunk * groups + group))
    stop = tl.load(group_slots + 2 * (chunk * groups + group) + 1)
    peak_at = peaks + tl.load(chunks + chunk.to(tl.int64) * CHUNK_FIELDS + 3)
    out = begin
    for first in range(begin, stop, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        peak = tl.load(peak_at + slot, mask=slot < stop, other=0)
        out = tl.maximum(out, tl.max(tl.where(peak > most, slot + 1, 0), axis=0))
    tl.store(wide + chunk * groups + group, out)
