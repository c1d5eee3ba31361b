"""CacheGen's controller (arXiv 2310.07240, section 5.3), and what its released artefact does instead.

Both take one stretch of the prompt after another, of about 1,500 tokens, and decide anew for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .base import RECOMPUTE, SLOWEST
from .written import written

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Ints, Plan, PlanRequest

STRETCH_TOKENS = 1536
"""The paper's chunks; several of ours make one."""


@dataclass(frozen=True)
class CacheGen:
    """The paper's rule, causal: the rest of the prompt at the throughput of the previous stretch.

    Text, which loses nothing, where recomputing the rest is in time; otherwise the finest level at which fetching the
    rest is; otherwise the coarsest. Decoding counts nothing, for it overlaps with fetching. Without a deadline, the
    level that is fetched soonest, or text where that is sooner.
    """

    name: str = "cachegen"
    window: int | None = None
    gives_up: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch, once the one before it is here."""
        bandwidth = max(request.throughput or request.bandwidth, SLOWEST)
        chunks, costs = request.chunks, request.costs
        floor, levels = request.goal.floor, chunks.levels
        text_s = request.promised.prefill_s + costs.prefill.seconds(int(chunks.tokens.sum()), 0)
        fetch_s = [float(chunks.bytes_at(chunks.level_for(level)).sum()) / bandwidth for level in range(floor, levels)]
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

    bandwidth: true mean bytes per second over so many seconds from an instant.
    """

    bandwidth: Callable[[float, float], float]
    text_s: float = 0.2
    name: str = "cachegen-artefact"
    window: int | None = None
    gives_up: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch, once the one before it is here."""
        chunks, goal = request.chunks, request.goal
        if not chunks.count:
            return _next_stretch(request, RECOMPUTE)
        total = request.prompt_tokens
        share = int(chunks.tokens[_stretch(request)].sum()) / max(total, 1)
        budget = inf if goal.deadline_s is None else goal.deadline_s * share
        stretch = _stretch(request)
        sizes = [chunks.bytes_at(chunks.level_for(level))[stretch].sum() for level in range(goal.floor, chunks.levels)]
        window = budget if budget < inf else self.text_s
        true = max(self.bandwidth(request.now, window), SLOWEST)
        times = {RECOMPUTE: self.text_s} | {goal.floor + at: float(size) / true for at, size in enumerate(sizes)}
        # Text is exact, then the finer level.
        ranked = [RECOMPUTE, *sorted((level for level in times if level >= 0), reverse=True)]
        fitting = [level for level in ranked if times[level] <= budget] if budget < inf else []
        return _next_stretch(request, fitting[0] if fitting else min(times, key=lambda level: times[level]))


def _stretch(request: PlanRequest) -> Ints:
    """Columns of the next stretch: neighbours of one document."""
    chunks = request.chunks
    if not chunks.count:
        return np.zeros(0, np.int64)
    before = np.cumsum(chunks.tokens) - chunks.tokens
    same = (chunks.document == chunks.document[0]) & (chunks.chunk - chunks.chunk[0] == np.arange(chunks.count))
    return np.flatnonzero(same & (before < STRETCH_TOKENS))


def _next_stretch(request: PlanRequest, choice: int) -> Plan:
    """Start the next stretch unless one is still on its way; what comes behind is left open."""
    chunks = request.chunks
    stretch = _stretch(request)
    rest = chunks.level_for(request.goal.floor)
    levels = np.where(rest == RECOMPUTE, np.where(chunks.top >= 0, chunks.top, RECOMPUTE), rest)
    if choice == RECOMPUTE:
        levels[stretch] = np.where(chunks.can_text[stretch], RECOMPUTE, chunks.top[stretch])
    else:
        levels[stretch] = chunks.level_for(choice)[stretch]
    idle = not len(request.promised.wire)
    order = stretch[levels[stretch] >= 0].tolist() if idle else []
    return written(request, levels, order, "text is in time" if choice == RECOMPUTE else "by the last throughput")
