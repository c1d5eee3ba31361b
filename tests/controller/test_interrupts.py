"""Forward passes that turn out to be slow are given up while their chunks can still be fetched in time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvwire.controller import Controller, ControllerSettings, Estimates, Goal
from kvwire.controller import events as ev
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

from .playing import COSTS, MB, RTT_S, ByHand, document, quality

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
        told_until(steps, ev.Interrupt, at - 0.001)
        out = steps.tell(ev.DriverPaused(paused_s), at - 0.001) + steps.tell(ev.Tick(), at)
        assert [each for each in out if isinstance(each, ev.Interrupt)] == [ev.Interrupt(running.first)] * (
            not paused_s
        )


def test_stopped_chunks_are_open_again_and_the_engine_counts_as_slow():
    steps, running = begun()
    told_until(steps, ev.Interrupt, 0.7)
    chunks = PASS[: running.last.chunk + 1]
    out = steps.tell(ev.RecomputeInterrupted(chunks, steps.now - 0.002))
    shorter = [each for each in out if isinstance(each, ev.Recompute)]
    assert all(each.first == each.last for each in shorter)
    assert steps.controller.loads[0].table.counts[4] == len(shorter) < len(chunks)
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
