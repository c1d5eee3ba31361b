"""Forward passes: which begins next, alone or together with those of other loads, and a look of the question."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import ARRIVED, FETCHING
from .joining import WaitingPass, joined
from .lanes import Job, check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .deadlines import Deadlines
    from .document_state import DocumentState
    from .fetching import Fetching
    from .load import Load
    from .pass_limits import PassLimits
    from .planning import Planner
    from .resources import Resources

_LOOK = 0.5  # share of the time until a load is handed over that a look may take
_MAX_FAILED_JOINS = (
    3  # joined passes in a row that an engine could not run; after these it is asked for none for a while
)
_JOINS_REST_S = 30.0  # without joined passes then


class Passes:
    """Gives the lane for forward passes something to do."""

    def __init__(
        self, shared: Resources, deadlines: Deadlines, limits: PassLimits, planner: Planner, fetching: Fetching
    ) -> None:
        """Start idle."""
        self._shared, self._deadlines, self._limits = shared, deadlines, limits
        self._planner, self._fetching = planner, fetching
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._policy, self._link, self._lanes = shared.policy, shared.link, shared.lanes
        self.reclaimed_at = -inf
        self._failed_joins = 0  # joined passes in a row that had to be run one by one
        self._joins_from = -inf

    def begin(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute a head start that fetched chunks wait for, or the next forward pass of the plan."""
        if not self._lanes.is_free("prefill"):
            return
        costs = self._shared.costs_of(load)
        for doc in load.docs if load.has_prefix else ():
            if doc.prefix_share_left and doc.has(FETCHING, ARRIVED):
                seconds = doc.prefix_share_left * costs.prefill.seconds(doc.tokens)
                doc.prefix_running = True
                self._lanes.start("prefill", Job("head start", load.number, doc.number, (), now, seconds))
                load.began = self._shared.turn()
                out.append(ev.ComputePrefix(load.number, doc.number, doc.variant))
                return
        if not load.is_known and now - load.known_since < self._link.ttfb_s:
            return  # the other indexes are about to come, and may change what is worth computing
        self._planner.refresh(load, now)
        if load.refused_s or not load.passes:
            return
        if self._estimates.bandwidth.is_guess:
            self._fetching.fetch(load, now, out)
        surest_s = min(self._limits.max_unmeasured_s(now), self._deadlines.until_closing_s(load, now))
        sure_s = min(self._limits.max_uncertain_s(load, costs, now), surest_s)
        found = load.passes.next(costs, min(self._limits.limit_s(load, costs, now), sure_s))
        if found is None:
            return
        doc, run = found
        first = run[0]
        least_s = costs.prefill.seconds(*doc.prefill_span(first, first))
        if least_s > surest_s:
            return
        table, at = doc.table, doc.start + first
        can_fetch = table.top[at] >= table.lowest(at, load.goal.floor) >= 0
        if can_fetch and least_s > sure_s:
            # Perhaps too slow even for one chunk: it is fetched as well as the others, and so is what waits for it.
            load.fetch_instead(doc, first)
        else:
            self._begin_pass(load, doc, run, now, out)

    def look(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Run the question on what is valid, before finer levels are fetched."""
        if not (self._lanes.is_free("prefill") and self.can_look(load, now)):
            return
        costs = self._shared.costs_of(load)
        seconds = costs.look_s(load.prompt_tokens)
        load.wants_look, load.is_looking = False, True
        load.began = self._shared.turn()
        job = Job("look", load.number, -1, (), now, seconds)
        self._lanes.start("prefill", job)
        out.append(ev.Look(load.number))

    def can_look(self, load: Load, now: float) -> bool:
        """Whether there is enough time to see where the question looks, and to fetch finer levels for that."""
        if not (load.wants_look and load.plan and load.plan.looks and load.is_ready):
            return False
        look_s = self._shared.costs_of(load).look_s(load.prompt_tokens) * self._estimates.prefill.high
        left_s = _LOOK * (self._deadlines.handover_at(load) - now) - self._lanes.left_s("prefill", now)
        return look_s <= min(left_s, self._deadlines.until_closing_s(load, now))

    def reclaim(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Give up fetches that idle compute would beat."""
        if not self._policy.preemptible or not self._lanes.is_free("prefill"):
            return
        if not load.table.counts[FETCHING]:
            return
        costs, table = self._shared.costs_of(load), load.table
        for number in sorted({chunk.document for chunk in self._link.fetches if chunk.load == load.number}):
            doc = load.doc(number)
            run: list[int] = []
            for chunk in range(doc.ready_before(), doc.count):
                at = doc.start + chunk
                if table.state[at] != FETCHING or not table.can_text[at]:
                    break
                decode_s = costs.decode.seconds(table.tokens[at], doc.size(chunk, table.level[at]))
                ready_s = self._link.arrival_s(doc.id(chunk), now) + decode_s
                if ready_s <= self._settings.cancel_margin * costs.prefill.seconds(
                    *doc.prefill_span((run or [chunk])[0], chunk)
                ):
                    break
                run.append(chunk)
            if run:
                self._shared.give_up(load, doc, run, now, out)
                return

    def stop(self, now: float, out: list[ev.Instruction]) -> None:
        """Stop the forward pass that runs where it is too slow, or nobody waits for it."""
        job = self._lanes.running("prefill")
        if job is None or (now < job.overdue_at and job.load in self._loads):
            return  # ``interrupts_at`` would be later, and takes longer to find out
        if now >= self._limits.interrupts_at(now):
            out.append(ev.Interrupt(self._lanes.interrupt().chunks[0]))

    def _begin_pass(
        self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]
    ) -> None:
        """Begin a forward pass over neighbouring chunks of a document, together with others' where that is sooner."""
        able = self._estimates.joined is not None and self._settings.max_joined > 1 and load.joins
        joins = (
            able and len(self._loads) > 1 and not (self._failed_joins >= _MAX_FAILED_JOINS and now < self._joins_from)
        )
        if not (joins and self._join(load, doc, run, now, out)):
            self._shared.start_pass(load, doc, run, now, out)

    def _join(self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]) -> bool:
        """Begin a pass together with those of other loads, where that is sooner in sum; returns whether it began."""
        costs = self._shared.costs_of(load)
        waiting = [(load, doc, run), *self._waiting(load, now)]
        if len(waiting) == 1:
            return False
        passes, alone_s = [], 0.0
        for each, each_doc, each_run in waiting:
            tokens, context = each_doc.prefill_span(each_run[0], each_run[-1])
            context -= 0 if each.can_see_before(each_doc) else each_doc.before
            seconds = costs.prefill.seconds(tokens, context)
            alone_s += seconds
            passes.append(WaitingPass(tokens, context, seconds, self._join_limit_s(each, alone_s, now)))
        # Whoever takes no part may need the lane as soon as the first pass alone would leave it.
        others = [each for each in self._loads.values() if all(each is not known for known, *_ in waiting)]
        free_s = min((self._join_limit_s(each, passes[0].seconds, now) for each in others), default=inf)
        passes = [replace(each, limit_s=min(each.limit_s, free_s)) for each in passes]
        chosen = joined(passes, costs, self._settings.max_joined)
        if len(chosen) == 1:
            return False
        jobs = [self._shared.pass_job(*waiting[number], now) for number in chosen]
        expected_s = costs.joined_s([(job.tokens, job.context) for job in jobs])
        self._lanes.start("prefill", replace(jobs[0], kind="joined", expected_s=expected_s, others=tuple(jobs[1:])))
        out.append(ev.RecomputeTogether(tuple(map(_asked, jobs))))
        return True

    def _waiting(self, first: Load, now: float) -> Iterator[tuple[Load, DocumentState, list[int]]]:
        """The next passes of other loads that could run now, in the order of their turns."""
        for load in sorted(self._loads.values(), key=self._deadlines.rank):
            if load is first or load.refused_s or not load.passes or not load.joins:
                continue
            if not load.is_known and now - load.known_since < self._link.ttfb_s:
                continue  # as in turns of their own: the other indexes are about to come
            self._planner.refresh(load, now)
            if load.refused_s or not load.passes:
                continue
            costs = self._shared.costs_of(load)
            surest_s = min(
                self._limits.max_unmeasured_s(now),
                self._deadlines.until_closing_s(load, now),
                self._limits.max_uncertain_s(load, costs, now),
            )
            found = load.passes.next(costs, min(self._limits.limit_s(load, costs, now), surest_s))
            if found and costs.prefill.seconds(*found[0].prefill_span(found[1][0], found[1][-1])) <= surest_s:
                yield load, *found

    def _join_limit_s(self, load: Load, alone_s: float, now: float) -> float:
        """Seconds that a joined pass may take so that a load is still handed over by its cut."""
        doubt_s = min(
            self._limits.max_unmeasured_s(now),
            self._limits.max_uncertain_s(load, self._shared.costs_of(load), now),
            self._settings.max_pass_s,
        )
        if load.due == inf or self._deadlines.rank(load)[0] or load.plan is None:
            return max(doubt_s, alone_s)
        ends = load.planned_at + load.plan.finish_s - self._shared.costs_of(load).closing_s(load.prompt_tokens)
        return max(alone_s, min(doubt_s, alone_s + self._deadlines.handover_at(load) - max(ends, now)))

    def ended_together(self, event: ev.RecomputedTogether, now: float) -> None:
        """Take in the end of a joined pass, for each of its loads."""
        job = self._lanes.running("prefill")
        if job is None or job.kind != "joined" or tuple(map(_asked, job.passes)) != event.passes:
            msg = "no such joined pass is running; report each instruction's outcome once, with exactly its passes"
            raise ArgumentError(msg)
        check_seconds(event.seconds)
        failed = {each.chunk.load: each for each in event.failed}
        ours = {chunk for each in job.passes for chunk in each.chunks}
        firsts = {each.chunks[0] for each in job.passes}
        are_ours = ours.issuperset(each.chunk for each in event.failed) and firsts.issuperset(event.blind)
        are_ours &= {each.load for each in firsts}.issuperset(event.unfit)
        if len(failed) < len(event.failed) or not are_ours:
            msg = (
                "of each pass at most one chunk failed, what was blind is named by its first chunk, and loads that are "
                "unfit are those of the pass"
            )
            raise ArgumentError(msg)
        self._lanes.end("prefill", "joined", job.chunks, job.load, job.document, now)
        if self._estimates.joined and event.joined and not (event.failed or event.blind):
            self._estimates.joined.add_rows([(each.tokens, each.context) for each in job.passes], event.seconds)
        if event.joined:
            self._failed_joins = 0
        elif not (event.failed or event.unfit):
            self._failed_joins += 1
            self._joins_from = now + _JOINS_REST_S
        for each in job.passes:
            load = self._loads.get(each.load)
            if load is None:
                continue
            load.joins &= each.load not in event.unfit
            if each.load in failed:
                load.pass_failed(each, failed[each.load].chunk, failed[each.load].reason)
            else:
                load.pass_ended(each, blind=each.chunks[0] in event.blind)


def _asked(job: Job) -> ev.Recompute:
    return ev.Recompute(job.chunks[0], job.chunks[-1], job.behind)
