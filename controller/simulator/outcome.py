"""What became of a simulated load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import Decision

    from ..documents import DocumentPlanInput

Lane = Literal["link", "decode", "prefill"]


@dataclass(frozen=True)
class Span:
    """Something that took from ``began`` to ``ended`` (instants): chunks first..last of a document on a lane.

    Attributes:
        lane: Which lane.
        began: Instant.
        ended: Instant.
        document: Number of the document.
        first: First chunk.
        last: Last chunk.
        what: ``fetch``, ``failed``, ``cancelled``, ``decode``, ``recompute``, ``head start`` or ``look``.
        level: Of a fetch or a decode; chunks that are decoded in one batch have a span each, at the same time.
    """

    lane: Lane
    began: float
    ended: float
    document: int
    first: int
    last: int
    what: str
    level: int | None


@dataclass(frozen=True)
class Outcome:
    """One load, times in seconds from its asking.

    Attributes:
        ready_s: Until all chunks were ready.
        ttft_s: Until the first token. in_time: by the deadline, or there was none.
        deadline_s: Seconds; None: there was none.
        error: Mean over tokens, a recomputed chunk counts with its finest error.
        seen_error: The same, weighed by what the question attends to; equal to ``error`` where nobody knows that.
        received: Bytes over the link.
        wasted: Those of them that are not in the prompt.
        recomputed: Tokens.
        levels: Tokens at each level.
        failed: There was no first token.
        refused: There was none because it would have been late.
        repair: Share of the prompt's rows that was computed anew.
        link_error: What is left of the error of documents that do not see each other; 0 where nobody knows it.
        reason: Of the last plan, in words.
        asked_at: The instant that spans count from.
        decisions: What was done.
        spans: What was done when.
    """

    ready_s: float
    ttft_s: float
    deadline_s: float | None
    error: float
    received: int
    wasted: int
    recomputed: int
    levels: tuple[int, ...]
    failed: bool
    reason: str
    asked_at: float
    decisions: tuple[Decision, ...]
    spans: tuple[Span, ...]
    refused: bool = False
    repair: float = 0.0
    link_error: float = 0.0
    seen_error: float = 0.0

    @property
    def in_time(self) -> bool:
        """Whether the first token came by the deadline, or there was none."""
        return not self.failed and (self.deadline_s is None or self.ttft_s <= self.deadline_s)

    @classmethod
    def of(  # noqa: PLR0913 - a load has as many sides
        cls, documents: Sequence[DocumentPlanInput], decisions: Sequence[Decision], *, reason: str, ready_s: float,
        ttft_s: float, deadline_s: float | None, received: int, asked_at: float, spans: tuple[Span, ...],
        refused: bool = False, repair: float = 0.0, link_error: float = 0.0,
        attention: Sequence[Sequence[float]] = (),
    ) -> Outcome:  # fmt: skip
        """Count up what was decided; without decisions the load failed."""
        error, seen_error, used, recomputed, tokens = 0.0, 0.0, 0, 0, 0
        levels = [0] * max((document.finest + 1 for document in documents), default=0)
        for decision in decisions:
            document, chunk = documents[decision.chunk.document], decision.chunk.chunk
            size = document.tokens[chunk]
            tokens += size
            weight = attention[decision.chunk.document][chunk] if attention else 1.0
            error += size * document.error(chunk, decision.level)
            seen_error += weight * size * document.error(chunk, decision.level)
            if decision.level is None:
                recomputed += size
            else:
                levels[decision.level] += size
                used += document.fetch_bytes[chunk][decision.level]
        return cls(
            ready_s=ready_s, ttft_s=ttft_s, deadline_s=deadline_s, error=error / max(tokens, 1), received=received,
            wasted=max(0, received - used), recomputed=recomputed, levels=tuple(levels), failed=not decisions,
            reason=reason, asked_at=asked_at, decisions=tuple(decisions), spans=spans, refused=refused,
            repair=repair, link_error=link_error, seen_error=seen_error / max(tokens, 1),
        )  # fmt: skip
