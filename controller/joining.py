"""Passes of different loads that wait for the engine, as rows of one where all of them end sooner in sum.

A pass costs a fixed part, on a GPU the reading of all weights, which the rows of one share. But rows are padded to the
longest, and all end with the last.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .costs import CostModel
    from .document_state import DocumentState
    from .load import Load
    from .settings import ControllerSettings
    from .state import State
    from .workers import Job

    Pass = tuple[Load, DocumentState, list[int]]


class Joining:
    """Chooses which passes run as one."""

    def __init__(self, state: State) -> None:
        """Nothing has failed yet."""
        self._state, self._from = state, 0.0

    def failed(self) -> None:
        """Join no passes for a while: the engine could not run one."""
        self._from = self._state.now + self._state.settings.patience_s

    def is_able(self, load: Load) -> bool:
        """Whether a load's passes may be rows of a joined one."""
        state = self._state
        return bool(state.estimates.joined and state.settings.max_joined > 1 and load.joins and state.now >= self._from)

    def job(self, jobs: list[Job]) -> Job:
        """Passes as one job."""
        costs = self._state.estimates.costs()
        expected_s = costs.joined_s([(each.tokens, each.context) for each in jobs])
        return replace(jobs[0], kind="joined", expected_s=expected_s, others=tuple(jobs[1:]))

    def joined(self, passes: Sequence[Pass]) -> list[Pass]:
        """Choose those that run together, the first among them."""
        state, costs, rows = self._state, self._state.estimates.costs(), []
        for load, doc, run in passes:
            tokens, context = doc.prefill_span(run[0], run[-1])
            rows.append((tokens, context - (0 if load.can_see_before(doc) else doc.before)))
        # No load may get ready later than it can afford; those that take no part wait for the engine, too.
        alone_s = costs.prefill.seconds(*rows[0])
        longest_s = min(state.settings.max_pass_s, *(self._slack_s(load) for load in state.loads.values()))
        return [passes[number] for number in join(rows, costs, state.settings, alone_s + max(0.0, longest_s))]

    def _slack_s(self, load: Load) -> float:
        """Seconds by which a load may get ready later than its plan has it."""
        state = self._state
        if load.due == inf or load.plan is None or state.is_late(load):
            return inf
        ready_at = load.planned_at + load.plan.finish_s - state.costs_of(load).closing_s(load.prompt_tokens)
        return state.handover_at(load) - max(ready_at, state.now)


def join(
    rows: Sequence[tuple[int, int]], costs: CostModel, settings: ControllerSettings, longest_s: float = inf
) -> list[int]:
    """Choose rows of new tokens and context, the first and each with which the sum of all ends becomes less."""
    alone_s = [costs.prefill.seconds(*row) for row in rows]
    chosen, least = [0], sum_of_ends(alone_s, [0], alone_s[0])
    for number in range(1, len(rows)):
        tried = [*chosen, number]
        some = [rows[each] for each in tried]
        padded, seconds = len(some) * sum(map(max, zip(*some, strict=True))), costs.joined_s(some)
        if len(tried) > settings.max_joined or padded > settings.max_joined_tokens or seconds > longest_s:
            continue
        ends = sum_of_ends(alone_s, tried, seconds)
        if ends < least:
            chosen, least = tried, ends
    return chosen


def sum_of_ends(alone_s: Sequence[float], together: Sequence[int], end_s: float) -> float:
    """When passes end, in sum: some together, then the others one after the other."""
    total = end_s * len(together)
    for number, seconds in enumerate(alone_s):
        if number not in together:
            end_s += seconds
            total += end_s
    return total
