"""One load: its goal, its documents as far as they are known, and its latest plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.chunk_table import ChunkTable
from kvwire.controller.document_state import ChunkState, DocumentState, among
from kvwire.controller.policies.base import RECOMPUTE, PlanRequest
from kvwire.controller.policies.timeline import prefill_s
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller.costs import CostModel
    from kvwire.controller.documents import DocumentPlanInput
    from kvwire.controller.events import LoadRequested
    from kvwire.controller.policies.base import Plan

Place = tuple[DocumentState, int]
"""A chunk: its document and its number there."""


class Load:
    """A prompt on its way.

    Attributes:
        due: Instant of the deadline, infinite without one.
        first_s: What its first complete plan expected.
        began: Number of the last thing begun for it.
        known_since: Instant at which the first document was known.
        plan: The latest.
        planned_at: When that was made.
        waiting: Chunks that it fetches, next one first.
        refine: Chunks that become better, and up to which level, next one first.
        compute_s: Seconds of recomputation that it holds.
        fallbacks: Chunks for which a fetch or decode was given up for recomputation.
    """

    def __init__(self, asked: LoadRequested, now: float) -> None:
        """Lay the load out; its documents come later.

        Args:
            asked: What was asked for.
            now: The instant, in seconds of the controller's clock.
        """
        if asked.documents < 1 or asked.query_tokens < 0:
            msg = f"a load needs at least one document and a question of 0 tokens or more, got {asked}"
            raise ArgumentError(msg)
        self.number, self.goal, self.asked_at = asked.load, asked.goal, now
        self.query_tokens = asked.query_tokens
        self.due = inf if asked.goal.deadline_s is None else now + asked.goal.deadline_s
        self.first_s: float | None = None
        self.began = 0
        self.known_since = inf
        self._slots: list[DocumentState | None] = [None] * asked.documents
        self.docs: list[DocumentState] = []
        self.plan: Plan | None = None
        self.planned_at = -inf
        self.waiting: list[tuple[DocumentState, int, int]] = []
        self.recompute: dict[int, set[int]] = {}
        self.refine: list[tuple[DocumentState, int, int]] = []
        self.compute_s = 0.0
        self.fallbacks = 0
        self._laid_out: list[tuple[int, int]] | None = None

    def add(self, number: int, variants: tuple[DocumentPlanInput, ...], now: float) -> DocumentState:
        """Make a document known.

        Args:
            number: Of the document in the prompt.
            variants: The same document as blobs coded for different prefix layers; usually one.
            now: The instant, in seconds of the controller's clock.

        Returns:
            Its state.

        Raises:
            ArgumentError: The document is known already or is none of this load.
        """
        if not 0 <= number < len(self._slots) or self._slots[number] is not None:
            msg = f"load {self.number} has no document {number} whose index is still missing"
            raise ArgumentError(msg)
        doc = self._slots[number] = DocumentState(self.number, number, variants)
        self.docs = [slot for slot in self._slots if slot is not None]
        self.planned_at = -inf
        self.known_since = min(self.known_since, now)
        return doc

    def doc(self, document: int) -> DocumentState:
        """A document that is known.

        Args:
            document: Number of the document in the prompt.

        Returns:
            Its state.

        Raises:
            ArgumentError: The document is not known.
        """
        doc = self._slots[document] if 0 <= document < len(self._slots) else None
        if doc is None:
            msg = f"document {document} of load {self.number} is not known"
            raise ArgumentError(msg)
        return doc

    @property
    def is_known(self) -> bool:
        """Whether all documents are."""
        return None not in self._slots

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the documents that are known."""
        return sum(int(doc.context[-1] + doc.tokens[-1]) for doc in self.docs)

    def having(self, *states: ChunkState) -> Iterator[Place]:
        """Chunks in any of some states, in prompt order."""
        for doc in self.docs:
            if doc.has(*states):
                for chunk in np.flatnonzero(among(doc.state, states)).tolist():
                    yield doc, chunk

    @property
    def is_ready(self) -> bool:
        """Whether all chunks are valid."""
        return self.is_known and all(doc.is_valid for doc in self.docs)

    @property
    def is_undecided(self) -> bool:
        """Whether a plan could still change anything: a chunk that nothing was started for, or that may be refined."""
        for doc in self.docs:
            if doc.has(ChunkState.PLANNED):
                return True
            if self.goal.objective != "quality" or not doc.has(ChunkState.READY):
                continue
            if ((doc.state == ChunkState.READY) & (doc.held > 0)).any():
                return True
        return False

    def is_refining(self) -> bool:
        """Whether a finer level of any chunk is on its way."""
        return next(self.having(ChunkState.REFINING, ChunkState.REFINED, ChunkState.REDECODING), None) is not None

    def request(self, base: PlanRequest) -> PlanRequest:
        """What a plan for the open chunks depends on; ``base`` knows the costs, the link and the lanes."""
        costs = base.costs
        heads = {
            doc.number: doc.prefix_share_left * costs.prefill.seconds(int(doc.tokens.sum()))
            for doc in self.docs
            if doc.prefix_share_left
        }
        variants = [(doc.number, doc.variant) for doc in self.docs]
        if self._laid_out != variants:
            self._columns, self._laid_out = ChunkTable(self.docs), variants
        columns, self._open = self._columns.open(heads)
        refinable = None
        if self.goal.objective == "quality":
            refinable, self._refinable = self._columns.refinable(self.goal.ceiling)
        share = len(self.docs) / len(self._slots)
        if share < 1:
            # What the other documents need is not known yet: until then the known ones get their share of everything.
            costs = replace(costs, prefill=costs.prefill.scaled(1 / share), decode=costs.decode.scaled(1 / share))
            base = replace(base, bandwidth=base.bandwidth * share, bandwidth_low=base.bandwidth_low * share)
        return replace(
            base, chunks=columns, goal=self.goal, prompt_tokens=self.prompt_tokens, refinable=refinable, costs=costs
        )

    def follow(self, plan: Plan, request: PlanRequest, now: float) -> None:
        """Take over a plan for the request made last.

        Args:
            plan: The plan.
            request: That it answers.
            now: The instant, in seconds of the controller's clock.
        """
        self.plan, self.planned_at = plan, now
        where, chunk = self._columns.where[self._open].tolist(), self._columns.chunk[self._open].tolist()
        levels = plan.levels.tolist()
        self.waiting = [(self.docs[where[at]], chunk[at], levels[at]) for at in plan.order]
        self.recompute = {}
        for at in np.flatnonzero(plan.levels == RECOMPUTE).tolist():
            self.recompute.setdefault(where[at], set()).add(chunk[at])
        self.compute_s = float(prefill_s(request)[plan.levels == RECOMPUTE].sum()) if len(chunk) else 0.0
        self.upgraded = {(where[at], chunk[at]) for at in plan.upgraded}
        self.refine = []
        some = request.refinable
        one_more = [int(some.level[at]) + 1 for at in plan.refine] if some else []
        for at, level in zip(plan.refine, plan.refine_levels or one_more, strict=True):
            place = self._refinable[at]
            self.refine.append((self.docs[self._columns.where[place]], int(self._columns.chunk[place]), level))

    def next_pass(self, costs: CostModel, limit_s: float) -> tuple[DocumentState, list[int]] | None:
        """Find the first forward pass that can run now and that the plan wants.

        Args:
            costs: What computing costs.
            limit_s: Seconds that the pass may take, unless one chunk takes longer.

        Returns:
            Its document and chunks; None where there is none.
        """
        for at, doc in enumerate(self.docs):
            wanted = self.recompute.get(at)
            first = doc.ready_before() if wanted else doc.count
            run: list[int] = []
            for chunk in range(first, doc.count):
                if chunk not in (wanted or ()) or doc.state[chunk] != ChunkState.PLANNED:
                    break
                if run and costs.prefill.seconds(*doc.prefill_span(first, chunk)) > limit_s:
                    break
                run.append(chunk)
            if run:
                return doc, run
        return None

    def fetch_instead(self, doc: DocumentState, chunk: int) -> None:
        """Fetch a chunk that the plan would have recomputed, at the quality floor.

        Args:
            doc: State of the document.
            chunk: Number of the chunk.
        """
        self.recompute[self.docs.index(doc)].discard(chunk)
        self.waiting.append((doc, chunk, min(self.goal.floor, int(doc.top[chunk]))))

    def reason(self, doc: DocumentState, chunk: int) -> str:
        """Why the plan does with a chunk what it does.

        Args:
            doc: State of the document.
            chunk: Number of the chunk.

        Returns:
            The reason, in words.
        """
        if (self.docs.index(doc), chunk) in self.upgraded:
            return "upgraded: time is left"
        return self.plan.reason if self.plan else ""
