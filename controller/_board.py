"""The state of every chunk of a load, and the one table of moves between states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.types import ChunkId, Decision

from .request import InFlight, OpenChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .documents import DocumentPlanInput


class ChunkState(Enum):
    """Where a chunk is on its way into the prompt."""

    PLANNED = "planned"  # nothing started; every plan may decide anew
    FETCHING = "fetching"
    ARRIVED = "arrived"
    DECODING = "decoding"
    RECOMPUTING = "recomputing"
    READY = "ready"
    FAILED = "failed"  # neither way is left


# Every move there is. Back to PLANNED: one way into the prompt is lost, or given up, and the other is left.
MOVES: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.PLANNED: frozenset({ChunkState.FETCHING, ChunkState.RECOMPUTING, ChunkState.FAILED}),
    ChunkState.FETCHING: frozenset({ChunkState.ARRIVED, ChunkState.PLANNED}),
    ChunkState.ARRIVED: frozenset({ChunkState.DECODING}),
    ChunkState.DECODING: frozenset({ChunkState.READY, ChunkState.PLANNED}),
    ChunkState.RECOMPUTING: frozenset({ChunkState.READY, ChunkState.PLANNED}),
    ChunkState.READY: frozenset(),
    ChunkState.FAILED: frozenset(),
}


@dataclass
class Card:
    """One chunk: what is known of it, where it is, and which ways are left.

    fetch_bytes[k]: bytes of levels 0..k. bytes_left: of the open fetch. trouble: why a way was lost.
    """

    chunk: ChunkId
    tokens: int
    context: int
    fetch_bytes: tuple[int, ...]
    finest: int
    can_recompute: bool
    can_fetch: bool
    state: ChunkState = ChunkState.PLANNED
    level: int | None = None
    bytes_left: int = 0
    reason: str = ""
    trouble: str = ""
    cancelled: bool = False

    def move(self, state: ChunkState) -> None:
        """Go to another state. Raises ArgumentError where ``MOVES`` has no such move."""
        if state not in MOVES[self.state]:
            msg = f"{self.chunk} is {self.state.value}: it cannot become {state.value}; report each outcome once"
            raise ArgumentError(msg)
        self.state = state

    def lose(self, trouble: str, *, fetch: bool) -> None:
        """Go back to planned without one of the two ways, and fail where the other is gone as well."""
        self.move(ChunkState.PLANNED)
        self.can_fetch = self.can_fetch and not fetch
        self.can_recompute = self.can_recompute and fetch
        self.level = None
        self.trouble = f"{self.trouble}; {trouble}" if self.trouble else trouble
        if not (self.can_fetch or self.can_recompute):
            self.move(ChunkState.FAILED)

    @property
    def size(self) -> int:
        """Bytes of the levels that are fetched; 0 where none is."""
        return 0 if self.level is None else self.fetch_bytes[self.level]

    @property
    def decision(self) -> Decision:
        """What was done with the chunk."""
        reason = f"{self.reason} ({self.trouble})" if self.trouble else self.reason
        return Decision(self.chunk, "recompute" if self.level is None else "fetch", self.level, reason)

    def as_open(self) -> OpenChunk:
        """The chunk as the planner sees it."""
        sizes = self.fetch_bytes if self.can_fetch else ()
        return OpenChunk(self.chunk, self.tokens, self.context, sizes, self.finest, self.can_recompute)

    def as_flight(self) -> InFlight:
        """The chunk's open fetch as the planner sees it."""
        return InFlight(self.chunk, self.tokens, self.size, self.bytes_left)


class Board:
    """All cards in prompt order."""

    def __init__(self, documents: Sequence[DocumentPlanInput]) -> None:
        """Lay out a card for every chunk."""
        self.documents = [_cards(number, document) for number, document in enumerate(documents)]
        self.cards = [card for cards in self.documents for card in cards]
        self.tokens = sum(card.tokens for card in self.cards)

    def card(self, chunk: ChunkId) -> Card:
        """The card of a chunk. Raises ArgumentError for a chunk that the load does not have."""
        known = 0 <= chunk.document < len(self.documents) and 0 <= chunk.chunk < len(self.documents[chunk.document])
        if not known:
            msg = f"{chunk} is not part of this load"
            raise ArgumentError(msg)
        return self.documents[chunk.document][chunk.chunk]

    def having(self, *states: ChunkState) -> list[Card]:
        """Cards in any of some states, in prompt order."""
        return [card for card in self.cards if card.state in states]

    def open_chunks(self) -> tuple[OpenChunk, ...]:
        """The chunks that nothing has been started for."""
        return tuple(card.as_open() for card in self.having(ChunkState.PLANNED))

    def next_pass(self, wanted: Iterable[ChunkId], limit: int) -> list[Card]:
        """Cards of the first forward pass that can run now over wanted planned chunks, at most ``limit`` of them."""
        chosen = set(wanted)
        for cards in self.documents:
            first = next((at for at, card in enumerate(cards) if card.state is not ChunkState.READY), len(cards))
            run: list[Card] = []
            for card in cards[first : first + limit]:
                if card.state is not ChunkState.PLANNED or card.chunk not in chosen:
                    break
                run.append(card)
            if run:
                return run
        return []

    def is_next(self, card: Card) -> bool:
        """Whether everything before a card in its document is ready, so that it could be recomputed now."""
        before = self.documents[card.chunk.document][: card.chunk.chunk]
        return all(other.state is ChunkState.READY for other in before)


def _cards(number: int, document: DocumentPlanInput) -> list[Card]:
    contexts = [0, *accumulate(document.tokens)]
    cards = []
    for index, tokens in enumerate(document.tokens):
        sizes = document.fetch_bytes[index] if document.has_blob else ()
        chunk = ChunkId(number, index)
        card = Card(chunk, tokens, contexts[index], sizes, document.finest, document.has_text, bool(sizes))
        if not (card.can_fetch or card.can_recompute):
            card.trouble = "it has neither text nor a segment to fetch"
            card.move(ChunkState.FAILED)
        cards.append(card)
    return cards
