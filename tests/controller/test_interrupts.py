"""Forward passes that turn out to be slow are given up while their chunks can still be fetched in time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvwire.controller import Controller, ControllerSettings, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.lanes import ComputeLanes, Job
from kvwire.controller.limits import Limits
from kvwire.controller.simulator import (
    LoadArrival,
    Scenario,
    World,
    constant,
    machine_named,
    model_named,
    settings_for,
    variants_for,
)
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

from .playing import COSTS, MB, RTT_S, ByHand, document, one, play, quality

SLOW = 5.0
DEADLINE_S = 1.0
LONG = document(24)
PASS = tuple(ChunkId(0, chunk) for chunk in range(24))


class SlowFrom(World):
    """Forward passes that begin after ``slow_from`` take ``SLOW`` times as long."""

    slow_from = float("inf")

    def _start(self, lane, instruction, seconds):
        slow = lane == "prefill" and self._now >= self.slow_from
        super()._start(lane, instruction, SLOW * seconds if slow else seconds)


@cache
def scene(gbit_s=1.0, deadline_s=DEADLINE_S, tokens=32768, documents=8):
    model = model_named("llama-3.1-8b")
    return Scenario(
        model=model, machine=machine_named("a100"), rate=constant(gbit_s * 1.25e8),
        documents=variants_for(model, [tokens // documents] * documents), goal=quality(deadline_s),
    )  # fmt: skip


def slowed(scenario, slow_from_s, *, interrupts=True):
    """One load whose engine becomes slow so many seconds after it came in; its outcome and its log."""
    log = []
    settings = replace(settings_for(scenario.machine), interrupts=interrupts)
    controller = Controller(scenario.estimates(), settings, record=log.append)
    world = SlowFrom(controller, scenario.rate, scenario.costs, rtt_s=scenario.rtt_s, workers=settings.workers)
    world.slow_from = scenario.begins_s + slow_from_s
    arrival = LoadArrival(scenario.begins_s, scenario.documents, scenario.goal, scenario.query_tokens)
    return world.run([arrival])[0], log


def said(log, kind):
    return [each for entry in log for each in entry.instructions if isinstance(each, kind)]


def begun(goal=None, **settings):
    """A controller whose first pass has begun at 0.002, with nothing more to come for a while; and that pass."""
    steps = ByHand(goal or quality(0.7), LONG, prior=5 * MB, workers=2, interrupts=True, **settings)
    steps.begin()
    steps.tell(ev.TransferProgress(100_000, 0.0, 0.02), 0.02)  # so that the link is no guess
    told_until(steps, ev.Recompute, 0.03)
    assert steps.pass_ is not None
    return steps, steps.pass_


def told_until(steps, kind, until_s):
    """Ticks where they are due, on a link that goes on; returns the first instruction of a kind, and when it came."""
    while steps.now < until_s:
        before, at = steps.now, min(max(steps.controller.wake_at, steps.now), steps.now + 0.02, until_s)
        steps.tell(ev.TransferProgress(int(5 * MB * (at - before)), before, at), at)
        found = [each for each in steps.tell(ev.Tick(), at) if isinstance(each, kind)]
        if found:
            return found[0], steps.now
    return None, until_s


def test_passes_that_can_be_stopped_are_long():
    passes = {}
    for interrupts in (False, True):
        _, played = one(quality(1.0), 5 * MB, LONG, workers=2, interrupts=interrupts)
        passes[interrupts] = len(played.instructions(ev.Recompute))
        assert not [each for entry in played.log for each in entry.instructions if isinstance(each, ev.Interrupt)]
    assert passes[True] < passes[False]


@given(slow_from_s=st.floats(0, 0.4), gbit_s=st.sampled_from([2.0, 4.0, 10.0]))
@example(slow_from_s=0.0, gbit_s=2.0)
@example(slow_from_s=0.2, gbit_s=4.0)
def test_an_engine_that_becomes_slow_makes_no_load_late(slow_from_s, gbit_s):
    outcome, _ = slowed(scene(gbit_s, 0.5, 8192, 2), slow_from_s)
    assert outcome.in_time


def test_what_is_stopped_is_fetched():
    outcome, log = slowed(scene(), 0.0)
    assert said(log, ev.Interrupt)
    ended = [entry.event for entry in log if isinstance(entry.event, ev.RecomputeInterrupted)]
    assert ended
    fetched = {each.chunk for each in said(log, ev.Fetch)}
    assert fetched.issuperset(ended[0].chunks)
    assert outcome.in_time


def test_a_pass_is_not_slow_for_a_driver_that_was_held_up():
    steps, _ = begun()
    _, at = told_until(steps, ev.Interrupt, 0.7)
    for paused_s in (0.0, 0.1):
        steps, running = begun()
        out = steps.tell(ev.DriverPaused(paused_s), at - 0.001) + steps.tell(ev.Tick(), at)
        assert [each for each in out if isinstance(each, ev.Interrupt)] == [ev.Interrupt(running.first)] * (
            not paused_s
        )


def test_a_pass_is_stopped_no_sooner_than_it_must_be():
    """One that is overdue may still end; what it computes takes little time to fetch."""
    steps, running = begun()
    expected_s = COSTS.prefill.seconds(256 * (running.last.chunk - running.first.chunk + 1))
    found, at = told_until(steps, ev.Interrupt, 0.7)
    assert found == ev.Interrupt(running.first)
    assert at > 0.002 + 1.5 * expected_s
    # All but its own chunks have come: what is left is the time to fetch and decode these, to close five times, and
    # to stop, which an engine does after a sixteenth of a pass that takes five times as long.
    link, chunks = steps.controller._dispatch.link, running.last.chunk + 1
    assert not link.open_bytes
    closing_s, size = COSTS.closing_s(24 * 256), 12_800
    fetching_s = RTT_S + chunks * size / link.bandwidth_low + chunks * COSTS.decode.seconds(256, size)
    left_s = 0.7 - ControllerSettings().reserve_s - at
    assert left_s == pytest.approx(5 * closing_s + fetching_s + 5 / 16 * expected_s, abs=0.003)


def test_a_pass_that_is_over_before_it_stops_counts():
    steps, running = begun()
    told_until(steps, ev.Interrupt, 0.7)
    chunks = PASS[: running.last.chunk + 1]
    steps.tell(ev.RecomputeDone(chunks, steps.now - 0.002))
    load = steps.controller.loads[0]
    assert all(load.table.state[chunk.chunk] == 5 for chunk in chunks)


def test_stopped_chunks_are_open_again_and_the_engine_counts_as_slow():
    steps, running = begun()
    told_until(steps, ev.Interrupt, 0.7)
    chunks = PASS[: running.last.chunk + 1]
    out = steps.tell(ev.RecomputeInterrupted(chunks, steps.now - 0.002))
    assert not [each for each in out if isinstance(each, ev.Recompute)]
    assert not steps.controller.loads[0].table.counts[4]
    with pytest.raises(ArgumentError, match="was to be stopped"):
        steps.tell(ev.RecomputeInterrupted(chunks, 0.1))


def test_nobody_tells_of_a_stop_that_was_not_asked_for():
    steps, running = begun()
    with pytest.raises(ArgumentError, match="was to be stopped"):
        steps.tell(ev.RecomputeInterrupted(PASS[: running.last.chunk + 1], 0.01))
    assert steps.controller.loads[0].table.counts[4]


def test_a_pass_that_nobody_waits_for_is_stopped_at_once():
    steps, running = begun()
    assert ev.Interrupt(running.first) in steps.tell(ev.LoadAbandoned(0))


@pytest.mark.parametrize(
    ("goal", "settings"), [(Goal(), {}), (quality(0.7), {"interrupts": False})], ids=["no deadline", "cannot be"]
)
def test_other_passes_run_to_their_end(goal, settings):
    steps = ByHand(goal, LONG, prior=5 * MB, workers=2, **({"interrupts": True} | settings))
    steps.begin()
    assert told_until(steps, ev.Interrupt, 3.0)[0] is None
    if settings:
        assert not [each for each in steps.tell(ev.LoadAbandoned(0)) if isinstance(each, ev.Interrupt)]


def test_text_without_a_blob_is_computed_however_slow():
    estimates = Estimates(COSTS, 5 * MB, RTT_S)
    controller = Controller(estimates, ControllerSettings(workers=2, interrupts=True))
    controller.handle(ev.LoadRequested(0, 1, 0, quality(0.7)), 0.0)
    out = controller.handle(ev.IndexKnown(0, 0, (replace(LONG, fetch_bytes=(), errors=()),)), 0.001)
    assert any(isinstance(each, ev.Recompute) for each in out)
    for step in range(1, 100):
        assert not [each for each in controller.handle(ev.Tick(), 0.01 * step) if isinstance(each, ev.Interrupt)]


def test_the_link_does_not_rest_while_chunks_may_become_finer():
    """Coarse levels come first; finer ones are asked for as soon as these are here, whatever the engine does."""
    scenario = scene(1.49, deadline_s=0.5)
    _, log = slowed(scenario, float("inf"))
    open_, idle_s, since = set(), [], None
    for entry in log:
        now = entry.now - scenario.begins_s
        if isinstance(entry.event, (ev.ChunkArrived, ev.ChunkFailed)):
            open_.discard(entry.event.chunk)
        for each in entry.instructions:
            if isinstance(each, ev.Fetch):
                if since is not None and not open_:
                    idle_s.append(now - since)
                open_.add(each.chunk)
            elif isinstance(each, ev.Cancel):
                open_.discard(each.chunk)
        since = None if open_ else now if since is None else since
    assert len(said(log, ev.Fetch)) > 100
    assert max(idle_s, default=0.0) < 0.02


def stopped_after(seconds, expected_s=0.1):
    """Lanes whose pass was asked to stop, and has so many seconds after it began."""
    lanes = ComputeLanes(2)
    lanes.start("prefill", Job("recompute", 0, 0, PASS, 1.0, expected_s))
    lanes.interrupt()
    lanes.end("prefill", "recompute", PASS, 0, 0, 1.0 + seconds)
    return lanes


def test_an_engine_whose_pass_nobody_waited_for_is_not_slow():
    assert not stopped_after(0.05).was_interrupted(1.1)
    assert stopped_after(0.05).slowness(1.1) == 1.0
    assert stopped_after(0.5).was_interrupted(1.6)
    assert stopped_after(0.5).slowness(1.6) == pytest.approx(5.0)


def test_a_closing_counts_as_slow_once():
    """Before any pass was stopped with four times more than its cut keeps, and then the cut keeps that itself."""
    steps, running = begun()
    limits, load = steps.controller._dispatch, steps.controller.loads[0]
    closing = steps.controller.estimates.closing
    for seconds in (0.006, 0.006, 0.006, 0.008) * 3:
        closing.add(24 * 256, seconds)
    limits.known_costs.clear()
    closing_s = steps.controller.estimates.costs().closing_s(24 * 256)
    kept_s = limits._closing_s(load)  # what most closings take: more than what is expected, less than five times that
    assert closing_s < kept_s < 5 * closing_s
    assert limits._slow_cut(load) == pytest.approx(limits._cut(load) + kept_s - 5 * closing_s)
    told_until(steps, ev.Interrupt, 0.7)
    steps.tell(ev.RecomputeInterrupted(PASS[: running.last.chunk + 1], steps.now - 0.002))
    limits._now = steps.now
    assert limits._slow_cut(load) == limits._cut(load)


def test_a_closing_that_runs_ends_no_later_for_a_driver_that_was_held_up():
    lanes = ComputeLanes(2)
    lanes.close(Job("closing", 0, -1, (), 1.0, 0.02))
    lanes.paused(0.35)
    assert lanes.left_s("prefill", 1.355) == pytest.approx(0.015)


def test_an_engine_is_slow_until_a_pass_keeps_its_time():
    for seconds, still in ((0.1, False), (0.5, True)):
        lanes = stopped_after(0.5)
        lanes.start("prefill", Job("recompute", 0, 0, PASS, 2.0, 0.1))
        lanes.end("prefill", "recompute", PASS, 0, 0, 2.0 + seconds)
        assert lanes.was_interrupted(2.6) is still


@given(began=st.floats(0, 1e5), expected_s=st.floats(1e-6, 1e3))
def test_who_looks_the_moment_a_pass_is_overdue_finds_it_slow(began, expected_s):
    job = Job("recompute", 0, 0, PASS, began, expected_s)
    assert job.slowness(job.overdue_at) > 1
    assert job.slowness(began + 1.4 * expected_s) == 1


def test_with_one_worker_passes_stay_short():
    longest = {}
    for workers in (1, 2):
        found = play([LoadArrival(0.0, ((LONG,),), quality(2.0))], 5 * MB, workers=workers, interrupts=True)
        first = next(each for _, each in found.instructions(ev.Recompute))
        longest[workers] = first.last.chunk - first.first.chunk
    assert longest[1] < longest[2]


@pytest.mark.parametrize("gbit_s", [1.0, 2.0])
def test_the_link_does_not_wait_for_the_ends_of_fetches(gbit_s, monkeypatch):
    """Those side by side end together: asked for only then, the next ones leave it idle for a round trip."""
    scenario = replace(scene(gbit_s, 2.0, documents=4), machine=machine_named("h100"), rtt_s=0.002)
    found, _ = slowed(scenario, 0.0)
    monkeypatch.setattr(Limits, "opens_at", lambda *_: float("inf"))
    without, _ = slowed(scenario, 0.0)
    assert found.in_time
    assert found.received > 1.01 * without.received
