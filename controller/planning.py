"""When a load's plan is made anew, what it rests on, and whether a load is taken in by its first one."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .chunk_table import FAILED, PLANNED
from .repair import rows_of
from .snapshot import RECOMPUTE, Columns, CommittedWork, PlanRequest

if TYPE_CHECKING:
    from .deadlines import Deadlines
    from .document_state import DocumentState
    from .load import Load
    from .pass_limits import PassLimits
    from .repairing import Repairs
    from .resources import Resources
    from .snapshot import Plan
    from .window import Window


_MARGIN = 0.05  # of a deadline: who is admitted in a queue that is full is to be in time
_VAGUE = 0.5  # relative error of a bandwidth by which nobody is refused
_MOST_DOUBLINGS = 2  # plans that the next ones only confirm are used for up to 2 to that power times as long
_NEAR = 0.02  # share by which a link's estimate may change and nothing has changed
_URGENT_COST, _USUAL_COST = 1.0, 20.0  # plans are made after that many times what one costs, at the soonest
_SURELY = 0.95  # share of a plan's time below which another one is worth taking: what hides is expected, and not sure


class Planner:
    """Has plans made for loads: seldom enough to cost little, and at once where something has changed."""

    def __init__(
        self, shared: Resources, deadlines: Deadlines, window: Window, limits: PassLimits, repairs: Repairs
    ) -> None:
        """Start idle."""
        self._shared, self._deadlines, self._window = shared, deadlines, window
        self._limits, self._repairs = limits, repairs
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._policy, self._link, self._lanes = shared.policy, shared.link, shared.lanes

    def add(self, load: Load, doc: DocumentState, now: float) -> None:
        """Choose a new document's variant, and leave out levels that would never fit into memory."""
        self._shared.now = now
        if len(doc.variants) > 1:
            self._choose(doc, min(range(len(doc.variants)), key=lambda each: self._score(load, doc, each, now)))
        else:
            self._choose(doc, 0)

    def _choose(self, doc: DocumentState, variant: int) -> None:
        if variant != doc.variant:
            doc.choose(variant)
        doc.limit(self._settings.memory_bytes)

    def _score(self, load: Load, doc: DocumentState, variant: int, now: float) -> tuple[bool, bool, float, float]:
        """How good the prompt as far as it is known would be with a variant; less is better."""
        self._choose(doc, variant)
        plan = self._policy.plan(self._request(load, now))
        goal = {"earliest": 0.0, "quality": plan.error, "cheapest": float(plan.bytes)}[load.goal.objective]
        hopeless = doc.has(FAILED)
        return hopeless, not plan.in_time, goal if plan.in_time else 0.0, plan.finish_s

    def is_due(self, load: Load, now: float) -> bool:
        """Whether a load's plan is to be made anew by now."""
        if not load.is_stale and now <= load.planned_at:
            return False  # however short the pause is: what was decided since at this instant stands
        if not load.is_stale and now < load.planned_at + self._settings.replan_s:
            return False  # however long the pause is, it is not shorter
        # As in ``wake_at``: a difference might round otherwise.
        pause_s = self._least_pause_s(load, now)
        return now >= load.planned_at + pause_s and now >= load.planned_at + pause_s * self._backoff(load, now)

    def pause_s(self, load: Load, now: float) -> float:
        """Seconds for which a plan is used: planning takes a small share of the time, the more there is to plan for."""
        return self._least_pause_s(load, now) * self._backoff(load, now)

    def _backoff(self, load: Load, now: float) -> float:
        """How many times as long a plan is used as it was, since the ones before it changed nothing."""
        if load.is_stale or not load.confirmed or not self._is_as_before(load, now):
            return 1.0
        if not (load.waiting or load.refine) and (load.may_refine or (load.table.counts[PLANNED] and not load.passes)):
            return 1.0  # coarse levels came first, and it is the others' turn
        return float(1 << min(load.confirmed, _MOST_DOUBLINGS))

    def _least_pause_s(self, load: Load, now: float) -> float:
        settings = self._settings
        cost_s = settings.plan_s + settings.plan_chunk_s * load.table.counts[PLANNED]
        if load.is_stale:
            return min(_URGENT_COST * cost_s, settings.replan_s)
        if not load.waiting and not load.refine and self._window.is_open():
            return settings.replan_s  # the link might have something to do
        # Near a deadline every decision counts.
        pause_s = min(_USUAL_COST * cost_s * len(self._loads), max(0.0, load.due - now) / _USUAL_COST)
        return max(settings.replan_s, pause_s)

    def fresh_until(self, load: Load, now: float) -> float:
        """Instant before which a load's plan is not due whatever arrives, unless it becomes stale; -inf where unknown.

        With nothing to ask for a plan depends on the window, before a deadline on the time: both move by themselves.
        """
        if load.due < inf or not (load.waiting or load.refine):
            return -inf
        return load.planned_at + self._least_pause_s(load, now)

    def _is_as_before(self, load: Load, now: float) -> bool:
        """Whether link and engine are what a load's plan took them for, and it shares them with no other load."""
        if not load.confirmed or len(self._loads) > 1 or self._lanes.slowness(now) > 1:
            return False
        rate, low = load.planned_for
        return _is_near(self._link.bandwidth, rate) and _is_near(self._link.bandwidth_low, low)

    def wants_plan(self, load: Load) -> bool:
        """Whether there is something to plan: anything is known, and open or never planned for."""
        return bool(load.docs) and (load.is_undecided or load.first_s is None)

    def refresh(self, load: Load, now: float) -> None:
        """Plan anew unless the plan is fresh."""
        if self.wants_plan(load) and self.is_due(load, now):
            self.plan(load, now)

    def plan(self, load: Load, now: float) -> None:
        """Plan anew, where there is anything to plan."""
        if not self.wants_plan(load):
            return
        self._repairs.choose(load, now)
        request = self._request(load, now)
        plan = self._planned(load, request)
        load.follow(plan, request, now)
        load.planned_for = self._link.bandwidth, self._link.bandwidth_low
        # Finer levels that may still come keep jobs beside the link waiting.
        hides = load.due < inf and load.goal.objective != "quality" and not load.in_order.documents
        load.overlapped_s = self._repairs.overlapped_s(load, plan) if hides else 0.0
        if load.first_s is None and load.is_known:
            self._admit(load, plan, now)

    def _admit(self, load: Load, first: Plan, now: float) -> None:
        """Admit a load with its first plan, or refuse it where its goal says so and it would be late."""
        overlapped_s = self._repairs.overlapped_s(load, first)
        load.first_s = now - load.asked_at + first.finish_s - overlapped_s
        load.came, load.asked_floor_s = now, load.floor_s
        if load.due < inf and load.goal.on_late == "refuse" and self._estimates.bandwidth.error < _VAGUE:
            # Those that go first give their quality back where that keeps this one's deadline.
            soonest_s = min(first.finish_s - overlapped_s, self._deadlines.floors_s(load, now))
            margin_s = _MARGIN * (load.due - load.asked_at) + self._deadlines.contention_s(load)
            load.refused_s = max(0.0, now + soonest_s + margin_s - load.due)
        if not load.refused_s:
            self._deadlines.arrivals.add(load.floor_s, now)

    def _request(self, load: Load, now: float) -> PlanRequest:
        costs, settings, link = self._shared.costs_among_many(load), self._settings, self._link
        slowness = self._lanes.slowness(now)
        if slowness > 1:
            costs = replace(costs, prefill=costs.prefill.scaled(slowness))
        rank = self._deadlines.rank(load)
        ahead = [other for other in self._loads.values() if other is not load and self._deadlines.rank(other) < rank]
        link.credit(now)
        backlog_s, beyond_s = self._shared.decode_backlog_s(costs)
        wire, work_s, behind, behind_s, last_s = self._awaited(load)
        closings_s = sum(self._shared.costs_of(other).closing_s(other.prompt_tokens) for other in ahead)
        committed = CommittedWork(
            wire=np.array(wire, np.float64),
            work_s=np.array(work_s, np.float64),
            prefill_s=self._lanes.left_s("prefill", now) + sum(other.compute_s for other in ahead) + closings_s,
            decode_s=self._lanes.left_s("decode", now) + backlog_s + behind_s,
            ahead_bytes=float(behind + sum(other.plan_bytes for other in ahead)),
            last_s=beyond_s if last_s is None else last_s,
        )
        left_s = None if load.due == inf else self._deadlines.left_s(load, costs, now)
        ahead_s = max(0.0, left_s or 0.0)
        base = PlanRequest(
            chunks=_NOTHING, costs=costs, goal=load.goal, bandwidth=link.bandwidth,
            bandwidth_low=link.bandwidth_low if left_s is None else link.low_over(ahead_s), prompt_tokens=0,
            committed=committed, left_s=left_s, lead_s=link.lead_s(now), ttfb_s=link.ttfb_s,
            parallel=settings.max_in_flight, workers=settings.workers, now=now,
            pass_chunks=self._limits.chunks(load, costs, now), last_decode=self._shared.last_decode,
            risk=link.risk(ahead_s) if len(self._loads) == 1 else 0.0,  # several are careful in a way of their own
        )  # fmt: skip
        return load.request(base, alone=len(self._loads) == 1)

    def _awaited(self, load: Load) -> tuple[list[float], list[float], float, float, float | None]:
        """Open fetches in a load's order, each with what link and decode lane do for others before it."""
        wire, work_s, last_s = [], [], None
        size, seconds = 0.0, 0.0
        for fetch in self._link.fetches.values():
            size, seconds = size + fetch.left, seconds + fetch.decode_s
            if fetch.chunk.load == load.number:
                wire.append(size)
                work_s.append(seconds)
                size, seconds, last_s = 0.0, 0.0, fetch.last_s
        return wire, work_s, size, seconds, last_s

    def _planned(self, load: Load, request: PlanRequest) -> Plan:
        """The policy's plan, or everything fetched front to back where that is sooner, since repair hides behind it.

        A plan that computes some of the prompt from text keeps the engine busy until the last chunk is here.
        """
        plan = self._policy.plan(request)
        recomputed, chunks = plan.levels == RECOMPUTE, request.chunks
        soonest = request.left_s is None or request.goal.objective == "earliest"
        if not (load.is_known and load.in_order.wants_order and load.repair_share and soonest and recomputed.any()):
            return plan
        if not (self._policy.preemptible and chunks.can_fetch.all()) or self._link.stalled:
            return plan
        other = self._policy.plan(replace(request, chunks=replace(chunks, can_text=np.zeros_like(chunks.can_text))))
        # What is computed behind the others needs no repair.
        first, front = load.docs[0].tokens, load.front()
        if load.sees_before:
            leading = int(recomputed.argmin()) if not recomputed.all() else len(recomputed)
            front = max(front, int(chunks.tokens[:leading].sum()))
        rows = rows_of(load.repair_share, load.prompt_tokens, first, front)
        costs, tokens = request.costs, load.prompt_tokens
        saved_s = costs.repair_s(tokens) - replace(costs, repair_rows=min(rows, costs.repair_rows)).repair_s(tokens)
        surely = 1.0 if load.in_order.share is not None else _SURELY
        sooner = other.finish_s - self._repairs.overlapped_s(load, other) < surely * (plan.finish_s - saved_s)
        return other if sooner else plan


def _is_near(figure: float, before: float) -> bool:
    return abs(figure - before) <= _NEAR * before


_NOTHING = Columns(
    *(np.zeros(0, np.int64),) * 4, np.zeros((1, 0), np.int64), np.zeros((1, 0)), *(np.zeros(0, np.int64),) * 2,
    np.zeros(0), np.zeros(0, np.bool_), np.zeros(0),
)  # fmt: skip
