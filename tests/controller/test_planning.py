"""When plans are made, and what is left for later, against doing all of it at every event."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from math import inf

import pytest

from kvwire.controller import DocumentPlanInput, Goal, planning
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive
from kvwire.controller.simulator.arrivals import LoadArrival
from kvwire.types.rates import RateTrace

from .playing import MB, document, play

GOALS = {"earliest": Goal(), "quality": Goal(objective="quality", deadline_s=1.0)}


class Counted(Adaptive):
    """The policy, and at which instants it made plans."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "plans", [])

    def plan(self, request):
        self.plans.append(request.now)
        return super().plan(request)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("rate", [2 * MB, 20 * MB, 200 * MB])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_arrival_that_lets_nothing_begin_leaves_only_fetches_for_later(goal, rate, workers):
    quiet = []

    def watched(controller):
        dispatch, search = controller._dispatch, controller._dispatch.may_begin

        def may_begin(now):
            if search(now):
                return True
            twin, out = deepcopy(controller), []
            twin._dispatch.act(now, out)
            assert all(isinstance(each, ev.Fetch) for each in out)
            quiet.append(now)
            return False

        dispatch.may_begin = may_begin
        return controller

    arrivals = [LoadArrival(0.0, ((document(chunks=24, tokens=64),),) * 3, GOALS[goal])]
    play(arrivals, rate, wrap=watched, workers=workers, decode_batch=8)
    assert quiet or rate < 20 * MB


@pytest.mark.parametrize("goal", GOALS)
def test_on_a_steady_link_fewer_plans_decide_the_same(goal, monkeypatch):
    outcomes, plans = [], []
    for confirmed in (planning._CONFIRMED, 0):
        monkeypatch.setattr(planning, "_CONFIRMED", confirmed)
        policy = Counted()
        played = play([LoadArrival(0.0, ((document(chunks=64),),), GOALS[goal])], 4 * MB, policy=policy, workers=2)
        outcomes.append(played.outcomes[0])
        plans.append(policy.plans)
    few, many = outcomes
    assert len(plans[0]) < len(plans[1])
    assert few.error == pytest.approx(many.error, rel=0.02)
    assert few.ttft_s == pytest.approx(many.ttft_s, rel=0.01)


def test_a_link_that_changes_is_planned_for_at_once():
    policy, falls = Counted(), 0.4
    trace = RateTrace((0.0, falls), (8 * MB, 2 * MB))
    play([LoadArrival(0.0, ((document(chunks=64),),), GOALS["quality"])], trace, policy=policy, workers=2)
    before = [now for now in policy.plans if now < falls]
    after = [now for now in policy.plans if now > falls]
    assert max(second - first for first, second in pairwise(before[2:])) > 0.04
    assert min(after) < falls + 0.035


class Asking(Adaptive):
    """The policy, and how many chunks plans were told that a pass takes."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "asked", [])

    def plan(self, request):
        self.asked.append(request.pass_chunks)
        return super().plan(request)


@pytest.mark.parametrize("blob", [True, False])
def test_plans_before_a_deadline_know_how_long_passes_are(blob):
    policy = Asking()
    given = document(chunks=32) if blob else DocumentPlanInput((256,) * 3, ())
    played = play([LoadArrival(0.0, ((given,),), GOALS["quality"])], MB, policy=policy, workers=2)
    assert all(each >= 1 and (each == inf or each == int(each)) for each in policy.asked)
    passes = [each.last.chunk - each.first.chunk + 1 for _, each in played.instructions(ev.Recompute)]
    assert passes
    assert max(passes) <= max(policy.asked)
    assert (policy.asked[0] == inf) is not blob  # a little text that nothing stands in for
