"""The modelled world keeps its own laws: lanes, links and bytes, whatever the controller asks for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvwire.controller import Controller, CostModel, DecodeCost, DocumentPlanInput, Goal, PrefillCost
from kvwire.controller import events as ev
from kvwire.controller.simulator import (
    Scenario,
    Steering,
    Trouble,
    ar1,
    constant,
    machine_named,
    model_named,
    policy_named,
    settings_for,
    simulate,
    variants_for,
)
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.simulator.world import World
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

MODEL, RATE = model_named("llama-3.1-8b"), 60e6
GOAL = Goal(objective="quality", deadline_s=0.4)


def scenario(**changed) -> Scenario:
    wanted = {
        "model": MODEL, "machine": machine_named("h100"), "documents": variants_for(MODEL, [1500, 2000]),
        "rate": ar1(np.random.default_rng(2), RATE, sigma=0.5, correlation=0.8, step_s=0.02), "goal": GOAL,
        "warm": False, "asked": (0.0, 0.03),
        "trouble": Trouble(fail=0.1, stall=0.1, stall_s=0.05, corrupt=0.1, noise=0.3),
    }  # fmt: skip
    return Scenario(**(wanted | changed))


def spans(outcomes, *lanes):
    return sorted((s for each in outcomes for s in each.spans if s.lane in lanes), key=lambda span: span.began)


def jobs(outcomes, *lanes):
    """When lanes were busy: chunks of one batch have spans of the same times."""
    return sorted({(span.began, span.ended) for span in spans(outcomes, *lanes)})


@pytest.mark.parametrize("seed", range(4))
def test_a_lane_does_one_thing_at_a_time(seed):
    scene = scenario(seed=seed)
    outcomes = simulate(scene, policy_named("adaptive", scene.rate))
    for lane in ("decode", "prefill"):
        found = jobs(outcomes, lane)
        assert found
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(found))


def test_one_worker_takes_turns():
    scene = scenario(machine=replace(machine_named("h100"), workers=1))
    outcomes = simulate(scene, policy_named("adaptive", scene.rate))
    assert {span.lane for span in spans(outcomes, "decode", "prefill")} == {"decode", "prefill"}
    assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(jobs(outcomes, "decode", "prefill")))


def test_spans_of_the_link_tell_the_level_and_what_became_of_it():
    scene = scenario(seed=1)
    outcomes = simulate(scene, policy_named("level-2", scene.rate))
    found = spans(outcomes, "link")
    assert {span.what for span in found} == {"fetch", "failed"}
    assert {span.level for span in found} == {2}
    assert all(span.ended - span.began >= scene.rtt_s for span in found if span.what == "fetch")


def test_without_troubles_every_byte_is_in_the_prompt_and_the_link_never_exceeds_its_rate():
    scene = scenario(trouble=Trouble(), asked=(0.0,), rate=constant(RATE))
    (outcome,) = simulate(scene, policy_named("level-1", scene.rate))
    sizes = [row[1] for (document,) in scene.documents for row in document.fetch_bytes]
    assert outcome.received == pytest.approx(sum(sizes), abs=len(sizes))
    assert outcome.wasted <= len(sizes)
    ended = max(span.ended for span in spans([outcome], "link"))
    assert sum(sizes) / RATE <= ended - outcome.asked_at - 2 * scene.rtt_s + 1e-6


def test_troubles_cost_bytes_and_time():
    calm = scenario(trouble=Trouble(), asked=(0.0,))
    rough = replace(calm, trouble=Trouble(corrupt=1.0))
    policy = policy_named("level-1", calm.rate)
    good, bad = simulate(calm, policy)[0], simulate(rough, policy)[0]
    assert bad.recomputed == 3500  # what cannot be decoded has its text
    assert bad.wasted == bad.received > 0
    assert bad.ttft_s > good.ttft_s


def test_what_is_reported_is_what_came():
    events: list[ev.LogEntry] = []
    scene = scenario(trouble=Trouble(), asked=(0.0,))
    (outcome,) = simulate(scene, policy_named("level-1", scene.rate), record=events.append)
    reports = [entry.event for entry in events if isinstance(entry.event, ev.TransferProgress)]
    assert sum(report.bytes for report in reports) == pytest.approx(outcome.received, abs=len(reports))
    assert all(a.ended <= b.started + 1e-9 for a, b in pairwise(reports))
    assert all(report.started < report.ended for report in reports)


def test_a_load_that_never_ends_is_an_error_and_not_a_hang():
    scene = scenario(asked=(0.0,), trouble=Trouble())
    controller = Controller(scene.estimates(), settings_for(scene.machine), policy_named("raw", scene.rate))
    world = World(controller, constant(1.0), scene.costs, limit_s=5.0)
    with pytest.raises(ArgumentError, match="not over"):
        world.run([LoadArrival(0.0, tuple((replace(d, has_text=False),) for (d,) in scene.documents), GOAL)])


def test_a_lane_that_stands_idle_between_jobs_delays_what_follows_but_not_what_is_measured():
    scene, events = scenario(asked=(0.0,), trouble=Trouble()), []
    ends = []
    for lane_s in (0.0, 0.01):
        policy = policy_named("text", scene.rate)
        controller = Controller(scene.estimates(), settings_for(scene.machine), policy, record=events.append)
        world = World(controller, scene.rate, scene.costs, lane_s=lane_s)
        ends.append(world.run([LoadArrival(0.0, scene.documents, GOAL)])[0].ready_s)
    passes = [entry.event.seconds for entry in events if isinstance(entry.event, ev.RecomputeDone)]
    assert passes[: len(passes) // 2] == pytest.approx(passes[len(passes) // 2 :])
    assert ends[1] - ends[0] == pytest.approx(0.01 * len(passes) / 2)


STEERING = Steering(event_s=2e-3, header_s=3e-3, request_s=1e-3)


def steered(steering, seed=0, policy="adaptive", **changed):
    scene, log = scenario(seed=seed, **changed), []
    scene = replace(scene, machine=replace(scene.machine, steering=steering))
    return simulate(scene, policy_named(policy, scene.rate), record=log.append), log


@pytest.mark.parametrize("seed", range(6))
def test_a_driver_that_takes_next_to_no_time_changes_nothing(seed):
    (free, _), (quick, _) = steered(Steering(), seed), steered(Steering(event_s=1e-13, request_s=1e-13), seed)
    assert [each.decisions for each in quick] == [each.decisions for each in free]
    assert [each.ttft_s for each in quick] == pytest.approx([each.ttft_s for each in free], rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_driver_hears_of_one_event_after_another(seed):
    _, log = steered(STEERING, seed)
    for entry, later in pairwise(log):
        requests = sum(isinstance(each, ev.Fetch) for each in entry.instructions)
        heard = 0.0 if isinstance(entry.event, ev.FirstByte) else STEERING.event_s
        heard += STEERING.header_s if isinstance(later.event, ev.IndexKnown) else 0.0
        assert later.now - entry.now >= heard + STEERING.request_s * requests - 1e-9


def test_instructions_come_when_the_controller_has_decided():
    (outcome,), log = steered(Steering(event_s=0.01), policy="level-0", trouble=Trouble(), asked=(0.0,))
    decided = {each.chunk: entry.now for entry in log for each in entry.instructions if isinstance(each, ev.Fetch)}
    asked = {ChunkId(span.document, span.first, 0): span.began for span in spans([outcome], "link")}
    assert asked
    assert all(began == pytest.approx(decided[chunk] + 0.01) for chunk, began in asked.items())


def test_steering_costs_time_the_more_the_more_headers_are_opened():
    ends = []
    for steering in (Steering(), Steering(event_s=1e-3), Steering(event_s=1e-3, header_s=0.05)):
        (outcome,), _ = steered(steering, trouble=Trouble(), asked=(0.0,), goal=Goal())
        ends.append(outcome.ttft_s)
    assert ends[0] < ends[1] < ends[2] - 0.05


def test_an_answer_that_is_cancelled_before_its_end_is_heard_of_never_ends():
    """The driver is busy with the first byte of A while A and B come in; what it decides then is to cancel A."""

    class Canceller(Stub):
        def handle(self, event, now):
            heard.append(event)
            return super().handle(event, now)

    heard = []
    answers = {
        ev.LoadRequested: [FETCH, replace(FETCH, chunk=B)], ev.TransferProgress: [ev.Cancel(A, "enough")],
        ev.ChunkArrived: [ev.Finish(0, (), "done")],
    }  # fmt: skip
    costs = CostModel(PrefillCost(1.0, 0.0), DecodeCost(1.0, 0.0))
    world = World(Canceller(answers), constant(1e4), costs, rtt_s=0.01, steering=Steering(event_s=0.05), limit_s=5.0)
    document = DocumentPlanInput((256, 256), ((100, 200), (100, 200)))
    world.run([LoadArrival(0.0, ((document,),), GOAL, index_s=0.0)])
    assert [each.chunk for each in heard if isinstance(each, ev.ChunkArrived)] == [B]


@pytest.mark.parametrize("wrong", [{"event_s": -1.0}, {"header_s": float("nan")}, {"request_s": float("inf")}])
def test_steering_that_cannot_be_is_refused(wrong):
    with pytest.raises(ArgumentError, match="steering"):
        Steering(**wrong)


@pytest.mark.parametrize("workers", [1, 2])
def test_closings_of_several_loads_take_turns_on_the_engine(workers):
    scene = scenario(trouble=Trouble(), rate=constant(1e9))
    settings = replace(settings_for(scene.machine), workers=workers)
    controller = Controller(scene.estimates(), settings, policy_named("level-0", scene.rate))
    costs = replace(scene.costs, link_s_per_token=1e-5)
    world = World(controller, scene.rate, costs, workers=workers)
    found = world.run([LoadArrival(0.0, scene.documents, GOAL), LoadArrival(0.0, scene.documents, GOAL)])
    closing_s = replace(costs, query_tokens=32).closing_s(3500)
    first, second = sorted(outcome.ttft_s for outcome in found)
    assert second - first >= closing_s - 1e-9
    decodes = jobs(found, "decode")
    overlap = sum(max(0.0, min(b, first) - max(a, first - closing_s)) for a, b in decodes)
    assert overlap == pytest.approx(0.0, abs=1e-9) if workers == 1 else overlap > 0


class Stub:
    """Answers each kind of event with the same instructions, once."""

    def __init__(self, answers):
        self.wake_at, self._answers = 1.0, dict(answers)

    def handle(self, event, now):
        self.wake_at = now + 1.0
        return self._answers.pop(type(event), [])


def first_bytes_and_arrivals(*sizes):
    """Instants of what fetches of one load bring at 100 kB/s, after a round trip of 0.1 s; by chunk, in order."""
    fetches = [ev.Fetch(ChunkId(0, at, 0), 0, 0, size, 0, 100.0) for at, size in enumerate(sizes)]
    heard, arrived = [], {}

    class Listener(Stub):
        def handle(self, event, now):
            if isinstance(event, ev.FirstByte):
                heard.append(event.seconds)
            if isinstance(event, ev.ChunkArrived):
                arrived[event.chunk.chunk] = now
                if len(arrived) == len(sizes):
                    return [ev.Finish(0, (), "all are here")]
            return super().handle(event, now)

    world = World(
        Listener({ev.LoadRequested: fetches}), constant(1e5), CostModel(PrefillCost(0, 0), DecodeCost(0, 0)), rtt_s=0.1
    )
    document = DocumentPlanInput((256,) * len(sizes), tuple((size,) for size in sizes))
    world.run([LoadArrival(0.0, ((document,),), GOAL, index_s=0.0)])
    return heard, [arrived[at] for at in range(len(sizes))]


def test_first_packets_come_one_after_another():
    heard, arrived = first_bytes_and_arrivals(10_000, 14_600, 5_000)
    assert heard == pytest.approx([0.1, 0.2, 0.346], abs=1e-3)
    assert arrived == pytest.approx([0.2, 0.346, 0.396], abs=1e-3)


def test_answers_past_their_first_packets_share_the_link():
    heard, arrived = first_bytes_and_arrivals(34_600, 34_600, 10_000)
    # 14,600 bytes of the first alone, then of the second beside as many of the first, the rest in thirds.
    assert heard == pytest.approx([0.1, 0.246, 0.538], abs=1e-3)
    assert arrived == pytest.approx([0.7, 0.892, 0.792], abs=1e-3)


A, B = ChunkId(0, 0, 0), ChunkId(0, 1, 0)
FETCH = ev.Fetch(A, 0, 0, 100, 0, 10.0)


@pytest.mark.parametrize(
    ("workers", "answers", "trouble"),
    [
        (2, {ev.LoadRequested: [ev.Recompute(A, A), ev.Recompute(A, A)]}, "lane is busy"),
        (2, {ev.LoadRequested: [ev.ComputePrefix(0, 0, 0), ev.Recompute(A, A)]}, "lane is busy"),
        (1, {ev.LoadRequested: [FETCH, ev.Recompute(A, A)], ev.ChunkArrived: [ev.Decode((A,), (0,))]}, "lane is busy"),
        (2, {ev.LoadRequested: [ev.Decode((A,), (0,))]}, "not all here"),
        (2, {ev.LoadRequested: [FETCH], ev.FirstByte: [ev.Decode((A,), (0,))]}, "not all here"),
        (2, {ev.LoadRequested: [FETCH], ev.ChunkArrived: [ev.Decode((A,), (1,))]}, "not all here"),
        (2, {ev.LoadRequested: [FETCH], ev.ChunkArrived: [ev.Release(A), ev.Decode((A,), (0,))]}, "not all here"),
        (2, {ev.LoadRequested: [ev.Recompute(B, B)]}, "not in the prompt"),
        (2, {ev.LoadRequested: [FETCH], ev.ChunkArrived: [ev.Recompute(B, B)]}, "not in the prompt"),
        (2, {ev.LoadRequested: [FETCH, FETCH]}, "already"),
        (2, {ev.LoadRequested: [FETCH], ev.ChunkArrived: [FETCH]}, "1 comes next"),
        (2, {ev.LoadRequested: [replace(FETCH, first=1, level=1)]}, "0 comes next"),
    ],
)
def test_what_no_driver_could_do_is_refused(workers, answers, trouble):
    costs = CostModel(PrefillCost(1.0, 0.0), DecodeCost(1.0, 0.0))
    world = World(Stub(answers), constant(1e4), costs, rtt_s=0.01, workers=workers, limit_s=0.5)
    document = DocumentPlanInput((256, 256), ((100, 200), (100, 200)))
    with pytest.raises(ArgumentError, match=trouble):
        world.run([LoadArrival(0.0, ((document,),), GOAL, index_s=0.001)])
