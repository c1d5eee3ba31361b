"""Who gets the link and the lanes next, and what for.

Loads are served in the order in which they are due; one without a deadline counts as due after some times what its
first plan expects, so that nobody waits for ever. A load that is late anyway comes after those that can still be in
time, but every fourth turn goes to a late one, to that which has begun nothing for longest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import islice, product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller import events as ev
from kvwire.controller.chunk_table import ChunkState
from kvwire.controller.lanes import Job
from kvwire.controller.limits import Limits
from kvwire.controller.policies.base import Columns, CommittedWork, PlanRequest

if TYPE_CHECKING:
    from kvwire.controller.costs import CostModel
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.load import Load

_S = ChunkState
_TICK_S = 0.05
_LEAST_TICK_S = 0.001
_TURNS = 4
_PLANS = 4  # plans made for one event, besides those of loads whose turn it is
_MARGIN = 0.05  # of a deadline: who is admitted in a queue that is full is to be in time
_VAGUE = 0.5  # relative error of a bandwidth by which nobody is refused
_OVERDUE = 1.5  # a pass that takes that many times what was expected tells of a slow engine
_URGENT, _CALM = 1.0, 20.0  # plans are made after that many times what one costs, at the soonest


class Dispatcher(Limits):
    """Hands out what the link and the lanes are free for."""

    _reclaimed_at = -inf

    def wake_at(self, now: float) -> float:
        """Instant of the next tick that is needed."""
        known = self._known_cuts
        moment = self._wakes_at(now)
        self._known_cuts = known  # asking changes nothing
        return moment

    def _wakes_at(self, now: float) -> float:
        moment, undecided = self._stalls_at(now), False
        idle = not self.link.fetches and self.lanes.is_free("prefill")
        for load in self._loads.values():
            if load.is_undecided:
                undecided = True
                if self._wants_plan(load) and (idle or load.is_stale):
                    moment = min(moment, max(load.planned_at + self._pause_s(load, now), now + _LEAST_TICK_S))
            if load.goal.objective == "quality" and load.is_ready:
                cut = self._cut(load)
                moment = min(moment, cut if cut > now else inf)
        if self.link.fetches or undecided:
            moment = min(moment, now + _TICK_S)
        if self._estimates.bandwidth.is_guess and self.link.fetches:
            moment = min(moment, now + max(self.link.waited_s(now), _LEAST_TICK_S))
        return max(now, moment)

    def add(self, load: Load, doc: DocumentState, now: float) -> None:
        """Choose a new document's variant, and leave out levels that would never fit into memory.

        Args:
            load: Whose document it is.
            doc: State of the document.
            now: The instant, in seconds of the controller's clock.
        """
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
        hopeless = doc.has(_S.FAILED)
        return hopeless, not plan.in_time, goal if plan.in_time else 0.0, plan.finish_s

    # What comes next.

    def act(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, then give free lanes and the link something to do.

        Args:
            now: The instant, in seconds of the controller's clock.
            out: Instructions are appended to it.
        """
        self._now = now
        self._conclude_all(now, out)
        if not self._loads:
            return
        self.link.retry(now)
        self.backlog_s = self._known_cuts = None
        loads = [load for load in self._loads.values() if self._wants_plan(load)]
        if len(loads) > 1:
            loads.sort(key=lambda load: (not load.is_stale, load.planned_at))
        for load in loads[:_PLANS]:
            self._refresh(load, now)
            if load.refused_s:
                self._conclude(load, now, out)
        order = self._order()
        steps = (self._decode, self._compute, self._redecode, self._fetch, self._refine)
        for begin, load in product(steps, order):
            begin(load, now, out)
        if now - self._reclaimed_at >= self._settings.replan_s:
            self._reclaimed_at = now
            for load in order:
                self._reclaim(load, now, out)
        self._conclude_all(now, out)

    def _conclude_all(self, now: float, out: list[ev.Instruction]) -> None:
        over = [load for load in self._loads.values() if load.may_end]
        for load in sorted(over, key=self._rank) if len(over) > 1 else over:
            self._conclude(load, now, out)

    def is_due(self, load: Load, now: float) -> bool:
        """Whether a load's plan is to be made anew by now.

        Args:
            load: Which one.
            now: The instant, in seconds of the controller's clock.
        """
        return now >= load.planned_at + self._pause_s(load, now)

    def _pause_s(self, load: Load, now: float) -> float:
        """Seconds for which a plan is used: planning takes a small share of the time, the more there is to plan for."""
        settings = self._settings
        cost_s = settings.plan_s + settings.plan_chunk_s * load.table.counts[_S.PLANNED]
        if load.is_stale:
            return min(_URGENT * cost_s, settings.replan_s)
        if not load.waiting and not load.refine and self._window_open():
            return settings.replan_s  # the link might have something to do
        # Near a deadline every decision counts.
        return max(settings.replan_s, min(_CALM * cost_s * len(self._loads), max(0.0, load.due - now) / _CALM))

    def _wants_plan(self, load: Load) -> bool:
        """Whether there is something to plan: anything is known, and open or never planned for."""
        return bool(load.docs) and (load.is_undecided or load.first_s is None)

    def _refresh(self, load: Load, now: float) -> None:
        """Plan anew unless the plan is fresh."""
        if now < load.planned_at + (0.0 if load.is_stale else self._settings.replan_s) or not self._wants_plan(load):
            return
        if now >= load.planned_at + self._pause_s(load, now):  # as in ``wake_at``: a difference might round otherwise
            self._plan(load, now)

    def _order(self) -> list[Load]:
        if len(self._loads) <= 1:
            return [*self._loads.values()]
        order = sorted(self._loads.values(), key=self._rank)
        if self.turns % _TURNS == _TURNS - 1:
            late = [load for load in order if self._rank(load)[0] and load.is_undecided]
            longest = min(late, key=lambda load: load.began, default=order[0])
            order.remove(longest)
            order.insert(0, longest)
        return order

    def _plan(self, load: Load, now: float) -> None:
        if not self._wants_plan(load):
            return
        self._choose_repair(load, now)
        request = self._request(load, now)
        load.follow(self._policy.plan(request), request, now)
        if load.first_s is None and load.is_known and load.plan:
            load.first_s = now - load.asked_at + load.plan.finish_s
            load.came, load.asked_floor_s = now, load.floor_s
            # Those that go first give their quality back where that keeps this one's deadline.
            soonest_s = min(load.plan.finish_s, self._floors_s(load, now))
            margin_s = _MARGIN * (load.due - load.asked_at) + self._beside_s(load)
            late_s = now + soonest_s + margin_s - load.due
            if (
                load.goal.on_late == "refuse"
                and load.due < inf
                and late_s > 0
                and self._estimates.bandwidth.error < _VAGUE
            ):
                load.refused_s = late_s
            else:
                self._demand.add(load.floor_s, now)

    def _request(self, load: Load, now: float) -> PlanRequest:
        costs, settings, link = self.costs_among_many(load), self._settings, self.link
        slowness = self.lanes.slowness(now)
        if slowness > _OVERDUE:
            costs = replace(costs, prefill=costs.prefill.scaled(slowness))
        rank = self._rank(load)
        ahead = [other for other in self._loads.values() if other is not load and self._rank(other) < rank]
        link.credit(now)
        fetches = link.fetches.values()
        closings_s = sum(self.costs_of(other).closing_s(other.prompt_tokens) for other in ahead)
        committed = CommittedWork(
            wire=np.array([fetch.left for fetch in fetches], np.float64),
            work_s=np.array([fetch.decode_s for fetch in fetches], np.float64),
            prefill_s=self.lanes.left_s("prefill", now) + sum(other.compute_s for other in ahead) + closings_s,
            decode_s=self.lanes.left_s("decode", now) + self._backlog_s(costs),
            ahead_bytes=float(sum(other.plan_bytes for other in ahead)),
        )
        left_s = None if load.due == inf else self._left_s(load, costs, now)
        ahead_s = max(0.0, left_s or 0.0)
        base = PlanRequest(
            chunks=_NOTHING, costs=costs, goal=load.goal, bandwidth=link.bandwidth,
            bandwidth_low=link.bandwidth_low if left_s is None else link.low_over(ahead_s), prompt_tokens=0,
            committed=committed, left_s=left_s, lead_s=link.lead_s(now), ttfb_s=link.ttfb_s,
            parallel=settings.max_in_flight, workers=settings.workers, now=now,
            risk=link.risk(ahead_s) if len(self._loads) == 1 else 0.0,  # several are careful in a way of their own
        )  # fmt: skip
        return load.request(base)

    def _backlog_s(self, costs: CostModel) -> float:
        """Seconds of decoding for what has arrived, over all loads; worked out once until that changes."""
        if self.backlog_s is not None:
            return self.backlog_s
        seconds = 0.0
        for load in self._loads.values():
            count, tokens, size = load.table.arrived()
            seconds += costs.decode.base_s * count + costs.decode.token_s * tokens + costs.decode.byte_s * size
        self.backlog_s = seconds
        return seconds

    def _decode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if load.table.counts[_S.ARRIVED] and self.lanes.is_free("decode"):
            places = (place for place in load.having(_S.ARRIVED) if not place[0].waits_for_prefix)
            self.start_decode(load, [*islice(places, self._settings.decode_batch)], _S.DECODING, now, out)

    def _redecode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode refinements, in one batch, after all that somebody waits for."""
        if load.table.counts[_S.REFINED] and self.lanes.is_free("decode"):
            # A forward pass reads what is before it in its document: nothing of that is overwritten meanwhile.
            able = (place for place in load.having(_S.REFINED) if not self._is_extended(place[0]))
            places = [*islice(able, self._settings.decode_batch)]
            left_s = self._cut(load) + self._settings.reserve_s - now
            # Nothing that is valid is overwritten too late.
            count = bisect_right(
                range(1, len(places) + 1), left_s, key=lambda count: self._decode_s(load, places[:count])
            )
            self.start_decode(load, places[:count], _S.REDECODING, now, out)

    def _is_extended(self, doc: DocumentState) -> bool:
        """Whether a forward pass over chunks of a document is running."""
        job = self.lanes.running("prefill")
        return job is not None and job.kind == "recompute" and (job.load, job.document) == (doc.load, doc.number)

    def _compute(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute a head start that fetched chunks wait for, or the next forward pass of the plan."""
        if not self.lanes.is_free("prefill"):
            return
        costs = self.costs_of(load)
        for doc in load.docs if load.has_prefix else ():
            if doc.prefix_share_left and doc.has(_S.FETCHING, _S.ARRIVED):
                seconds = doc.prefix_share_left * costs.prefill.seconds(doc.tokens)
                doc.prefix_running = True
                self.lanes.start("prefill", Job("head start", load.number, doc.number, (), now, seconds))
                load.began = self.turn()
                out.append(ev.ComputePrefix(load.number, doc.number, doc.variant))
                return
        if not load.is_known and now - load.known_since < self.link.ttfb_s:
            return  # the other indexes are about to come, and may change what is worth computing
        self._refresh(load, now)
        if load.refused_s or not load.wants_passes:
            return
        if self._estimates.bandwidth.is_guess:
            self._fetch(load, now, out)
        surest_s = min(self._heard_s(now), self._until_closing_s(load, now))
        sure_s = min(self._sure_s(load, costs, now), surest_s)
        found = load.next_pass(costs, min(self._pass_limit_s(load, costs, now), sure_s))
        if found is None:
            return
        doc, run = found
        first = run[0]
        least_s = costs.prefill.seconds(*doc.prefill_span(first, first))
        if least_s > surest_s:
            return
        table, at = doc.table, doc.start + first
        can_fetch = table.top[at] >= min(load.goal.floor, max(table.finest[at], 0))
        if can_fetch and least_s > sure_s:
            # Perhaps too slow even for one chunk: it is fetched as well as the others.
            load.fetch_instead(doc, first)
        else:
            self.start_pass(load, doc, run, now, out)

    def _fetch(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the fetches that the plan wants next."""
        if not self._window_open():
            return
        self._refresh(load, now)
        if load.refused_s:
            return
        if load.waiting:
            self._refine(load, now, out)  # where a plan names both, what is valid goes first
        table = load.table
        while load.waiting and self._window_open():
            at, level = load.waiting[0]
            if table.state[at] != _S.PLANNED or table.top[at] < level:
                load.waiting.popleft()
                continue
            doc, chunk = load.place(at)
            if not self.make_room(load, doc.size(chunk, level), out):
                return
            load.waiting.popleft()
            doc.reasons[chunk] = load.reason(doc, chunk)
            doc.move(chunk, _S.FETCHING)
            self.ask(load, (doc, chunk), 0, level, now + self._settings.patience_s, now, out)
            load.plan_bytes = max(0, load.plan_bytes - doc.size(chunk, level))

    def _refine(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the refinements that the plan names."""
        if not load.refine:
            return
        cut, table = self._cut(load), load.table
        while load.refine and now < cut and self._window_open():
            at, level = load.refine.popleft()
            valid = table.valid_level[at]
            more = table.sizes[level][at] - (table.sizes[valid][at] if valid >= 0 else 0)
            usable = table.state[at] == _S.READY and table.held[at] and valid < level <= table.top[at]
            if usable and self.held + more <= self._settings.memory_bytes:
                doc, chunk = load.place(at)
                doc.move(chunk, _S.REFINING)
                self.ask(load, (doc, chunk), valid + 1, level, cut, now, out)

    def _reclaim(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Give up fetches that idle compute would beat."""
        if not self._policy.preemptible or not self.lanes.is_free("prefill"):
            return
        if not load.table.counts[_S.FETCHING]:
            return
        costs, table = self.costs_of(load), load.table
        for number in sorted({chunk.document for chunk in self.link.fetches if chunk.load == load.number}):
            doc = load.doc(number)
            run: list[int] = []
            for chunk in range(doc.ready_before(), doc.count):
                at = doc.start + chunk
                if table.state[at] != _S.FETCHING or not table.can_text[at]:
                    break
                decode_s = costs.decode.seconds(table.tokens[at], doc.size(chunk, table.level[at]))
                ready_s = self.link.arrival_s(doc.id(chunk), now) + decode_s
                if ready_s <= self._settings.cancel_margin * costs.prefill.seconds(
                    *doc.prefill_span((run or [chunk])[0], chunk)
                ):
                    break
                run.append(chunk)
            if run:
                self.give_up(load, doc, run, now, out)
                return

    # How loads end.

    def _conclude(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """End a load that is ready or cannot become so."""
        if load.number not in self._loads:
            return
        if load.refused_s:
            self.end(load, now, out)
            out.append(ev.Refuse(load.number, load.refused_s))
        elif load.table.counts[_S.FAILED]:
            doc, chunk = next(load.having(_S.FAILED))
            self.end(load, now, out)
            out.append(ev.Fail(load.number, f"{doc.id(chunk)} cannot be made ready: {doc.troubles[chunk]}"))
        elif load.is_ready and not self._becomes_better(load, now):
            for doc, chunk in [*load.having(_S.REFINED)]:
                self.settle(doc, chunk)
            decisions = tuple(doc.decision(chunk) for doc in load.docs for chunk in range(doc.count))
            self._settle_repair(load, now)
            costs = self.costs_of(load)
            closing_s = costs.closing_s(load.prompt_tokens)
            verdict = load.goal.verdict(now - load.asked_at + self.lanes.left_s("prefill", now) + closing_s)
            self.end(load, now, out)
            repair_s = costs.repair_s(load.prompt_tokens) / costs.repair_scale
            self.lanes.close(Job("closing", load.number, -1, (), now, closing_s, repair_s=repair_s))
            out.append(ev.Finish(load.number, decisions, verdict, load.repair_share))

    def _becomes_better(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for refinements."""
        if load.goal.objective != "quality" or now >= self._cut(load):
            return False
        if load.is_refining:
            return True
        if now > load.planned_at and not load.refine:
            self._plan(load, now)
        return bool(load.refine)

    def end(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Take a load out: its fetches are cancelled and its bytes forgotten.

        Args:
            load: Which one.
            now: The instant, in seconds of the controller's clock.
            out: Instructions are appended to it.
        """
        for doc, chunk in load.having(_S.FETCHING, _S.REFINING):
            self.link.drop(doc.id(chunk), now)
            out.append(ev.Cancel(doc.id(chunk), "nobody waits for it any more"))
        for at in np.flatnonzero(load.table.look("held")).tolist() if load.table.held_total else ():
            self.release(*load.place(at), out)
        del self._loads[load.number]
        self._known_cuts = None


_NOTHING = Columns(
    *(np.zeros(0, np.int64),) * 4, np.zeros((1, 0), np.int64), np.zeros((1, 0)), *(np.zeros(0, np.int64),) * 2,
    np.zeros(0), np.zeros(0, np.bool_), np.zeros(0),
)  # fmt: skip
