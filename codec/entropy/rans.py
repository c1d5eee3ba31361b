"""The entropy coder at speed: private-lane rANS, the same streams as ``rans_naive``, run by the numba kernels.

Two coders share the lane layout. Base symbols (bytes) decode through a lookup table. Refinements have three symbols and
a context, so two thresholds take the table's place: nothing to look up but four bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.entropy import encode_kernels, kernels
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.entropy.tables import Entries, Tables

SYMBOLS_PER_LANE = 8192
"""A lane costs six bytes of state and length; at this many symbols that is under 1 % even at a tenth of a bit each."""
MAX_LANES = 1 << 14
"""A power of two that a uint16 can count, and more than the largest chunk of the widest model needs."""
_MAX_WORDS_PER_LANE = 65535
"""A lane's length is a uint16."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """One rANS stream.

    Attributes:
        states: uint32 ``[lanes]``.
        counts: uint16 ``[lanes]``, words of each lane.
        words: uint16, lane after lane.
    """

    states: NDArray[np.uint32]
    counts: NDArray[np.uint16]
    words: NDArray[np.uint16]


def lanes_for(symbols: int, per_lane: int = SYMBOLS_PER_LANE) -> int:
    """Choose the number of lanes."""
    wanted = max(1, symbols // per_lane, -(-symbols // _MAX_WORDS_PER_LANE))
    return int(min(MAX_LANES, 1 << (wanted - 1).bit_length()))


def encode_base(symbols: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, lanes: int) -> Lanes:
    """Encode base symbols, each column with the table of its class."""
    return _encode(symbols, classes, tables.base, tables.base_entries, lanes)


def encode_ternary(
    symbols: NDArray[np.uint8], contexts: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, lanes: int
) -> Lanes:
    """Encode refinement symbols under their contexts."""
    return encode_refinement(np.uint8(3) * contexts + symbols, classes, tables, lanes)


def encode_refinement(codes: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, lanes: int) -> Lanes:
    """Encode refinement symbols that stand together with their contexts."""
    return _encode(codes, classes, tables.ternary, tables.ternary_entries, lanes)


def _encode(
    symbols: NDArray[np.uint8],
    classes: NDArray[np.integer],
    frequencies: NDArray[np.uint16],
    entries: Entries,
    lanes: int,
) -> Lanes:
    """Encode symbols that select, with their column's class, an entry of the tables."""
    tokens, columns = symbols.shape
    room = tokens * -(-columns // lanes) + 1
    buffer, states, counts = np.empty(lanes * room, np.uint16), np.empty(lanes, np.uint32), np.empty(lanes, np.int64)
    own, symbols_of_class = np.asarray(classes, np.int64), frequencies.size // len(frequencies)
    encode_kernels.encode(
        np.ascontiguousarray(symbols), own, symbols_of_class, *entries, room, buffer, states, counts
    )  # fmt: skip
    return Lanes(states, counts.astype(np.uint16), buffer[: counts.sum()].copy())


def decode_base(
    lanes: Lanes, classes: NDArray[np.integer], tables: Tables, tokens: int, *, check: bool = True
) -> NDArray[np.uint8]:
    """Decode base symbols."""
    out, (states, words, wrong) = np.empty((tokens, len(classes)), np.uint8), _opened(lanes)
    kernels.decode_base(words, lanes.counts, states, np.asarray(classes, np.int64), tables.lookup, out, wrong)
    _closed(wrong, check=check)
    return out


def decode_ternary(
    lanes: Lanes, contexts: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, *, check: bool = True
) -> NDArray[np.uint8]:
    """Decode refinement symbols."""
    out, (states, words, wrong) = np.empty(contexts.shape, np.uint8), _opened(lanes)
    own = np.asarray(classes, np.int64)
    kernels.decode_refinement(words, lanes.counts, states, own, tables.thresholds, contexts, out, wrong)
    _closed(wrong, check=check)
    return out


def _opened(lanes: Lanes) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint32]]:
    """A working copy of the states, the words, of which there must be one to read, and room for what was wrong."""
    return lanes.states.copy(), lanes.words if len(lanes.words) else np.zeros(1, np.uint16), np.empty(1, np.uint32)


def _closed(wrong: NDArray[np.uint32], *, check: bool) -> None:
    if check and wrong[0]:
        msg = "a lane of the entropy coder does not end in the state it began with; fetch the segment again"
        raise CorruptError(msg)
