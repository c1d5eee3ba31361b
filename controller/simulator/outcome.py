"""What became of a simulated load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller.documents import DocumentPlanInput
    from kvwire.types import Decision

Lane = Literal["link", "decode", "prefill"]


@dataclass(frozen=True)
class Span:
    """Something that took from ``began`` to ``ended`` (instants): chunks first..last of a document on a lane.

    what: ``fetch``, ``failed``, ``cancelled``, ``decode``, ``recompute`` or ``head start``. level: of a fetch or a
    decode; chunks that are decoded in one batch have a span each, at the same time.
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

    ready_s: until all chunks were ready. ttft_s: until the first token. in_time: by the deadline, or there was none.
    error: mean over tokens, a recomputed chunk counts with its finest error. received: bytes over the link;
    wasted: those of them that are not in the prompt. recomputed: tokens. failed: there was no first token.
    levels: tokens at each level. decisions, spans: what was done; asked_at: the instant that spans count from.
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

    @property
    def in_time(self) -> bool:
        """Whether the first token came by the deadline, or there was none."""
        return not self.failed and (self.deadline_s is None or self.ttft_s <= self.deadline_s)

    @classmethod
    def of(  # noqa: PLR0913 - a load has as many sides
        cls, documents: Sequence[DocumentPlanInput], decisions: Sequence[Decision], *, reason: str, ready_s: float,
        ttft_s: float, deadline_s: float | None, received: int, asked_at: float, spans: tuple[Span, ...],
    ) -> Outcome:  # fmt: skip
        """Count up what was decided; without decisions the load failed."""
        error, used, recomputed, tokens = 0.0, 0, 0, 0
        levels = [0] * max((document.finest + 1 for document in documents), default=0)
        for decision in decisions:
            document, chunk = documents[decision.chunk.document], decision.chunk.chunk
            size = document.tokens[chunk]
            tokens += size
            error += size * document.error(chunk, decision.level)
            if decision.level is None:
                recomputed += size
            else:
                levels[decision.level] += size
                used += document.fetch_bytes[chunk][decision.level]
        return cls(
            ready_s=ready_s, ttft_s=ttft_s, deadline_s=deadline_s, error=error / max(tokens, 1), received=received,
            wasted=max(0, received - used), recomputed=recomputed, levels=tuple(levels), failed=not decisions,
            reason=reason, asked_at=asked_at, decisions=tuple(decisions), spans=spans,
        )  # fmt: skip
