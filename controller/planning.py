"""When a load's plan is made anew, what it rests on, and whether a load is taken in by its first one."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller import events as ev
from kvwire.controller.chunk_table import FAILED, PLANNED, READY
from kvwire.controller.lanes import Job
from kvwire.controller.limits import Limits
from kvwire.controller.policies.base import RECOMPUTE, SLOWEST, Columns, CommittedWork, PlanRequest
from kvwire.controller.repair import beside_link, expected_rows, rows_of
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvwire.controller.costs import CostModel
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.load import Load
    from kvwire.controller.policies.base import Plan

_MARGIN = 0.05  # of a deadline: who is admitted in a queue that is full is to be in time
_VAGUE = 0.5  # relative error of a bandwidth by which nobody is refused
_CONFIRMED = 2  # plans that the next ones only confirm are used for up to 2 to that power times as long
_NEAR = 0.02  # share by which a link's estimate may change and nothing has changed
_URGENT, _CALM = 1.0, 20.0  # plans are made after that many times what one costs, at the soonest
_READY = bytes((READY,))
_SURELY = 0.95  # share of a plan's time below which another one is worth taking: what hides is expected, and not sure


class Planner(Limits):
    """Has plans made for loads: seldom enough to cost little, and at once where something has changed."""

    def add(self, load: Load, doc: DocumentState, now: float) -> None:
        """Choose a new document's variant, and leave out levels that would never fit into memory."""
        self._now = now
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

    # When.

    def is_due(self, load: Load, now: float) -> bool:
        """Whether a load's plan is to be made anew by now."""
        if not load.is_stale and now <= load.planned_at:
            return False  # however short the pause is: what was decided since at this instant stands
        if not load.is_stale and now < load.planned_at + self._settings.replan_s:
            return False  # however long the pause is, it is not shorter
        # As in ``wake_at``: a difference might round otherwise.
        pause_s = self._least_pause_s(load, now)
        return now >= load.planned_at + pause_s and now >= load.planned_at + pause_s * self._calm(load, now)

    def _pause_s(self, load: Load, now: float) -> float:
        """Seconds for which a plan is used: planning takes a small share of the time, the more there is to plan for."""
        return self._least_pause_s(load, now) * self._calm(load, now)

    def _calm(self, load: Load, now: float) -> float:
        """How many times as long a plan is used as it was, since the ones before it changed nothing."""
        if load.is_stale or not load.confirmed or not self._is_as_before(load, now):
            return 1.0
        if not (load.waiting or load.refine) and (load.may_refine or (load.table.counts[PLANNED] and not load.passes)):
            return 1.0  # coarse levels came first, and it is the others' turn
        return float(1 << min(load.confirmed, _CONFIRMED))

    def _least_pause_s(self, load: Load, now: float) -> float:
        settings = self._settings
        cost_s = settings.plan_s + settings.plan_chunk_s * load.table.counts[PLANNED]
        if load.is_stale:
            return min(_URGENT * cost_s, settings.replan_s)
        if not load.waiting and not load.refine and self._window_open():
            return settings.replan_s  # the link might have something to do
        # Near a deadline every decision counts.
        pause_s = min(_CALM * cost_s * len(self._loads), max(0.0, load.due - now) / _CALM)
        return max(settings.replan_s, pause_s)

    def _fresh_until(self, load: Load, now: float) -> float:
        """Instant before which a load's plan is not due whatever arrives, unless it becomes stale; -inf where unknown.

        With nothing to ask for a plan depends on the window, before a deadline on the time: both move by themselves.
        """
        if load.due < inf or not (load.waiting or load.refine):
            return -inf
        return load.planned_at + self._least_pause_s(load, now)

    def _is_as_before(self, load: Load, now: float) -> bool:
        """Whether link and engine are what a load's plan took them for, and it shares them with no other load."""
        if not load.confirmed or len(self._loads) > 1 or self.lanes.slowness(now) > 1:
            return False
        rate, low = load.planned_for
        return _is_near(self.link.bandwidth, rate) and _is_near(self.link.bandwidth_low, low)

    def _wants_plan(self, load: Load) -> bool:
        """Whether there is something to plan: anything is known, and open or never planned for."""
        return bool(load.docs) and (load.is_undecided or load.first_s is None)

    def _refresh(self, load: Load, now: float) -> None:
        """Plan anew unless the plan is fresh."""
        if self._wants_plan(load) and self.is_due(load, now):
            self._plan(load, now)

    # What.

    def _plan(self, load: Load, now: float) -> None:
        if not self._wants_plan(load):
            return
        self._choose_repair(load, now)
        request = self._request(load, now)
        plan = self._planned(load, request)
        load.follow(plan, request, now)
        load.planned_for = self.link.bandwidth, self.link.bandwidth_low
        # Finer levels that may still come keep jobs beside the link waiting.
        hides = load.due < inf and load.goal.objective != "quality" and not load.in_order.documents
        load.hidden_s = self._hidden_s(load, plan) if hides else 0.0
        if load.first_s is None and load.is_known:
            self._admit(load, plan, now)

    def _admit(self, load: Load, first: Plan, now: float) -> None:
        """Admit a load with its first plan, or refuse it where its goal says so and it would be late."""
        hidden_s = self._hidden_s(load, first)
        load.first_s = now - load.asked_at + first.finish_s - hidden_s
        load.came, load.asked_floor_s = now, load.floor_s
        if load.due < inf and load.goal.on_late == "refuse" and self._estimates.bandwidth.error < _VAGUE:
            # Those that go first give their quality back where that keeps this one's deadline.
            soonest_s = min(first.finish_s - hidden_s, self._floors_s(load, now))
            margin_s = _MARGIN * (load.due - load.asked_at) + self._beside_s(load)
            load.refused_s = max(0.0, now + soonest_s + margin_s - load.due)
        if not load.refused_s:
            self._demand.add(load.floor_s, now)

    def _request(self, load: Load, now: float) -> PlanRequest:
        costs, settings, link = self.costs_among_many(load), self._settings, self.link
        slowness = self.lanes.slowness(now)
        if slowness > 1:
            costs = replace(costs, prefill=costs.prefill.scaled(slowness))
        rank = self._rank(load)
        ahead = [other for other in self._loads.values() if other is not load and self._rank(other) < rank]
        link.credit(now)
        backlog_s, beyond_s = self._backlog_s(costs)
        wire, work_s, behind, behind_s, last_s = self._awaited(load)
        closings_s = sum(self.costs_of(other).closing_s(other.prompt_tokens) for other in ahead)
        committed = CommittedWork(
            wire=np.array(wire, np.float64),
            work_s=np.array(work_s, np.float64),
            prefill_s=self.lanes.left_s("prefill", now) + sum(other.compute_s for other in ahead) + closings_s,
            decode_s=self.lanes.left_s("decode", now) + backlog_s + behind_s,
            ahead_bytes=float(behind + sum(other.plan_bytes for other in ahead)),
            last_s=beyond_s if last_s is None else last_s,
        )
        left_s = None if load.due == inf else self._left_s(load, costs, now)
        ahead_s = max(0.0, left_s or 0.0)
        base = PlanRequest(
            chunks=_NOTHING, costs=costs, goal=load.goal, bandwidth=link.bandwidth,
            bandwidth_low=link.bandwidth_low if left_s is None else link.low_over(ahead_s), prompt_tokens=0,
            committed=committed, left_s=left_s, lead_s=link.lead_s(now), ttfb_s=link.ttfb_s,
            parallel=settings.max_in_flight, workers=settings.workers, now=now,
            pass_chunks=self._pass_chunks(load, costs, now), last_decode=self.last_decode,
            risk=link.risk(ahead_s) if len(self._loads) == 1 else 0.0,  # several are careful in a way of their own
        )  # fmt: skip
        return load.request(base, alone=len(self._loads) == 1)

    def _awaited(self, load: Load) -> tuple[list[float], list[float], float, float, float | None]:
        """Open fetches in a load's order, each with what link and decode lane do for others before it."""
        wire, work_s, last_s = [], [], None
        size, seconds = 0.0, 0.0
        for fetch in self.link.fetches.values():
            size, seconds = size + fetch.left, seconds + fetch.decode_s
            if fetch.chunk.load == load.number:
                wire.append(size)
                work_s.append(seconds)
                size, seconds, last_s = 0.0, 0.0, fetch.last_s
        return wire, work_s, size, seconds, last_s

    def _backlog_s(self, costs: CostModel) -> tuple[float, float]:
        """Seconds of decoding for what has arrived, over all loads, and beyond that for batches that are not full.

        Worked out once until that changes.
        """
        if self.backlog_s is not None:
            return self.backlog_s
        seconds, beyond_s, cost, settings = 0.0, 0.0, costs.decode, self._settings
        for load in self._loads.values():
            count, tokens, size = load.table.arrived()
            seconds += cost.apart(count, tokens, size)
            last = count % settings.decode_batch
            if last:
                rounds = -(-last // settings.decode_threads)
                batch_s = self.costs_of(load).decode.seconds(tokens * rounds // count, size * rounds // count)
                beyond_s += max(0.0, batch_s - last * cost.seconds(tokens // count, size // count))
        self.backlog_s = seconds, beyond_s
        return self.backlog_s

    # Repair of a load in document order. Such a job costs a pass of its own, which all rows at once would share: it is
    # begun only where it is over, and all that is still to be decoded as well, before the link has brought the rest.

    def _repair(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute rows of documents that stay as they are, where the link takes longer for what is left."""
        state = load.in_order
        if not (load.is_known and state.may_begin(load.repair_share, has_looked=load.has_looked)):
            return
        if not self.lanes.is_free("prefill"):
            return
        raised = {at for at, _ in load.refine}
        last = final_documents(load.docs, state.documents, raised, looked=load.has_looked)
        if last in {state.documents, state.refused} or last == len(load.docs):
            return  # what comes after the last chunk is the closing's
        share, front = state.share or load.repair_share, load.front()
        tokens = [doc.tokens for doc in load.docs]
        rows = expected_rows(share, tokens, front, state.documents, last, load.links)
        if not rows:
            return
        seen = sum(tokens[:last])
        seconds = replace(self.costs_of(load), repair_rows=rows, repair_looks=False).repair_s(seen)
        others_s = min(self._until_others_s(load, now), self._until_closing_s(load, now))
        if seconds > min(self._beside_link_s(load, now), others_s):
            state.refused = last
            return
        for doc in load.docs[state.documents : last]:
            self._settle_document(doc, out)
        state.share, state.is_running = share, True
        state.front = front if share else None
        load.began = self.turn()
        self.lanes.start("prefill", Job("repair", load.number, last - 1, (), now, seconds, context=seen))
        out.append(ev.Repair(load.number, last, share, front))

    def _settle_document(self, doc: DocumentState, out: list[ev.Instruction]) -> None:
        """Have a document stay as it is."""
        table = doc.table
        for chunk in range(doc.count):
            at = doc.start + chunk
            if table.valid_level[at] >= 0:
                table.top[at] = table.valid_level[at]
            self.release(doc, chunk, out)

    def _beside_link_s(self, load: Load, now: float) -> float:
        """Seconds that the engine may take for something else before what is left of a load is here."""
        table, link = load.table, self.link
        size = float(link.open_bytes + load.plan_bytes + load.refine_bytes)
        cost, decode_s = self.costs_among_many(load).decode, 0.0
        for at, level in load.refine:
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        link_s = link.lead_s(now) + size / max(link.bandwidth, SLOWEST)
        if self._settings.workers > 1:
            return link_s
        for at, level in load.waiting:
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        decode_s += (
            sum(fetch.decode_s for fetch in link.fetches.values()) + self._backlog_s(self.costs_among_many(load))[0]
        )
        return link_s - decode_s

    def repaired(self, event: ev.RepairDone, load: Load | None, now: float) -> None:
        """End a job, and learn from it."""
        if min(event.rows, event.left) < 0:
            msg = f"a repair computes 0 rows or more and leaves as many, got {event}"
            raise ArgumentError(msg)
        job = self.lanes.end("prefill", "repair", (), event.load, event.documents - 1, now)
        if event.rows and not event.trouble:
            costs = replace(self._estimates.costs(), repair_rows=event.rows, repair_looks=False, repair_scale=1.0)
            self._estimates.repair.add(costs.repair_s(job.context), event.seconds)
        if load is None:
            return
        state = load.in_order
        state.is_running = False
        if event.trouble:
            state.stop()
        else:
            load.query_tokens -= sum(load.links[state.documents : event.documents])
            state.documents, state.left = event.documents, event.left
        self._known_cuts = None

    def _planned(self, load: Load, request: PlanRequest) -> Plan:
        """The policy's plan, or everything fetched front to back where that is sooner, since repair hides behind it.

        A plan that computes some of the prompt from text keeps the engine busy until the last chunk is here.
        """
        plan = self._policy.plan(request)
        recomputed, chunks = plan.levels == RECOMPUTE, request.chunks
        soonest = request.left_s is None or request.goal.objective == "earliest"
        if not (load.is_known and load.in_order.wants_order and load.repair_share and soonest and recomputed.any()):
            return plan
        if not (self._policy.preemptible and chunks.can_fetch.all()) or self.link.stalled:
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
        sooner = other.finish_s - self._hidden_s(load, other) < surely * (plan.finish_s - saved_s)
        return other if sooner else plan

    def _hidden_s(self, load: Load, plan: Plan) -> float:
        """Seconds of repair or link tokens that a load's plan has at its end, and that are done beside the link."""
        begins = load.in_order.may_begin(load.repair_share, has_looked=False)
        if not (begins and load.is_known) or (plan.levels == RECOMPUTE).any():
            return 0.0
        costs, table, share = self.costs_among_many(load), load.table, load.repair_share
        tokens, front = [doc.tokens for doc in load.docs], load.docs[0].tokens
        level = load.levels_of(plan)
        works, sizes = [], []
        for doc in load.docs:
            chunks = [at for at in range(doc.start, doc.stop) if at in level]
            size = [table.sizes[level[at]][at] for at in chunks]
            sizes.append(sum(size))
            works.append(
                sum(costs.decode.seconds(table.tokens[at], each) for at, each in zip(chunks, size, strict=True))
            )
        rate, lead_s = max(self.link.bandwidth, SLOWEST), max(self.link.ttfb_s, self.link.lead_s(self._now))
        arrived = [lead_s + size / rate for size in accumulate(sizes)]

        def job_s(first: int, last: int) -> float:
            rows = expected_rows(share, tokens, front, first, last, load.links)
            return replace(costs, repair_rows=rows, repair_looks=False).repair_s(sum(tokens[:last]))

        done = beside_link(arrived, works, job_s, self._settings.workers)
        if load.links:
            after = replace(costs, query_tokens=costs.query_tokens - sum(load.links[:done]))
            return max(0.0, costs.closing_s(load.prompt_tokens) - after.closing_s(load.prompt_tokens))
        left = expected_rows(share, tokens, front, done, len(tokens))
        after = replace(costs, repair_rows=left, repair_looks=False)
        return max(0.0, costs.repair_s(load.prompt_tokens) - after.repair_s(load.prompt_tokens))


def final_documents(docs: Sequence[DocumentState], known: int, raised: Collection[int], *, looked: bool) -> int:
    """Documents, from the prompt's beginning on, that stay as they are."""
    for doc in docs[known:]:
        table, part = doc.table, slice(doc.start, doc.stop)
        if table.state[part].strip(_READY):
            break
        # Bytes are kept of what may become finer.
        if any(table.held[part]) and (not looked or any(doc.start <= at < doc.stop for at in raised)):
            break
        known += 1
    return known


def _is_near(figure: float, before: float) -> bool:
    return abs(figure - before) <= _NEAR * before


_NOTHING = Columns(
    *(np.zeros(0, np.int64),) * 4, np.zeros((1, 0), np.int64), np.zeros((1, 0)), *(np.zeros(0, np.int64),) * 2,
    np.zeros(0), np.zeros(0, np.bool_), np.zeros(0),
)  # fmt: skip
