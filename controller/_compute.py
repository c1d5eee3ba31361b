"""The compute of a load: at most one forward pass and one decode at a time, on one worker or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from ._board import ChunkState

if TYPE_CHECKING:
    from kvwire.types import ChunkId

    from ._board import Card
    from .costs import CostCorrection, CostModel

# A pass this many times as long as its fixed cost is not extended: that would save less than a tenth of it.
_LONG_PASS = 10.0


class Compute:
    """What runs, what waits for decoding, and what both should still take. Times are the session's, in seconds."""

    def __init__(self, costs: CostModel, correction: CostCorrection, workers: int) -> None:
        """Start idle."""
        self._base = costs
        self._correction = correction
        self._workers = workers
        self._arrived: list[Card] = []
        self._decoding: Card | None = None
        self._running: list[Card] = []
        self._decode_began = 0.0
        self._pass_began = 0.0

    @property
    def costs(self) -> CostModel:
        """Costs with what was measured so far."""
        return self._base.corrected(self._correction)

    @property
    def can_decode(self) -> bool:
        """Whether a chunk waits for decoding and a worker is free for it."""
        return bool(self._arrived) and self._decoding is None and (self._workers > 1 or not self._running)

    @property
    def can_recompute(self) -> bool:
        """Whether a worker is free for a forward pass."""
        return not self._running and (self._workers > 1 or (self._decoding is None and not self._arrived))

    def arrived(self, card: Card) -> None:
        """Queue a chunk for decoding."""
        card.move(ChunkState.ARRIVED)
        self._arrived.append(card)

    def start_decode(self, now: float) -> Card:
        """Start the decode that has waited longest."""
        card = self._arrived.pop(0)
        card.move(ChunkState.DECODING)
        self._decoding, self._decode_began = card, now
        return card

    def worth_merging(self, cards: list[Card]) -> list[Card]:
        """Leading cards for one pass: more would save little of the fixed cost, and promise compute early."""
        prefill = self._base.prefill
        tokens = 0
        for count, card in enumerate(cards):
            if count and prefill.seconds(tokens, cards[0].context) >= _LONG_PASS * prefill.base_s:
                return cards[:count]
            tokens += card.tokens
        return cards

    def start_pass(self, cards: list[Card], now: float) -> None:
        """Start a forward pass."""
        for card in cards:
            card.move(ChunkState.RECOMPUTING)
            card.level = None
        self._running, self._pass_began = cards, now

    def end_decode(self, chunk: ChunkId, seconds: float | None) -> Card:
        """End the running decode, after ``seconds`` where it worked."""
        card = self._decoding
        if card is None or card.chunk != chunk:
            msg = f"{chunk} is not being decoded; report each decode once, and only after its instruction"
            raise ArgumentError(msg)
        if seconds is not None:
            self._correction.decode.add(seconds, self._base.decode.seconds(card.tokens, card.size))
        self._decoding = None
        return card

    def end_pass(self, chunks: tuple[ChunkId, ...], seconds: float) -> list[Card]:
        """End the running forward pass over exactly these chunks, after ``seconds``."""
        cards = self._running
        if not cards or tuple(card.chunk for card in cards) != chunks:
            msg = f"{chunks} is not what is being recomputed; report the chunks of the instruction, all at once"
            raise ArgumentError(msg)
        self._correction.prefill.add(seconds, self._pass_s(self._base))
        self._running = []
        return cards

    def abort_pass(self, chunk: ChunkId) -> list[Card]:
        """End the running forward pass, which failed because of ``chunk``."""
        cards = self._running
        if chunk not in {card.chunk for card in cards}:
            msg = f"{chunk} is not being recomputed; name a chunk of the pass that failed"
            raise ArgumentError(msg)
        self._running = []
        return cards

    def busy_s(self, now: float) -> float:
        """Seconds of compute that are promised already: what runs and what waits for decoding."""
        costs = self.costs
        decodes = [costs.decode.seconds(card.tokens, card.size) for card in self._arrived]
        if self._decoding is not None:
            whole = costs.decode.seconds(self._decoding.tokens, self._decoding.size)
            decodes.append(max(0.0, whole - (now - self._decode_began)))
        rest = max(0.0, self._pass_s(costs) - (now - self._pass_began)) if self._running else 0.0
        return rest + sum(decodes) * (1 - costs.decode_overlap)

    def _pass_s(self, costs: CostModel) -> float:
        return costs.prefill.seconds(sum(card.tokens for card in self._running), self._running[0].context)
