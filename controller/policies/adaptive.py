"""The controller's own policy: both resources always busy, the least error that is in time, safe against bad estimates.

Model predictive control over uniform levels and meeting points (see ``forecast.py``): sizes are known from the indexes,
so one estimate of the link gives every finishing time. With a deadline it plans with the bandwidth to rely on (as
RobustMPC does, Yin et al., SIGCOMM 2015), spends what that leaves on single chunks by error removed per byte, and what
turns out to be left on refinements of chunks that are valid already. Slack is carried forward, since every plan is of
what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ..forecast import Timeline, decode_s, unfetched_s, wire_s
from ..repair import LEAST_ERROR, decibels
from ..snapshot import RECOMPUTE, SLOWEST, Plan

if TYPE_CHECKING:
    from ..snapshot import Flags, Floats, Ints, PlanRequest, UpgradeCandidates


_EFFORT = 0.01  # of all quality: what twice the requests and decodes are worth where there is time for them
_MISS = 3.0  # times all quality: whoever set a deadline waits for something
LOOK_SHARE = 0.5
"""Share of the time left that may be gone when a question looks: the rest is for finer levels."""
_LONG = 40.0  # recomputation of that many times a pass's fixed cost can afford one more pass
_LOOKED = 0.8  # of the error, what is expected to be left where as many bytes go to what the question looks at


@dataclass(frozen=True)
class Adaptive:
    """The least that the goal asks for, soonest, while nothing is known of the future but estimates.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "adaptive"
    preemptible: bool = True

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for every open chunk, and name refinements where all are under way."""
        if not request.chunks.count:
            return _only_refine(request)
        if request.goal.objective == "earliest" or request.left_s is None:
            return _earliest(request)
        timeline = Timeline(request, _targets(request), request.bandwidth_low)
        if not (timeline.finish_s <= request.left_s).any():
            return _earliest(request)
        if request.goal.objective == "cheapest":
            score = np.where(timeline.finish_s <= request.left_s, timeline.bytes, np.inf)
            row, split = divmod(int(np.argmin(score)), score.shape[1])
            return _written(request, timeline, row, split, "fewest bytes in time")
        return _best_quality(request, timeline)


def _best_quality(request: PlanRequest, timeline: Timeline) -> Plan:
    """The least error in time, in the order that suits the link and whoever wants to look."""
    row, split = _best(request, timeline)
    if _looking_pays(request, timeline, row, split):
        first = _written(request, timeline, 0, request.chunks.count, "coarse levels first, to see what matters")
        return replace(first, looks=True)
    plan = _upgraded(request, timeline, row, split)
    if not plan.order:
        return _refining(request, plan)  # the link need not wait for what is only computed
    return _insured(request, plan, timeline, (row, split)) if request.risk > 0 else plan


def _best(request: PlanRequest, timeline: Timeline) -> tuple[int, int]:
    """Target and split of the least error in time; of those that are as good as the best, the soonest."""
    feasible = timeline.finish_s <= (inf if request.left_s is None else request.left_s)
    least = float(timeline.error[feasible].min()) + _alike(request)
    score = np.where(feasible & (timeline.error <= least), timeline.finish_s, np.inf)
    return divmod(int(score.argmin()), int(score.shape[1]))


def _alike(request: PlanRequest) -> float:
    """By how much errors, summed over tokens, may differ where only the order of adding is another."""
    return LEAST_ERROR * int(request.chunks.tokens.sum())


def _insured(request: PlanRequest, plan: Plan, timeline: Timeline, at: tuple[int, int]) -> Plan:
    """A plan under which a link that falls makes nothing late, where it costs less than what it may save.

    What recomputation cannot reach before the deadline is made valid at the floor first, then finer; what it can reach
    is fetched last, so that either way stays open. A miss loses more than all quality; requests and decodes of coarse
    levels lose what no longer fits, as a share of decibels.
    """
    far = ~_within_reach(request)
    if not far[list(plan.order)].any():
        return plan
    coarse = Timeline(request, _targets(request), request.bandwidth_low, coarse=far)
    left_s = inf if request.left_s is None else request.left_s
    if not (coarse.finish_s <= left_s).any():
        return plan
    best = _best(request, coarse)
    # The more time a plan leaves, the further the link may fall.
    chance = request.risk * min(1.0, plan.finish_s / left_s)
    lost = _lost(_mixed(request, coarse, *best), _mixed(request, timeline, *at))
    if _EFFORT + lost > _MISS * chance:
        return plan
    first = _written(request, coarse, *best, "coarse levels first")
    return replace(first, order=[column for column in first.order if far[column]])


def _may_look(request: PlanRequest, ready_s: float) -> bool:
    """Whether enough time is left, once all is valid, for what follows from seeing where the question looks.

    ready_s: until the first token, were nothing more fetched then.
    """
    if request.look_s is None or request.left_s is None:
        return False
    closing_s = request.costs.closing_s(request.prompt_tokens)
    base_s = max(request.committed.prefill_s, ready_s - closing_s)
    return base_s + request.look_s <= LOOK_SHARE * (request.left_s - closing_s)


def _looking_pays(request: PlanRequest, timeline: Timeline, row: int, split: int) -> bool:
    """Whether fetching all at the floor, and finer levels where the question looks, leaves less error than a plan."""
    count = request.chunks.count
    if not request.chunks.can_fetch.all() or request.look_s is None or request.left_s is None:
        return False
    layered = request.chunks.layered is None or bool(request.chunks.layered.all())
    if not (layered and _may_look(request, float(timeline.finish_s[0, count]))):
        return False
    finish_s, error = timeline.finish_s[:, count] + request.look_s, timeline.error[:, count]
    fits = int(np.count_nonzero(finish_s <= request.left_s)) - 1
    if fits < 0:
        return False
    after = float(error[fits])
    if fits + 1 < len(error):
        share = (request.left_s - finish_s[fits]) / (finish_s[fits + 1] - finish_s[fits])
        after += float(share * (error[fits + 1] - after))
    tokens = int(request.chunks.tokens.sum())
    looked = (max(float(error[-1]), _LOOKED * after) + _alike(request)) / tokens
    return request.was_to_look or looked < _mixed(request, timeline, row, split)


def _within_reach(request: PlanRequest) -> Flags:
    """Chunks that recomputation alone, from the front, has ready in time ``[n]``."""
    chunks, committed = request.chunks, request.committed
    seconds = np.cumsum(request.prefill_s) + committed.prefill_s + request.costs.closing_s(request.prompt_tokens)
    if request.workers == 1:
        seconds += committed.decode_s + float(committed.work_s.sum())
    return np.asarray(chunks.can_text & (seconds <= (inf if request.left_s is None else request.left_s)))


def _mixed(request: PlanRequest, timeline: Timeline, row: int, split: int) -> float:
    """Error of a candidate, with as many chunks at the next level as the time that it leaves is a share of theirs."""
    error, finish_s = float(timeline.error[row, split]), float(timeline.finish_s[row, split])
    if row + 1 < len(timeline.finish_s) and request.left_s is not None:
        finer = int(np.argmin(timeline.finish_s[row + 1]))
        longer_s = float(timeline.finish_s[row + 1, finer]) - finish_s
        share = min(1.0, (request.left_s - finish_s) / longer_s) if longer_s > 0 else 0.0
        error += share * min(0.0, float(timeline.error[row + 1, finer]) - error)
    return error / int(request.chunks.tokens.sum())


def _lost(error: float, best: float) -> float:
    """Share of the decibels of one error that another one lacks."""
    most = decibels(best)
    return 1 - decibels(error) / most if most > 0 else 0.0


def _targets(request: PlanRequest) -> Ints:
    """Uniform levels to consider ``[targets]``; never empty."""
    goal = request.goal
    finest = max(int(request.chunks.finest.max()), goal.floor)
    return np.arange(goal.floor, min(finest, finest if goal.ceiling is None else goal.ceiling) + 1)


def _earliest(request: PlanRequest) -> Plan:
    """The soonest finish at the floor, by the expected bandwidth: errors to either side cost the same."""
    as_it_is = request if request.refinable is None else replace(request, refinable=None)
    timeline = Timeline(as_it_is, np.array([request.goal.floor]), request.bandwidth)
    split = int(np.argmin(timeline.finish_s[0]))
    worth_it = request.bandwidth > 0 and float(request.prefill_s.sum()) > _LONG * request.costs.prefill.base_s
    if not split and timeline.counts[0] and not len(request.committed.wire) and worth_it:
        # An idle link tells nothing. One chunk, the last that compute would come to, costs little, and may tell much.
        return replace(_written(request, timeline, 0, 1, "soonest"), finish_s=float(timeline.finish_s[0, 0]))
    return _written(request, timeline, 0, split, "soonest")


def _written(request: PlanRequest, timeline: Timeline, row: int, split: int, reason: str) -> Plan:
    order = timeline.order[row, :split]
    levels = np.full(request.chunks.count, RECOMPUTE)
    levels[order] = timeline.levels[row, order]
    finish_s = float(timeline.finish_s[row, split])
    return Plan(
        levels=levels,
        order=order.tolist(),
        finish_s=finish_s,
        error=float(timeline.error[row, split]) / int(request.chunks.tokens.sum()),
        bytes=timeline.fetched_bytes(row, split),
        in_time=request.left_s is None or finish_s <= request.left_s,
        reason=reason,
    )


def _upgraded(request: PlanRequest, timeline: Timeline, row: int, split: int) -> Plan:
    """Give single chunks the next level while the plan stays in time: most error removed per byte first."""
    plan = _written(request, timeline, row, split, "least error in time")
    chunks, order = request.chunks, timeline.order[row, :split]
    levels = plan.levels
    top = chunks.top if request.goal.ceiling is None else np.minimum(chunks.top, request.goal.ceiling)
    able = order[levels[order] < top[order]]
    if not len(able):
        return plan
    now = levels[able]
    more = chunks.sizes[now + 1, able] - chunks.sizes[now, able]
    gain = chunks.tokens[able] * (chunks.errors[now, able] - chunks.errors[now + 1, able])
    # A chunk that grows holds up the link and its own decode; both at once is the most that it can cost.
    costs = more / max(request.bandwidth_low, 1.0) + request.costs.decode.byte_s * more
    best = np.argsort(-gain / np.maximum(more, 1), kind="stable")
    left = (inf if request.left_s is None else request.left_s) - plan.finish_s
    chosen = able[best[: int(np.searchsorted(np.cumsum(costs[best]), left, side="right"))]]
    levels[chosen] += 1
    return Plan(
        levels=levels,
        order=plan.order,
        finish_s=plan.finish_s + float(costs[best[: len(chosen)]].sum()),
        error=float((chunks.tokens * chunks.errors_at(levels)).sum()) / int(chunks.tokens.sum()),
        bytes=int(chunks.bytes_at(levels).sum()),
        in_time=True,
        reason=plan.reason,
        upgraded=frozenset(chosen.tolist()),
    )


def _only_refine(request: PlanRequest) -> Plan:
    """Everything is under way, and ends so and so."""
    finish_s = unfetched_s(request, request.bandwidth_low)
    in_time = request.left_s is None or finish_s <= request.left_s
    return _refining(request, Plan(np.zeros(0, np.int64), (), finish_s, 0.0, 0, in_time, "all is under way"))


def _refining(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with the refinements that still fit before the deadline.

    Most error removed per byte goes first. What is not ready yet counts, but is not asked for.
    """
    some, left_s = request.refinable, request.left_s
    if some is None or request.goal.objective != "quality" or left_s is None:
        return plan
    finer = Refining(request, some)
    if finer.ready_s > left_s:
        return plan
    if _may_look(request, finer.ready_s):
        return replace(plan, looks=True)  # what is fetched now might be nothing that the question looks at
    levels = finer.best_within(left_s)
    order = finer.order(levels)
    order = order[some.ready[order]]
    return replace(plan, refine=order.tolist(), refine_levels=levels[order].tolist())


class Refining:
    """What chunks that are valid or under way could become, and when that would be done; levels are arrays ``[m]``.

    Refinements are asked for up to the level that is wanted in one go, and decoded once, behind all other decoding. The
    link delivers them one after another while earlier ones are decoded.

    Attributes:
        ready_s: Seconds from now to the first token without refinements.
    """

    def __init__(self, request: PlanRequest, some: UpgradeCandidates) -> None:
        """Work out what must be done anyway."""
        self._request, self._some = request, some
        committed = request.committed
        self.ready_s = unfetched_s(request, request.bandwidth_low)
        self._closing_s = request.costs.closing_s(request.prompt_tokens)
        decoding_s = committed.decode_s + float(committed.work_s.sum())
        # With one worker refinements wait for all other work, with two for all other decoding.
        self._lane_s = decoding_s
        if request.workers == 1:
            self._lane_s = self.ready_s - self._closing_s
        first = float(committed.wire.sum()) + committed.ahead_bytes  # what others ask for comes before
        self._link_s = request.lead_s + first / max(request.bandwidth_low, SLOWEST)

    def best_within(self, left_s: float) -> Ints:
        """Levels that remove most error for their bytes, as far as the time goes: of all steps the best ones first.

        A chunk's step counts no more than the one before it, so that none is taken without that.
        """
        some = self._some
        steps, gains = [], []
        before, best, all_ = some.level, np.full(len(some.level), np.inf), np.arange(len(some.level))
        for _ in range(int((some.top - some.level).max(initial=0))):
            after = np.minimum(before + 1, some.top)
            best = np.minimum(best, -self._by_gain(all_, before, after))
            able = np.flatnonzero(before < some.top)
            steps.append(able)
            gains.append(best[able])
            before = after
        if not steps:
            return some.level
        order = np.concatenate(steps)[np.argsort(-np.concatenate(gains), kind="stable")]

        def after_first(count: int) -> Ints:
            return np.asarray(some.level + np.bincount(order[:count], minlength=len(some.level)))

        return after_first(
            bisect_right(range(1, len(order) + 1), left_s, key=lambda count: self.end_s(after_first(count)))
        )

    def order(self, levels: Ints) -> Ints:
        """Candidates that these levels make better, most error removed per byte first."""
        able = np.flatnonzero(levels > self._some.level)
        return able[self._by_gain(able, self._some.level[able], levels[able]).argsort(kind="stable")]

    def _by_gain(self, which: Ints, before: Ints, after: Ints) -> Floats:
        """Error removed per byte, of some candidates, negative so that the largest sorts first ``[which]``."""
        some = self._some
        more = some.sizes[after, which] - some.sizes[before, which]
        gain = some.tokens[which] * (some.errors[before, which] - some.errors[after, which])
        return np.asarray(-gain / np.maximum(more, 1))

    @cached_property
    def _each_s(self) -> tuple[Floats, Floats]:
        """What raising each candidate to each level takes of the link and of the decode lane ``[L, m]``."""
        some, request = self._some, self._request
        more = some.sizes - some.sizes[some.level, np.arange(len(some.level))]
        wire = wire_s(more, request.bandwidth_low)
        return wire, decode_s(request, some.tokens, some.sizes)

    def end_s(self, levels: Ints) -> float:
        """Expect the first token where candidates are raised to some levels."""
        some = self._some
        (raised,) = (levels > some.level).nonzero()
        if not len(raised):
            return self.ready_s
        to, (wires, works) = levels[raised], self._each_s
        wire, work = wires[to, raised].cumsum(), works[to, raised]
        done = work.cumsum()
        end = max(self._lane_s, self._link_s + float((wire - done + work).max())) + float(done[-1])
        return max(self.ready_s, end + self._closing_s)
