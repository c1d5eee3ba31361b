"""CacheGen's controller (arXiv 2310.07240, section 5.3), and what its released artefact does instead.

Both decide for one stretch of the prompt after another, of about 1,500 tokens, whatever documents these are of. Here a
choice is made anew whenever the controller plans, and holds for what is asked for until then: requests follow one
another without a gap, as those of a stream do, and recomputation goes forward by one stretch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.policies.base import RECOMPUTE, SLOWEST
from kvwire.controller.policies.sequential import sequential_plan
from kvwire.controller.policies.timeline import prefill_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.controller.policies.base import Ints, Plan, PlanRequest

STRETCH_TOKENS = 1536
"""The paper's chunks; several of ours make one."""


@dataclass(frozen=True)
class CacheGen:
    """The paper's rule, causal: the rest of the prompt at the throughput that the link has shown.

    Text, which loses nothing, where recomputing the rest is in time, each document by itself; otherwise the finest
    level at which fetching the rest is; otherwise the coarsest. Decoding counts nothing, for it overlaps with fetching.
    Without a deadline, the level that is fetched soonest, or text where that is sooner.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "cachegen"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch."""
        bandwidth = max(request.bandwidth, SLOWEST)
        chunks, costs = request.chunks, request.costs
        floor = request.goal.floor
        text_s = request.committed.prefill_s + float(prefill_s(request)[chunks.can_text].sum())
        sizes = [chunks.bytes_at(chunks.level_for(level)).sum() for level in _levels(request)]
        fetch_s = [float(size) / bandwidth for size in sizes]
        if request.left_s is None:
            choice = RECOMPUTE if text_s <= min(fetch_s, default=inf) else floor
        else:
            left_s = request.left_s - costs.closing_s(request.prompt_tokens)
            fitting = [floor + at for at, seconds in enumerate(fetch_s) if seconds <= left_s]
            choice = RECOMPUTE if text_s <= left_s else max(fitting, default=floor)
        return _next_stretch(request, choice)


@dataclass(frozen=True)
class CacheGenArtefact:
    """The released artefact's rule, which sees the future: the true bandwidth while the next stretch is sent.

    Each stretch gets an equal share of the deadline, and what one leaves is lost to the others; round trips and
    decoding count nothing, and text counts ``text_s`` whatever its length. The most exact choice that fits a share is
    taken, otherwise the quickest.

    Attributes:
        bandwidth: True mean bytes per second over so many seconds from an instant.
        text_s: Seconds that text counts.
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    bandwidth: Callable[[float, float], float]
    text_s: float = 0.2
    name: str = "cachegen-artefact"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch."""
        chunks, goal = request.chunks, request.goal
        stretch = _stretch(request)
        share = int(chunks.tokens[stretch].sum()) / max(request.prompt_tokens, 1)
        budget = inf if goal.deadline_s is None else goal.deadline_s * share
        sizes = [chunks.bytes_at(chunks.level_for(level))[stretch].sum() for level in _levels(request)]
        true = max(self.bandwidth(request.now, budget if 0 < budget < inf else self.text_s), SLOWEST)
        times = {RECOMPUTE: self.text_s} | {goal.floor + at: float(size) / true for at, size in enumerate(sizes)}
        # Text is exact, then the finer level.
        ranked = [RECOMPUTE, *sorted((level for level in times if level >= 0), reverse=True)]
        fitting = [level for level in ranked if times[level] <= budget] if budget < inf else []
        return _next_stretch(request, fitting[0] if fitting else min(times, key=lambda level: times[level]))


def _levels(request: PlanRequest) -> range:
    """Levels to choose from."""
    goal, levels = request.goal, request.chunks.levels
    return range(goal.floor, levels if goal.ceiling is None else min(levels, goal.ceiling + 1))


def _stretch(request: PlanRequest) -> Ints:
    """Columns of the next stretch: the first ones in the prompt."""
    tokens = request.chunks.tokens
    return np.flatnonzero(np.cumsum(tokens) - tokens < STRETCH_TOKENS)


def _next_stretch(request: PlanRequest, choice: int) -> Plan:
    """Recompute the next stretch and leave the rest open, or fetch what the controller asks for before it plans again.

    What can only be fetched is fetched in any case, what can only be recomputed is recomputed.
    """
    chunks = request.chunks
    if choice == RECOMPUTE:
        floor = chunks.level_for(request.goal.floor)
        levels = np.where((floor == RECOMPUTE) & chunks.can_fetch, chunks.top, floor)
        stretch = _stretch(request)
        levels[stretch] = np.where(chunks.can_text, RECOMPUTE, chunks.top)[stretch]
        order = stretch[levels[stretch] >= 0]
        return sequential_plan(request, levels, order.tolist(), "text is in time")
    levels = chunks.level_for(choice)
    return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), "by the throughput so far")
