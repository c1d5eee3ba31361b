"""The readable entropy coder: private-lane rANS over plain Python integers.

Every lane is a separate rANS coder (Duda, arXiv 1311.2540; streaming form after Giesen's ryg_rans): a 32-bit state at
or above 2^16, 16-bit words, 12-bit probabilities. Symbols are a matrix ``[tokens, columns]``; lane ``l`` walks columns
``l``, ``l + lanes``, ``l + 2 * lanes``, ... in token order. Lanes share nothing, so a vector unit or a GPU decodes them
in lockstep. ``entropy.rans`` is the fast twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.entropy.tables import PROBABILITY_BITS
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATE_FLOOR = 1 << 16
"""States are in [2^16, 2^32), so that one 16-bit word always suffices to refill one."""
_MASK = (1 << PROBABILITY_BITS) - 1


def encode_lanes(
    symbols: NDArray[np.integer], tables: NDArray[np.integer], frequencies: NDArray[np.integer], lanes: int
) -> tuple[list[int], list[list[int]]]:
    """Encode ``symbols[t, c]`` with row ``tables[t, c]`` of ``frequencies``."""
    tokens, columns = symbols.shape
    starts = np.cumsum(frequencies, axis=1) - frequencies
    states: list[int] = []
    words: list[list[int]] = []
    for lane in range(lanes):
        state = STATE_FLOOR
        out: list[int] = []
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


def decode_lanes(
    states: list[int],
    words: list[list[int]],
    tables: NDArray[np.integer],
    frequencies: NDArray[np.integer],
) -> NDArray[np.uint8]:
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
