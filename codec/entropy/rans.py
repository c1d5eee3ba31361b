"""The entropy coder: private-lane rANS in numba kernels.

Every lane is a separate rANS coder (Duda, arXiv 1311.2540; streaming form after Giesen's ryg_rans): a 32-bit state at
or above 2^16, so that one 16-bit word always refills it, and 12-bit probabilities. Of symbols ``[tokens, columns]``,
lane ``l`` walks columns ``l``, ``l + lanes``, ``l + 2 * lanes``, ... in token order. Lanes share nothing, so a vector
unit or a GPU decodes them in lockstep.

Two coders share the lane layout. Base symbols (bytes) decode through a lookup table. Refinements have three symbols and
a context, so two thresholds of four bytes together replace the table.
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
"""A lane costs six bytes of state and length: with this many symbols under 1 %, even at a tenth of a bit each."""
MAX_LANES = 1 << 14
"""A power of two that fits uint16 and exceeds the need of the largest chunk of the widest model."""
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
    """Choose the number of lanes of a stream, a power of two."""
    wanted = max(1, symbols // per_lane, -(-symbols // _MAX_WORDS_PER_LANE))
    return int(min(MAX_LANES, 1 << (wanted - 1).bit_length()))


def encode_base(symbols: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, lanes: int) -> Lanes:
    """Encode base symbols ``[tokens, columns]``, each column with the table of its class."""
    return _encode(symbols, classes, tables.base, tables.base_entries, lanes)


def encode_refinement(codes: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, lanes: int) -> Lanes:
    """Encode refinement codes, ``3 * context + symbol``."""
    return _encode(codes, classes, tables.ternary, tables.ternary_entries, lanes)


def _encode(
    symbols: NDArray[np.uint8],
    classes: NDArray[np.integer],
    frequencies: NDArray[np.uint16],
    entries: Entries,
    lanes: int,
) -> Lanes:
    """Encode symbols; a symbol and its column's class select an entry of the tables."""
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
    """Decode base symbols, uint8 ``[tokens, columns]``."""
    out, (states, words, wrong) = np.empty((tokens, len(classes)), np.uint8), _kernel_inputs(lanes)
    kernels.decode_base(words, lanes.counts, states, np.asarray(classes, np.int64), tables.lookup, out, wrong)
    _check_ends(wrong, check=check)
    return out


def decode_ternary(
    lanes: Lanes, contexts: NDArray[np.uint8], classes: NDArray[np.integer], tables: Tables, *, check: bool = True
) -> NDArray[np.uint8]:
    """Decode refinement symbols, uint8 ``[tokens, columns]``."""
    out, (states, words, wrong) = np.empty(contexts.shape, np.uint8), _kernel_inputs(lanes)
    own = np.asarray(classes, np.int64)
    kernels.decode_refinement(words, lanes.counts, states, own, tables.thresholds, contexts, out, wrong)
    _check_ends(wrong, check=check)
    return out


def _kernel_inputs(lanes: Lanes) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint32]]:
    """Return a copy of the states, at least one word, and room for the number of damaged lanes."""
    return lanes.states.copy(), lanes.words if len(lanes.words) else np.zeros(1, np.uint16), np.empty(1, np.uint32)


def _check_ends(wrong: NDArray[np.uint32], *, check: bool) -> None:
    if check and wrong[0]:
        msg = "a lane of the entropy coder does not end in the state it began with; fetch the segment again"
        raise CorruptError(msg)
