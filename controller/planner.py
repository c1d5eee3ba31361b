"""When a load's plan is made anew, what it rests on, and whether a load is taken in by its first one."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .chunk_table import FAILED, PLANNED
from .estimators import UNKNOWN
from .limits import pass_chunks
from .repair import rows_of
from .snapshot import RECOMPUTE, Columns, CommittedWork, PlanRequest

if TYPE_CHECKING:
    from .costs import CostModel
    from .document_state import DocumentState
    from .load import Load
    from .repairing import Repairs
    from .snapshot import Plan
    from .state import State


_MARGIN = 0.05  # of a deadline: a load that is admitted into a full queue is to be in time


class Planner:
    """Has plans made for loads: seldom enough to cost little, and at once where something has changed."""

    def __init__(self, state: State, repairs: Repairs) -> None:
        """Start idle."""
        self._state, self._repairs = state, repairs

    def add(self, load: Load, doc: DocumentState) -> None:
        """Choose a new document's variant, and leave out levels that would never fit into memory."""
        scores = []
        for variant in range(len(doc.variants)) if len(doc.variants) > 1 else ():
            self._choose(doc, variant)
            plan = self._state.policy.plan(self._request(load))
            goal = {"earliest": 0.0, "quality": plan.error, "cheapest": float(plan.bytes)}[load.goal.objective]
            scores.append((doc.has(FAILED), not plan.in_time, goal if plan.in_time else 0.0, plan.finish_s, variant))
        self._choose(doc, min(scores)[-1] if scores else 0)

    def _choose(self, doc: DocumentState, variant: int) -> None:
        if variant != doc.variant:
            doc.choose(variant)
        doc.limit(self._state.settings.memory_bytes)

    def wants_plan(self, load: Load) -> bool:
        """Whether there is something to plan: anything is known, and open or never planned for."""
        return bool(load.docs) and (load.is_undecided or load.first_s is None)

    def due_at(self, load: Load, now: float) -> float:
        """Instant from which on a load's plan is to be made anew: making it takes a small share of the time."""
        settings, link = self._state.settings, self._state.link
        cost_s = settings.plan_s + settings.plan_chunk_s * load.table.counts[PLANNED]
        if load.is_stale:
            return load.planned_at + min(cost_s, settings.replan_s)
        if not load.waiting and not load.refine and link.is_open():
            return load.planned_at + settings.replan_s  # the link might have something to do
        # Near a deadline every decision counts.
        share = settings.plan_share
        pause_s = min(cost_s * len(self._state.loads) / share, max(0.0, load.due - now) * share)
        return load.planned_at + max(settings.replan_s, pause_s)

    def is_due(self, load: Load, now: float) -> bool:
        """Whether a load's plan is to be made anew by now; what was decided at this instant stands."""
        return (load.is_stale or now > load.planned_at) and now >= self.due_at(load, now)

    def refresh(self, load: Load, now: float) -> None:
        """Plan anew unless the plan is fresh."""
        if self.wants_plan(load) and self.is_due(load, now):
            self.plan(load, now)

    def plan(self, load: Load, now: float) -> None:
        """Plan anew, where there is anything to plan."""
        if not self.wants_plan(load):
            return
        self._repairs.choose(load)
        request = self._request(load)
        plan = self._planned(load, request)
        if not (plan.in_time or load.hurries) and len(self._state.loads) == 1:
            load.hurries = True  # short passes cost time that it does not have
            request = self._request(load)
            plan = self._planned(load, request)
        load.follow(plan, request, now)
        # Finer levels that may still come keep jobs beside the link waiting.
        hides = load.due < inf and load.goal.objective != "quality" and not load.in_order.documents
        load.overlapped_s = self._repairs.overlapped_s(load, plan) if hides else 0.0
        self._state.changed()
        if load.first_s is None and load.is_known:
            self._admit(load, plan, now)

    def _admit(self, load: Load, first: Plan, now: float) -> None:
        """Admit a load with its first plan, or refuse it where its goal says so and it would be late."""
        overlapped_s = self._repairs.overlapped_s(load, first)
        load.first_s = now - load.asked_at + first.finish_s - overlapped_s
        if load.due < inf and load.goal.on_late == "refuse" and self._state.estimates.bandwidth.error < UNKNOWN:
            # Those that go first give their quality back where that keeps this one's deadline.
            soonest_s = min(first.finish_s - overlapped_s, self._state.floors_s(load))
            margin_s = _MARGIN * (load.due - load.asked_at) + self._state.contention_s(load)
            load.refused_s = max(0.0, now + soonest_s + margin_s - load.due)
        if not load.refused_s:
            self._state.arrivals.add(load, now)
            for other in self._state.loads.values():  # they make room, and no later than their next fetch
                other.is_stale |= other is not load and bool(other.waiting or other.refine)

    def _request(self, load: Load) -> PlanRequest:
        state, now = self._state, self._state.now
        link, workers, settings = state.link, state.workers, state.settings
        costs, slowness = state.costs_among_many(load), workers.slowness(now)
        if slowness > 1:
            costs = replace(costs, prefill=costs.prefill.scaled(slowness))
        rank, alone = state.rank(load), len(state.loads) == 1
        ahead = [other for other in state.loads.values() if other is not load and state.rank(other) < rank]
        left_s = None if load.due == inf else state.left_s(load, costs)
        base = PlanRequest(
            chunks=_NOTHING, costs=costs, goal=load.goal, bandwidth=link.bandwidth,
            bandwidth_low=link.bandwidth_low if left_s is None else link.low_over(max(0.0, left_s)), prompt_tokens=0,
            committed=self._committed(load, costs, ahead), left_s=left_s, lead_s=link.lead_s(now), ttfb_s=link.ttfb_s,
            workers=settings.workers, now=now,
            pass_chunks=pass_chunks(state, load, costs),
            # Several loads are careful in a way of their own.
            risk=state.estimates.bandwidth.horizons.risk(max(0.0, left_s or 0.0)) if alone else 0.0,
        )  # fmt: skip
        return load.request(base, alone=alone)

    def _committed(self, load: Load, costs: CostModel, ahead: list[Load]) -> CommittedWork:
        """What was asked for already, and what loads that go first will ask for."""
        state, now = self._state, self._state.now
        wire, work_s, size, seconds = [], [], 0, 0.0
        for fetch, left in state.link.left():
            size, seconds = size + left, seconds + fetch.decode_s
            if fetch.chunk.load == load.number:
                wire.append(size)
                work_s.append(seconds)
                size, seconds = 0, 0.0
        for other in state.loads.values():
            seconds += costs.decode.apart(*other.table.arrived())
        closings_s = sum(state.costs_of(other).closing_s(other.prompt_tokens) for other in ahead)
        return CommittedWork(
            wire=np.array(wire, np.float64),
            work_s=np.array(work_s, np.float64),
            prefill_s=state.workers.left_s("prefill", now) + sum(other.compute_s for other in ahead) + closings_s,
            decode_s=state.workers.left_s("decode", now) + seconds,
            ahead_bytes=float(size + sum(other.plan_bytes for other in ahead)),
        )

    def _planned(self, load: Load, request: PlanRequest) -> Plan:
        """The policy's plan, or everything fetched front to back where that is sooner, since repair hides behind it.

        A plan that computes some of the prompt from text keeps the engine busy until the last chunk is here.
        """
        policy, chunks = self._state.policy, request.chunks
        plan = policy.plan(request)
        recomputed = plan.levels == RECOMPUTE
        soonest = request.left_s is None or request.goal.objective == "earliest"
        if not (load.is_known and load.in_order.wants_order and load.repair_share and soonest and recomputed.any()):
            return plan
        if not (policy.preemptible and chunks.can_fetch.all()) or self._state.link.stalled:
            return plan
        other = policy.plan(replace(request, chunks=replace(chunks, can_text=np.zeros_like(chunks.can_text))))
        # What is computed behind the others needs no repair.
        first, front = load.docs[0].tokens, load.front()
        if load.sees_before:
            leading = int(recomputed.argmin()) if not recomputed.all() else len(recomputed)
            front = max(front, int(chunks.tokens[:leading].sum()))
        rows = rows_of(load.repair_share, load.prompt_tokens, first, front)
        costs, tokens = request.costs, load.prompt_tokens
        saved_s = costs.repair_s(tokens) - replace(costs, repair_rows=min(rows, costs.repair_rows)).repair_s(tokens)
        sooner = other.finish_s - self._repairs.overlapped_s(load, other) < plan.finish_s - saved_s
        return other if sooner else plan


_NOTHING = Columns(
    *(np.zeros(0, np.int64),) * 4, np.zeros((1, 0), np.int64), np.zeros((1, 0)), *(np.zeros(0, np.int64),) * 2,
    np.zeros(0), np.zeros(0, np.bool_), np.zeros(0),
)  # fmt: skip
