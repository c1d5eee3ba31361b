"""Which rows of a load are computed anew, and when: at the end, or beside the link."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import READY
from .coding import coding_options, finest_bytes
from .lanes import Job
from .repair import beside_link, expected_rows
from .snapshot import RECOMPUTE, SLOWEST, RepairRule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .costs import CostModel
    from .deadlines import Deadlines
    from .document_state import DocumentState
    from .load import Load
    from .repair import RepairOption
    from .resources import Resources
    from .snapshot import Plan

_READY = bytes((READY,))


class Repairs:
    """Weighs repaired rows against finer bytes, and computes them where the link takes longer."""

    def __init__(self, shared: Resources, deadlines: Deadlines) -> None:
        """Start idle."""
        self._shared, self._deadlines = shared, deadlines
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._policy, self._link, self._lanes = shared.policy, shared.link, shared.lanes

    def choose(self, load: Load, now: float) -> None:
        """Weigh repaired rows against finer bytes, by what both take of the time that is left."""
        option = load.repair
        if option is None or not load.is_known or load.in_order.share is not None:
            return
        share, costs = option.least, self._shared.costs_among_many(load)
        if isinstance(self._policy, RepairRule):
            share = self._ruled_share(self._policy, option, load, costs)
        elif option.most > option.least and load.goal.objective == "quality" and load.due < inf:
            left_s = self._deadlines.left_s(load, costs, now) - self._lanes.left_s("prefill", now)
            coding = coding_options(
                load.table, load.goal, costs.decode, self._link.bandwidth_low, self._link.lead_s(now)
            )
            share = option.best(left_s, partial(load.closing_s, costs), coding)
        if share != load.repair_share:
            load.repair_share = share
            self._deadlines.known = None

    def _ruled_share(self, rule: RepairRule, option: RepairOption, load: Load, costs: CostModel) -> float:
        """What a policy with a rule of its own makes of a load, unless a share was asked for."""
        if option.most <= option.least:
            return option.least
        load_s = finest_bytes(load.table, load.goal) / max(self._link.bandwidth, SLOWEST)
        return max(option.least, rule.repair_share(load_s, costs.prefill.seconds(load.prompt_tokens, 0)))

    def settle(self, load: Load, now: float) -> None:
        """Repair more where time is left over, less where it has run out."""
        option = load.repair
        if option is None or load.due == inf or option.most <= option.least or isinstance(self._policy, RepairRule):
            return
        alone = len(self._loads) == 1 and load.goal.objective == "quality"
        left_s = min(
            self._deadlines.left_s(load, self._shared.costs_of(load), now), self._deadlines.until_others_s(load, now)
        )
        left_s -= self._lanes.left_s("prefill", now)
        closing_s = partial(load.closing_s, self._shared.costs_of(load))
        # What was planned may use up the reserve, for who waits for a cut never hears of it before it is over.
        kept = option.most_within(left_s + self._deadlines.steady_reserve_s, closing_s, load.repair_share)
        more = alone and load.in_order.share is None  # rows that were computed did not see those
        load.repair_share = max(kept, option.most_within(left_s, closing_s, option.most)) if more else kept

    def begin(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute rows of documents that stay as they are, where the link takes longer for what is left."""
        state = load.in_order
        if not (load.is_known and state.may_begin(load.repair_share, has_looked=load.has_looked)):
            return
        if not self._lanes.is_free("prefill"):
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
        seconds = replace(self._shared.costs_of(load), repair_rows=rows, repair_looks=False).repair_s(seen)
        others_s = min(self._deadlines.until_others_s(load, now), self._deadlines.until_closing_s(load, now))
        if seconds > min(self._beside_link_s(load, now), others_s):
            state.refused = last
            return
        for doc in load.docs[state.documents : last]:
            self._settle_document(doc, out)
        state.share, state.is_running = share, True
        state.front = front if share else None
        load.began = self._shared.turn()
        self._lanes.start("prefill", Job("repair", load.number, last - 1, (), now, seconds, context=seen))
        out.append(ev.Repair(load.number, last, share, front))

    def _settle_document(self, doc: DocumentState, out: list[ev.Instruction]) -> None:
        """Have a document stay as it is."""
        table = doc.table
        for chunk in range(doc.count):
            at = doc.start + chunk
            if table.valid_level[at] >= 0:
                table.top[at] = table.valid_level[at]
            self._shared.release(doc, chunk, out)

    def _beside_link_s(self, load: Load, now: float) -> float:
        """Seconds that the engine may take for something else before what is left of a load is here."""
        table, link = load.table, self._link
        size = float(link.open_bytes + load.plan_bytes + load.refine_bytes)
        cost, decode_s = self._shared.costs_among_many(load).decode, 0.0
        for at, level in load.refine:
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        link_s = link.lead_s(now) + size / max(link.bandwidth, SLOWEST)
        if self._settings.workers > 1:
            return link_s
        for at, level in load.waiting:
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        decode_s += (
            sum(fetch.decode_s for fetch in link.fetches.values())
            + self._shared.decode_backlog_s(self._shared.costs_among_many(load))[0]
        )
        return link_s - decode_s

    def ended(self, event: ev.RepairDone, load: Load | None, now: float) -> None:
        """End a job, and learn from it."""
        if min(event.rows, event.left) < 0:
            msg = f"a repair computes 0 rows or more and leaves as many, got {event}"
            raise ArgumentError(msg)
        job = self._lanes.end("prefill", "repair", (), event.load, event.documents - 1, now)
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
        self._deadlines.known = None

    def overlapped_s(self, load: Load, plan: Plan) -> float:
        """Seconds of repair or link tokens that a load's plan has at its end, and that are done beside the link."""
        begins = load.in_order.may_begin(load.repair_share, has_looked=False)
        if not (begins and load.is_known) or (plan.levels == RECOMPUTE).any():
            return 0.0
        costs, table, share = self._shared.costs_among_many(load), load.table, load.repair_share
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
        rate, lead_s = max(self._link.bandwidth, SLOWEST), max(self._link.ttfb_s, self._link.lead_s(self._shared.now))
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
