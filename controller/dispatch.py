"""Who gets the link and the lanes next, and what for.

Loads are served in the order in which they are due; one without a deadline counts as due after some times what its
first plan expects, so that nobody waits for ever. A load that is late anyway comes after those that can still be in
time, but every fourth turn goes to a late one, to that which has begun nothing for longest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller import events as ev
from kvwire.controller.document_state import ChunkState
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


class Dispatcher(Limits):
    """Hands out what the link and the lanes are free for."""

    def wake_at(self, now: float) -> float:
        """Instant of the next tick that is needed."""
        refining = (load for load in self._loads.values() if load.goal.objective == "quality" and load.is_ready)
        cuts = [self._cut(load) for load in refining]
        undecided = any(load.is_undecided for load in self._loads.values())
        regular = now + _TICK_S if self.link.fetches or undecided else inf
        if undecided and not self.link.fetches and self.lanes.is_free("prefill"):
            regular = now + max(self._settings.replan_s, _LEAST_TICK_S)
        if self._estimates.bandwidth.is_guess and self.link.fetches:
            regular = min(regular, now + max(self.link.waited_s(now), _LEAST_TICK_S))
        return max(now, min([self._stalls_at(now), regular, *(cut for cut in cuts if cut > now)]))

    def add(self, load: Load, doc: DocumentState, now: float) -> None:
        """Choose a new document's variant, and leave out levels that would never fit into memory.

        Args:
            load: Whose document it is.
            doc: State of the document.
            now: The instant, in seconds of the controller's clock.
        """
        if len(doc.variants) > 1:
            self._choose(doc, min(range(len(doc.variants)), key=lambda each: self._score(load, doc, each, now)))
        else:
            self._choose(doc, 0)

    def _choose(self, doc: DocumentState, variant: int) -> None:
        doc.choose(variant)
        fitting = (doc.sizes <= self._settings.memory_bytes).sum(axis=0) - 1
        for chunk in np.flatnonzero(fitting < doc.top).tolist():
            doc.top[chunk] = fitting[chunk]
            doc.note(chunk, f"finer levels exceed the memory bound of {self._settings.memory_bytes} bytes")
            if doc.top[chunk] < 0 and not doc.can_text[chunk]:
                doc.move(chunk, _S.FAILED)

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
        for load in list(self._loads.values()):
            self._conclude(load, now, out)
        if not self._loads:
            return
        self.link.retry(now)
        self.backlog_s = None
        for load in sorted(self._loads.values(), key=lambda load: load.planned_at)[:_PLANS]:
            self._refresh(load, now)
        order = self._order()
        steps = (
            self._decode, self._compute, self._redecode, self._fetch, self._refine, self._reclaim, self._conclude,
        )  # fmt: skip
        for begin in steps:
            for load in order:
                begin(load, now, out)

    def _refresh(self, load: Load, now: float) -> None:
        """Plan anew unless the plan is fresh."""
        idle = not self.link.fetches and not load.waiting
        if now > load.planned_at and (idle or now - load.planned_at >= self._settings.replan_s):
            self._plan(load, now)

    def _rank(self, load: Load) -> tuple[bool, float, int]:
        """Whether a load is late anyway, when it is due, and its number; less goes first."""
        if load.due == inf:
            # Before anything is known of it nobody can tell, and those who are due go first.
            due = inf if load.first_s is None else load.asked_at + self._settings.stretch * load.first_s
            return False, due, load.number
        finish = load.planned_at + load.plan.finish_s if load.plan else -inf
        return finish > load.due, load.due, load.number

    def _order(self) -> list[Load]:
        order = sorted(self._loads.values(), key=self._rank)
        if len(order) > 1 and self.turns % _TURNS == _TURNS - 1:
            late = [load for load in order if self._rank(load)[0] and load.is_undecided]
            longest = min(late, key=lambda load: load.began, default=order[0])
            order.remove(longest)
            order.insert(0, longest)
        return order

    def _plan(self, load: Load, now: float) -> None:
        if not load.is_undecided and (load.first_s is not None or not load.docs):
            return
        request = self._request(load, now)
        load.follow(self._policy.plan(request), request, now)
        if load.first_s is None and load.is_known and load.plan:
            load.first_s = now - load.asked_at + load.plan.finish_s

    def _request(self, load: Load, now: float) -> PlanRequest:
        costs, settings, link = self.costs_among_many(load), self._settings, self.link
        ahead = [other for other in self._loads.values() if self._rank(other) < self._rank(load)]
        fetches = link.fetches
        committed = CommittedWork(
            wire=np.array([fetch.left for fetch in fetches], np.float64),
            work_s=np.array([fetch.decode_s for fetch in fetches], np.float64),
            prefill_s=self.lanes.left_s("prefill", now) + sum(other.compute_s for other in ahead),
            decode_s=self.lanes.left_s("decode", now) + self._backlog_s(costs),
            ahead_bytes=float(sum(other.plan.bytes for other in ahead if other.plan)),
        )
        left_s = None if load.due == inf else load.due - now - settings.reserve_s - self._beside_s(load)
        ahead_s = max(0.0, left_s or 0.0)
        base = PlanRequest(
            chunks=_NOTHING, costs=costs, goal=load.goal, bandwidth=link.bandwidth,
            bandwidth_low=link.bandwidth_low if left_s is None else link.low_over(ahead_s), prompt_tokens=0,
            committed=committed, left_s=left_s, lead_s=link.lead_s(now), ttfb_s=link.ttfb_s,
            parallel=settings.max_in_flight, workers=settings.workers, now=now, risk=link.risk(ahead_s),
        )  # fmt: skip
        return load.request(base)

    def _beside_s(self, load: Load) -> float:
        """Seconds by which fetches of other loads, which share the link with a load's last ones, may hold these up."""
        others = any(other.waiting or other.refine for other in self._loads.values() if other is not load)
        return 2 * self.link.ttfb_s + self._settings.horizon_s if others else 0.0

    def _backlog_s(self, costs: CostModel) -> float:
        """Seconds of decoding for what has arrived, over all loads; worked out once until that changes."""
        if self.backlog_s is not None:
            return self.backlog_s
        seconds = 0.0
        for load in self._loads.values():
            for doc in load.docs:
                if doc.has(_S.ARRIVED, _S.REFINED):
                    chunks = np.flatnonzero((doc.state == _S.ARRIVED) | (doc.state == _S.REFINED))
                    sizes = doc.sizes[doc.level[chunks], chunks]
                    each = costs.decode.token_s * doc.tokens[chunks] + costs.decode.byte_s * sizes
                    seconds += costs.decode.base_s * len(chunks) + float(each.sum())
        self.backlog_s = seconds
        return seconds

    def _decode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if self.lanes.is_free("decode"):
            arrived = load.having(_S.ARRIVED)
            places = [(doc, chunk) for doc, chunk in arrived if doc.prefix_done or not doc.input.prefix_share]
            self.start_decode(load, places[: self._settings.decode_batch], _S.DECODING, now, out)

    def _redecode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode refinements, in one batch, after all that somebody waits for."""
        if self.lanes.is_free("decode"):
            # A forward pass reads what is before it in its document: nothing of that is overwritten meanwhile.
            places = [place for place in load.having(_S.REFINED) if not self._is_extended(place[0])]
            places = places[: self._settings.decode_batch]
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
        for doc in load.docs:
            if doc.prefix_share_left and doc.has(_S.FETCHING, _S.ARRIVED):
                seconds = doc.prefix_share_left * costs.prefill.seconds(int(doc.tokens.sum()))
                doc.prefix_running = True
                self.lanes.start("prefill", Job("head start", load.number, doc.number, (), now, seconds))
                load.began = self.turn()
                out.append(ev.ComputePrefix(load.number, doc.number, doc.variant))
                return
        if not load.is_known and now - load.known_since < self.link.ttfb_s:
            return  # the other indexes are about to come, and may change what is worth computing
        self._refresh(load, now)
        if self._estimates.bandwidth.is_guess:
            self._fetch(load, now, out)
        heard_s = self._heard_s(now)
        sure_s = min(self._sure_s(load, costs, now), heard_s)
        found = load.next_pass(costs, min(self._pass_limit_s(load, costs), sure_s))
        if found is None:
            return
        doc, run = found
        first = run[0]
        least_s = costs.prefill.seconds(*doc.prefill_span(first, first))
        if least_s > heard_s:
            return
        can_fetch = doc.top[first] >= min(load.goal.floor, max(doc.finest, 0))
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
        if load.waiting:
            self._refine(load, now, out)  # where a plan names both, what is valid goes first
        while load.waiting and self._window_open():
            doc, chunk, level = load.waiting[0]
            if doc.state[chunk] != _S.PLANNED or doc.top[chunk] < level:
                load.waiting.pop(0)
                continue
            if not self.make_room(load, doc.size(chunk, level), out):
                return
            load.waiting.pop(0)
            doc.reasons[chunk] = load.reason(doc, chunk)
            doc.move(chunk, _S.FETCHING)
            self.ask(load, (doc, chunk), 0, level, now + self._settings.patience_s, now, out)
            if load.plan:
                load.plan = replace(load.plan, bytes=max(0, load.plan.bytes - doc.size(chunk, level)))

    def _refine(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the refinements that the plan names."""
        cut = self._cut(load)
        while load.refine and now < cut and self._window_open():
            doc, chunk, level = load.refine.pop(0)
            valid = int(doc.valid_level[chunk])
            usable = doc.state[chunk] == _S.READY and doc.held[chunk] and valid < level <= doc.top[chunk]
            if usable and self.held + doc.size(chunk, level) - doc.size(chunk, valid) <= self._settings.memory_bytes:
                doc.move(chunk, _S.REFINING)
                self.ask(load, (doc, chunk), valid + 1, level, cut, now, out)

    def _reclaim(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Give up fetches that idle compute would beat."""
        if not self._policy.preemptible or not self.lanes.is_free("prefill"):
            return
        costs = self.costs_of(load)
        for doc in load.docs:
            if not doc.has(_S.FETCHING):
                continue
            run: list[int] = []
            for chunk in range(doc.ready_before(), doc.count):
                if doc.state[chunk] != _S.FETCHING or not doc.can_text[chunk]:
                    break
                size = doc.size(chunk, int(doc.level[chunk]))
                tokens = int(doc.tokens[chunk])
                ready_s = self.link.arrival_s(doc.id(chunk), now) + costs.decode.seconds(tokens, size)
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
        failed = next(load.having(_S.FAILED), None)
        if failed:
            doc, chunk = failed
            self.end(load, out)
            out.append(ev.Fail(load.number, f"{doc.id(chunk)} cannot be made ready: {doc.troubles[chunk]}"))
        elif load.is_ready and not self._becomes_better(load, now):
            for doc, chunk in [*load.having(_S.REFINED)]:
                self.settle(doc, chunk)
            decisions = tuple(doc.decision(chunk) for doc in load.docs for chunk in range(doc.count))
            self.end(load, out)
            out.append(ev.Finish(load.number, decisions, self._verdict(load, now)))

    def _becomes_better(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for refinements."""
        if load.goal.objective != "quality" or now >= self._cut(load):
            return False
        if load.is_refining():
            return True
        if now - load.planned_at > 0:
            self._plan(load, now)
        return bool(load.refine)

    def _verdict(self, load: Load, now: float) -> str:
        if load.due == inf:
            return "all chunks are ready"
        left = load.due - now - self.costs_of(load).closing_s(load.prompt_tokens)
        return f"in time by {left:.3f} s" if left >= 0 else f"late by {-left:.3f} s"

    def end(self, load: Load, out: list[ev.Instruction]) -> None:
        """Take a load out: its fetches are cancelled and its bytes forgotten.

        Args:
            load: Which one.
            out: Instructions are appended to it.
        """
        for doc, chunk in load.having(_S.FETCHING, _S.REFINING):
            self.link.drop(doc.id(chunk))
            out.append(ev.Cancel(doc.id(chunk), "nobody waits for it any more"))
        for doc in load.docs:
            for chunk in np.flatnonzero(doc.held).tolist():
                self.release(doc, chunk, out)
        del self._loads[load.number]


_NOTHING = Columns(
    *(np.zeros(0, np.int64),) * 4, np.zeros((1, 0), np.int64), np.zeros((1, 0)), *(np.zeros(0, np.int64),) * 2,
    np.zeros(0), np.zeros(0, np.bool_), np.zeros(0),
)  # fmt: skip
