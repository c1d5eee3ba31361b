from __future__ import annotations

from math import inf

import pytest

from kvwire.controller import Goal
from kvwire.controller.simulator import Optimum, Outcome, Scored, Summary, decibels
from kvwire.errors import ArgumentError

IN_A_SECOND = Goal(objective="quality", deadline_s=1.0)


def outcome(ttft_s, error=0.001, deadline_s=1.0, failed=False, received=100, wasted=10) -> Outcome:
    return Outcome(
        ready_s=ttft_s, ttft_s=ttft_s, deadline_s=deadline_s, error=error, received=received, wasted=wasted,
        recomputed=25, levels=(75, 0), failed=failed, reason="", asked_at=0.0, decisions=(), spans=(),
    )  # fmt: skip


def bound(ttft_s=0.5, error=0.0001, size=80.0, in_time=True) -> Optimum:
    return Optimum(ttft_s=ttft_s, error=error, bytes=size, in_time=in_time)


CHEAPEST = Goal(objective="cheapest", deadline_s=1.0)


@pytest.mark.parametrize(
    ("goal", "found", "best", "regret"),
    [
        (IN_A_SECOND, outcome(0.9), bound(), 1 - 30 / 40),  # the share of decibels lost, where both are in time
        (IN_A_SECOND, outcome(1.1), bound(), None),
        (IN_A_SECOND, outcome(0.9), bound(in_time=False), None),
        (IN_A_SECOND, outcome(0.9, error=1.0), bound(error=1.0), None),
        (IN_A_SECOND, outcome(0.9, error=2.0), bound(error=2.0), None),
        (Goal(), outcome(0.6, deadline_s=None), bound(), 0.2),  # the time lost
        (Goal(), outcome(0.6, deadline_s=None, failed=True), bound(), None),
        (CHEAPEST, outcome(0.9), bound(), 0.25),  # the bytes too many
        (CHEAPEST, outcome(0.9), bound(size=0.0), None),
    ],
)
def test_regret_is_what_the_goal_counts(goal, found, best, regret):
    assert Scored(goal, found, best).regret == (None if regret is None else pytest.approx(regret))


def test_a_miss_is_avoidable_where_the_bound_is_in_time():
    late = outcome(1.2)
    assert Scored(IN_A_SECOND, late, bound()).avoidable
    assert not Scored(IN_A_SECOND, late, bound(in_time=False)).avoidable
    assert not Scored(IN_A_SECOND, outcome(0.9), bound()).avoidable
    assert Scored(IN_A_SECOND, outcome(0.1, failed=True), bound()).avoidable
    assert Scored(IN_A_SECOND, outcome(0.1, failed=True), bound()).late == inf


def test_figures_over_loads_equal_those_by_hand():
    runs = [
        Scored(IN_A_SECOND, outcome(0.2), bound()),
        Scored(IN_A_SECOND, outcome(0.4, error=0.003), bound()),
        Scored(IN_A_SECOND, outcome(1.5), bound()),
        Scored(IN_A_SECOND, outcome(3.0), bound(ttft_s=2.0, in_time=False)),
        Scored(IN_A_SECOND, outcome(30.0, failed=True), bound()),
    ]
    found = Summary.of(runs)
    assert (found.loads, found.failed, found.missed, found.avoidable, found.missed_by_bound) == (5, 1, 3, 2, 1)
    assert found.ttft_s == pytest.approx((0.26, 0.95, 2.55, 2.955))
    assert found.error == pytest.approx(0.002)
    assert found.quality_db == pytest.approx(26.9897, abs=1e-3)
    assert (found.received, found.wasted, found.recomputed) == (500, 50, 0.25)
    regrets = (1 - 30 / 40, 1 - decibels(0.003) / 40)
    assert found.regret == pytest.approx((sum(regrets) / 2, regrets[0] + 0.9 * (regrets[1] - regrets[0])))
    assert found.late == pytest.approx(0.5)


def test_figures_that_no_load_tells_are_none():
    found = Summary.of([Scored(IN_A_SECOND, outcome(0.5, failed=True), bound())])
    assert (found.ttft_s, found.quality_db, found.error, found.regret, found.late) == (None,) * 5
    with pytest.raises(ArgumentError):
        Summary.of([])


def test_no_error_is_a_finite_quality():
    assert decibels(0.0) == 120
    assert decibels(0.001) == pytest.approx(30)
