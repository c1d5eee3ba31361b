"""The library under ``kvwire plan``: real policies, real costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire import controller as ctl
from kvwire.controller.policies import Adaptive, CacheGen, Fixed
from kvwire.controller.simulator import LoadArrival, World, constant, costs, documents_for, machine_named, model_named
from kvwire.errors import ArgumentError
from kvwire.whatif.break_even import FASTEST, SLOWEST
from kvwire.whatif.plan import plan_load
from kvwire.whatif.situation import Details, PlanScenario, known_link

MODEL, MACHINE = model_named("llama-3.1-8b"), machine_named("h100")
COSTS = costs(MODEL, MACHINE)
SETTINGS = ctl.ControllerSettings(workers=2, decode_batch=8)
BANDWIDTH, RTT_S = 125e6, 0.002
GOALS = (
    ctl.Goal(),
    ctl.Goal(objective="quality", deadline_s=0.2),
    ctl.Goal(objective="cheapest", deadline_s=0.2),
    ctl.Goal(objective="quality", deadline_s=0.15, floor=1, ceiling=2),
)
"""On this link: some recomputed, some fetched, some upgraded and refined."""


@pytest.fixture(scope="module")
def prompt():
    return documents_for(MODEL, [2048, 1500, 4096])


def made(prompt, goal=None, bandwidth=BANDWIDTH, *, compare=False, details=None):
    documents = tuple(each if isinstance(each, tuple) else (each,) for each in prompt)
    estimates = known_link(COSTS, bandwidth, RTT_S)
    scenario = PlanScenario(documents, estimates, goal or ctl.Goal(), SETTINGS, details=details or Details())
    return plan_load(scenario, compare=compare)


def loaded(prompt, goal, policy=None, bandwidth=BANDWIDTH):
    """A load on a link of that bandwidth, played by nothing of what plans it."""
    controller = ctl.Controller(known_link(COSTS, bandwidth, RTT_S), SETTINGS, policy)
    world = World(controller, constant(bandwidth), replace(COSTS, query_tokens=32), rtt_s=RTT_S)
    return world.run([LoadArrival(0.0, tuple((document,) for document in prompt), goal, 32, RTT_S)])[0]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.objective}-{goal.floor}")
def test_the_plan_is_what_a_load_then_does(prompt, goal):
    plan, outcome = made(prompt, goal), loaded(prompt, goal)
    assert [(c.document, c.chunk, c.level, c.reason) for c in plan.chunks] == [
        (d.chunk.document, d.chunk.chunk, d.level, d.reason) for d in outcome.decisions
    ]
    prediction = plan.prediction
    assert (prediction.ttft_s, prediction.bytes) == (outcome.ttft_s, outcome.received)
    assert prediction.error == pytest.approx(outcome.error)
    assert prediction.in_time == outcome.in_time
    assert prediction.recomputed == outcome.recomputed
    assert prediction.recomputed + sum(prediction.levels) == 7644
    assert sum(chunk.bytes for chunk in plan.chunks) == outcome.received - outcome.wasted
    assert prediction.closing_s == pytest.approx(outcome.ttft_s - outcome.ready_s)
    for part in (prediction.fetch_s, prediction.decode_s, prediction.prefill_s):
        assert 0 <= part <= outcome.ready_s


@pytest.mark.parametrize("goal", GOALS[:3], ids=lambda goal: goal.objective)
def test_what_the_policy_expects_comes_true_on_a_link_that_it_knows(prompt, goal):
    plan = made(prompt, goal)
    assert plan.expected_s == pytest.approx(plan.prediction.ttft_s, rel=0.2)
    kept = sum(chunk.level == chunk.first_level for chunk in plan.chunks)
    assert kept >= 0.7 * len(plan.chunks)


def test_the_first_plan_of_one_document_is_what_a_controller_asks_its_policy_for(prompt):
    asked = []

    class Recording(Adaptive):
        def plan(self, request):
            asked.append(super().plan(request))
            return asked[-1]

    loaded(prompt[:1], ctl.Goal(), Recording())
    plan = made(prompt[:1])
    assert [-1 if chunk.first_level is None else chunk.first_level for chunk in plan.chunks] == asked[0].levels.tolist()
    assert plan.expected_s == RTT_S + asked[0].finish_s


def test_estimates_stay_as_they_are(prompt):
    estimates = known_link(COSTS, BANDWIDTH, RTT_S)
    before = estimates.to_state()
    plan_load(PlanScenario((tuple(prompt[:1]),), estimates, settings=SETTINGS))
    assert estimates.to_state() == before


def test_alternatives_are_loads_by_other_policies(prompt):
    goal = GOALS[1]
    plan = made(prompt, goal, compare=True, details=Details(raw_token_bytes=MODEL.cache_bytes))
    found = {each.name: each for each in plan.alternatives}
    assert list(found) == [
        "text only", *(f"level {level}" for level in range(5)), "raw cache", "CacheGen's rule", "objective earliest",
        "objective cheapest",
    ]  # fmt: skip
    assert found["text only"].bytes == 0
    assert found["text only"].recomputed == 7644
    assert found["raw cache"].bytes == 7644 * MODEL.cache_bytes
    assert found["raw cache"].error == pytest.approx(found["text only"].error)
    for level in range(5):
        outcome, each = loaded(prompt, goal, Fixed(level)), found[f"level {level}"]
        assert (each.ttft_s, each.bytes, each.in_time) == (outcome.ttft_s, outcome.received, outcome.in_time)
        assert each.error == pytest.approx(outcome.error)
    assert found["objective earliest"].ttft_s == loaded(prompt, replace(goal, objective="earliest")).ttft_s
    assert found["objective earliest"].ttft_s <= min(each.ttft_s for each in found.values()) * 1.25
    for each in plan.alternatives:
        if each.in_time and each.name.startswith(("level", "objective")):
            assert plan.prediction.error <= each.error * 1.001


def holds(point, prompt, bandwidth, goal):
    """Whether a plan made anew at a bandwidth is on the far side of a break-even point."""
    if point.what == "in time":
        plan = made(prompt, replace(goal, floor=point.level), bandwidth)
        return plan.expected_s <= goal.deadline_s - 2 * SETTINGS.reserve_s  # kept while chunks are not begun
    if point.what == "beats text":
        blobs = made([replace(document, has_text=False) for document in prompt], ctl.Goal(floor=point.level), bandwidth)
        texts = made([replace(document, fetch_bytes=(), errors=()) for document in prompt], None, bandwidth)
        return blobs.expected_s < texts.expected_s
    recomputed = sum(chunk.first_level is None for chunk in made(prompt, goal, bandwidth).chunks)
    return not recomputed if point.what == "fetches all" else recomputed < 7 - 1


def test_plans_differ_at_both_sides_of_every_break_even_point():
    prompt, goal = documents_for(MODEL, [1024, 700]), ctl.Goal(objective="quality", deadline_s=0.05)
    plan = made(prompt, goal, compare=True)
    levels = [("beats text", level) for level in range(5)] + [("in time", level) for level in range(5)]
    assert [(p.what, p.level) for p in plan.break_evens] == [("fetches", None), ("fetches all", None), *levels]
    assert sum(point.holds == "from" for point in plan.break_evens) > 6
    for point in plan.break_evens:
        below, above = SLOWEST, FASTEST
        if point.bandwidth is not None:
            below, above = point.bandwidth / 1.01, point.bandwidth * 1.01
        expected = {"from": (False, True), "always": (True, True), "never": (False, False)}[point.holds]
        assert (holds(point, prompt, below, goal), holds(point, prompt, above, goal)) == expected, point


def test_the_first_plan_is_another_beyond_the_bandwidths_told_and_the_same_within(prompt):
    plan = made(prompt, compare=True)

    def first(bandwidth):
        return [chunk.first_level for chunk in made(prompt, None, bandwidth).chunks]

    below, above = plan.unchanged
    assert below < BANDWIDTH < above
    known = [chunk.first_level for chunk in plan.chunks]
    assert first(below * 1.002) == first(above / 1.002) == known
    assert known not in (first(below / 1.0001), first(above * 1.0001))


def test_finer_levels_need_more_bandwidth(prompt):
    points = made(prompt[:1], ctl.Goal(objective="quality", deadline_s=0.05), compare=True).break_evens
    for what in ("beats text", "in time"):
        rates = [point.bandwidth for point in points if point.what == what and point.bandwidth]
        assert len(rates) > 2
        assert rates == sorted(rates)


def test_a_load_that_is_too_long_to_be_played_is_as_its_policy_expects(prompt):
    unread = [replace(document, has_text=False) for document in prompt]
    plan = made(unread, None, 1e3)
    assert not plan.prediction.played
    assert plan.prediction.ttft_s == plan.expected_s > plan.prediction.bytes / 1e3
    assert [chunk.level for chunk in plan.chunks] == [0] * len(plan.chunks)


def test_many_documents_are_planned_though_not_played_and_too_many_are_refused():
    many = documents_for(MODEL, [128] * 65)
    plan = made(many)
    assert not plan.prediction.played
    assert sorted({chunk.document for chunk in plan.chunks}) == list(range(65))
    with pytest.raises(ArgumentError, match="up to 128"):
        made(many * 2)


def test_asking_again_is_the_same_as_asking_anew(prompt):
    """However a prompt was asked about before, and with a deadline that counts from the asking."""
    goal = ctl.Goal(objective="quality", deadline_s=0.2)
    old = PlanScenario(tuple((each,) for each in prompt), known_link(COSTS, BANDWIDTH, RTT_S), goal, SETTINGS, 32,
                    Details(header_bytes=100_000))  # fmt: skip
    for bandwidth in (1e5, 1e9, 1e6, 1e8):
        for policy in (Adaptive(), Fixed(1), CacheGen()):
            again, anew = (each.forecast(policy, bandwidth) for each in (old, replace(old)))
            assert again.levels == anew.levels
            assert again.plan.finish_s == pytest.approx(anew.plan.finish_s)
            assert again.plan.in_time == anew.plan.in_time


def test_a_variant_is_chosen_and_counted(prompt):
    heads = documents_for(MODEL, [2048], method="kvwire-head-start-2")
    plans = {bandwidth: made([(prompt[0], heads[0])], None, bandwidth) for bandwidth in (1e6, 1e7, 1e11)}
    for bandwidth, plan in plans.items():
        fetched = [chunk for chunk in plan.chunks if chunk.level is not None]
        assert any(
            all(chunk.bytes == variant.fetch_bytes[chunk.chunk][chunk.level] for chunk in fetched)
            for variant in (prompt[0], heads[0])
        ), bandwidth
        alone = [made([each], None, bandwidth).expected_s for each in (prompt[0], heads[0])]
        assert plan.expected_s == pytest.approx(min(alone))


def test_recomputed_chunks_count_with_no_divergence(prompt):
    kl = (0.5, 0.4, 0.3, 0.2, 0.1)
    details = Details(level_kl=(kl, kl, kl))
    plan = made(prompt, details=details)
    expected = sum(c.tokens * (0.0 if c.level is None else kl[c.level]) for c in plan.chunks) / 7644
    assert plan.prediction.kl == pytest.approx(expected)
    assert made(prompt, details=Details(level_kl=(kl, ()))).prediction.kl is None


def test_a_chunk_without_text_and_bytes_cannot_be_planned(prompt):
    lost = replace(prompt[0], has_text=False, fetch_bytes=(*prompt[0].fetch_bytes[:-1], ()), errors=())
    with pytest.raises(ArgumentError, match="neither text nor a segment"):
        made([lost])
    with pytest.raises(ArgumentError, match="at least one document"):
        made([])
    with pytest.raises(ArgumentError, match="above 0"):
        known_link(COSTS, 0.0, 0.0)
