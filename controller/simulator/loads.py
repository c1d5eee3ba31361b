"""Loads of a simulated world: how they come in, how far they are, what becomes of them, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

from ..repair import expected_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import Decision

    from ..costs import CostModel
    from ..documents import DocumentPlanInput
    from ..events import Finish, Repair
    from ..repair import RepairOption
    from ..settings import Goal


@dataclass(frozen=True)
class LoadArrival:
    """A load that comes in.

    Attributes:
        at: Instant of the asking.
        documents: Each with its variants.
        goal: What is wanted, and by when.
        query_tokens: Length of the question.
        index_s: Until indexes are known.
        leaves_s: Seconds after which nobody waits for it any more.
        repair: What repairing its links may take and gives; None: they stay as they are.
        attention: What the question attends to, see ``Looked``; empty: nobody looks.
        links: Tokens that are computed behind each document, besides the question; empty: none.
    """

    at: float
    documents: tuple[tuple[DocumentPlanInput, ...], ...]
    goal: Goal
    query_tokens: int = 32
    index_s: float | None = None
    leaves_s: float = inf
    repair: RepairOption | None = None
    attention: tuple[tuple[float, ...], ...] = ()
    links: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, by chance.

    Attributes:
        fail: Probability of a fetch to break off.
        stall: Probability of a fetch to stand still before its first byte.
        stall_s: Seconds of that.
        corrupt: Probability of a fetch to be undecodable.
        noise: Sigma of the logarithm of compute times.
    """

    fail: float = 0.0
    stall: float = 0.0
    stall_s: float = 0.5
    corrupt: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse chances that are none."""
        chances = all(0 <= chance <= 1 for chance in (self.fail, self.stall, self.corrupt))
        if not (chances and 0 <= self.stall_s < inf and 0 <= self.noise < inf):
            raise ArgumentError(
                f"fail, stall and corrupt are chances from 0 to 1, stall_s and noise finite and at least 0, got {self}"
            )


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


@dataclass(eq=False)
class Run:
    """A load."""

    arrival: LoadArrival  # what was asked for, and when
    number: int  # for the controller
    chunks: int  # how many it has
    received: float = 0.0  # bytes that came for it
    corrupt: set[ChunkId] = field(default_factory=set)  # chunks that cannot be decoded
    here: dict[ChunkId, int] = field(default_factory=dict)  # level up to which a chunk's bytes are here
    valid: set[ChunkId] = field(default_factory=set)  # chunks that are in the prompt
    spans: list[Span] = field(default_factory=list)  # what was done for it so far
    # which of its blobs a document is fetched from; 0 where nothing was fetched
    variants: dict[int, int] = field(default_factory=dict)
    refused: bool = False  # it was not admitted
    looked: bool = False  # it is known what the question attends to
    repaired: int = 0  # documents whose rows are computed, or being so
    rows: int = 0  # how many rows have been
    share: float = 0.0  # of the rows, those that are in all; 0 before the first are
    outcome: Outcome | None = None  # how it ended; None before
    _under_way: int = 0
    _all: int = 0

    def seen(self, first: ChunkId, *, behind: bool) -> list[ChunkId]:
        """Chunks that a pass sees."""
        documents = range(first.document + 1) if behind else (first.document,)
        counts = {number: len(self.arrival.documents[number][0].tokens) for number in documents}
        counts[first.document] = first.chunk
        return [ChunkId(number, chunk, self.number) for number in documents for chunk in range(counts[number])]

    def size(self, chunk: ChunkId, level: int) -> tuple[int, int]:
        """Tokens of a chunk, and bytes of a level of it."""
        given = self.given(chunk.document)
        return given.tokens[chunk.chunk], given.fetch_bytes[chunk.chunk][level]

    def are_valid(self, documents: int) -> bool:
        """Whether all chunks of the first documents are in the prompt."""
        counts = [len(given.tokens) for given in self.inputs[:documents]]
        return all(
            ChunkId(at, each, self.number) in self.valid for at, count in enumerate(counts) for each in range(count)
        )

    def begin_repair(self, costs: CostModel, asked: Repair) -> float:
        """Compute rows of documents, of which each has as many of the share as it has of the tokens."""
        tokens = [sum(given.tokens) for given in self.inputs]
        links = self.links
        rows = expected_rows(asked.share, tokens, asked.front, self.repaired, asked.documents, links)
        self.repaired, self.share, self._under_way = asked.documents, asked.share, rows
        self._all = expected_rows(asked.share, tokens, asked.front, 0, len(tokens), links)
        return replace(costs, repair_rows=rows, repair_looks=False).repair_s(sum(tokens[: asked.documents]))

    def end_repair(self) -> tuple[int, int]:
        """The rows that were under way, and how many of the share are left."""
        self.rows += self._under_way
        return self._under_way, max(0, self._all - self.rows)

    def _rows_left(self, rows: int, share: float) -> int:
        """Of a share's rows, those that are left for the closing."""
        if not (self.repaired and self.share):
            return rows
        return min(rows, ceil(max(0, self._all - self.rows) * min(1.0, share / self.share)))

    @property
    def inputs(self) -> list[DocumentPlanInput]:
        """Its documents, as the blobs that they are fetched from."""
        return [self.given(document) for document in range(len(self.arrival.documents))]

    def given(self, document: int) -> DocumentPlanInput:
        """A document, as the blob that it is fetched from."""
        return self.arrival.documents[document][self.variants.get(document, 0)]

    @property
    def prompt_tokens(self) -> int:
        """Of all documents."""
        return sum(sum(given.tokens) for given in self.inputs)

    def closing_costs(self, costs: CostModel, last: Finish) -> CostModel:
        """What computing costs, the repair and the question of this load included."""
        repair, first, links = self.repair, sum(self.inputs[0].tokens), self.links
        rows = repair.work(last.repair, self.prompt_tokens, first, last.front) if repair else 0
        return replace(
            costs,
            query_tokens=self.arrival.query_tokens + sum(self.arrival.links) - (self.rows if links else 0),
            repair_rows=self._rows_left(rows, last.repair),
            repair_looks=repair is not None and repair.looks and not self.looked,
        )

    @property
    def links(self) -> tuple[int, ...]:
        """Tokens that are computed behind each document, beside the link where they are."""
        return self.arrival.links if len(self.arrival.documents) > 1 and self.repair is None else ()

    @property
    def repair(self) -> RepairOption | None:
        """What repairing its links may take; None where it has none."""
        return self.arrival.repair if len(self.arrival.documents) > 1 else None

    def link_error(self, last: Finish) -> float:
        """Error that its links are left with."""
        blind = 1 - max(0, last.front - sum(self.inputs[0].tokens)) / self.prompt_tokens
        return blind * self.repair.error_left(last.repair) if self.repair else 0.0
