"""What begins next on the link and on the workers. Every job and fetch starts here, and so does every guard.

1. What is valid is overwritten only if it is valid again, as expected, before the hand-over: ``redecode``.
2. No pass begins that would cross the hand-over of a load that is due earlier: ``_next_pass``.
3. A fetch opens only while less is open than the link surely carries in two round trips and the horizon, and while all
   bytes fit into memory: ``_may_open``.
4. A chunk keeps a way: fetches are given up for passes that beat them, passes for fetches: ``reclaim``, ``stop``.
5. A silent link has rate 0 in every plan: ``Link.bandwidth``.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from . import events as ev
from .chunk_table import (
    ARRIVED,
    DECODING,
    FETCHING,
    PLANNED,
    READY,
    RECOMPUTING,
    REDECODING,
    REFINED,
    REFINING,
    ChunkState,
)
from .costs import busiest
from .joining import Joining
from .limits import interrupts_at, pass_limit_s
from .link import InflightFetch
from .policies.adaptive import LOOK_SHARE
from .state import DOUBT
from .workers import Job

if TYPE_CHECKING:
    from .document_state import DocumentState
    from .load import Load, Place
    from .planner import Planner
    from .state import State

SPARE = 16
"""Fetches are opened when one of so many is over, not for each alone."""


class Starter:
    """Gives the link and the workers something to do."""

    def __init__(self, state: State, planner: Planner) -> None:
        """Start idle."""
        self._state, self._planner = state, planner
        self.joining = Joining(state)
        self.reclaimed_at = -inf

    # Decoding.

    def decode(self, load: Load, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if load.table.counts[ARRIVED] and self._state.workers.is_free("decode"):
            places = (place for place in load.having(ARRIVED) if not place[0].waits_for_prefix)
            batch = [*islice(places, self._state.settings.decode_batch)]
            if load.due < inf and self._state.policy.preemptible and batch and not self._all_decodable(load):
                # What is left of a chunk then waits for time that is left, as a refinement does.
                self._decode(load, batch, DECODING, out, [doc.coarsest(at, load.goal.floor) for doc, at in batch])
            else:
                self._decode(load, batch, DECODING, out)

    def _all_decodable(self, load: Load) -> bool:
        """Whether all that came or is to come can be valid before the hand-over as finely as it comes."""
        state = self._state
        beside_s = load.compute_s if state.settings.workers == 1 else 0.0
        left_s = (state.handover_at(load) - state.now - beside_s) / min(state.estimates.decode.high, DOUBT)
        fetched_s = sum(each.decode_s for each in state.link.fetches.values() if each.chunk.load == load.number)
        return state.decode_among_many.apart(*load.table.arrived()) + fetched_s <= left_s

    def redecode(self, load: Load, out: list[ev.Instruction]) -> None:
        """Decode refinements, in one batch, if what they overwrite is valid again before the hand-over."""
        state = self._state
        if not (load.table.counts[REFINED] and state.workers.is_free("decode")):
            return
        # A forward pass reads what is before it in its document: nothing of that is overwritten meanwhile.
        # Those that are coarsest lose most if they stay so.
        able = [place for place in load.having(REFINED) if not self._is_read(place[0])]
        able.sort(key=lambda place: load.table.valid_level[place[0].start + place[1]])
        left_s = state.handover_at(load) + state.steady_reserve_s / 2 - state.now  # what is expected may use half of it
        if load.due < inf and left_s > 0:
            self._coarsen(load, able, left_s)
        while left_s > 0 and (places := able[: state.settings.decode_batch]):
            count = bisect_right(range(1, len(places) + 1), left_s, key=lambda n: self._decode_s(load, places[:n]))
            if count:
                self._decode(load, places[:count], REDECODING, out)
                return
            state.settle(*places[0])  # there is no time for it, and hardly more later
            state.release(*able.pop(0), out)

    def _coarsen(self, load: Load, able: list[Place], left_s: float) -> None:
        """Decode refinements no finer than all that came, or is about to come, can be decoded in the time left."""
        table, settings, cost = load.table, self._state.settings, self._state.costs_of(load).decode
        at = np.fromiter(table.having(REFINED, REFINING), np.int64)
        level, valid, tokens = table.look("level")[at], table.look("valid_level")[at], table.look("tokens")[at]
        unsure = 1 + min(self._state.estimates.decode.spread, 1.0)
        for cap in range(int(level.max()), 0, -1):
            to = np.maximum(np.minimum(level, cap), valid)
            some = to > valid
            size = table.sizes_by_level()[to, at][some].sum() / settings.decode_threads
            batches = -(-int(some.sum()) // settings.decode_batch)
            seconds = cost.apart(batches, float(tokens[some].sum()) / settings.decode_threads, float(size))
            if seconds * unsure <= left_s:
                break
        for doc, chunk in able:
            place = doc.start + chunk
            to_level = max(cap, table.valid_level[place] + 1)
            if to_level < table.level[place]:
                table.level[place] = table.top[place] = to_level

    def _is_read(self, doc: DocumentState) -> bool:
        """Whether a forward pass that reads a document is running."""
        running = self._state.workers.running("prefill")
        job = next((each for each in running.passes if each.load == doc.load), None) if running else None
        if job is None or job.kind == "head start":
            return False
        if job.kind == "look" or job.behind or job.kind == "repair":
            return job.kind == "look" or doc.number <= job.document
        return doc.number == job.document

    def _decode_s(self, load: Load, places: list[Place]) -> float:
        """Seconds that decoding a batch should not exceed: a standard deviation more than expected."""
        table = load.table
        chunks = [(table.tokens[doc.start + at], doc.size(at, table.level[doc.start + at])) for doc, at in places]
        seconds = self._state.costs_of(load).decode.seconds(*busiest(chunks, self._state.settings.decode_threads))
        return seconds * (1 + min(self._state.estimates.decode.spread, 1.0))

    def _decode(
        self, load: Load, places: list[Place], then: ChunkState, out: list[ev.Instruction],
        to: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Begin to decode a batch, if there is any."""
        if not places:
            return
        state, table = self._state, load.table
        ats = [doc.start + chunk for doc, chunk in places]
        for at in ats:
            table.move(at, then)
        levels = tuple(to or (table.level[at] for at in ats))
        chunks = [(table.tokens[at], table.sizes[level][at]) for at, level in zip(ats, levels, strict=True)]
        tokens, size = busiest(chunks, state.settings.decode_threads)
        seconds = state.costs_of(load).decode.seconds(tokens, size)
        ids = tuple(doc.id(chunk) for doc, chunk in places)
        job = Job("decode", load.number, ids[0].document, ids, state.now, seconds, tokens, 0, size, levels)
        state.workers.start("decode", job)
        state.turn(load)
        out.append(ev.Decode(ids, levels))

    # Forward passes.

    def compute(self, load: Load, out: list[ev.Instruction]) -> None:
        """Compute prefix layers that fetched chunks wait for, or the next forward pass of the plan."""
        state, now = self._state, self._state.now
        if not state.workers.is_free("prefill"):
            return
        for doc in load.docs if load.has_prefix else ():
            if doc.prefix_share_left and doc.has(FETCHING, ARRIVED):
                seconds = doc.prefix_share_left * state.costs_of(load).prefill.seconds(doc.tokens)
                doc.prefix_running = True
                self._occupy(load, Job("head start", load.number, doc.number, (), now, seconds))
                out.append(ev.ComputePrefix(load.number, doc.number, doc.variant))
                return
        if not load.is_known and now - load.known_since < state.link.ttfb_s:
            return  # the other indexes are about to come, and may change what is worth computing
        self._planner.refresh(load, now)
        if load.refused_s or not load.wants_passes:
            return
        if state.estimates.bandwidth.is_guess:
            self.fetch(load, out)
        found = self._next_pass(load)
        if found is None:
            return
        doc, run = found
        others = [(each, *its) for each in self._others(load) if (its := self._next_pass(each))]
        together = self.joining.joined([(load, doc, run), *others]) if others else []
        if len(together) > 1:
            jobs = [self.pass_job(*each) for each in together]
            self._occupy(load, self.joining.job(jobs))
            out.append(ev.RecomputeTogether(tuple(ev.Recompute(j.chunks[0], j.chunks[-1], j.behind) for j in jobs)))
        else:
            self._begin_pass(load, doc, run, out)

    def _others(self, load: Load) -> list[Load]:
        """Loads whose next passes could be rows of one with a load's."""
        if len(self._state.loads) == 1 or not self.joining.is_able(load):
            return []
        order = sorted(self._state.loads.values(), key=self._state.rank)
        return [each for each in order if each is not load and each.wants_passes and self.joining.is_able(each)]

    def _next_pass(self, load: Load) -> tuple[DocumentState, list[int]] | None:
        """A load's next pass; none that would cross the hand-over of a load that is due earlier."""
        state, costs, room_s = self._state, self._state.costs_of(load), self._state.room_s(load)
        if state.estimates.bandwidth.is_guess and state.link.fetches and state.policy.preemptible:
            # The first bytes tell more than any prior: what is computed in vain is at most as long as they took.
            room_s = min(room_s, state.link.waited_s(state.now))
        found = load.next_pass(costs, min(pass_limit_s(state, load, costs), room_s))
        if found is None:
            return None
        doc, (first, *_) = found
        least_s = costs.prefill.seconds(*doc.prefill_span(first, first))
        return found if least_s <= room_s else None

    def _begin_pass(self, load: Load, doc: DocumentState, run: list[int], out: list[ev.Instruction]) -> None:
        job = self.pass_job(load, doc, run)
        self._occupy(load, job)
        out.append(ev.Recompute(job.chunks[0], job.chunks[-1], job.behind))

    def pass_job(self, load: Load, doc: DocumentState, run: list[int]) -> Job:
        """Note that neighbouring chunks of a document are being recomputed."""
        for chunk in run:
            doc.reasons[chunk] = load.reason(doc.start + chunk)
            doc.move(chunk, RECOMPUTING)
            doc.table.level[doc.start + chunk] = -1
        tokens, context = doc.prefill_span(run[0], run[-1])
        behind = load.can_see_before(doc)
        context -= 0 if behind else doc.before
        seconds = self._state.costs_of(load).prefill.seconds(tokens, context)
        load.compute_s = max(0.0, load.compute_s - seconds)
        ids = tuple(doc.id(chunk) for chunk in run)
        job = Job("recompute", load.number, doc.number, ids, self._state.now, seconds, tokens, context, behind=behind)
        self._state.turn(load)
        return job

    def _occupy(self, load: Load, job: Job) -> None:
        self._state.turn(load)
        self._state.workers.start("prefill", job)

    def look(self, load: Load, out: list[ev.Instruction]) -> None:
        """Run the question on what is valid, before finer levels are fetched."""
        if self._state.workers.is_free("prefill") and self.can_look(load):
            seconds = self._state.costs_of(load).look_s(load.prompt_tokens)
            load.wants_look, load.is_looking = False, True
            self._occupy(load, Job("look", load.number, -1, (), self._state.now, seconds))
            out.append(ev.Look(load.number))

    def can_look(self, load: Load) -> bool:
        """Whether there is enough time to see where the question looks, and to fetch finer levels for that."""
        state = self._state
        if not (load.wants_look and load.plan and load.plan.looks and load.is_ready):
            return False
        look_s = state.costs_of(load).look_s(load.prompt_tokens) * state.estimates.prefill.high
        left_s = LOOK_SHARE * (state.handover_at(load) - state.now) - state.workers.left_s("prefill", state.now)
        return look_s <= min(left_s, state.room_s(load))

    def stop(self, out: list[ev.Instruction]) -> None:
        """Stop the forward pass that runs where it is too slow, or no load waits for it."""
        state, job = self._state, self._state.workers.running("prefill")
        if job is None or (state.now < job.overdue_at and job.load in state.loads):
            return  # ``interrupts_at`` would be later, and takes longer to find out
        if state.now >= interrupts_at(state):
            out.append(ev.Interrupt(state.workers.interrupt().chunks[0]))

    def reclaim(self, load: Load, out: list[ev.Instruction]) -> None:
        """Give up fetches that idle compute would beat."""
        state = self._state
        if not (state.workers.is_free("prefill") and state.policy.preemptible and load.table.counts[FETCHING]):
            return
        costs, table = state.costs_of(load), load.table
        arrivals = {chunk: seconds for chunk, seconds in state.link.arrivals(state.now) if chunk.load == load.number}
        for doc in map(load.doc, sorted({chunk.document for chunk in arrivals})):
            run: list[int] = []
            for chunk in range(doc.ready_before(), doc.count):
                at = doc.start + chunk
                if table.state[at] != FETCHING or not table.can_text[at]:
                    break
                ready_s = arrivals[doc.id(chunk)]
                ready_s += costs.decode.seconds(table.tokens[at], doc.size(chunk, table.level[at]))
                pass_s = costs.prefill.seconds(*doc.prefill_span((run or [chunk])[0], chunk))
                if ready_s <= state.settings.cancel_margin * pass_s:
                    break
                run.append(chunk)
            if run:
                self._give_up(load, doc, run, out)
                return

    def _give_up(self, load: Load, doc: DocumentState, run: list[int], out: list[ev.Instruction]) -> None:
        """Cancel the fetches of neighbouring chunks, and recompute these at once."""
        trouble = "nothing arrived for a while" if self._state.link.stalled else "its fetch became slow"
        for chunk in run:
            self._state.link.drop(doc.id(chunk))
            doc.lose(chunk, trouble, fetch=True)
            self._state.hold(doc, chunk, 0)
            load.fallbacks += 1
            out.append(ev.Cancel(doc.id(chunk), trouble))
        self._begin_pass(load, doc, run, out)
        for chunk in run:
            doc.reasons[chunk] = "sooner than its fetch"

    # Fetches.

    @property
    def can_fetch(self) -> bool:
        """Whether fetches that a plan names are worth opening: one at a time on a link with few, several with many."""
        waits = any(load.waiting or load.refine for load in self._state.loads.values())
        return waits and self._state.link.is_open(spare=SPARE)

    def _may_open(self, size: int, load: Load | None, out: list[ev.Instruction]) -> bool:
        """Whether another fetch may open; for a load that waits for it, bytes for refinements make room."""
        state = self._state
        if not state.link.is_open():
            return False
        fits = state.held + size <= state.settings.memory_bytes
        return fits or (load is not None and state.make_room(load, size, out))

    def fetch(self, load: Load, out: list[ev.Instruction]) -> None:
        """Open the fetches that the plan wants next; several at a time where many are open and there is no deadline."""
        state, now = self._state, self._state.now
        alone = load.due == inf and len(state.loads) == 1
        if not state.link.is_open(spare=SPARE if alone else 0) or now < self.waits_until(load):
            return
        self._planner.refresh(load, now)
        if load.refused_s:
            return
        table, until = load.table, now + state.settings.patience_s
        while load.waiting:
            at, level = load.waiting[0]
            if table.state[at] != PLANNED or table.top[at] < level:
                load.waiting.popleft()
                continue
            size = table.sizes[level][at]
            if not self._may_open(size, load, out):
                return
            load.waiting.popleft()
            doc, chunk = load.place(at)
            doc.reasons[chunk] = load.reason(at)
            table.move(at, FETCHING)
            self._ask(load, doc, chunk, 0, level, until, out)
            load.plan_bytes = max(0, load.plan_bytes - size)

    def refine(self, load: Load, out: list[ev.Instruction]) -> None:
        """Open the refinements that the plan names."""
        if not load.refine:
            return
        state, table, until = self._state, load.table, self._state.handover_at(load)
        while load.refine and state.now < until and state.link.is_open():
            at, level = load.refine.popleft()
            valid = table.valid_level[at]
            more = table.sizes[level][at] - (table.sizes[valid][at] if valid >= 0 else 0)
            usable = table.state[at] == READY and table.held[at] and valid < level <= table.top[at]
            if usable and self._may_open(more, None, out):
                doc, chunk = load.place(at)
                doc.move(chunk, REFINING)
                self._ask(load, doc, chunk, valid + 1, level, until, out)

    def _ask(
        self, load: Load, doc: DocumentState, chunk: int, first: int, level: int, until: float,
        out: list[ev.Instruction],
    ) -> None:  # fmt: skip
        """Open a fetch of levels first..level of a chunk."""
        state, table, at, name = self._state, doc.table, doc.start + chunk, doc.id(chunk)
        whole, tokens = table.sizes[level][at], table.tokens[at]
        size = whole - table.sizes[first - 1][at] if first else whole
        table.level[at] = level
        load.asked_bytes += size
        state.hold(doc, chunk, whole)
        state.link.ask(InflightFetch(name, size, state.now, state.decode_among_many.seconds(tokens, whole)))
        state.turn(load)
        out.append(ev.Fetch(name, first, level, size, doc.variant, until))

    def waits_until(self, load: Load) -> float:
        """Instant until which the link waits for indexes that are about to come, too, where there is a deadline."""
        if load.is_known or load.due == inf or not (load.docs and self._state.policy.preemptible):
            return -inf
        return load.known_since + min(self._state.link.ttfb_s, self._state.settings.replan_s)
