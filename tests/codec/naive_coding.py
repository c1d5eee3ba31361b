"""Readable twins of the layered levels' encoder and of the entropy coder, over plain loops and whole arrays."""

from __future__ import annotations

import itertools

import numpy as np

from kvwire.codec.entropy.rans import encode_base, encode_refinement, lanes_for
from kvwire.codec.entropy.tables import BIAS, ESCAPE, PROBABILITY_BITS, clip_class, column_classes
from kvwire.codec.format.segment import SegmentState, pack_segment
from kvwire.codec.transform.levels import RATIO, quantise
from kvwire.errors import CorruptError

STATE_FLOOR = 1 << 16
_MASK = (1 << PROBABILITY_BITS) - 1


def encode_lanes(symbols, tables, frequencies, lanes):
    """Encode ``symbols[t, c]`` with row ``tables[t, c]`` of ``frequencies``."""
    tokens, columns = symbols.shape
    starts = np.cumsum(frequencies, axis=1) - frequencies
    states = []
    words = []
    for lane in range(lanes):
        state = STATE_FLOOR
        out = []
        walk = [(t, c) for c in range(lane, columns, lanes) for t in range(tokens)]
        for t, c in reversed(walk):
            table, symbol = tables[t, c], symbols[t, c]
            frequency, start = int(frequencies[table, symbol]), int(starts[table, symbol])
            if state >> (32 - PROBABILITY_BITS) >= frequency:
                out.append(state & 0xFFFF)
                state >>= 16
            state = (state // frequency << PROBABILITY_BITS) + state % frequency + start
        states.append(state)
        words.append(out[::-1])
    return states, words


def decode_lanes(states, words, tables, frequencies):
    """Undo ``encode_lanes``."""
    tokens, columns = tables.shape
    starts = np.cumsum(frequencies, axis=1) - frequencies
    out = np.zeros((tokens, columns), np.uint8)
    lanes = len(states)
    for lane in range(lanes):
        state, reading = states[lane], iter(words[lane])
        for c in range(lane, columns, lanes):
            for t in range(tokens):
                slot, table = state & _MASK, tables[t, c]
                symbol = int(np.searchsorted(starts[table], slot, side="right")) - 1
                frequency, start = int(frequencies[table, symbol]), int(starts[table, symbol])
                state = frequency * (state >> PROBABILITY_BITS) + slot - start
                if state < STATE_FLOOR:
                    state = state << 16 | next(reading, 0)
                out[t, c] = symbol
        if state != STATE_FLOOR or next(reading, None) is not None:
            raise CorruptError(f"lane {lane} does not end in the state it began with: the segment is damaged")
    return out


def encode_ternary(symbols, contexts, classes, tables, lanes):
    """Encode refinement symbols under their contexts."""
    return encode_refinement(np.uint8(3) * contexts + symbols, classes, tables, lanes)


def split_levels_naive(finest, levels):
    """Split as ``split_levels``, which is its fast twin."""
    values = [finest]
    for _ in range(levels - 1):
        values.insert(0, np.rint(values[0] / RATIO).astype(np.int32))
    symbols = []
    for coarse, fine in itertools.pairwise(values):
        remainder = fine - RATIO * coarse
        symbols.append((1 + np.where(coarse < 0, -remainder, remainder)).astype(np.uint8))
    return values, symbols


def energy_of(coefficients):
    """The sum of squares."""
    return float(np.square(coefficients, dtype=np.float32).sum(dtype=np.float64))


def chunk_levels_naive(coefficients, ladder, spread, tables):
    """Encode a chunk as ``ChunkLevels`` does, but level by level from all values; its readable twin."""
    values, refinements = split_levels_naive(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
    unit = column_classes(coefficients)
    state = SegmentState(len(coefficients), spread, tables)
    coded = []
    for level, (shift, step) in enumerate(zip(ladder.shifts, ladder.steps, strict=True)):
        refinement = refinements[level - 1] if level else None
        data, symbols = encode_segment(state, shift, unit - shift, values[level], refinement)
        coded.append((data, symbols, squared_error(coefficients, values[level], tables.sizes_of(state.classes), step)))
    return coded


def squared_error(coefficients, values, sizes, step):
    """Sum the squared errors of quantised values."""
    size = abs(values).astype(np.float32)
    for small in (1, 2):
        size = np.where(abs(values) == small, sizes[small], size)
    missed = np.abs(coefficients) - np.float32(step) * size
    return float((missed * missed).sum(axis=0).sum(dtype=np.float64))


def encode_segment(state, shift, wanted, values, refinement):
    """Encode the next level of a chunk and advance the state; the readable twin of ``transform.levels``."""
    entering = np.asarray(values.any(axis=0))
    codes = enter_level(state, shift, wanted, entering)
    escapes = b""
    if refinement is None:
        stream, escapes = _encode_base(state, values)
    else:
        columns = state.columns
        symbols = refinement[:, columns]
        lanes = lanes_for(symbols.size)
        stream = encode_ternary(symbols, state.contexts(), state.classes[columns], state.tables, lanes)
    state.values = values
    return pack_segment(codes, escapes, stream), state.tokens * len(state.columns)


def enter_level(state, shift, wanted, entering):
    """Advance a state's classes to the next level; return the class codes of the open columns."""
    open_columns = np.flatnonzero(state.classes == 0)
    entering = entering[open_columns]
    fresh = open_columns[entering]
    chosen = clip_class(wanted[fresh])
    codes = np.zeros(len(open_columns), np.uint8)
    codes[entering] = _zigzag(chosen - clip_class(state.spread[fresh] - shift)) + 1
    state.enter(fresh, chosen)
    return codes.tobytes()


def _encode_base(state, values):
    columns = state.columns
    classes = state.classes[columns]
    picked = values[:, columns]
    symbols = np.where(np.abs(picked) < BIAS, picked + BIAS, ESCAPE).astype(np.uint8)
    symbols[state.tables.base[classes[None, :] - 1, symbols] == 0] = ESCAPE
    stream = encode_base(symbols, classes, state.tables, lanes_for(symbols.size))
    return stream, picked[symbols == ESCAPE].astype("<i4").tobytes()


def _zigzag(delta):
    return np.where(delta >= 0, 2 * delta, -2 * delta - 1).astype(np.uint8)
