"""What the planner is asked and what it answers: plain data, all times in seconds from now."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import ChunkId, Decision

    from .costs import CostModel

# Below this a link is dead for planning. Not 0: finishing times must stay finite so that plans can be compared.
_SLOWEST = 1.0  # bytes per second


@dataclass(frozen=True)
class OpenChunk:
    """A chunk that nothing has been started for.

    context: tokens before it in its document. fetch_bytes[k]: bytes of levels 0..k, for the levels that can be had;
    empty without a blob. finest: the document's finest level, whether it can be had or not; -1 without a blob.
    can_recompute: its text is known.
    """

    chunk: ChunkId
    tokens: int
    context: int
    fetch_bytes: tuple[int, ...]
    finest: int
    can_recompute: bool

    def __post_init__(self) -> None:
        """Refuse a chunk that nothing can be done about, and sizes that are not sizes."""
        if not self.fetch_bytes and not self.can_recompute:
            msg = f"{self.chunk} has neither text nor a level to fetch"
            raise ArgumentError(msg)
        if self.tokens < 1 or self.context < 0 or min(self.fetch_bytes, default=0) < 0:
            msg = f"{self.chunk} needs at least one token, and bytes and context of at least 0"
            raise ArgumentError(msg)

    def level_for(self, target: int) -> int | None:
        """Level to fetch so that quality is at least ``target``; None where only recomputation gives that.

        A document's finest level stands for all above it. Without text the best level that can be had must do.
        """
        wanted, top = min(target, self.finest), len(self.fetch_bytes) - 1
        if 0 <= wanted <= top:
            return wanted
        return None if self.can_recompute else top


@dataclass(frozen=True)
class InFlight:
    """A chunk whose fetch has been asked for: bytes still to come, and all of its bytes for the cost of decoding."""

    chunk: ChunkId
    tokens: int
    size: int
    bytes_left: int


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on.

    open_chunks: in prompt order. in_flight: in the order of their requests. busy_s: compute already promised.
    prompt_tokens: of all documents. bandwidth: bytes per second, with its safety factor. lead_s: until the link
    delivers again, at most one time to first byte. ttfb_s, parallel: what a request waits, and how many are open at
    once: together they are what each fetch costs besides its bytes. deadline_s: until the first token is due, or None.
    quality_floor: the lowest level that may be fetched where there is a choice. merge_chunks: of one forward pass.
    """

    open_chunks: tuple[OpenChunk, ...]
    costs: CostModel
    bandwidth: float
    quality_floor: int
    in_flight: tuple[InFlight, ...] = ()
    busy_s: float = 0.0
    prompt_tokens: int = 0
    lead_s: float = 0.0
    ttfb_s: float = 0.0
    parallel: int = 1
    deadline_s: float | None = None
    merge_chunks: int = 1

    def __post_init__(self) -> None:
        """Refuse counts, times and rates that cannot be."""
        times = (self.bandwidth, self.busy_s, self.lead_s, self.ttfb_s)
        if not all(isfinite(value) and value >= 0 for value in times):
            msg = f"bandwidth, busy_s, lead_s and ttfb_s must be finite and at least 0, got {times}"
            raise ArgumentError(msg)
        if self.parallel < 1 or self.merge_chunks < 1 or self.quality_floor < 0:
            msg = "parallel and merge_chunks must be at least 1 and quality_floor at least 0"
            raise ArgumentError(msg)

    def wire_s(self, size: int) -> float:
        """Seconds for which one fetch of ``size`` bytes holds up the next one."""
        # Requests that share a link end together, and it idles for one time to first byte until the next ones deliver.
        return size / max(self.bandwidth, _SLOWEST) + self.ttfb_s / self.parallel

    def remaining_s(self, flight: InFlight) -> float:
        """Seconds of link time that an open request still needs."""
        return flight.bytes_left / max(self.bandwidth, _SLOWEST)

    def decode_s(self, tokens: int, size: int) -> tuple[float, float]:
        """Seconds from a chunk's arrival to its being ready, and seconds of those taken from recomputation."""
        whole = self.costs.decode.seconds(tokens, size)
        return whole, whole * (1 - self.costs.decode_overlap)


@dataclass(frozen=True)
class Plan:
    """What to do with every open chunk, and what that should lead to.

    decisions: in prompt order. fetch_order: chunks to fetch, first one first. finish_s: predicted seconds from now to
    the first token. fetch_bytes: of the chunks to fetch. level: quality that all chunks reach at least, where their
    documents have it; None with nothing open. front: open chunks up to the meeting point, which are recomputed where
    their text is known. in_time: the deadline is met by the prediction, or there is none.
    """

    decisions: tuple[Decision, ...]
    fetch_order: tuple[ChunkId, ...]
    finish_s: float
    fetch_bytes: int
    level: int | None
    front: int
    in_time: bool
