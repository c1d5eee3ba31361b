"""Which rows of a load are computed anew, and when: at the end, or beside the link."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import READY, RECOMPUTING, VALID
from .repair import beside_link, expected_rows
from .snapshot import RECOMPUTE, SLOWEST, RepairRule
from .workers import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .costs import CostModel, DecodeCost
    from .document_state import DocumentState
    from .load import Load
    from .repair import RepairOption
    from .snapshot import Plan
    from .state import State

_READY = bytes((READY,))


class Repairs:
    """Weighs repaired rows against finer bytes, and computes them where the link takes longer."""

    def __init__(self, state: State) -> None:
        """Start idle."""
        self._state = state

    def choose(self, load: Load) -> None:
        """Weigh repaired rows against finer bytes, by what both take of the time that is left."""
        state, option = self._state, load.repair
        if option is None or not load.is_known or load.in_order.share is not None:
            return
        costs = state.costs_among_many(load)
        if isinstance(state.policy, RepairRule):
            load.repair_share = self._ruled_share(state.policy, option, load, costs)
        elif option.most > option.least and load.goal.objective == "quality" and load.due < inf:
            left_s = state.left_s(load, costs) - state.workers.left_s("prefill", state.now)
            coding = coding_options(load, costs.decode, state.link.bandwidth_low, state.link.lead_s(state.now))
            load.repair_share = option.best(left_s, partial(load.closing_s, costs), coding)
        else:
            load.repair_share = option.least
        state.changed()

    def _ruled_share(self, rule: RepairRule, option: RepairOption, load: Load, costs: CostModel) -> float:
        """What a policy with a rule of its own makes of a load, unless a share was asked for."""
        if option.most <= option.least:
            return option.least
        levels, ceiling = load.table.sizes, load.goal.ceiling
        finest = levels[-1] if ceiling is None else levels[min(ceiling, len(levels) - 1)]
        load_s = sum(finest) / max(self._state.link.bandwidth, SLOWEST)
        return max(option.least, rule.repair_share(load_s, costs.prefill.seconds(load.prompt_tokens, 0)))

    def settle(self, load: Load) -> None:
        """Repair more where time is left over, less where it has run out."""
        state, option = self._state, load.repair
        if option is None or load.due == inf or option.most <= option.least or isinstance(state.policy, RepairRule):
            return
        costs = state.costs_of(load)
        left_s = min(state.left_s(load, costs), state.room_s(load, of_all=True))
        left_s -= state.workers.left_s("prefill", state.now)
        closing_s = partial(load.closing_s, costs)
        # What was planned may use up the reserve: a load that waits for its hand-over hears of it when it is there.
        kept = option.most_within(left_s + state.steady_reserve_s, closing_s, load.repair_share)
        alone = len(state.loads) == 1 and load.goal.objective == "quality"
        more = alone and load.in_order.share is None  # rows that were computed did not see those
        load.repair_share = max(kept, option.most_within(left_s, closing_s, option.most)) if more else kept

    def begin(self, load: Load, out: list[ev.Instruction]) -> None:
        """Compute rows of documents that stay as they are, where the link takes longer for what is left."""
        state, progress = self._state, load.in_order
        if not (load.is_known and progress.may_begin(load.repair_share, has_looked=load.has_looked)):
            return
        if not state.workers.is_free("prefill"):
            return
        last = final_documents(load.docs, progress.documents, {at for at, _ in load.refine}, looked=load.has_looked)
        if last in {progress.documents, progress.refused} or last == len(load.docs):
            return  # what comes after the last chunk is the closing's
        share, front = progress.share or load.repair_share, load.front()
        tokens = [doc.tokens for doc in load.docs]
        rows = expected_rows(share, tokens, front, progress.documents, last, load.links)
        if not rows:
            return
        seen = sum(tokens[:last])
        seconds = replace(state.costs_of(load), repair_rows=rows, repair_looks=False).repair_s(seen)
        if seconds > min(self._beside_link_s(load), state.room_s(load), state.room_s(load, of_all=True)):
            progress.refused = last
            return
        for doc in load.docs[progress.documents : last]:
            for chunk, at in enumerate(range(doc.start, doc.stop)):
                if doc.table.valid_level[at] >= 0:
                    doc.table.top[at] = doc.table.valid_level[at]
                state.release(doc, chunk, out)
        progress.share, progress.is_running = share, True
        progress.front = front if share else None
        state.turn(load)
        state.workers.start("prefill", Job("repair", load.number, last - 1, (), state.now, seconds, context=seen))
        out.append(ev.Repair(load.number, last, share, front))

    def _beside_link_s(self, load: Load) -> float:
        """Seconds that the engine may take for something else before what is left of a load is here."""
        state, table, link = self._state, load.table, self._state.link
        size = float(link.open_bytes + load.plan_bytes + load.refine_bytes)
        link_s = link.lead_s(state.now) + size / max(link.bandwidth, SLOWEST)
        if state.settings.workers > 1:
            return link_s
        cost = state.decode_among_many
        open_s = sum(fetch.decode_s for fetch in link.fetches.values())
        open_s += sum(cost.apart(*other.table.arrived()) for other in state.loads.values())
        named = (*load.refine, *load.waiting)
        return link_s - open_s - sum(cost.seconds(table.tokens[at], table.sizes[level][at]) for at, level in named)

    def ended(self, event: ev.RepairDone, load: Load | None) -> None:
        """End a job, and learn from it."""
        state = self._state
        if min(event.rows, event.left) < 0:
            raise ArgumentError(f"a repair computes 0 rows or more and leaves as many, got {event}")
        job = state.workers.end("prefill", "repair", (), event.load, event.documents - 1, state.now)
        if event.rows and event.seconds and not event.trouble:
            costs = replace(state.estimates.costs(), repair_rows=event.rows, repair_looks=False, repair_scale=1.0)
            if expected_s := costs.repair_s(job.context):
                state.estimates.repair.add(event.seconds / expected_s)
        if load is None:
            return
        progress = load.in_order
        progress.is_running = False
        if event.trouble:
            progress.stop()
        else:
            load.query_tokens -= sum(load.links[progress.documents : event.documents])
            progress.documents, progress.left = event.documents, event.left

    def overlapped_s(self, load: Load, plan: Plan) -> float:
        """Seconds of repair or link tokens that a load's plan has at its end, and that are done beside the link."""
        state, progress = self._state, load.in_order
        begins = load.is_known and progress.may_begin(load.repair_share, has_looked=False)
        if not begins or (plan.levels == RECOMPUTE).any():
            return 0.0
        costs, table, share = state.costs_among_many(load), load.table, load.repair_share
        tokens, front = [doc.tokens for doc in load.docs], load.docs[0].tokens
        level = load.levels_of(plan)
        chunks = [[at for at in range(doc.start, doc.stop) if at in level] for doc in load.docs]
        sizes = [[table.sizes[level[at]][at] for at in row] for row in chunks]
        works = [
            sum(costs.decode.seconds(table.tokens[at], size) for at, size in zip(*row, strict=True))
            for row in zip(chunks, sizes, strict=True)
        ]
        rate, lead_s = max(state.link.bandwidth, SLOWEST), max(state.link.ttfb_s, state.link.lead_s(state.now))
        arrived = [lead_s + size / rate for size in accumulate(map(sum, sizes))]

        def job_s(first: int, last: int) -> float:
            rows = expected_rows(share, tokens, front, first, last, load.links)
            return replace(costs, repair_rows=rows, repair_looks=False).repair_s(sum(tokens[:last]))

        done = beside_link(arrived, works, job_s, state.settings.workers)
        if load.links:
            after = replace(costs, query_tokens=costs.query_tokens - sum(load.links[:done]))
        else:
            left = expected_rows(share, tokens, front, done, len(tokens))
            after = replace(costs, repair_rows=left, repair_looks=False)
        return max(0.0, costs.closing_s(load.prompt_tokens) - after.closing_s(load.prompt_tokens))


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


def coding_options(load: Load, decode: DecodeCost, bandwidth: float, lead_s: float) -> list[tuple[float, float]]:
    """When all chunks could be at a level, and what error they had then, coarsest level first."""
    table, goal = load.table, load.goal
    tokens, held, state, level = (table.look(name) for name in ("tokens", "held", "state", "valid_level"))
    valid = (state >= VALID[0]) & (state <= VALID[-1])
    text = (state == RECOMPUTING) | (valid & (level < 0))
    fetched = np.flatnonzero(valid & (level >= 0))
    sizes, errors = table.sizes_by_level(), table.errors_by_level()
    reached = np.where(text, table.look("exact_error"), inf)  # nothing that is valid becomes worse
    reached[fetched] = errors[level[fetched], fetched]
    finest = len(sizes) - 1
    out = []
    for at in range(min(goal.floor, finest), 1 + (finest if goal.ceiling is None else min(goal.ceiling, finest))):
        more = np.where(text | (valid & (level >= at)), 0, np.maximum(sizes[at] - held, 0))
        size, begun = float(more.sum()), int(np.count_nonzero(more))
        decode_s = decode.apart(begun, float(tokens[more > 0].sum()), size)
        error = float((np.minimum(errors[at], reached) * tokens).sum()) / max(1, int(tokens.sum()))
        out.append((lead_s * (size > 0) + max(size / max(bandwidth, SLOWEST), decode_s), error))
    return out
