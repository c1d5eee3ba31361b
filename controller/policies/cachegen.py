"""CacheGen's controller (arXiv 2310.07240, section 5.3), and what its released artefact does instead.

Both decide for one stretch of the prompt after another, of about 1,500 tokens, whatever documents these are of. Here a
choice is made anew whenever the controller plans, and holds for what is asked for until then: requests follow one
another without a gap, as those of a stream do, and recomputation goes forward by one stretch at a time. A stretch that
is recomputed leaves the link to those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..forecast import Timeline
from ..snapshot import RECOMPUTE, SLOWEST
from .simple import sequential_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..snapshot import Floats, Ints, Plan, PlanRequest

STRETCH_TOKENS = 1536
"""The paper's chunks; several of ours make one."""


@dataclass(frozen=True)
class CacheGen:
    """The paper's rule, causal: the rest of the prompt at the throughput that the link has shown.

    Text, which loses nothing, where recomputing the rest is in time, each document by itself; otherwise the finest
    level at which fetching the rest is, behind what is asked for already; otherwise the coarsest. Decoding and round
    trips count nothing. Without a deadline, text from the front and beside it the coarsest level of what is behind,
    divided where both are done soonest.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "cachegen"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch."""
        bandwidth = max(request.bandwidth, SLOWEST)
        chunks, committed = request.chunks, request.committed
        text = np.where(chunks.can_text, request.prefill_s, 0.0)
        text_s = committed.prefill_s + float(text.sum())
        ahead = committed.ahead_bytes + float(committed.wire.sum())
        sizes = [chunks.bytes_at(chunks.level_for(level)) for level in _levels(request)]
        if request.left_s is None:
            fetch_s = (ahead + _from(sizes[0])) / bandwidth
            done_s = np.maximum(committed.prefill_s + _before(text), fetch_s)
            return _divided(request, done_s)
        closing_s = request.costs.closing_s(request.prompt_tokens)
        fetch = [(ahead + float(size.sum())) / bandwidth + closing_s for size in sizes]
        return _in_time(request, text_s + closing_s, fetch, request.left_s)


@dataclass(frozen=True)
class CacheGenTimed:
    """CacheGen's rule with kvwire's model of time: round trips, decoding, lanes that are busy; see ``Timeline``.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "cachegen-timed"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for the next stretch."""
        levels = np.array(_levels(request))
        timeline = Timeline(replace(request, refinable=None), levels, request.bandwidth)
        if request.left_s is None:
            # Fetched from the back on: so many of them are from each column on.
            behind = _from((timeline.levels[0] >= 0).astype(np.int64))
            return _divided(request, timeline.finish_s[0, np.maximum(behind, timeline.least[0])])
        whole = timeline.finish_s[np.arange(len(levels)), timeline.counts].tolist()
        return _in_time(request, float(timeline.finish_s[0, timeline.least[0]]), whole, request.left_s)


@dataclass(frozen=True)
class CacheGenArtefact:
    """The released artefact's rule, which sees the future: the true bandwidth while the next stretch is sent.

    ``config_selection`` of its ``src/utils.py``: each stretch gets an equal share of the deadline, and what one leaves
    is lost to the others. Levels are tried from the finest on, and the first that takes less than the share is taken;
    text only where none does. Round trips and decoding count nothing, and what text takes does not matter. It knows
    none but loads with a deadline: without one, or behind it, the soonest is taken here, and text counts ``text_s``.

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
        """Decide for the next stretch, and for those behind it until one is fetched."""
        for stretch in _stretches(request):
            chosen = self._choice(request, stretch)
            if chosen != RECOMPUTE:
                return _written(request, chosen, int(stretch[0]))
        return _written(request, RECOMPUTE, request.chunks.count)

    def _choice(self, request: PlanRequest, stretch: Ints) -> int:
        chunks, levels = request.chunks, _levels(request)
        share = int(chunks.tokens[stretch].sum()) / max(request.prompt_tokens, 1)
        budget = (request.goal.deadline_s or 0.0) * share
        true = max(self.bandwidth(request.now, budget if budget > 0 else self.text_s), SLOWEST)
        times = [float(chunks.bytes_at(chunks.level_for(level))[stretch].sum()) / true for level in levels]
        if budget <= 0:
            return levels[0] if times[0] < self.text_s else RECOMPUTE
        fitting = [level for level, seconds in zip(levels, times, strict=True) if seconds < budget]
        return max(fitting, default=RECOMPUTE)


def _levels(request: PlanRequest) -> range:
    """Levels to choose from; never none."""
    goal = request.goal
    most = request.chunks.levels if goal.ceiling is None else min(request.chunks.levels, goal.ceiling + 1)
    return range(goal.floor, max(most, goal.floor + 1))


def _from(values: Ints) -> Ints:
    """Sums from each column to the last, then 0 ``[n + 1]``."""
    return np.append(np.cumsum(values[::-1])[::-1], 0)


def _before(values: Floats) -> Floats:
    """Sums before each column, then of all ``[n + 1]``."""
    return np.append(0.0, np.cumsum(values))


def _stretches(request: PlanRequest) -> list[Ints]:
    """Columns of each stretch, from the front of the prompt on."""
    tokens = request.chunks.tokens
    number = (np.cumsum(tokens) - tokens) // STRETCH_TOKENS
    return np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(number)) + 1) if len(tokens) else []


def _in_time(request: PlanRequest, text_s: float, fetch_s: list[float], left_s: float) -> Plan:
    """Text where it is in time, otherwise the finest level that is, otherwise the coarsest; for all that is left."""
    if text_s <= left_s:
        return _written(request, RECOMPUTE, request.chunks.count)
    levels = _levels(request)
    fitting = [level for level, seconds in zip(levels, fetch_s, strict=True) if seconds <= left_s]
    return _written(request, max(fitting, default=levels[0]), 0)


def _divided(request: PlanRequest, done_s: Floats) -> Plan:
    """Text before a stretch and the coarsest level from it on. done_s: the end, by the first column fetched."""
    starts = np.array([*(int(stretch[0]) for stretch in _stretches(request)), request.chunks.count])
    # Of equals the most text, which loses nothing.
    at = int(starts[::-1][np.argmin(done_s[starts][::-1])])
    return _written(request, RECOMPUTE if at == request.chunks.count else request.goal.floor, at)


def _written(request: PlanRequest, choice: int, first: int) -> Plan:
    """Fetch from a column on, and recompute the next stretch of what is before it; the rest of that is left open.

    What can only be fetched is fetched in any case, what can only be recomputed is recomputed.
    """
    chunks = request.chunks
    floor = chunks.level_for(request.goal.floor)
    levels = np.where((floor == RECOMPUTE) & chunks.can_fetch, chunks.top, floor)
    taken = np.zeros(chunks.count, np.bool_)
    if first:
        stretch = _stretches(request)[0]
        stretch = stretch[stretch < first]
        levels[stretch] = np.where(chunks.can_text, RECOMPUTE, chunks.top)[stretch]
        taken[stretch] = True
    if choice != RECOMPUTE:
        levels[first:] = chunks.level_for(choice)[first:]
        taken[first:] = True
    reason = "text is in time" if choice == RECOMPUTE else "by the throughput so far"
    return sequential_plan(request, levels, np.flatnonzero(taken & (levels >= 0)).tolist(), reason)
