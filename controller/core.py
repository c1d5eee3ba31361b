"""All loads that share a link and an engine as one state machine: events in, instructions out; no clock, no I/O.

``handle`` takes an event in, makes plans anew where they are due, and begins the head of what plans name on each
resource that is free (``starting.py``).
"""

from __future__ import annotations

from itertools import chain, product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import (
    FAILED,
    FETCHING,
    PLANNED,
    REFINED,
    REFINING,
)
from .limits import interrupts_at
from .load import Load
from .outcomes import Outcomes
from .planner import Planner
from .policies.adaptive import Adaptive
from .repairing import Repairs
from .starting import SPARE, Starter
from .state import State
from .workers import Job, check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from .documents import DocumentPlanInput
    from .estimates import Estimates
    from .settings import ControllerSettings
    from .snapshot import Policy

_TICK_S = 0.05  # between looks at loads that wait, and at fetches that compute may beat
_PLANS = 4  # made for one event, besides those of loads whose turn it is: an event takes 2 ms at most


class Controller:
    """Steers loads from ``LoadRequested`` to ``Finish`` or ``Fail``, of which one comes for each that is not abandoned.

    The driver carries out the instructions and reports what happens, and sends a ``Tick`` at ``wake_at``. An
    event that cannot happen in the present state raises ArgumentError and changes nothing; what is still reported of a
    cancelled fetch or of a load that is over is ignored.

    Feeding the recorded events to an equal new controller gives the same instructions, see ``replay``.
    """

    def __init__(
        self,
        estimates: Estimates,
        settings: ControllerSettings,
        policy: Policy | None = None,
        *,
        record: Callable[[ev.LogEntry], object] | None = None,
    ) -> None:
        """Start without loads.

        Args:
            estimates: Updated in place; they may serve other controllers of the same link.
            settings: How loads are steered.
            policy: By default kvwire's own.
            record: Called with every event and its instructions.
        """
        self.estimates = estimates
        self._settings, self._record = settings, record
        self._state = state = State(estimates, settings, policy or Adaptive())
        self._repairs = Repairs(state)
        self._planner = Planner(state, self._repairs)
        self._starter = Starter(state, self._planner)
        self._outcomes = Outcomes(state, self._starter.joining)
        self._now = -inf
        self._wake_at = inf

    @property
    def loads(self) -> dict[int, Load]:
        """Loads under way, by their numbers; to look at."""
        return self._state.loads

    def is_under_way(self, load: int) -> bool:
        """Whether a load is neither abandoned nor assembled."""
        return load in self._state.loads or load in self._state.workers.closings

    @property
    def held_bytes(self) -> int:
        """Bytes that were asked for, have arrived or are kept, over all loads."""
        return self._state.held

    @property
    def wake_at(self) -> float:
        """Instant at which to send a ``Tick`` unless something else happens before; infinite where there is no need."""
        return max(self._now, self._wake_at)

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take in one event.

        Args:
            event: What happened.
            now: The instant, in seconds of any clock that never goes back.

        Returns:
            What to do, in this order.

        Raises:
            ArgumentError: The event cannot happen in the present state; nothing has changed.
        """
        if not (self._now <= now < inf and now > -inf):
            raise ArgumentError(f"time must be finite and never go back: {now} after {self._now}")
        out: list[ev.Instruction] = []
        self._state.now = self._state.link.now = now
        try:
            acts = self._take(event, now, out)  # it raises before it changes anything
        except ArgumentError:
            self._state.now = self._state.link.now = self._now
            raise
        finally:
            self._state.forget()
        if acts:
            self._act(now, out)
            self._wake_at = self._next_wake(now)
            self._state.forget()
        cancelled = {each.chunk for each in out if isinstance(each, ev.Cancel)} if out else None
        if cancelled:
            known = self._outcomes.cancelled | cancelled
            self._outcomes.cancelled = {chunk for chunk in known if chunk.load in self.loads}
        self._now = now
        if self._record:
            self._record(ev.LogEntry(now, event, tuple(out)))
        return out

    # What happened.

    def _take(self, event: ev.Event, now: float, out: list[ev.Instruction]) -> bool:  # noqa: C901, PLR0912, PLR0915 - a case for each event
        """Take in an event; returns whether there may be something to do."""
        state = self._state
        match event:
            # The most frequent ones first, and without patterns for their fields, which take longer.
            case ev.ChunkArrived():
                lost = self._outcomes.arrived(event.chunk, event.level, event.trouble, now, out)
                return lost or self._may_begin(now)
            case ev.TransferProgress():
                self._progressed(event, now)
                return False
            case ev.FirstByte():
                state.link.first_byte(event.seconds, now)
                return False
            case ev.DecodeDone(chunks, seconds):
                self._outcomes.decoded(chunks, (), seconds, "", out)
            case ev.LoadRequested(load):
                if load <= self._outcomes.newest:
                    raise ArgumentError(f"loads are numbered upwards: {load} after {self._outcomes.newest}")
                state.loads[load] = Load(event, now)
                self._outcomes.newest = load
            case ev.IndexKnown(load, document, variants):
                return self._index(load, document, variants, now)
            case ev.PromptAssembled():
                self._outcomes.assembled(event, now)
            case ev.ChunkFailed(chunk, reason):
                return self._outcomes.fetch_failed(chunk, reason)
            case ev.DecodeFailed(chunks, bad, reason):
                self._outcomes.decoded(chunks, bad, None, reason, out)
            case ev.RecomputeDone(chunks, seconds, blind, copied):
                self._outcomes.pass_over(chunks, seconds, blind=blind, copied=copied)
            case ev.RecomputeFailed(chunk, reason):
                self._outcomes.pass_failed(chunk, reason)
            case ev.RecomputeInterrupted(chunks, seconds):
                if not state.workers.is_interrupted:
                    raise ArgumentError("no forward pass was to be stopped; report what became of it")
                self._outcomes.pass_over(chunks, seconds, stopped=True)
            case ev.RecomputedTogether():
                self._outcomes.passes_over(event)
            case ev.PrefixComputed(load, document, seconds):
                check_seconds(seconds)
                state.workers.end("prefill", "head start", (), load, document, now)
                if known := self._outcomes.load(load):
                    doc = known.doc(document)
                    doc.prefix_done, doc.prefix_running = True, False
            case ev.PrefixFailed(load, document, reason):
                self._outcomes.prefix_failed(load, document, reason, out)
            case ev.Looked(load, attention, seconds):
                self._outcomes.looked(load, attention, seconds)
            case ev.RepairDone(load, seconds=seconds):
                check_seconds(seconds)
                self._repairs.ended(event, self._outcomes.load(load))
            case ev.Tick():
                if now >= state.stalls_at():
                    state.link.stall(now)
            case ev.DriverPaused(seconds):
                check_seconds(seconds)
                state.link.paused(seconds, now)
                state.workers.paused(seconds)
            case ev.LoadAbandoned(load):
                known = self._outcomes.load(load)
                state.workers.closed(load, now)
                if known:
                    self._end(known, out)
        return True

    def _index(self, number: int, document: int, variants: tuple[DocumentPlanInput, ...], now: float) -> bool:
        load = self._outcomes.load(number)
        if load is None:
            return False
        self._planner.add(load, load.add(document, variants, now))
        due_at = self._planner.due_at(load, now)
        # What can be done with a document is known once a plan names it.
        self._wake_at = min(self._wake_at, max(due_at, now + self._settings.plan_s))
        return load.is_known or now >= due_at

    def _progressed(self, event: ev.TransferProgress, now: float) -> None:
        guessed = self.estimates.bandwidth.is_guess
        self._state.link.progress(event.bytes, event.started, event.ended)
        for load in self.loads.values() if guessed else ():
            if load.table.counts[PLANNED]:
                load.is_stale = True  # the first bytes tell more than what the plan rests on
                self._wake_at = now
        # What bytes let begin waits for what they bring, which mostly comes at the same instant.
        if self._wake_at > now and self._starter.can_fetch:
            self._wake_at = now

    def _may_begin(self, now: float) -> bool:
        """Whether anything may begin now that a chunk has arrived: cheaper than finding out what."""
        workers = self._state.workers
        if now >= self._wake_at or workers.is_free("decode") or self._starter.can_fetch:
            return True
        return workers.is_free("prefill") and any(load.wants_passes or load.has_prefix for load in self.loads.values())

    # What to do.

    def _act(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, make plans anew, then give free workers and the link something to do."""
        state, planner, starter = self._state, self._planner, self._starter
        self._conclude_all(now, out)
        starter.stop(out)
        if not state.loads:
            return
        state.link.retry(now)
        due = [load for load in state.loads.values() if planner.wants_plan(load) and planner.is_due(load, now)]
        due.sort(key=lambda load: (not load.is_stale, load.planned_at))
        for load in due[:_PLANS]:
            planner.refresh(load, now)
            if load.refused_s:
                self._conclude(load, now, out)
        order = state.order()
        steps = (
            starter.decode, starter.look, starter.compute, starter.redecode, starter.fetch, starter.refine,
            self._repairs.begin,
        )  # fmt: skip
        for begin, load in product(steps, order):
            begin(load, out)
        if state.workers.is_free("prefill") and now - starter.reclaimed_at >= self._settings.replan_s:
            starter.reclaimed_at = now
            for load in order:
                starter.reclaim(load, out)
        self._conclude_all(now, out)
        starter.stop(out)

    def _next_wake(self, now: float) -> float:
        """Instant of the next tick that is needed."""
        state, link, starter = self._state, self._state.link, self._starter
        computes, least = state.workers.is_free("prefill"), now + self._settings.plan_s
        moments, waits = [state.stalls_at(), interrupts_at(state)], bool(link.fetches)
        for load in state.loads.values():
            if load.is_undecided:
                waits = True
                moments.append(starter.waits_until(load))
                idle = not link.fetches and (computes or load.may_refine)
                if (idle or load.is_stale) and self._planner.wants_plan(load):
                    moments.append(max(self._planner.due_at(load, now), least))
            if load.goal.objective == "quality" and load.is_ready:
                moments.append(state.handover_at(load))
        if waits:
            moments.append(now + _TICK_S)
        if link.fetches and computes and state.policy.preemptible:
            moments.append(max(starter.reclaimed_at + _TICK_S, least))
        if any(load.waiting or load.refine for load in state.loads.values()):
            moments.append(max(link.opens_at(now, SPARE), least))
        if self.estimates.bandwidth.is_guess and link.fetches:
            moments.append(max(now + link.waited_s(now), least))
        return min((moment for moment in moments if moment > now), default=inf)

    def _conclude_all(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, in the order in which they are due."""
        over = [load for load in self.loads.values() if load.may_end]
        for load in sorted(over, key=self._state.rank) if len(over) > 1 else over:
            self._conclude(load, now, out)

    def _conclude(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """End a load that is ready or cannot become so."""
        state = self._state
        if load.number not in state.loads:
            return
        if load.refused_s:
            self._end(load, out)
            out.append(ev.Refuse(load.number, load.refused_s))
        elif load.table.counts[FAILED]:
            doc, chunk = next(load.having(FAILED))
            self._end(load, out)
            out.append(ev.Fail(load.number, f"{doc.id(chunk)} cannot be made ready: {doc.troubles[chunk]}"))
        elif load.is_ready and not load.in_order.is_running and not self._becomes_better(load, now):
            for doc, chunk in [*load.having(REFINED)]:
                state.settle(doc, chunk)
            decisions = tuple(chain.from_iterable(doc.decisions() for doc in load.docs))
            self._repairs.settle(load)
            costs = state.costs_of(load)
            closing_s = costs.closing_s(load.prompt_tokens)
            verdict = load.goal.verdict(now - load.asked_at + state.workers.left_s("prefill", now) + closing_s)
            self._end(load, out)
            repair_s = costs.repair_s(load.prompt_tokens) / costs.repair_scale
            state.workers.close(Job("closing", load.number, -1, (), now, closing_s, repair_s=repair_s))
            out.append(ev.Finish(load.number, decisions, verdict, load.repair_share, load.front()))

    def _becomes_better(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for refinements."""
        if load.goal.objective != "quality" or now >= self._state.handover_at(load):
            return False
        if load.is_refining or load.is_looking:
            return True
        if now > load.planned_at and not load.refine:
            self._planner.plan(load, now)
        if load.refine or self._starter.can_look(load):
            return True
        if load.wants_look and load.plan and load.plan.looks:  # there is no time for that: it becomes better without
            load.wants_look = False
            self._planner.plan(load, now)
        return bool(load.refine)

    def _end(self, load: Load, out: list[ev.Instruction]) -> None:
        """Take a load out: its fetches are cancelled and its bytes forgotten."""
        for doc, chunk in load.having(FETCHING, REFINING):
            self._state.link.drop(doc.id(chunk))
            out.append(ev.Cancel(doc.id(chunk), "its load is over"))
        for at in np.flatnonzero(load.table.look("held")).tolist() if load.table.held_total else ():
            self._state.release(*load.place(at), out)
        del self._state.loads[load.number]
        self._state.changed()


def replay(log: list[ev.LogEntry], controller: Controller) -> None:
    """Feed a log's events to a new controller.

    Args:
        log: What a controller recorded.
        controller: A new one with equal settings, estimates and policy.

    Raises:
        ArgumentError: An instruction differs from the log's.
    """
    for number, entry in enumerate(log):
        given = tuple(controller.handle(entry.event, entry.now))
        if given != entry.instructions:
            msg = f"entry {number}: {given} instead of {entry.instructions}; compare policy, settings and estimates"
            raise ArgumentError(msg)
