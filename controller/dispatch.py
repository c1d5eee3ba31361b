"""Who gets the link and the lanes next, and what for.

Loads are served in the order in which they are due; one without a deadline counts as due after some times what its
first plan expects, so that nobody waits for ever. A load that is late anyway comes after those that can still be in
time, but every fourth turn goes to a late one, to that which has begun nothing for longest.
"""

from __future__ import annotations

from itertools import chain, product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from . import events as ev
from .chunk_table import FAILED, FETCHING, REFINED, REFINING
from .deadlines import Deadlines
from .decoding import Decoding
from .fetching import Fetching
from .lanes import Job
from .pass_limits import PassLimits
from .passing import Passes
from .planning import Planner
from .repairing import Repairs
from .resources import Resources
from .window import Window

if TYPE_CHECKING:
    from .estimates import Estimates
    from .load import Load
    from .settings import ControllerSettings
    from .snapshot import Policy

_TICK_S = 0.05
_LEAST_TICK_S = 0.001
_TURNS = 4
_PLANS = 4  # plans made for one event, besides those of loads whose turn it is


class Dispatcher:
    """Hands out what the link and the lanes are free for."""

    def __init__(
        self, estimates: Estimates, settings: ControllerSettings, policy: Policy, loads: dict[int, Load]
    ) -> None:
        """Start idle."""
        self.shared = shared = Resources(estimates, settings, policy, loads)
        self._estimates, self._settings, self._loads, self._policy = estimates, settings, loads, policy
        self.link, self.lanes = shared.link, shared.lanes
        self.deadlines = Deadlines(shared)
        self.window = Window(shared, self.deadlines)
        self._limits = PassLimits(shared, self.deadlines)
        self.repairs = Repairs(shared, self.deadlines)
        self.planner = Planner(shared, self.deadlines, self.window, self._limits, self.repairs)
        self._fetching = Fetching(shared, self.deadlines, self.window, self.planner)
        self.passes = Passes(shared, self.deadlines, self._limits, self.planner, self._fetching)
        self._decoding = Decoding(shared, self.deadlines)

    def wake_at(self, now: float) -> float:
        """Instant of the next tick that is needed."""
        known = self.deadlines.known
        moment = self._wakes_at(now)
        self.deadlines.known = known  # asking changes nothing
        return moment

    def _wakes_at(self, now: float) -> float:
        moment, undecided = self.window.stalls_at(now), False
        is_silent, may_compute = not self.link.fetches, self.lanes.is_free("prefill")
        for load in self._loads.values():
            moment = min(moment, load.waits_until if load.waits_until > now else inf)
            if load.is_undecided:
                undecided = True
                waits = self._fetching.waits_until(load)
                moment = min(moment, waits if waits > now else inf)
                idle = is_silent and (may_compute or load.may_refine)
                if (idle or load.is_stale) and self.planner.wants_plan(load):
                    due = load.planned_at + self.planner.pause_s(load, now)
                    moment = min(moment, max(due, now + _LEAST_TICK_S))
            if load.goal.objective == "quality" and load.is_ready:
                cut = self.deadlines.handover_at(load)
                moment = min(moment, cut if cut > now else inf)
        if self.link.fetches or undecided:
            moment = min(moment, now + _TICK_S)
        if self.link.fetches and self.lanes.is_free("prefill") and self._policy.preemptible:
            moment = min(moment, max(self.passes.reclaimed_at + _TICK_S, now + _LEAST_TICK_S))
        moment = min(moment, self._limits.interrupts_at(now), max(self.window.opens_at(now), now + _LEAST_TICK_S))
        if self._estimates.bandwidth.is_guess and self.link.fetches:
            moment = min(moment, now + max(self.link.waited_s(now), _LEAST_TICK_S))
        return max(now, moment)

    def may_begin(self, now: float) -> bool:
        """Whether anything may begin now that a chunk has arrived: cheaper than finding out what."""
        if self.lanes.is_free("decode") or self.window.can_fetch:
            return True
        idle = self.lanes.is_free("prefill")
        if idle and now - self.passes.reclaimed_at >= self._settings.replan_s:
            return True
        for load in self._loads.values():
            if idle and (load.passes or load.has_prefix):
                return True
            may_be_due = (load.is_stale or now >= load.fresh_until) and self.planner.wants_plan(load)
            if may_be_due and self.planner.is_due(load, now):
                return True
        return False

    def act(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, then give free lanes and the link something to do."""
        self.shared.now = now
        self._conclude_all(now, out)
        self.passes.stop(now, out)
        if not self._loads:
            return
        self.link.retry(now)
        self.shared.backlog_s = self.deadlines.known = None
        loads = [load for load in self._loads.values() if self.planner.wants_plan(load)]
        if len(loads) > 1:
            loads.sort(key=lambda load: (not load.is_stale, load.planned_at))
        for load in loads[:_PLANS]:
            self.planner.refresh(load, now)
            if load.refused_s:
                self._conclude(load, now, out)
        order = self._order()
        steps = (
            self._decoding.decode, self.passes.look, self.passes.begin, self._decoding.redecode, self._fetching.fetch,
            self._fetching.refine, self.repairs.begin,
        )  # fmt: skip
        for begin, load in product(steps, order):
            begin(load, now, out)
        if self.lanes.is_free("prefill") and now - self.passes.reclaimed_at >= self._settings.replan_s:
            self.passes.reclaimed_at = now
            for load in order:
                self.passes.reclaim(load, now, out)
        self._conclude_all(now, out)
        self.passes.stop(now, out)
        for load in self._loads.values():
            load.fresh_until = self.planner.fresh_until(load, now)
        self.deadlines.known = None

    def _conclude_all(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, in the order in which they are due."""
        over = [load for load in self._loads.values() if load.may_end]
        for load in sorted(over, key=self.deadlines.rank) if len(over) > 1 else over:
            self._conclude(load, now, out)

    def _order(self) -> list[Load]:
        if len(self._loads) <= 1:
            return [*self._loads.values()]
        order = sorted(self._loads.values(), key=self.deadlines.rank)
        if self.shared.turns % _TURNS == _TURNS - 1:
            late = [load for load in order if self.deadlines.rank(load)[0] and load.is_undecided]
            longest = min(late, key=lambda load: load.began, default=order[0])
            order.remove(longest)
            order.insert(0, longest)
        return order

    def _conclude(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """End a load that is ready or cannot become so."""
        if load.number not in self._loads:
            return
        if load.refused_s:
            self.end(load, now, out)
            out.append(ev.Refuse(load.number, load.refused_s))
        elif load.table.counts[FAILED]:
            doc, chunk = next(load.having(FAILED))
            self.end(load, now, out)
            out.append(ev.Fail(load.number, f"{doc.id(chunk)} cannot be made ready: {doc.troubles[chunk]}"))
        elif load.is_ready and not load.in_order.is_running and not self._becomes_better(load, now):
            for doc, chunk in [*load.having(REFINED)]:
                self.shared.settle(doc, chunk)
            decisions = tuple(chain.from_iterable(doc.decisions() for doc in load.docs))
            self.repairs.settle(load, now)
            costs = self.shared.costs_of(load)
            closing_s = costs.closing_s(load.prompt_tokens)
            verdict = load.goal.verdict(now - load.asked_at + self.lanes.left_s("prefill", now) + closing_s)
            self.end(load, now, out)
            repair_s = costs.repair_s(load.prompt_tokens) / costs.repair_scale
            self.lanes.close(Job("closing", load.number, -1, (), now, closing_s, repair_s=repair_s))
            out.append(ev.Finish(load.number, decisions, verdict, load.repair_share, load.front()))

    def _becomes_better(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for refinements."""
        if load.goal.objective != "quality" or now >= self.deadlines.handover_at(load):
            return False
        if load.is_refining or load.is_looking:
            return True
        if now > load.planned_at and not load.refine:
            self.planner.plan(load, now)
        if load.refine or self.passes.can_look(load, now):
            return True
        if load.wants_look and load.plan and load.plan.looks:  # there is no time for that: it becomes better without
            load.wants_look = False
            self.planner.plan(load, now)
        return bool(load.refine)

    def end(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Take a load out: its fetches are cancelled and its bytes forgotten."""
        for doc, chunk in load.having(FETCHING, REFINING):
            self.link.drop(doc.id(chunk), now)
            out.append(ev.Cancel(doc.id(chunk), "nobody waits for it any more"))
        for at in np.flatnonzero(load.table.look("held")).tolist() if load.table.held_total else ():
            self.shared.release(*load.place(at), out)
        del self._loads[load.number]
        self.deadlines.known = None
