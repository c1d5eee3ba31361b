"""One load: its goal, its documents as far as they are known, and its latest plan."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from itertools import accumulate
from math import inf, isfinite
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from .chunk_table import FAILED, PLANNED, READY, REDECODING, REFINED, REFINING, ChunkState, ChunkTable
from .document_state import DocumentState
from .forecast import floor_s, prefill_s
from .passes import WantedPasses
from .repair import RepairProgress
from .snapshot import RECOMPUTE, PlanRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.types import ChunkId

    from .costs import CostModel
    from .documents import DocumentPlanInput
    from .events import LoadRequested
    from .lanes import Job
    from .snapshot import Plan

Place = tuple[DocumentState, int]
"""A chunk: its document and its number there."""
_REPLAN_GROWTH = 1.25  # times as many documents, after which a plan is made anew
_MIN_UNSTARTED_SHARE = 0.75  # of chunks, so that everything can still be planned otherwise
_UNSEEN = 0.1  # what a chunk that the question does not look at counts: an answer may look elsewhere


class Load:
    """A prompt on its way.

    Attributes:
        due: Instant of the deadline, infinite without one.
        first_s: What its first complete plan expected.
        began: Number of the last thing begun for it.
        came: Instant of that plan, None before.
        asked_floor_s: ``floor_s`` then.
        refused_s: Seconds by which it would be late, where it is refused for that.
        known_since: Instant at which the first document was known.
        docs: Documents that are known, in prompt order.
        prompt_tokens: Of these.
        table: Their chunks.
        plan: The latest.
        optional_repair_s: Seconds of it that repair takes and could do without.
        plan_bytes: Of it, still to be asked for.
        floor_s: Seconds that its open chunks need at the quality floor, by what the plan knew.
        planned_at: When that was made.
        is_stale: Something happened since that the plan did not foresee.
        fresh_until: Instant before which it is not made anew unless it is stale, by what was known when something last
            could begin; -inf where that is to be found out.
        confirmed: How many plans in a row asked for just what was left of the one before.
        planned_for: Bytes per second, expected and to rely on, when the plan was made.
        waiting: Places in the table of chunks that it fetches, and their levels, next one first.
        refine: Places of chunks that become better, and up to which level, next one first.
        waits_until: Instant until which the decode lane waits for a finer level that is about to come; infinite where
            it does not.
        passes: Forward passes that the plan wants.
        compute_s: Seconds of recomputation that it holds.
        repair: What repairing its links may take and gives; None: they stay as they are.
        repair_share: Share of its rows that is to be computed anew, by what is known now.
        links: Tokens that are computed behind each document, see ``LoadRequested``.
        in_order: How far it is repaired while it is fetched.
        has_looked: Its question was run, and what it attends to is known.
        sees_before: What is recomputed is to see the documents before its own.
        wants_look: Its question could be run before the prompt is complete, and has not been.
        is_looking: It runs.
        joins: Its passes may be rows of a joined one.
        overlapped_s: Of what its plan has at its end, seconds that are done beside the link.
        fallbacks: Chunks for which a fetch or decode was given up for recomputation.
    """

    def __init__(self, asked: LoadRequested, now: float) -> None:
        """Lay the load out; its documents come later."""
        if asked.documents < 1 or asked.query_tokens < 0:
            msg = f"a load needs at least one document and a question of 0 tokens or more, got {asked}"
            raise ArgumentError(msg)
        links = asked.links
        if links and (len(links) != asked.documents or min(links) < 0 or sum(links) > asked.query_tokens):
            msg = f"a load's link tokens are told for each document, and count in query_tokens, got {asked}"
            raise ArgumentError(msg)
        self.number, self.goal, self.asked_at = asked.load, asked.goal, now
        self.query_tokens = asked.query_tokens
        self.repair = asked.repair if asked.documents > 1 or (asked.repair and asked.repair.whole) else None
        self.repair_share = self.repair.least if self.repair else 0.0
        self.links = links if asked.documents > 1 and self.repair is None else ()
        self.in_order = RepairProgress(self.repair, self.links)
        self.wants_look = asked.looks and asked.goal.objective == "quality" and asked.goal.deadline_s is not None
        self.is_looking = self.has_looked = False
        self.sees_before = bool(self.repair and (self.repair.least or asked.goal.objective == "quality"))
        self._costs: tuple[CostModel, CostModel] | None = None
        self.due = inf if asked.goal.deadline_s is None else now + asked.goal.deadline_s
        self.first_s: float | None = None
        self.came: float | None = None
        self.asked_floor_s = 0.0
        self.refused_s = 0.0
        self.began = 0
        self.known_since = inf
        self._slots: list[DocumentState | None] = [None] * asked.documents
        self.docs: list[DocumentState] = []
        self.prompt_tokens = 0
        self.table = ChunkTable()
        self.plan: Plan | None = None
        self.plan_bytes = 0
        self.optional_repair_s = 0.0
        self.floor_s, self._floor_chunks = 0.0, 0
        self.planned_at = -inf
        self._planned_docs = 0
        self.is_stale = True
        self.fresh_until = -inf
        self.confirmed = 0
        self.planned_for = 0.0, 0.0
        self.waiting: deque[tuple[int, int]] = deque()
        self.passes = WantedPasses(self.table)
        self.refine: deque[tuple[int, int]] = deque()
        self.waits_until = inf
        self.compute_s = 0.0
        self.fallbacks = 0
        self.joins = True
        self.overlapped_s = 0.0
        self.has_prefix = False
        self._upgraded: set[int] = set()
        self._open = self._refinable = np.zeros(0, np.int64)

    def add(self, number: int, variants: tuple[DocumentPlanInput, ...], now: float) -> DocumentState:
        """Make a document known."""
        if not 0 <= number < len(self._slots) or self._slots[number] is not None:
            msg = f"load {self.number} has no document {number} whose index is still missing"
            raise ArgumentError(msg)
        doc = self._slots[number] = DocumentState(self.number, number, variants, self.table)
        if self.docs and number < self.docs[-1].number:
            insort(self.docs, doc, key=attrgetter("number"))
        else:
            self.docs.append(doc)
        if self.sees_before and self.is_known:
            for each, before in zip(self.docs, accumulate((doc.tokens for doc in self.docs), initial=0), strict=False):
                self.table.move_back(each.start, each.stop, before)
        self.prompt_tokens += doc.tokens
        self.has_prefix |= any(variant.prefix_share > 0 for variant in variants)
        # As documents come one by one, plans are made anew when there are a quarter more, and when all are known.
        if self.is_known:
            self.planned_at = -inf
        if self.is_known or len(self.docs) >= _REPLAN_GROWTH * self._planned_docs:
            self.is_stale = True
        self.known_since = min(self.known_since, now)
        return doc

    def costs(self, base: CostModel) -> CostModel:
        """What computing costs, the repair of this load included."""
        rows = self._rows(self.repair_share)
        if not rows:
            return base
        if self._costs is None or self._costs[0] is not base or self._costs[1].repair_rows != rows:
            self._costs = base, self._repairing(base, rows)
        return self._costs[1]

    def checked_attention(self, attention: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Attention as ``looked`` takes it."""
        counts = [doc.count for doc in self.docs]
        if attention and [len(row) for row in attention] != counts:
            msg = f"attention is told for each of {counts} chunks, got {[len(row) for row in attention]} figures"
            raise ArgumentError(msg)
        if not all(isfinite(each) and each >= 0 for row in attention for each in row):
            msg = "attention to a chunk must be finite and at least 0"
            raise ArgumentError(msg)
        return attention

    def looked(self, attention: Sequence[Sequence[float]]) -> None:
        """Have the errors of what the question attends to count more, now that this is known."""
        self.is_looking, self.is_stale = False, True
        self.has_looked, self._costs = bool(attention), None
        for doc, row in zip(self.docs, attention, strict=False):
            self.table.weigh(doc.start, [_UNSEEN + (1 - _UNSEEN) * each for each in row])

    def can_see_before(self, doc: DocumentState) -> bool:
        """Whether a forward pass over a document can see all of those before it now."""
        if not (self.sees_before and self.is_known and doc.number):
            return False
        if self.table.in_prompt_order:
            return self.table.are_valid(doc.start)
        return all(each.is_valid for each in self.docs[: doc.number])

    def front(self) -> int:
        """Tokens from the prompt's beginning on that see all before them, or did when the first repair began."""
        if self.in_order.front is not None:
            return self.in_order.front
        first, *others = self.docs
        tokens = first.tokens
        for doc in others:
            seeing = doc.front()
            tokens += seeing
            if seeing < doc.tokens:
                break
        return tokens

    def _rows(self, share: float) -> int:
        """Rows that a share takes as much as, choosing them included."""
        if not (share and self.docs and self.repair):
            return 0
        first, front = (0, 0) if self.repair.whole else (self.docs[0].tokens, self.front())
        work = self.repair.work(share, self.prompt_tokens, first, front)
        return self.in_order.rows_left(work, share)

    def _repairing(self, costs: CostModel, rows: int) -> CostModel:
        looks = bool(rows and self.repair and self.repair.looks and not self.has_looked)
        return replace(costs, repair_rows=rows, repair_looks=looks)

    def closing_s(self, costs: CostModel, share: float) -> float:
        """Seconds from the last chunk to the first token, were a share of rows repaired."""
        return self._repairing(costs, self._rows(share)).closing_s(self.prompt_tokens)

    def pass_ended(self, job: Job, *, blind: bool) -> None:
        """Take in chunks that were recomputed."""
        doc = self.doc(job.document)
        for chunk in job.chunks:
            doc.move(chunk.chunk, READY)
            doc.table.valid_level[doc.start + chunk.chunk] = -1
        if job.behind and not blind:
            doc.saw_before(chunk.chunk for chunk in job.chunks)

    def pass_failed(self, job: Job, bad: ChunkId, reason: str) -> None:
        """Take in that a pass failed: nothing of it is valid."""
        doc, self.is_stale = self.doc(job.document), True
        for chunk in job.chunks:
            if chunk == bad:
                doc.lose(chunk.chunk, f"recomputation failed: {reason}", fetch=False)
            else:
                doc.move(chunk.chunk, PLANNED)

    def pass_stopped(self, job: Job) -> None:
        """Take in that a pass was stopped: every way is open for its chunks again."""
        doc, self.is_stale = self.doc(job.document), True
        for chunk in job.chunks:
            doc.move(chunk.chunk, PLANNED)

    def doc(self, document: int) -> DocumentState:
        """A document that is known."""
        doc = self._slots[document] if 0 <= document < len(self._slots) else None
        if doc is None:
            msg = f"document {document} of load {self.number} is not known"
            raise ArgumentError(msg)
        return doc

    @property
    def is_known(self) -> bool:
        """Whether all documents are."""
        return len(self.docs) == len(self._slots)

    def place(self, at: int) -> Place:
        """The document and the number of a chunk of the table."""
        return self.doc(self.table.document[at]), self.table.chunk[at]

    def having(self, *states: ChunkState) -> Iterator[Place]:
        """Chunks in any of some states, in prompt order."""
        return map(self.place, self.table.having(*states))

    @property
    def floor_left_s(self) -> float:
        """What is left of ``floor_s`` for chunks that nothing was begun for since the plan, taken for alike."""
        return self.floor_s * self.table.counts[PLANNED] / max(self._floor_chunks, 1)

    @property
    def refine_bytes(self) -> int:
        """Of finer levels that the plan names, still to be asked for."""
        sizes, valid = self.table.sizes, self.table.valid_level
        return sum(sizes[level][at] - sizes[max(valid[at], 0)][at] for at, level in self.refine)

    @property
    def is_ready(self) -> bool:
        """Whether all chunks are valid."""
        return self.is_known and self.table.valid == len(self.table)

    @property
    def may_end(self) -> bool:
        """Whether it is ready, refused, or cannot become ready."""
        counts = self.table.counts
        if self.refused_s or counts[FAILED]:
            return True
        return not counts[PLANNED] and self.is_ready

    @property
    def is_undecided(self) -> bool:
        """Whether a plan could still change anything: a chunk that nothing was started for, or that may be refined."""
        return bool(self.table.counts[PLANNED] or self.may_refine)

    @property
    def may_refine(self) -> bool:
        """Whether a chunk is valid and may become finer."""
        return self.goal.objective == "quality" and bool(self.table.held_total and self.table.counts[READY])

    @property
    def is_refining(self) -> bool:
        """Whether a finer level of any chunk is on its way."""
        counts = self.table.counts
        return bool(counts[REFINING] or counts[REFINED] or counts[REDECODING])

    def request(self, base: PlanRequest, *, alone: bool = True) -> PlanRequest:
        """What a plan for the open chunks depends on."""
        costs = base.costs
        heads = {
            doc.number: doc.prefix_share_left * costs.prefill.seconds(doc.tokens)
            for doc in (self.docs if self.has_prefix else ())
            if doc.prefix_share_left
        }
        columns, self._open = self.table.open(heads)
        if alone and self.sees_before and self.repair and self.repair.weighs_text:
            # What is fetched does not see the documents before its own.
            linked = self.repair.error_left(self.repair_share) * (columns.document > 0)
            columns = replace(columns, errors=columns.errors + linked)
        refinable = None
        if self.goal.objective == "quality":
            refinable, self._refinable = self.table.refinable(self.goal.ceiling)
        share = len(self.docs) / len(self._slots)
        if share < 1:
            # What the other documents need is not known yet: until then the known ones get their share of everything.
            costs = replace(costs, prefill=costs.prefill.scaled(1 / share), decode=costs.decode.scaled(1 / share))
            base = replace(base, bandwidth=base.bandwidth * share, bandwidth_low=base.bandwidth_low * share)
        return replace(
            base, chunks=columns, goal=self.goal, prompt_tokens=self.prompt_tokens, refinable=refinable, costs=costs,
            look_s=costs.look_s(round(self.prompt_tokens / share)) if self._may_look else None,
            is_weighed=self.table.is_weighed,
        )  # fmt: skip

    @property
    def _may_look(self) -> bool:
        """Whether plans may count on a look: it was planned before, or hardly anything is begun."""
        if not self.wants_look:
            return False
        least = _MIN_UNSTARTED_SHARE * len(self.table)
        return bool(self.plan and self.plan.looks) or self.table.counts[PLANNED] >= least

    def follow(self, plan: Plan, request: PlanRequest, now: float) -> None:
        """Take over a plan for the request made last."""
        self.plan, self.plan_bytes, self.planned_at = plan, plan.bytes, now
        self.optional_repair_s = 0.0
        if self.repair and self.repair_share > self.repair.least:
            least_s = self.closing_s(request.costs, self.repair.least)
            self.optional_repair_s = max(0.0, self.closing_s(request.costs, self.repair_share) - least_s)
        self.is_stale, self._planned_docs = False, len(self.docs)
        recomputed, levels = plan.levels == RECOMPUTE, plan.levels
        if request.chunks.floor is not None:  # whatever the policy says
            lowest = np.minimum(request.chunks.floor, request.chunks.top)
            levels = np.where(recomputed, levels, np.maximum(levels, lowest))
        order = np.asarray(plan.order, np.int64)
        if self.in_order.wants_order and self.is_known and not recomputed.any():
            order = np.sort(order)  # nothing is to meet it from the front
        before = self.waiting, self.refine
        self.waiting = deque(zip(self._open[order].tolist(), levels[order].tolist(), strict=True))
        wanted_alike = self.passes.want(self._open[recomputed], self._open, self.doc)
        self.compute_s = float(prefill_s(request)[recomputed].sum()) if self.passes else 0.0
        self.floor_s, self._floor_chunks = floor_s(request), len(self._open)
        self._upgraded = set(self._open[[*plan.upgraded]].tolist()) if plan.upgraded else set()
        some, finer = request.refinable, np.asarray(plan.refine, np.int64)
        one_more = (some.level[finer] + 1).tolist() if some else []
        self.refine = deque(zip(self._refinable[finer].tolist(), plan.refine_levels or one_more, strict=True))
        same = self.waiting == before[0] and self.refine == before[1]
        self.confirmed = self.confirmed + 1 if same and wanted_alike else 0

    def levels_of(self, plan: Plan) -> dict[int, int]:
        """What a plan for the request made last has for each open chunk, by its place; RECOMPUTE among them."""
        return dict(zip(self._open.tolist(), plan.levels.tolist(), strict=True))

    @property
    def can_fetch_instead(self) -> bool:
        """Whether there is a blob of any document."""
        return any(doc.input.has_blob for doc in self.docs)

    def fetch_instead(self, doc: DocumentState, chunk: int) -> None:
        """Fetch what the plan would have recomputed of a document from a chunk on, which could only wait for it."""
        table = self.table
        for at in range(doc.start + chunk, doc.stop):
            lowest = table.lowest(at, self.goal.floor)
            if self.passes.wants(at) and table.top[at] >= lowest >= 0:
                self.passes.give_up(at)
                self.waiting.append((at, lowest))

    def reason(self, at: int) -> str:
        """Why the plan does with a chunk what it does."""
        if at in self._upgraded:
            return "upgraded: time is left"
        return self.plan.reason if self.plan else ""
