"""Passes of different loads that wait for the engine, joined into one where all of them end sooner in sum.

A pass costs a fixed part, on a GPU the reading of all weights, which several share that run as the rows of one. But
rows are padded to the longest, and all end with the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from kvwire.controller import events as ev
from kvwire.controller.lanes import check_seconds
from kvwire.controller.planning import Planner
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.controller.costs import CostModel
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.lanes import Job
    from kvwire.controller.load import Load

_SOONER = 0.99  # what joining must bring the sum of ends down to: less is not worth what estimates are off
_VAIN = 3  # joined passes in a row that an engine could not run; after these it is asked for none for a while
_VAIN_S = 30.0
_MOST_PADDED = 32768
"""Tokens of all rows together, padding and what stands before them included: their caches lie in memory twice."""


@dataclass(frozen=True)
class WaitingPass:
    """A pass that could run now.

    Attributes:
        tokens: New ones.
        context: Tokens before them.
        seconds: That it takes alone.
        limit_s: Seconds from now by which a pass that it is part of must end.
    """

    tokens: int
    context: int
    seconds: float
    limit_s: float = inf


def joined(passes: Sequence[WaitingPass], costs: CostModel, most: int) -> list[int]:
    """Choose which passes run as one, the first among them, so that the sum of all ends becomes less.

    Those that are chosen end together; the others follow, one after the other, in their order. Each is taken in that
    makes the sum less when it is its turn.
    """
    chosen = [0]
    least = sum_of_ends(passes, chosen, costs)
    for number in range(1, len(passes)):
        if len(chosen) == most:
            break
        tried = [*chosen, number]
        rows = [passes[each] for each in tried]
        if len(rows) * sum(max(getattr(row, side) for row in rows) for side in ("tokens", "context")) > _MOST_PADDED:
            continue
        seconds = costs.joined_s([(row.tokens, row.context) for row in rows])
        if seconds > min(row.limit_s for row in rows):
            continue
        ends = sum_of_ends(passes, tried, costs)
        if ends < _SOONER * least:
            chosen, least = tried, ends
    return chosen


def sum_of_ends(passes: Sequence[WaitingPass], chosen: Sequence[int], costs: CostModel) -> float:
    """Work out when passes end, in sum."""
    rows = [passes[number] for number in chosen]
    end = rows[0].seconds if len(rows) == 1 else costs.joined_s([(row.tokens, row.context) for row in rows])
    total = end * len(rows)
    for number, each in enumerate(passes):
        if number not in chosen:
            end += each.seconds
            total += end
    return total


class Joiner(Planner):
    """Has passes of several loads run as one."""

    _in_vain = 0  # joined passes in a row that had to be run one by one
    _vain_until = -inf

    def begin_pass(self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]) -> None:
        """Begin a forward pass over neighbouring chunks of a document, together with others' where that is sooner."""
        able = self._estimates.joined is not None and self._settings.max_joined > 1 and load.joins
        joins = able and len(self._loads) > 1 and not (self._in_vain >= _VAIN and now < self._vain_until)
        if not (joins and self._join(load, doc, run, now, out)):
            self.start_pass(load, doc, run, now, out)

    def _join(self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]) -> bool:
        """Begin a pass together with those of other loads, where that is sooner in sum; returns whether it began."""
        costs = self.costs_of(load)
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
        jobs = [self.pass_job(*waiting[number], now) for number in chosen]
        expected_s = costs.joined_s([(job.tokens, job.context) for job in jobs])
        self.lanes.start("prefill", replace(jobs[0], kind="joined", expected_s=expected_s, others=tuple(jobs[1:])))
        out.append(ev.RecomputeTogether(tuple(map(_asked, jobs))))
        return True

    def _waiting(self, first: Load, now: float) -> Iterator[tuple[Load, DocumentState, list[int]]]:
        """The next passes of other loads that could run now, in the order of their turns."""
        for load in sorted(self._loads.values(), key=self._rank):
            if load is first or load.refused_s or not load.passes or not load.joins:
                continue
            if not load.is_known and now - load.known_since < self.link.ttfb_s:
                continue  # as in turns of their own: the other indexes are about to come
            self._refresh(load, now)
            if load.refused_s or not load.passes:
                continue
            costs = self.costs_of(load)
            surest_s = min(self._heard_s(now), self._until_closing_s(load, now), self._sure_s(load, costs, now))
            found = load.passes.next(costs, min(self._pass_limit_s(load, costs, now), surest_s))
            if found and costs.prefill.seconds(*found[0].prefill_span(found[1][0], found[1][-1])) <= surest_s:
                yield load, *found

    def _join_limit_s(self, load: Load, alone_s: float, now: float) -> float:
        """Seconds that a joined pass may take so that a load is still handed over by its cut."""
        doubt_s = min(self._heard_s(now), self._sure_s(load, self.costs_of(load), now), self._settings.max_pass_s)
        if load.due == inf or self._rank(load)[0] or load.plan is None:
            return max(doubt_s, alone_s)
        ends = load.planned_at + load.plan.finish_s - self.costs_of(load).closing_s(load.prompt_tokens)
        return max(alone_s, min(doubt_s, alone_s + self._cut(load) - max(ends, now)))

    def recomputed_together(self, event: ev.RecomputedTogether, now: float) -> None:
        """Take in the end of a joined pass, for each of its loads."""
        job = self.lanes.running("prefill")
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
        self.lanes.end("prefill", "joined", job.chunks, job.load, job.document, now)
        if self._estimates.joined and event.joined and not (event.failed or event.blind):
            self._estimates.joined.add_rows([(each.tokens, each.context) for each in job.passes], event.seconds)
        if event.joined:
            self._in_vain = 0
        elif not (event.failed or event.unfit):
            self._in_vain += 1
            self._vain_until = now + _VAIN_S
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
