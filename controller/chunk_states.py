"""Where a chunk is on its way into the prompt, and the one table of moves between these states."""

from __future__ import annotations

from enum import IntEnum


class ChunkState(IntEnum):
    """Where a chunk is on its way into the prompt. From READY on it is valid there, and only becomes better."""

    PLANNED = 0  # nothing started; every plan may decide anew
    FETCHING = 1
    ARRIVED = 2
    DECODING = 3
    RECOMPUTING = 4
    READY = 5
    REFINING = 6  # ready, and a finer level is being fetched
    REFINED = 7  # ready, and a finer level is here
    REDECODING = 8  # being overwritten with a finer level
    FAILED = 9  # neither way is left


_S = ChunkState

# Every move there is. Back to PLANNED: one way into the prompt is lost, or given up, and the other is left.
MOVES: dict[ChunkState, frozenset[ChunkState]] = {
    _S.PLANNED: frozenset({_S.FETCHING, _S.RECOMPUTING, _S.FAILED}),
    _S.FETCHING: frozenset({_S.ARRIVED, _S.PLANNED}),
    _S.ARRIVED: frozenset({_S.DECODING, _S.PLANNED}),
    _S.DECODING: frozenset({_S.READY, _S.PLANNED}),
    _S.RECOMPUTING: frozenset({_S.READY, _S.PLANNED}),
    _S.READY: frozenset({_S.REFINING}),
    _S.REFINING: frozenset({_S.REFINED, _S.READY}),
    _S.REFINED: frozenset({_S.REDECODING, _S.READY}),
    _S.REDECODING: frozenset({_S.READY, _S.ARRIVED}),  # ARRIVED: spoilt, but what it was made from is still here
    _S.FAILED: frozenset(),
}

VALID = (_S.READY, _S.REFINING, _S.REFINED)
"""States in which a chunk of the prompt can be used as it is."""
