"""What was recorded happens again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.controller import Controller, ControllerSettings, Estimates, Goal, replay
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive, Fixed
from kvwire.controller.simulator import policy_named, policy_names
from kvwire.controller.simulator.loads import LoadArrival, Trouble
from kvwire.controller.simulator.world import World
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, RTT_S, document

RATE = RateTrace((0.0, 0.05, 0.3), (4 * MB, 1 * MB, 6 * MB), 1.0)
TROUBLE = Trouble(fail=0.1, stall=0.1, corrupt=0.1, noise=0.2)
POLICIES = [Fixed(2), *(policy_named(name, RATE) for name in policy_names(0))]


def recorded(policy):
    """A log of three loads with troubles, and what a new controller needs to relive it."""
    estimates = Estimates(COSTS, 2 * MB, RTT_S)
    options = ControllerSettings(workers=2, decode_batch=2)
    log, new = [], Controller(estimates.copy(), options, policy)
    controller = Controller(estimates, options, policy, record=log.append)
    goals = [Goal(), Goal(objective="quality", deadline_s=0.6), Goal(objective="cheapest", deadline_s=0.4)]
    arrivals = [LoadArrival(0.05 * at, ((document(), document(head=0.2)),) * 2, goal) for at, goal in enumerate(goals)]
    World(controller, RATE, COSTS, rtt_s=RTT_S, trouble=TROUBLE, seed=3).run(arrivals)
    return log, new


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_load_with_troubles_happens_again(policy):
    log, new = recorded(policy)
    assert len(log) > 20
    replay(log, new)


def test_a_changed_log_is_noticed():
    log, new = recorded(Adaptive())
    at = next(at for at, entry in enumerate(log) if any(isinstance(each, ev.Fetch) for each in entry.instructions))
    log[at] = replace(log[at], instructions=())
    with pytest.raises(ArgumentError, match=f"entry {at}: "):
        replay(log, new)


def test_other_estimates_are_noticed():
    log, _ = recorded(Adaptive())
    with pytest.raises(ArgumentError, match="compare policy, settings and estimates"):
        replay(log, Controller(Estimates(COSTS, 100 * MB, RTT_S), ControllerSettings(workers=2, decode_batch=2)))
