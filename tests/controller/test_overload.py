"""More loads than there is room for: quality falls before deadlines do, and who cannot be in time is told so."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from kvwire.controller import ControllerSettings, DocumentPlanInput, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.core import Controller
from kvwire.controller.policies import Adaptive, Fixed
from kvwire.controller.simulator import Scenario, constant, machine_named, model_named, simulate, variants_for
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.errors import ArgumentError

from .playing import COSTS, MB, RTT_S, document, play, quality

DEADLINE_S = 0.5
SETTINGS = {"workers": 2, "max_in_flight": 16, "decode_batch": 16}


def stream(rate, *, seconds=1.5, seed=3, **more):
    """Loads of 8 chunks that come in at random; level 0 of one takes 13 ms of a link of 8 MB a second."""
    random, at, found = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        found.append(LoadArrival(at, ((document(),),), quality(DEADLINE_S, **more)))
    return found


@pytest.mark.parametrize("rate", [4, 16, 40])
def test_what_always_level_0_sustains_is_in_time(rate):
    arrivals = stream(rate)
    coarsest = play(arrivals, 8 * MB, policy=Fixed(0), **SETTINGS).outcomes
    assert all(outcome.in_time for outcome in coarsest), "the test asks for too much"
    outcomes = play(arrivals, 8 * MB, **SETTINGS).outcomes
    assert all(outcome.in_time for outcome in outcomes)
    assert sum(outcome.error for outcome in outcomes) < sum(outcome.error for outcome in coarsest)


def test_quality_of_early_loads_makes_no_later_ones_late():
    """About as many loads as the link carries at level 0, of a model whose text takes eight times as long."""
    random, at, asked = Random("6 30"), 0.0, []
    while (at := at + random.expovariate(30)) < 1.5:
        asked.append(at)
    model = model_named("llama-3.1-8b")
    scene = Scenario(
        model=model, machine=machine_named("h100"), documents=variants_for(model, [2048] * 4), rate=constant(2.5e8),
        goal=quality(DEADLINE_S), asked=tuple(asked),
    )  # fmt: skip
    coarsest, ours = (simulate(scene, policy) for policy in (Fixed(0), Adaptive()))
    assert all(outcome.in_time for outcome in coarsest), "the test asks for too much"
    assert sum(not outcome.in_time for outcome in ours) <= 0.05 * len(ours)
    assert sum(outcome.error for outcome in ours) < 0.95 * sum(outcome.error for outcome in coarsest)


def test_the_more_loads_the_coarser():
    errors = []
    for rate in (2, 10, 40):
        outcomes = play(stream(rate), 8 * MB, **SETTINGS).outcomes
        errors.append(sum(outcome.error for outcome in outcomes) / len(outcomes))
    assert errors == sorted(errors)


def test_what_was_said_of_a_load_is_what_happened():
    played = play(stream(40), 8 * MB, **SETTINGS)
    said = {finish.load: finish.reason for entry in played.log for finish in entry.instructions
            if isinstance(finish, ev.Finish)}  # fmt: skip
    assert len(said) == len(played.outcomes)
    for number, outcome in enumerate(played.outcomes):
        assert said[number].startswith("in time") == outcome.in_time
        assert outcome.reason.startswith("in time") == outcome.in_time


def test_who_cannot_be_in_time_is_refused_at_once_and_the_others_are_in_time():
    outcomes = play(stream(150, on_late="refuse", seconds=1.0), 8 * MB, **SETTINGS).outcomes
    refused = [outcome for outcome in outcomes if outcome.refused]
    admitted = [outcome for outcome in outcomes if not outcome.refused]
    assert refused
    assert all(outcome.failed and "late by" in outcome.reason for outcome in refused)
    assert max(outcome.ready_s for outcome in refused) < 0.1 * DEADLINE_S
    assert len(admitted) > 30
    assert sum(outcome.in_time for outcome in admitted) >= 0.98 * len(admitted)
    served = play(stream(150, seconds=1.0), 8 * MB, **SETTINGS).outcomes
    assert not any(outcome.refused for outcome in served)
    assert len(admitted) > 0.9 * sum(outcome.in_time for outcome in served)


def test_nobody_is_refused_by_a_guess():
    goal = quality(0.02, on_late="refuse")
    for known, refused in ((False, False), (True, True)):
        estimates = Estimates(COSTS, 1000.0, RTT_S)
        if known:
            estimates.bandwidth.add(20_000, 0.0, 20.0)
        controller = Controller(estimates, ControllerSettings())
        controller.handle(ev.LoadRequested(0, 1, 0, goal), 21.0)
        out = controller.handle(ev.IndexKnown(0, 0, (document(),)), 21.0)
        assert any(isinstance(each, ev.Refuse) for each in out) == refused
        assert (0 in controller.loads) != refused


def test_late_loads_are_served_or_refused_and_nothing_else():
    with pytest.raises(ArgumentError, match="serve or refuse"):
        Goal(on_late="never")


# Closings.


def finished(**settings):
    """A controller whose first load has just finished, another one that is to be recomputed being under way."""
    controller = Controller(Estimates(COSTS, 1.0, RTT_S), ControllerSettings(**settings))
    out = controller.handle(ev.LoadRequested(0, 1, 32, Goal()), 0.0)
    out = controller.handle(ev.IndexKnown(0, 0, (document(1),)), 0.1)
    (first,) = [each for each in out if isinstance(each, ev.Recompute)]
    controller.handle(ev.LoadRequested(1, 1, 32, Goal()), 0.11)
    controller.handle(ev.IndexKnown(1, 0, (document(1),)), 0.11)
    out = controller.handle(ev.RecomputeDone((first.first,), 0.03), 0.13)
    assert [type(each) for each in out] == [ev.Finish]
    return controller


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("over", [ev.PromptAssembled(0, 256, 0.001), ev.LoadAbandoned(0)])
def test_no_pass_begins_before_a_closing_is_over(workers, over):
    controller = finished(workers=workers)
    assert controller.is_under_way(0)
    assert not [each for each in controller.handle(ev.Tick(), 0.14) if isinstance(each, ev.Recompute)]
    out = controller.handle(over, 0.15)
    assert [type(each) for each in out] == [ev.Recompute]
    assert not controller.is_under_way(0)


def test_a_closing_is_reported_once():
    controller = finished(workers=2)
    with pytest.raises(ArgumentError, match="not finished"):
        controller.handle(ev.PromptAssembled(1, 256, 0.001), 0.14)
    controller.handle(ev.PromptAssembled(0, 256, 0.001), 0.15)
    learnt = controller.estimates.closing.value
    assert controller.handle(ev.PromptAssembled(0, 256, 0.5), 0.16) == []
    assert controller.estimates.closing.value == learnt
    with pytest.raises(ArgumentError, match="never asked for"):
        controller.handle(ev.PromptAssembled(7, 256, 0.001), 0.17)


@pytest.mark.parametrize(
    "wrong",
    [
        {"passes": ((32, 256, 0.02), (32, 256, -1.0))}, {"passes": ((32, 256, 0.02), (32, inf, 0.02))},
        {"seconds": inf, "passes": ((32, 256, 0.02),)}, {"rows": (20, -1), "passes": ((32, 256, 0.02),)},
        {"prompt_tokens": 0, "passes": ((32, 256, 0.02),)},
    ],
)  # fmt: skip
def test_a_closing_that_cannot_be_changes_nothing(wrong):
    controller = finished(workers=2)
    before = controller.estimates.to_state()
    with pytest.raises(ArgumentError):
        controller.handle(replace(ev.PromptAssembled(0, 256, 0.001), **wrong), 0.14)
    assert controller.estimates.to_state() == before
    assert controller.is_under_way(0)


def test_a_closing_teaches_what_its_rows_and_passes_took():
    controller = finished(workers=2)
    estimates, cost = controller.estimates, COSTS.prefill
    took = cost.seconds(32, 256)
    expected = sum(cost.base_s + cost.token_s * rows + cost.pair_s * rows * 256 for rows in (20, 40))
    for _ in range(1, 4):
        estimates.prefill.add(256, 0, cost.seconds(256))
    controller.handle(ev.PromptAssembled(0, 256, 0.001, 3 * expected, (20, 40), ((32, 256, took),)), 0.15)
    assert estimates.repair.value == pytest.approx(2.0, rel=0.05)  # between what was assumed and what was measured
    assert estimates.prefill.cost.seconds(32, 256) == pytest.approx(took, rel=0.05)
    for _ in range(4):
        estimates.repair.add(3.0)
    assert estimates.repair.value == pytest.approx(3.0, rel=0.05)


# Loads that say nothing.


def test_a_load_that_is_overdue_holds_nobody_up():
    """Its index never comes, or its only chunk never does; others compute meanwhile."""
    for index in (False, True):
        controller = Controller(Estimates(COSTS, 8 * MB, RTT_S), ControllerSettings(workers=2))
        controller.handle(ev.LoadRequested(0, 1, 0, quality(0.5)), 0.0)
        if index:
            controller.handle(ev.IndexKnown(0, 0, (document(1, text=False),)), 0.01)
        controller.handle(ev.LoadRequested(1, 1, 0, Goal()), 1.0)
        out = controller.handle(ev.IndexKnown(1, 0, (DocumentPlanInput((256,)),)), 1.01)
        out += controller.handle(ev.Tick(), 1.05)
        assert any(isinstance(each, ev.Recompute) for each in out)


def test_loads_of_which_nothing_is_known_take_nobodys_turn():
    estimates = Estimates(COSTS, 1000.0, RTT_S)
    estimates.bandwidth.add(20_000, 0.0, 20.0)
    controller = Controller(estimates, ControllerSettings(workers=2))
    for number in range(6):
        controller.handle(ev.LoadRequested(number, 1, 0, Goal()), 21.0)
    controller.handle(ev.LoadRequested(6, 1, 0, quality(0.02, on_late="refuse")), 21.0)
    out = controller.handle(ev.IndexKnown(6, 0, (document(),)), 21.0)
    assert [type(each) for each in out] == [ev.Refuse]
    assert controller.wake_at == inf


def test_asking_when_to_wake_changes_nothing():
    log = play(stream(40, seconds=0.3), 8 * MB, **SETTINGS).log
    asked, silent = (Controller(Estimates(COSTS, 8 * MB, RTT_S), ControllerSettings(**SETTINGS)) for _ in range(2))
    for entry in log:
        out = asked.handle(entry.event, entry.now)
        assert asked.wake_at >= entry.now
        assert tuple(out) == tuple(silent.handle(entry.event, entry.now)) == entry.instructions
