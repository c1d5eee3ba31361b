"""The state of every chunk of a load, and the one table of moves between states."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.documents import UNMEASURED
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId, Decision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.controller.documents import DocumentPlanInput
    from kvwire.controller.policies.base import Flags


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
_VALID_BYTES = bytes(VALID)


@cache
def _members(states: tuple[ChunkState, ...]) -> Flags:
    return np.isin(np.arange(len(ChunkState)), states)


def among(state: NDArray[np.uint8], states: tuple[ChunkState, ...]) -> Flags:
    """Which of some states are any of others; quicker than ``isin``.

    Args:
        state: Of each chunk ``[n]``.
        states: Those looked for.

    Returns:
        Flags ``[n]``.
    """
    return np.asarray(_members(states)[state])


class DocumentState:
    """The chunks of one document as arrays, one column each.

    Attributes:
        level: Asked for or in the prompt ``[n]``.
        valid_level: In the prompt; RECOMPUTE (-1) where it was recomputed ``[n]``.
        held: Bytes that were asked for or have arrived and are not released ``[n]``.
    """

    def __init__(self, load: int, number: int, variants: tuple[DocumentPlanInput, ...]) -> None:
        """Lay out a column for every chunk; the first variant is the chosen one until ``choose``.

        Args:
            load: Number of the load.
            number: Of the document in the prompt.
            variants: The same document as blobs coded for different prefix layers; usually one.

        Raises:
            ArgumentError: There is no variant, or their chunks differ.
        """
        self.load, self.number, self.variants = load, number, variants
        if not variants or any(variant.tokens != variants[0].tokens for variant in variants):
            msg = f"document {number} needs at least one variant, and all of them chunks of the same tokens"
            raise ArgumentError(msg)
        tokens = variants[0].tokens
        count = self.count = len(tokens)
        self.tokens = np.array(tokens, np.int64)
        self.context = np.array([0, *accumulate(tokens)][:-1], np.int64)
        self.state = np.zeros(count, np.uint8)
        self.level = np.full(count, -1, np.int64)
        self.valid_level = np.full(count, -1, np.int64)
        self.held = np.zeros(count, np.int64)
        self.reasons: dict[int, str] = {}
        self.failures = 0
        self._given_up: dict[int, int] = {}  # finest levels of chunks that nobody tried to fetch
        self.prefix_done = False
        self.prefix_running = False
        self.choose(0)

    def choose(self, variant: int) -> None:
        """Take one of the variants; before anything is fetched."""
        self.variant = variant
        self.state[:] = _S.PLANNED
        self.troubles: dict[int, str] = {}
        self.input = chosen = self.variants[variant]
        self.can_text = np.full(self.count, any(each.has_text for each in self.variants))
        self.finest = chosen.finest
        levels = max(self.finest + 1, 1)
        rows = chosen.fetch_bytes or ((),) * self.count
        self.top = np.array([len(row) - 1 for row in rows], np.int64)
        self.sizes = np.array([_padded(row, levels) for row in rows], np.int64).T.copy()
        errors = chosen.errors or tuple(tuple(UNMEASURED ** (1 + k) for k in range(len(row))) for row in rows)
        self.errors = np.array([_padded(row, levels) for row in errors], np.float64).T.copy()
        self.exact_error = self.errors[-1] if chosen.has_blob else np.zeros(self.count)
        for chunk in np.flatnonzero((self.top < 0) & ~self.can_text).tolist():
            self.troubles[chunk] = "it has neither text nor a segment to fetch"
            self.move(chunk, _S.FAILED)

    def id(self, chunk: int) -> ChunkId:
        """The chunk's name."""
        return ChunkId(self.number, chunk, self.load)

    def move(self, chunk: int, state: ChunkState) -> None:
        """Go to another state.

        Args:
            chunk: Number of the chunk.
            state: The next one.

        Raises:
            ArgumentError: ``MOVES`` has no such move.
        """
        old = ChunkState(int(self.state[chunk]))
        if state not in MOVES[old]:
            msg = f"{self.id(chunk)} is {old.name.lower()}: it cannot become {state.name.lower()}; report outcomes once"
            raise ArgumentError(msg)
        self.state[chunk] = state

    def lose(self, chunk: int, trouble: str, *, fetch: bool) -> None:
        """Go back to planned without one of the two ways, and fail where the other is gone as well.

        Without its text, a chunk that was given up with its document's blob is tried after all.

        Args:
            chunk: Number of the chunk.
            trouble: What went wrong, in words.
            fetch: Fetching is lost; otherwise recomputing is.
        """
        self.move(chunk, _S.PLANNED)
        if fetch:
            self.top[chunk] = -1
        else:
            self.can_text[chunk] = False
            self.top[chunk] = max(int(self.top[chunk]), self._given_up.pop(chunk, -1))
        self.level[chunk] = -1
        self.note(chunk, trouble)
        if self.top[chunk] < 0 and not self.can_text[chunk]:
            self.move(chunk, _S.FAILED)

    def give_up_blob(self, trouble: str, *, all_of_it: bool = False) -> None:
        """Fetch nothing more of this document where its text stands in, or not even where it does not.

        Args:
            trouble: What went wrong, in words.
            all_of_it: Also for chunks without text, which fail.
        """
        if all_of_it:
            self._given_up.clear()
        for chunk in np.flatnonzero((self.state == _S.PLANNED) & (self.top >= 0)).tolist():
            if self.can_text[chunk] or all_of_it:
                if not all_of_it:
                    self._given_up[chunk] = int(self.top[chunk])
                self.top[chunk] = -1
                self.note(chunk, trouble)
                if not self.can_text[chunk]:
                    self.move(chunk, _S.FAILED)

    def note(self, chunk: int, trouble: str) -> None:
        """Remember what went wrong.

        Args:
            chunk: Number of the chunk.
            trouble: What went wrong, in words.
        """
        before = self.troubles.get(chunk)
        self.troubles[chunk] = f"{before}; {trouble}" if before else trouble

    def size(self, chunk: int, level: int) -> int:
        """Bytes of a chunk up to a level; 0 below level 0.

        Args:
            chunk: Number of the chunk.
            level: The level.

        Returns:
            Bytes.
        """
        return int(self.sizes[level, chunk]) if level >= 0 else 0

    def prefill_span(self, first: int, last: int) -> tuple[int, int]:
        """Measure a forward pass over chunks first..last.

        Args:
            first: First chunk.
            last: Last chunk.

        Returns:
            Its tokens, and the tokens before them.
        """
        start = int(self.context[first])
        return int(self.context[last] + self.tokens[last]) - start, start

    def ready_before(self) -> int:
        """The first chunk that is not valid yet; the number of chunks where all are."""
        missing = np.flatnonzero(~self.valid)
        return int(missing[0]) if len(missing) else self.count

    def has(self, *states: ChunkState) -> bool:
        """Whether any chunk is in one of some states; far quicker than ``among`` where few chunks are."""
        codes = self.state.tobytes()
        return any(state in codes for state in states)

    @property
    def is_valid(self) -> bool:
        """Whether all chunks can be used as they are."""
        return not self.state.tobytes().translate(None, _VALID_BYTES)

    @property
    def valid(self) -> Flags:
        """Chunks that can be used as they are."""
        return among(self.state, VALID)

    @property
    def prefix_share_left(self) -> float:
        """Share of the document's forward pass that is still needed before anything of it can be decoded."""
        return 0.0 if self.prefix_done or self.prefix_running else self.input.prefix_share

    def decision(self, chunk: int) -> Decision:
        """What was done with a chunk."""
        reason, trouble = self.reasons.get(chunk, ""), self.troubles.get(chunk)
        level = int(self.valid_level[chunk])
        text = f"{reason} ({trouble})" if trouble else reason
        return Decision(self.id(chunk), "recompute" if level < 0 else "fetch", None if level < 0 else level, text)


def _padded(row: tuple[float, ...], levels: int) -> list[float]:
    """A row of levels, its last entry repeated; zeros where it is empty."""
    return [*row, *(row[-1:] or (0,)) * (levels - len(row))]
