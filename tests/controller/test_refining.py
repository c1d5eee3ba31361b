"""What becomes finer first where the link or the decoder has more to do than there is time for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.controller import Controller, ControllerSettings, DecodeCost, DocumentPlanInput, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.horizons import EDGES, HORIZONS_S, HorizonErrors
from kvwire.controller.simulator.arrivals import LoadArrival
from kvwire.controller.simulator.world import World
from kvwire.types import ChunkId
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, RTT_S, ByHand, document, quality

SHAKY = HorizonErrors(tuple(tuple(4.0 if edge in {0.0, 1.0} else 0.0 for edge in EDGES) for _ in HORIZONS_S))
SLOW = replace(COSTS, decode=DecodeCost(0.001, 1e-5, 1e-9))
"""A chunk takes 2.6 ms to decode, besides 1 ms for the batch."""


def shaky(rate):
    """What is known of a link that has fallen before."""
    estimates = Estimates(SLOW, rate, RTT_S)
    estimates.bandwidth.horizons = HorizonErrors(SHAKY.counts)
    return estimates


def decodes(rate, deadline_s):
    """Batches, and requests for finer levels, of a load of 32 chunks whose coarse levels come first; with instants."""
    log = []
    controller = Controller(shaky(rate), ControllerSettings(workers=2, decode_batch=64), record=log.append)
    world = World(controller, RateTrace((0.0,), (rate,)), SLOW, rtt_s=RTT_S, workers=2)
    documents = ((document(16, 6, text=False, scale=8),),) * 2
    (outcome,) = world.run([LoadArrival(0.0, documents, quality(deadline_s))])
    assert outcome.in_time
    told = [(entry.now, each) for entry in log for each in entry.instructions]
    batches = [each for each in told if isinstance(each[1], ev.Decode) and set(each[1].levels) == {0}]
    finer = [each for each in told if isinstance(each[1], ev.Fetch) and each[1].first]
    return batches, finer


def test_batches_are_short_while_the_link_waits_for_what_they_make_valid():
    batches, finer = decodes(300 * MB, 0.4)
    sizes = [len(each.chunks) for _, each in batches]
    assert max(sizes) <= 8
    assert finer[0][0] < batches[len(batches) // 2][0]


@pytest.mark.parametrize("goal", [Goal(), quality(0.4)])
def test_batches_are_as_large_as_they_may_be_where_nothing_becomes_finer_or_the_decoder_is_what_takes_long(goal):
    log = []
    controller = Controller(shaky(300 * MB), ControllerSettings(workers=2, decode_batch=64), record=log.append)
    world = World(controller, RateTrace((0.0,), (300 * MB,)), SLOW, rtt_s=RTT_S, workers=2)
    world.run([LoadArrival(0.0, ((document(16, text=False, scale=8),),) * 2, goal)])
    sizes = [len(each.chunks) for entry in log for each in entry.instructions if isinstance(each, ev.Decode)]
    assert max(sizes) > 16


def beside(gains, left_s, left_bytes=10_000):
    """Two chunks valid at the base, finer levels of which are on their way when the cut is near; the first one comes.

    gains: Error that the finer level of each takes away. left_bytes: That are still to come of the second one.
    """
    errors = tuple((0.5, 0.5 - gain) for gain in gains)
    uneven = DocumentPlanInput((256,) * 2, ((12_800, 1_280_000),) * 2, has_text=False, errors=errors)
    steps = ByHand(quality(0.5), uneven, prior=0.4 * MB, decode_batch=2, stall_s=10.0)
    fetches = [each for each in steps.quick_link(steps.valid_at_level_0()) if isinstance(each, ev.Fetch)]
    assert {fetch.chunk.chunk for fetch in fetches} == {0, 1}
    cut = fetches[0].until
    for chunk, size in enumerate((1_280_000, 1_267_200 - left_bytes)):
        steps.tell(ev.TransferProgress(size, cut - 0.05, cut - 0.03, ChunkId(0, chunk)))
    out = steps.tell(ev.ChunkArrived(ChunkId(0, 0), 1), cut - left_s)
    return steps, [each.chunks for each in out if isinstance(each, ev.Decode)]


def test_what_gains_little_leaves_the_decoder_to_what_gains_more_and_is_about_to_come():
    steps, decoded = beside((0.01, 0.4), 0.0017)
    assert not decoded
    out = steps.tell(ev.ChunkArrived(ChunkId(0, 1), 1), steps.now + 0.0003)
    assert [each.chunks for each in out if isinstance(each, ev.Decode)] == [(ChunkId(0, 1),)]


@pytest.mark.parametrize(("gains", "left_s"), [((0.4, 0.01), 0.0017), ((0.01, 0.4), 0.1)])
def test_what_gains_most_or_has_time_enough_waits_for_nothing(gains, left_s):
    _, decoded = beside(gains, left_s)
    assert decoded == [(ChunkId(0, 0),)]


def test_nobody_waits_for_what_comes_too_late_to_be_decoded():
    _, decoded = beside((0.01, 0.4), 0.0017, left_bytes=1_200_000)
    assert decoded == [(ChunkId(0, 0),)]


def test_what_does_not_come_when_it_should_is_waited_for_no_longer():
    steps, decoded = beside((0.01, 0.4), 0.0017)
    assert not decoded
    assert steps.controller.wake_at <= steps.now + 0.0015
    out = steps.tell(ev.Tick(), steps.controller.wake_at)
    assert [each.chunks for each in out if isinstance(each, ev.Decode)] == [(ChunkId(0, 0),)]


def test_what_waits_for_a_longer_one_is_decoded_meanwhile_where_there_is_time():
    """The second one comes just in time to be decoded, long after the first one could be."""
    costs = replace(COSTS, decode=DecodeCost(0.001, 1e-6, 1e-8))
    uneven = DocumentPlanInput((256,) * 2, ((12_800, 400_000), (12_800, 2_000_000)), False, ((0.5, 0.4), (0.5, 0.01)))
    steps = ByHand(quality(0.5), uneven, prior=0.4 * MB, decode_batch=2, stall_s=10.0)
    steps.controller = Controller(Estimates(costs, 0.4 * MB, RTT_S), ControllerSettings(decode_batch=2, stall_s=10.0))
    fetches = [each for each in steps.quick_link(steps.valid_at_level_0()) if isinstance(each, ev.Fetch)]
    cut = next(fetch.until for fetch in fetches)
    for _ in range(20):  # a slow link by now, and a decoder that is well known
        steps.tell(ev.TransferProgress(10_000, steps.now, steps.now + 0.001, ChunkId(0, 1)))
    out = steps.tell(ev.ChunkArrived(ChunkId(0, 0), 1), cut - 0.06)
    assert [each.chunks for each in out if isinstance(each, ev.Decode)] == [(ChunkId(0, 0),)]


def test_a_load_keeps_what_most_closings_took():
    cuts = []
    for times in ((0.012,) * 18, (0.01, 0.012, 0.014) * 6, (0.01, 0.012, 0.014) * 5 + (0.5,) * 2):
        estimates = Estimates(COSTS, 30 * MB, RTT_S)
        for seconds in times:
            estimates.closing.add(2048, seconds)
        controller = Controller(estimates, ControllerSettings())
        controller.handle(ev.LoadRequested(0, 1, 0, quality(0.5)), 0.0)
        controller.handle(ev.IndexKnown(0, 0, (document(),)), 0.0)
        load = controller.loads[0]
        beyond_s = 0.5 - controller._dispatch._reserve_s - controller._dispatch._cut(load)
        cuts.append(beyond_s - estimates.costs().closing_s(load.prompt_tokens))
    assert cuts[0] == pytest.approx(0.0, abs=1e-6)
    assert cuts[1:] == pytest.approx([2.965 * 0.002] * 2, rel=0.01)  # two that were held up change nothing


@pytest.mark.parametrize(("off", "share"), [(0.0, 0.5), (0.02, 0.7), (0.05, 1.0), (0.5, 1.0)])
def test_the_reserve_is_the_smaller_the_better_computing_is_known(off, share):
    estimates = Estimates(COSTS, 30 * MB, RTT_S)
    for estimator in (estimates.prefill, estimates.decode):
        estimator._learner._error = off / 1.2533
    controller = Controller(estimates, ControllerSettings(reserve_s=0.01))
    controller.handle(ev.LoadRequested(0, 1, 0, quality(0.5)), 0.0)
    controller.handle(ev.IndexKnown(0, 0, (document(),)), 0.0)
    load = controller.loads[0]
    closing_s = controller._dispatch._closing_s(load)
    assert 0.5 - controller._dispatch._cut(load) == pytest.approx(closing_s + share * 0.01)
