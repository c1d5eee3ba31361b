"""Coarse levels first, silent links and cold starts, in worlds where beliefs turn out wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import Controller, ControllerSettings, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.forecast import Timeline, decode_s, first_levels, wire_s
from kvwire.controller.horizons import EDGES, HORIZONS_S, HorizonErrors
from kvwire.controller.policies import Adaptive, Fixed, TextOnly
from kvwire.controller.policies.adaptive import Refining
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.simulator.world import World
from kvwire.controller.snapshot import UpgradeCandidates
from kvwire.types.rates import RateTrace

from .naive_timeline import finish_naive, splits
from .playing import COSTS, MB, RTT_S, document, one, quality
from .requests import LEVELS, plan_requests

TARGETS = np.arange(LEVELS)
SHAKY = HorizonErrors(tuple(tuple(4.0 if edge in (0.125, 0.96) else 0.0 for edge in EDGES) for _ in HORIZONS_S))


@given(plan_requests(), st.data())
@settings(max_examples=200, deadline=None)
def test_coarse_levels_first_end_when_playing_them_through_ends(request, data):
    coarse = np.array(data.draw(st.lists(st.booleans(), min_size=(n := request.chunks.count), max_size=n)))
    request = replace(request, chunks=replace(request.chunks, layered=np.arange(n) % 5 != 1))
    targets = TARGETS[request.goal.floor :]
    timeline = Timeline(request, targets, request.bandwidth, coarse=coarse)
    whole = Timeline(request, targets, request.bandwidth)
    assert (timeline.order == whole.order).all()
    assert timeline.error == pytest.approx(whole.error)
    for row, target in enumerate(targets):
        levels = request.chunks.level_for(int(target))
        assert (timeline.levels[row] == first_levels(request, levels, coarse)).all()
        for split in splits(request, levels):
            expected = finish_naive(request, int(target), levels, split, request.bandwidth, coarse=coarse)
            assert timeline.finish_s[row, split] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def candidates(levels, ready):
    count = len(levels)
    steps = np.arange(4)[:, None]
    return UpgradeCandidates(
        level=np.array(levels), top=np.full(count, 3), sizes=np.full(count, 1000) * 4**steps,
        errors=np.ones(count) * 0.1 ** (1.0 + steps), tokens=np.full(count, 256), ready=np.array(ready),
    )  # fmt: skip


@given(
    plan_requests(), st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8), st.floats(0.1, 5)
)
@settings(max_examples=100, deadline=None)
def test_refinements_fit_with_those_of_chunks_that_are_not_ready_yet(request, rows, left_s):
    some = candidates(*zip(*rows, strict=True))
    goal = Goal(objective="quality", deadline_s=left_s)
    none = replace(request.chunks, **{
        name: value[..., :0] for name, value in vars(request.chunks).items() if isinstance(value, np.ndarray)
    })  # fmt: skip
    asked = replace(request, chunks=none, refinable=some, goal=goal, left_s=left_s)
    plan = Adaptive().plan(asked)
    levels = some.level.copy()
    levels[list(plan.refine)] = plan.refine_levels
    assert (levels[list(plan.refine)] > some.level[list(plan.refine)]).all()
    assert some.ready[list(plan.refine)].all()
    if plan.refine:
        finer = Refining(asked, some)
        # All that is ready gets what the others can have as well, single ones a level more.
        lowest = int(levels[some.ready].min()) - 1
        assert finer.end_s(np.where(some.ready, levels, np.maximum(some.level, lowest))) <= left_s + 1e-9


def played(policy, rate, documents, goal, *, workers=2, prior=30 * MB, horizons=SHAKY):
    estimates = Estimates(COSTS, prior, RTT_S)
    estimates.bandwidth.horizons = HorizonErrors(horizons.counts)
    log = []
    controller = Controller(estimates, ControllerSettings(workers=workers, decode_batch=8), policy, record=log.append)
    world = World(controller, rate, COSTS, rtt_s=RTT_S, workers=workers)
    (outcome,) = world.run([LoadArrival(0.0, documents, goal)])
    return outcome, log


@pytest.mark.parametrize("at", [0.03, 0.08, 0.15, 0.25, 0.33, 0.38])
@pytest.mark.parametrize("share", [0.3, 0.1, 0.03, 0.0])
@pytest.mark.parametrize("workers", [1, 2])
def test_whatever_the_link_does_insured_loads_are_in_time_where_the_lowest_level_is(at, share, workers):
    """The link is believed in and falls once, to a share of its rate, for the rest of the load."""
    documents = ((document(16, text=False, scale=8),),) * 2
    fallen = RateTrace((0.0, at, 3.0), (30 * MB, share * 30 * MB, 30 * MB))
    coarse, _ = played(Fixed(0), fallen, documents, quality(0.4), workers=workers)
    ours, _ = played(None, fallen, documents, quality(0.4), workers=workers)
    assert ours.in_time >= coarse.in_time
    if coarse.in_time:
        assert ours.error <= coarse.error


def test_insurance_is_what_keeps_the_deadline():
    documents = ((document(16, text=False, scale=8),),) * 2
    fallen = RateTrace((0.0, 0.15), (30 * MB, 0.3 * MB))
    sure = HorizonErrors(tuple(tuple(40.0 if edge == 1.0 else 0.0 for edge in EDGES) for _ in HORIZONS_S))
    insured, log = played(None, fallen, documents, quality(0.4))
    bold, _ = played(None, fallen, documents, quality(0.4), horizons=sure)
    assert insured.in_time
    assert not bold.in_time
    fetches = [each for entry in log for each in entry.instructions if isinstance(each, ev.Fetch)]
    assert {fetch.level for fetch in fetches[:32]} == {0}
    assert all(fetch.first == 1 for fetch in fetches[32:])


# A silent link.


@pytest.mark.parametrize("silent_from", [0.0, 0.012, 0.03])
@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_alone_is_in_time_is_in_time_on_a_silent_link(silent_from, workers):
    documents = ((document(16, scale=40),),) * 2
    silent = RateTrace((0.0, max(silent_from, 1e-9), 60.0), (30 * MB, 0.0, 30 * MB))
    text, _ = played(TextOnly(), silent, documents, quality(2.0), workers=workers)
    deadline_s = 1.15 * text.ttft_s
    outcome, _ = played(None, silent, documents, quality(deadline_s), workers=workers, horizons=HorizonErrors())
    assert outcome.in_time


def test_a_pause_is_waited_out_where_text_is_late_anyway():
    documents = ((document(16, scale=4),),)
    pause = RateTrace((0.0, 0.012, 0.1), (30 * MB, 0.0, 30 * MB))
    outcome, log = played(None, pause, documents, quality(0.25))
    assert outcome.in_time
    cancelled = [each for entry in log for each in entry.instructions if isinstance(each, ev.Cancel)]
    assert not any(each.reason == "nothing arrived for a while" for each in cancelled)


# Cold starts.


@pytest.mark.parametrize("rate", [100 * MB, 1000 * MB])
def test_a_prior_that_is_far_too_low_costs_little(rate):
    """Text takes 0.9 s; a pass of what a link of 1 MB/s would leave to it is never begun."""
    documents = document(32)
    right, _ = one(Goal(), rate, documents, workers=2)
    wrong, _ = one(Goal(), rate, documents, workers=2, prior=1 * MB)
    assert wrong.ttft_s < right.ttft_s + 3 * RTT_S + COSTS.prefill.seconds(256)
    assert wrong.ttft_s < 0.25 * one(Goal(), 1.0, documents, workers=2)[0].ttft_s


def end_s(finer, request, some, levels):
    """``Refining.end_s`` with what each candidate takes worked out for these levels alone."""
    raised = np.flatnonzero(levels > some.level)
    if not len(raised):
        return finer.ready_s
    sizes, tokens = some.sizes[levels[raised], raised], some.tokens[raised]
    wire = wire_s(sizes - some.sizes[some.level[raised], raised], request.bandwidth_low).cumsum()
    work = decode_s(request, tokens, sizes)
    end = max(finer._lane_s, finer._link_s + float((wire - work.cumsum() + work).max())) + float(work.cumsum()[-1])
    return max(finer.ready_s, end + finer._closing_s)


@given(plan_requests(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_what_refining_takes_is_worked_out_once_for_all_levels(request, rows):
    before, to = zip(*rows, strict=True)
    some = candidates(before, [True] * len(rows))
    levels = np.maximum(before, to)
    finer = Refining(request, some)
    assert finer.end_s(levels) == end_s(finer, request, some, levels)
    gain = some.tokens * (some.errors[some.level, range(len(rows))] - some.errors[levels, range(len(rows))])
    more = some.sizes[levels, range(len(rows))] - some.sizes[some.level, range(len(rows))]
    best = np.argsort(-gain / np.maximum(more, 1), kind="stable")
    assert finer.order(levels).tolist() == best[levels[best] > some.level[best]].tolist()
