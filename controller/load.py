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
from .forecast import floor_s
from .repair import RepairProgress
from .snapshot import RECOMPUTE, PlanRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.types import ChunkId

    from .costs import CostModel
    from .documents import DocumentPlanInput
    from .events import LoadRequested
    from .snapshot import Ints, Plan
    from .workers import Job

Place = tuple[DocumentState, int]
"""A chunk: its document and its number there."""
_UNSEEN = 0.1  # what a chunk that the question does not look at counts: an answer may look elsewhere


class Load:
    """A prompt on its way. Columns of chunks are in ``table``; places are rows of it."""

    def __init__(self, asked: LoadRequested, now: float) -> None:
        """Lay the load out; its documents come later."""
        if asked.documents < 1 or asked.query_tokens < 0:
            raise ArgumentError(f"a load needs at least one document and a question of 0 tokens or more, got {asked}")
        links = asked.links
        if links and (len(links) != asked.documents or min(links) < 0 or sum(links) > asked.query_tokens):
            msg = f"a load's link tokens are told for each document, and count in query_tokens, got {asked}"
            raise ArgumentError(msg)
        self.number, self.goal, self.asked_at, self.query_tokens = asked.load, asked.goal, now, asked.query_tokens
        self.due = inf if asked.goal.deadline_s is None else now + asked.goal.deadline_s
        # Documents.
        self._slots: list[DocumentState | None] = [None] * asked.documents
        self.docs: list[DocumentState] = []  # those that are known, in prompt order
        self.known_since = inf
        self.prompt_tokens = 0
        self.table = ChunkTable()
        self.has_prefix = False  # a variant of a document has prefix layers
        # Repair, links and looks.
        self.repair = asked.repair if asked.documents > 1 or (asked.repair and asked.repair.whole) else None
        self.repair_share = self.repair.least if self.repair else 0.0  # of the rows, by what is known now
        self.links = links if asked.documents > 1 and self.repair is None else ()
        self.in_order = RepairProgress(self.repair, self.links)
        self.sees_before = bool(self.repair and (self.repair.least or asked.goal.objective == "quality"))
        self.wants_look = asked.looks and asked.goal.objective == "quality" and asked.goal.deadline_s is not None
        self.is_looking = self.has_looked = False
        self._costs: tuple[CostModel, CostModel] | None = None
        # The plan, and what is left of it to begin.
        self.plan: Plan | None = None
        self.planned_at = -inf
        self.is_stale = True  # something happened that the plan did not foresee
        self.came: tuple[float, float] | None = None  # when its first plan was made, and its floor_s then
        self.hurries = False  # its plan was late with short passes: it gets long ones
        self.first_s: float | None = None  # what the first complete plan expected
        self.refused_s = 0.0  # by which the load would be late, where it is refused for that
        self.waiting: deque[tuple[int, int]] = deque()  # places to fetch, and their levels
        self.refine: deque[tuple[int, int]] = deque()  # places that become finer, and up to which level
        self.plan_bytes = 0  # still to be asked for
        self.asked_bytes = 0  # since it came
        self.compute_s = 0.0  # of passes that the plan wants
        self._wanted, self._wanted_docs = bytearray(), deque[DocumentState]()
        self.floor_s, self._floor_chunks = 0.0, 0  # what the open chunks need at the quality floor
        self.overlapped_s = 0.0  # of repair at the plan's end, what is done beside the link
        self.optional_repair_s = 0.0  # of repair at its end, what could be left out
        self.began = 0  # number of the last thing begun for it
        self.joins = True  # its passes may be rows of a joined one
        self.fallbacks = 0  # chunks that are recomputed since a fetch or decode came to nothing
        self._upgraded: set[int] = set()
        self._open = self._refinable = np.zeros(0, np.int64)

    # Documents.

    def add(self, number: int, variants: tuple[DocumentPlanInput, ...], now: float) -> DocumentState:
        """Make a document known."""
        if not 0 <= number < len(self._slots) or self._slots[number] is not None:
            raise ArgumentError(f"load {self.number} has no document {number} whose index is still missing")
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
        if self.is_known:
            self.planned_at = -inf
        if self.is_known or self.plan is None:
            self.is_stale = True
        self.known_since = min(self.known_since, now)
        return doc

    @property
    def is_known(self) -> bool:
        """Whether all documents are."""
        return len(self.docs) == len(self._slots)

    def doc(self, document: int) -> DocumentState:
        """A document that is known."""
        doc = self._slots[document] if 0 <= document < len(self._slots) else None
        if doc is None:
            raise ArgumentError(f"document {document} of load {self.number} is not known")
        return doc

    def place(self, at: int) -> Place:
        """The document and the number of a chunk of the table."""
        return self.doc(self.table.document[at]), self.table.chunk[at]

    def having(self, *states: ChunkState) -> Iterator[Place]:
        """Chunks in any of some states, in prompt order."""
        return map(self.place, self.table.having(*states))

    # How far it is.

    @property
    def is_ready(self) -> bool:
        """Whether all chunks are valid."""
        return self.is_known and self.table.valid == len(self.table)

    @property
    def may_end(self) -> bool:
        """Whether it is ready, refused, or cannot become ready."""
        return bool(self.refused_s or self.table.counts[FAILED]) or self.is_ready

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

    @property
    def can_fetch_instead(self) -> bool:
        """Whether there is a blob of any document."""
        return any(doc.input.has_blob for doc in self.docs)

    # Passes over its documents.

    def can_see_before(self, doc: DocumentState) -> bool:
        """Whether a forward pass over a document can see all of those before it now."""
        if not (self.sees_before and self.is_known and doc.number):
            return False
        if self.table.in_prompt_order:
            return self.table.are_valid(doc.start)
        return all(each.is_valid for each in self.docs[: doc.number])

    def next_pass(self, costs: CostModel, limit_s: float) -> tuple[DocumentState, list[int]] | None:
        """The first forward pass that the plan wants and that can run now, no longer than a limit or one chunk."""
        state, can_text, wanted, docs = self.table.state, self.table.can_text, self._wanted, self._wanted_docs
        while docs and not (docs[0].has(PLANNED) and wanted.find(1, docs[0].start, docs[0].stop) >= 0):
            docs.popleft()
        for doc in docs:
            first = doc.ready_before()
            run: list[int] = []
            for chunk in range(first, doc.count):
                at = doc.start + chunk
                if not (wanted[at] and can_text[at]) or state[at] != PLANNED:
                    break
                if run and costs.prefill.seconds(*doc.prefill_span(first, chunk)) > limit_s:
                    break
                run.append(chunk)
            if run:
                return doc, run
        return None

    @property
    def wants_passes(self) -> bool:
        """Whether the plan may have chunks left to recompute."""
        return bool(self._wanted_docs)

    def pass_ended(self, job: Job, *, blind: bool) -> None:
        """Take in chunks that were recomputed."""
        doc = self.doc(job.document)
        for chunk in job.chunks:
            doc.move(chunk.chunk, READY)
            doc.table.valid_level[doc.start + chunk.chunk] = -1
        if job.behind and not blind:
            doc.saw_before(chunk.chunk for chunk in job.chunks)

    def pass_stopped(self, job: Job, bad: ChunkId | None = None, reason: str = "") -> None:
        """Take in that a pass computed nothing; ``bad`` of it is not to be recomputed again."""
        doc, self.is_stale = self.doc(job.document), True
        for chunk in job.chunks:
            if chunk == bad:
                doc.lose(chunk.chunk, f"recomputation failed: {reason}", fetch=False)
            else:
                doc.move(chunk.chunk, PLANNED)

    # Repair and looks.

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

    def costs(self, base: CostModel) -> CostModel:
        """What computing costs, the repair of this load included."""
        rows = self._rows(self.repair_share)
        if not rows:
            return base
        if self._costs is None or self._costs[0] is not base or self._costs[1].repair_rows != rows:
            self._costs = base, self._repairing(base, rows)
        return self._costs[1]

    def closing_s(self, costs: CostModel, share: float) -> float:
        """Seconds from the last chunk to the first token, were a share of rows repaired."""
        return self._repairing(costs, self._rows(share)).closing_s(self.prompt_tokens)

    def _rows(self, share: float) -> int:
        """Rows that a share takes as much as, choosing them included."""
        if not (share and self.docs and self.repair):
            return 0
        first, front = (0, 0) if self.repair.whole else (self.docs[0].tokens, self.front())
        return self.in_order.rows_left(self.repair.work(share, self.prompt_tokens, first, front), share)

    def _repairing(self, costs: CostModel, rows: int) -> CostModel:
        looks = bool(rows and self.repair and self.repair.looks and not self.has_looked)
        return replace(costs, repair_rows=rows, repair_looks=looks)

    def checked_attention(self, attention: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Attention as ``looked`` takes it."""
        counts = [doc.count for doc in self.docs]
        if attention and [len(row) for row in attention] != counts:
            msg = f"attention is told for each of {counts} chunks, got {[len(row) for row in attention]} figures"
            raise ArgumentError(msg)
        if not all(isfinite(each) and each >= 0 for row in attention for each in row):
            raise ArgumentError("attention to a chunk must be finite and at least 0")
        return attention

    def looked(self, attention: Sequence[Sequence[float]]) -> None:
        """Have the errors of what the question attends to count more, now that this is known."""
        self.is_looking, self.is_stale = False, True
        self.has_looked, self._costs = bool(attention), None
        for doc, row in zip(self.docs, attention, strict=False):
            self.table.weigh(doc.start, [_UNSEEN + (1 - _UNSEEN) * each for each in row])

    # The plan.

    def request(self, base: PlanRequest, *, alone: bool) -> PlanRequest:
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
            was_to_look=bool(self.plan and self.plan.looks and any(self.table.held)),
        )  # fmt: skip

    @property
    def _may_look(self) -> bool:
        """Whether plans may count on a look: it was planned before, or nothing is begun."""
        planned = bool(self.plan and self.plan.looks)
        return self.wants_look and (planned or self.table.counts[PLANNED] == len(self.table))

    def follow(self, plan: Plan, request: PlanRequest, now: float) -> None:
        """Take over a plan for the request made last."""
        self.plan, self.plan_bytes, self.planned_at = plan, plan.bytes, now
        self.optional_repair_s = 0.0
        if self.repair and self.repair_share > self.repair.least:
            least_s = self.closing_s(request.costs, self.repair.least)
            self.optional_repair_s = max(0.0, self.closing_s(request.costs, self.repair_share) - least_s)
        self.is_stale = False
        recomputed, levels = plan.levels == RECOMPUTE, plan.levels
        if request.chunks.floor is not None:  # whatever the policy says
            lowest = np.minimum(request.chunks.floor, request.chunks.top)
            levels = np.where(recomputed, levels, np.maximum(levels, lowest))
        order = np.asarray(plan.order, np.int64)
        if self.in_order.wants_order and self.is_known and not recomputed.any():
            order = np.sort(order)  # nothing is to meet it from the front
        self.waiting = deque(zip(self._open[order].tolist(), levels[order].tolist(), strict=True))
        self._want(self._open[recomputed])
        self.compute_s = float(request.prefill_s[recomputed].sum()) if self._wanted_docs else 0.0
        self.floor_s, self._floor_chunks = floor_s(request), len(self._open)
        self._upgraded = set(self._open[[*plan.upgraded]].tolist()) if plan.upgraded else set()
        some, finer = request.refinable, np.asarray(plan.refine, np.int64)
        one_more = (some.level[finer] + 1).tolist() if some else []
        self.refine = deque(zip(self._refinable[finer].tolist(), plan.refine_levels or one_more, strict=True))

    def _want(self, places: Ints) -> None:
        """Take over which chunks are to be recomputed."""
        self._wanted, self._wanted_docs = bytearray(len(self.table)), deque()
        if len(places):
            np.frombuffer(self._wanted, np.uint8)[places] = 1
            documents = np.flatnonzero(np.bincount(self.table.look("document")[places]))
            self._wanted_docs.extend(map(self.doc, documents.tolist()))

    def levels_of(self, plan: Plan) -> dict[int, int]:
        """What a plan for the request made last has for each open chunk, by its place; RECOMPUTE among them."""
        return dict(zip(self._open.tolist(), plan.levels.tolist(), strict=True))

    @property
    def floor_left_s(self) -> float:
        """What is left of ``floor_s`` for chunks that nothing was begun for since the plan, taken for alike."""
        return self.floor_s * self.table.counts[PLANNED] / max(self._floor_chunks, 1)

    @property
    def refine_bytes(self) -> int:
        """Of finer levels that the plan names, still to be asked for."""
        sizes, valid = self.table.sizes, self.table.valid_level
        return sum(sizes[level][at] - sizes[max(valid[at], 0)][at] for at, level in self.refine)

    def reason(self, at: int) -> str:
        """Why the plan does with a chunk what it does."""
        if at in self._upgraded:
            return "upgraded: time is left"
        return self.plan.reason if self.plan else ""
