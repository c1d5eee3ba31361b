"""Each policy's rule, on requests made by hand or at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import CostModel, DecodeCost, Goal, PrefillCost
from kvwire.controller.policies import (
    RECOMPUTE,
    Adaptive,
    CacheGen,
    CacheGenArtefact,
    CacheGenTimed,
    Fixed,
    PlanRequest,
    Raw,
    TextOnly,
)
from kvwire.controller.policies.cachegen import STRETCH_TOKENS
from kvwire.controller.snapshot import SLOWEST, CommittedWork, UpgradeCandidates
from kvwire.errors import ArgumentError

from .naive_timeline import fetch_order, finish_naive, splits
from .requests import LEVELS, columns, plan_requests

COSTS = CostModel(PrefillCost(0.0, 1e-4), DecodeCost(0.0, 0.0), 0.0)


def request(chunks=3, *, tokens=512, top=3, text=True, deadline_s=None, objective="quality", bandwidth=1e6, **more):
    """One document of equal chunks: 10, 30, 90 and 270 bytes for each token up to each level."""
    made = columns([([(tokens, top, text, 0)] * chunks, 0.0)])
    goal = more.pop("goal", None) or Goal(
        objective="earliest" if deadline_s is None else objective, deadline_s=deadline_s, floor=more.pop("floor", 0)
    )
    return PlanRequest(
        chunks=made, costs=COSTS, goal=goal, bandwidth=bandwidth, bandwidth_low=bandwidth,
        prompt_tokens=tokens * chunks, left_s=deadline_s, **more,
    )  # fmt: skip


def test_a_level_is_had_as_it_is_or_from_text_or_as_well_as_can_be():
    chunks = [(256, top, text, 0) for top, text in ((3, False), (1, False), (1, True), (-1, True))]
    made = replace(columns([(chunks, 0.0)]), finest=np.full(4, 3))
    assert made.level_for(0).tolist() == [0, 0, 0, RECOMPUTE]
    assert made.level_for(2).tolist() == [2, 1, RECOMPUTE, RECOMPUTE]
    assert made.level_for(7).tolist() == [3, 1, RECOMPUTE, RECOMPUTE]


# CacheGen.


def test_cachegen_takes_text_where_it_is_in_time():
    plan = CacheGen().plan(request(deadline_s=0.2))  # 1536 tokens at 0.1 ms
    assert plan.levels.tolist() == [RECOMPUTE] * 3


@pytest.mark.parametrize(("throughput", "level"), [(4.2e6, 3), (1.4e6, 2), (0.5e6, 1), (0.2e6, 0), (0.01e6, 0)])
def test_cachegen_takes_the_finest_level_that_fits_by_the_throughput(throughput, level):
    plan = CacheGen().plan(request(deadline_s=0.1, bandwidth=throughput))
    assert plan.levels.tolist() == [level] * 3
    assert list(plan.order) == [0, 1, 2]


def test_cachegen_recomputes_one_stretch_over_documents_and_leaves_the_rest_open():
    made = columns([([(512, 3, True, 0)] * 2, 0.0)] * 4)
    plan = CacheGen().plan(replace(request(8, deadline_s=1.0), chunks=made))
    ahead = STRETCH_TOKENS // 512
    assert plan.levels.tolist() == [RECOMPUTE] * ahead + [0] * (8 - ahead)
    assert not list(plan.order)


def test_cachegen_asks_on_while_earlier_requests_are_open():
    busy = request(8, deadline_s=0.3, committed=CommittedWork(wire=np.array([1e6]), work_s=np.array([0.0])))
    assert list(CacheGen().plan(busy).order) == list(range(8))


def test_cachegen_prices_text_document_by_document():
    """Two documents cost less than one pass over both, whose later half would attend to the earlier one."""
    costs = CostModel(PrefillCost(0.0, 1e-4, 1e-7), DecodeCost(0.0, 0.0), 0.0)
    made = columns([([(512, 3, True, 0)] * 3, 0.0)] * 2)
    asked = replace(request(6), chunks=made, costs=costs)
    alone_s, at_once_s = 2 * costs.prefill.seconds(1536), costs.prefill.seconds(3072)
    for left_s, text in ((alone_s * 1.01, True), (alone_s * 0.99, False)):
        assert left_s < at_once_s
        plan = CacheGen().plan(replace(asked, goal=Goal.within(left_s), left_s=left_s))
        assert (plan.levels[0] == RECOMPUTE) == text


def test_cachegen_keeps_to_the_ceiling():
    asked = request(deadline_s=0.1, goal=Goal(objective="quality", deadline_s=0.1, ceiling=1), bandwidth=1e9)
    assert CacheGen().plan(asked).levels.tolist() == [1] * 3


def test_cachegen_keeps_to_the_floor():
    plan = CacheGen().plan(request(deadline_s=0.01, floor=2, bandwidth=1e3))
    assert plan.levels.tolist() == [2] * 3


@pytest.mark.parametrize(("bandwidth", "level"), [(1e4, RECOMPUTE), (1e6, 0)])
def test_cachegen_without_a_deadline_takes_what_is_sooner(bandwidth, level):
    assert CacheGen().plan(request(bandwidth=bandwidth)).levels.tolist() == [level] * 3


@pytest.mark.parametrize("policy", [CacheGen(), CacheGenTimed()])
def test_cachegen_without_a_deadline_fetches_the_back_while_the_front_is_recomputed(policy):
    asked = request(24, bandwidth=1e5)  # eight stretches of 0.154 s each as text and as level 0
    plan = policy.plan(asked)
    taken = sorted(plan.order)
    ahead = STRETCH_TOKENS // 512
    assert taken == list(range(24 - len(taken), 24))
    assert len(taken) / ahead == 4  # both are done after half of the time
    assert plan.levels[:ahead].tolist() == [RECOMPUTE] * ahead
    assert set(plan.levels[ahead:].tolist()) == {0}


def test_cachegen_counts_what_is_asked_for_already():
    wire = CommittedWork(wire=np.array([5e4]), work_s=np.array([0.0]))
    alone, behind = (
        CacheGen().plan(request(deadline_s=0.1, bandwidth=1.4e6, **more)) for more in ({}, {"committed": wire})
    )
    assert alone.levels.tolist() == [2] * 3
    assert behind.levels.tolist() == [1] * 3


@pytest.mark.parametrize("trip_s", [0.0, 0.04])
def test_cachegen_with_a_model_of_time_knows_round_trips_and_decoding(trip_s):
    slow = CostModel(PrefillCost(0.0, 1e-3), DecodeCost(0.0, 4e-5), 0.0)  # 20 ms to decode a chunk
    link = {"bandwidth": 1.4e6, "lead_s": trip_s, "ttfb_s": trip_s}
    asked = replace(request(deadline_s=0.15, workers=2, **link), costs=slow)
    assert CacheGen().plan(asked).levels.tolist() == [2] * 3  # 138,240 bytes: 0.099 s
    expected = 2 if 0.099 + 2 * trip_s + 0.02 <= 0.15 else 1
    assert CacheGenTimed().plan(asked).levels.tolist() == [expected] * 3
    assert CacheGenTimed().plan(replace(asked, left_s=2.0)).levels.tolist() == [RECOMPUTE] * 3
    assert CacheGenTimed().plan(replace(asked, left_s=0.01)).levels.tolist() == [0] * 3


def artefact(bandwidth):
    asked = []

    def true(start, seconds):
        asked.append((start, seconds))
        return bandwidth

    return CacheGenArtefact(true), asked


def test_the_artefact_sees_the_true_bandwidth_and_splits_the_deadline_evenly():
    policy, asked = artefact(2.8e6)
    plan = policy.plan(request(6, deadline_s=0.3, bandwidth=1.0, now=7.0))
    assert asked == [(7.0, 0.15)]  # half of the tokens
    assert plan.levels[:3].tolist() == [3] * 3  # 414,720 bytes are there in 0.148 s


def test_the_artefact_prices_text_at_a_fifth_of_a_second_whatever_it_takes():
    slow = CostModel(PrefillCost(100.0, 1.0), DecodeCost(0.0, 0.0), 0.0)
    policy, _ = artefact(1.0)
    assert policy.plan(replace(request(deadline_s=0.21), costs=slow)).levels.tolist() == [RECOMPUTE] * 3
    assert policy.plan(request(deadline_s=0.19)).levels.tolist() == [RECOMPUTE] * 3  # nothing fits: the quickest


@pytest.mark.parametrize(("bandwidth", "level"), [(9e9, 3), (1.9e6, 2), (0.2e6, 0), (0.15e6, RECOMPUTE)])
def test_the_artefact_takes_the_finest_level_that_fits_and_text_only_where_none_does(bandwidth, level):
    policy, _ = artefact(bandwidth)
    plan = policy.plan(request(deadline_s=0.1))  # 1536 tokens, whose text takes 0.154 s
    assert plan.levels.tolist() == [level] * 3


def test_the_artefact_fetches_the_next_stretch_while_one_is_recomputed():
    """The second stretch is smaller than the first one, and fits its share of the deadline."""
    made = columns([([(512, 3, True, 0)] * 3, 0.0), ([(512, 3, True, 0)] * 3, 0.0)])
    made = replace(made, sizes=np.concatenate([made.sizes[:, :3] * 1000, made.sizes[:, 3:]], axis=1))
    policy, _ = artefact(1e6)
    plan = policy.plan(replace(request(6, deadline_s=0.2), chunks=made))
    assert plan.levels.tolist() == [RECOMPUTE] * 3 + [1] * 3
    assert list(plan.order) == [3, 4, 5]


@pytest.mark.parametrize("deadline_s", [0.0, -0.1])
def test_the_artefact_takes_the_quickest_where_the_deadline_is_over(deadline_s):
    policy, asked = artefact(1e9)
    assert policy.plan(request(deadline_s=deadline_s)).levels.tolist() == [0] * 3
    assert asked == [(0.0, 0.2)]


# Simple ones.


def test_a_fixed_level_is_that_level_or_the_next_best():
    made = columns([([(100, 3, True, 0), (100, 0, True, 0), (100, 0, False, 0)], 0.0), ([(100, 1, True, 0)], 0.0)])
    asked = replace(request(), chunks=made)
    assert Fixed(2).plan(asked).levels.tolist() == [2, RECOMPUTE, 0, 1]
    assert list(Fixed(2).plan(asked).order) == [0, 2, 3]
    assert Fixed(2).name == "level-2"
    with pytest.raises(ArgumentError):
        Fixed(-1)


def test_raw_fetches_the_only_level():
    assert Raw().plan(request(top=0)).levels.tolist() == [0] * 3
    assert Raw().name == "raw"


def test_text_recomputes_whatever_it_can():
    made = columns([([(100, 3, True, 0), (100, 3, False, 0)], 0.0)])
    plan = TextOnly().plan(replace(request(), chunks=made))
    assert plan.levels.tolist() == [RECOMPUTE, 3]
    assert list(plan.order) == [1]


# Adaptive, against every candidate played through.


def candidates(asked, bandwidth):
    """All uniform targets within floor and ceiling and all meeting points: finish, error, bytes of each."""
    goal, chunks = asked.goal, asked.chunks
    finest = max(int(chunks.finest.max()), goal.floor)
    highest = finest if goal.ceiling is None else min(finest, goal.ceiling)
    for target in range(goal.floor, highest + 1):
        levels = chunks.level_for(target)
        for split in splits(asked, levels):
            tail = fetch_order(asked, levels)[:split]
            chosen = np.full(chunks.count, RECOMPUTE)
            chosen[tail] = levels[tail]
            error = float((chunks.tokens * chunks.errors_at(chosen)).sum()) + raised(asked, target)
            finish_s = finish_naive(asked, target, levels, split, bandwidth)
            yield finish_s, error / int(chunks.tokens.sum()), int(chunks.bytes_at(chosen).sum())


def raised(asked, target):
    """Error, summed over tokens, of what is under way once it is raised to a target."""
    some = asked.refinable
    if some is None:
        return 0.0
    to = np.maximum(some.level, np.minimum(target, some.top))
    return float((some.tokens * some.errors[to, np.arange(len(to))]).sum())


@given(plan_requests())
@settings(max_examples=150, deadline=None)
def test_adaptive_is_the_best_of_its_class(asked):
    plan = Adaptive().plan(asked)
    some = None if asked.goal.objective == "earliest" or asked.left_s is None else asked.refinable
    careful = list(candidates(replace(asked, refinable=some), asked.bandwidth_low))
    in_time = [each for each in careful if asked.left_s is not None and each[0] <= asked.left_s]
    if asked.goal.objective == "earliest" or not in_time:
        floor = Goal(floor=asked.goal.floor, ceiling=asked.goal.floor)
        soonest = min(each[0] for each in candidates(replace(asked, goal=floor, refinable=None), asked.bandwidth))
        assert plan.finish_s == pytest.approx(soonest)
    elif asked.goal.objective == "cheapest":
        assert plan.bytes == min(each[2] for each in in_time)
        assert plan.in_time
    else:
        assert plan.error <= min(each[1] for each in in_time) * 1.0011
        assert plan.in_time


@st.composite
def upgradable(draw):
    """Requests for quality whose deadline some uniform level meets with a little to spare, but no finer one."""
    asked = replace(draw(plan_requests()), refinable=None)
    asked = replace(asked, goal=replace(asked.goal, objective="quality", deadline_s=1.0))
    level = draw(st.integers(asked.goal.floor, LEVELS - 2))
    soonest = [min(times(asked, each)) for each in (level, level + 1)]
    left_s = soonest[0] + draw(st.floats(0.05, 0.95)) * max(0.0, soonest[1] - soonest[0])
    return replace(asked, left_s=left_s)


def times(asked, level):
    levels = asked.chunks.level_for(level)
    return [finish_naive(asked, level, levels, split, asked.bandwidth_low) for split in splits(asked, levels)]


UPGRADED = []


@given(upgradable())
@settings(max_examples=150, deadline=None)
def check_upgrades(asked):
    """A plan with upgrades is played through at its own levels."""
    plan = Adaptive().plan(asked)
    if not plan.upgraded:
        return
    UPGRADED.append(plan)
    upgraded, fetched = np.array(sorted(plan.upgraded)), plan.levels >= 0
    assert (plan.levels[upgraded] <= asked.chunks.top[upgraded]).all()
    base = plan.levels.copy()
    base[upgraded] -= 1
    ends = []
    for target in range(asked.goal.floor, LEVELS):
        uniform = asked.chunks.level_for(target)
        split = int(fetched.sum())
        if (uniform == base)[fetched].all() and fetch_order(asked, uniform)[:split] == list(plan.order):
            levels = np.where(fetched, plan.levels, uniform)
            ends.append(finish_naive(asked, target, levels, split, asked.bandwidth_low))
    assert min(ends) <= asked.left_s + 1e-9


def test_upgrades_keep_the_plan_in_time():
    UPGRADED.clear()
    check_upgrades()
    assert len(UPGRADED) >= 15


def test_refinements_go_by_error_removed_per_byte_and_stop_at_the_deadline():
    level_0, level_1 = np.array([0.1, 0.4, 0.2]), np.array([0.01, 0.01, 0.01])
    some = UpgradeCandidates(
        level=np.zeros(3, np.int64), top=np.ones(3, np.int64), sizes=np.array([[100] * 3, [1100] * 3]),
        errors=np.stack([level_0, level_1]), tokens=np.full(3, 10), ready=np.array([True, True, True]),
    )  # fmt: skip
    nothing = columns([([(1, 0, True, 0)], 0.0)])
    none = replace(nothing, **{
        name: value[..., :0] for name, value in vars(nothing).items() if isinstance(value, np.ndarray)
    })  # fmt: skip
    asked = replace(request(deadline_s=2.5e-3), chunks=none, refinable=some, bandwidth=1e6, bandwidth_low=1e6)
    assert list(Adaptive().plan(asked).refine) == [1, 2]
    assert list(Adaptive().plan(replace(asked, left_s=10.0)).refine) == [1, 2, 0]
    assert list(Adaptive().plan(replace(asked, left_s=0.5e-3)).refine) == []
    assert list(Adaptive().plan(replace(asked, bandwidth_low=SLOWEST)).refine) == []
