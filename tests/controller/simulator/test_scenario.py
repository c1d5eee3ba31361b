from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import Controller, DocumentPlanInput, Goal
from kvwire.controller.events import Recompute
from kvwire.controller.simulator import (
    LoadArrival,
    Machine,
    Model,
    RateTrace,
    Scenario,
    Trouble,
    World,
    ar1,
    constant,
    machine_named,
    model_named,
    policy_named,
    policy_names,
    raw_of,
    settings_for,
    simulate,
    variants_for,
)
from kvwire.errors import ArgumentError, NotFoundError

MODEL = Model(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, key_dim=32, value_dim=32, parameters=1e6,
    active_parameters=1e6,
)  # fmt: skip
SLOW = Machine(
    name="slow", bf16_flops=1e10, fp8_flops=1e10, memory_bytes=1e9, memory_bytes_s=1e10, wire_bytes_s=1e9, efficiency=1,
    attention_efficiency=1, expert_efficiency=1, launch_s=1e-3, chunk_decode_s=1e-4, element_decode_s=1e-10,
    byte_decode_s=1e-10,
)  # fmt: skip
RATE = 2e5
WILD = ar1(np.random.default_rng(8), RATE, sigma=0.6, correlation=0.8, step_s=0.02, length_s=5.0)
POLICIES = policy_names(5)


def scenario(**changed) -> Scenario:
    wanted = {
        "model": MODEL, "machine": SLOW, "documents": variants_for(MODEL, [1000, 700]), "rate": constant(RATE),
        "goal": Goal(objective="quality", deadline_s=0.3), "warm": False,
    }  # fmt: skip
    return Scenario(**(wanted | changed))


def figures(scene: Scenario, name: str) -> list[tuple[object, ...]]:
    outcomes = simulate(scene, policy_named(name, scene.rate))
    return [(each.ttft_s, each.error, each.received, each.wasted, each.decisions) for each in outcomes]


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_scenario_gives_the_same_outcomes(name):
    trouble = Trouble(fail=0.1, stall=0.1, noise=0.3)
    scene = scenario(rate=WILD, trouble=trouble, seed=4, warm=True, asked=(0.0, 0.05))
    again = replace(scene)
    assert figures(scene, name) == figures(scene, name) == figures(again, name)


def test_another_seed_is_another_run():
    scene = scenario(trouble=Trouble(noise=0.3), rate=WILD)
    assert figures(scene, "adaptive") != figures(replace(scene, seed=1), "adaptive")


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=3)
@given(
    fail=st.floats(0, 1), stall=st.floats(0, 1), corrupt=st.floats(0, 1), noise=st.floats(0, 1),
    seed=st.integers(0, 99), objective=st.sampled_from(["earliest", "quality", "cheapest"]),
)  # fmt: skip
def test_every_load_ends_whatever_goes_wrong(name, fail, stall, corrupt, noise, seed, objective):
    trouble = Trouble(fail=fail, stall=stall, stall_s=0.3, corrupt=corrupt, noise=noise)
    scene = scenario(
        trouble=trouble, seed=seed, asked=(0.0, 0.02, 0.02), goal=Goal(objective=objective, deadline_s=0.3),
        documents=variants_for(MODEL, [600, 300]),
    )  # fmt: skip
    for outcome in simulate(scene, policy_named(name, scene.rate)):
        assert not outcome.failed
        assert len(outcome.decisions) == 5


@pytest.mark.parametrize("name", ["adaptive", "level-2", "raw"])
def test_a_link_that_dies_and_comes_back_is_survived(name):
    rate = RateTrace((0.0, 0.05, 1.0), (RATE, 0.0, RATE))
    outcome = simulate(scenario(rate=rate), policy_named(name, rate))[0]
    assert not outcome.failed


def test_text_needs_no_link_and_takes_what_prefill_takes():
    scene = scenario()
    outcome = simulate(scene, policy_named("text", scene.rate))[0]
    prefill = scene.costs.prefill
    # No index is waited for; the question comes last.
    seconds = prefill.seconds(1000) + prefill.seconds(700) + scene.costs.closing_s(1700)
    assert outcome.received == 0
    assert outcome.recomputed == 1700
    assert outcome.ttft_s == pytest.approx(seconds, rel=1e-6)


def test_raw_caches_take_their_bytes_over_the_link():
    scene = scenario()
    outcome = simulate(scene, policy_named("raw", scene.rate))[0]
    assert outcome.received == 1700 * MODEL.cache_bytes
    assert outcome.wasted == 0
    assert outcome.levels == (1700,)
    assert outcome.ttft_s > 1700 * MODEL.cache_bytes / RATE


def test_raw_and_recomputed_chunks_count_with_the_same_error():
    document = variants_for(MODEL, [1000])[0][0]
    raw = raw_of(MODEL, document)
    assert [raw.error(chunk, 0) for chunk in range(4)] == [document.error(chunk, None) for chunk in range(4)]
    assert raw_of(MODEL, DocumentPlanInput(tokens=(5,))).error(0, 0) == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("objective", ["earliest", "quality", "cheapest"])
def test_nobody_betters_the_bound(name, objective):
    scene = scenario(rate=WILD, goal=Goal(objective=objective, deadline_s=0.3))
    outcome, bound = simulate(scene, policy_named(name, scene.rate))[0], scene.bounds[0]
    if name == "raw":  # its decoding costs less than the bound's
        return
    if objective == "earliest":
        spared_s = scene.rtt_s if name == "text" else 0.0  # it waits for no index
        assert outcome.ttft_s >= (bound.ttft_s - spared_s) * (1 - 1e-9)
    elif outcome.in_time:
        assert bound.in_time
        figure = (outcome.error, bound.error) if objective == "quality" else (outcome.received, bound.bytes)
        assert figure[0] >= figure[1] * (1 - 1e-9)


@pytest.mark.parametrize("ceiling", [0, 1, 4])
@pytest.mark.parametrize("name", ["adaptive", "cachegen"])
def test_nobody_betters_the_bound_under_a_ceiling(name, ceiling):
    scene = scenario(rate=constant(10 * RATE), goal=Goal(objective="quality", deadline_s=0.3, ceiling=ceiling))
    outcome, bound = simulate(scene, policy_named(name, scene.rate))[0], scene.bounds[0]
    assert outcome.in_time
    assert outcome.error >= bound.error * (1 - 1e-9)
    assert len(outcome.levels[ceiling + 1 :]) == 0 or not any(outcome.levels[ceiling + 1 :])


def test_cachegen_leaves_no_gaps_between_its_requests():
    scene = scenario(rate=constant(50 * RATE), goal=Goal(), documents=variants_for(MODEL, [1000] * 6))
    fixed, cachegen = (simulate(scene, policy_named(name, scene.rate))[0] for name in ("level-0", "cachegen"))
    assert cachegen.received == fixed.received
    assert cachegen.ttft_s == pytest.approx(fixed.ttft_s, rel=0.02)


def test_settings_of_other_workers_than_the_machine_has_are_refused():
    scene = scenario()
    with pytest.raises(ArgumentError, match="workers"):
        simulate(scene, policy_named("text", scene.rate), settings=replace(settings_for(SLOW), workers=1))


def test_the_same_chunks_fail_under_every_policy():
    trouble = Trouble(fail=0.3)
    scene = scenario(trouble=trouble, seed=7, asked=(0.0, 0.05), documents=variants_for(MODEL, [1000] * 4))
    ends = []
    for name in ("level-0", "level-2", "cachegen"):
        outcomes = simulate(scene, policy_named(name, scene.rate))
        fetches = [(load, each) for load, outcome in enumerate(outcomes) for each in outcome.spans]
        ends.append({(load, s.document, s.first): s.what for load, s in fetches if s.lane == "link"})
    for one, other in ((ends[0], ends[1]), (ends[0], ends[2])):
        common = one.keys() & other.keys()
        assert {one[chunk] for chunk in common} == {"fetch", "failed"}
        assert all(one[chunk] == other[chunk] for chunk in common)


def test_an_earlier_load_teaches_the_estimates_and_is_over_before_the_first_one():
    scene = scenario(warm=True, bandwidth_error=4.0)
    estimates = scene.estimates()
    assert estimates.knows_link
    assert estimates.bandwidth.value == pytest.approx(RATE, rel=0.3)
    assert scene.begins_s > 0.5
    assert simulate(scene, policy_named("adaptive", scene.rate))[0].asked_at == scene.begins_s


def test_estimates_of_a_scenario_are_a_copy_each_time():
    scene = scenario()
    scene.estimates().bandwidth.add(10_000_000, 0.0, 1.0)
    assert scene.estimates().bandwidth.value == RATE


def test_priors_are_wrong_by_the_factors_given():
    known = scenario(bandwidth_error=2.0, prefill_error=0.5).estimates()
    assert known.bandwidth.value == 2 * RATE
    assert known.costs().prefill.token_s == pytest.approx(0.5 * scenario().costs.prefill.token_s)


def test_who_waits_no_longer_has_failed():
    scene = scenario(leaves_s=0.1)
    outcome = simulate(scene, policy_named("raw", scene.rate))[0]
    assert outcome.failed
    assert not outcome.in_time
    assert outcome.received == pytest.approx(0.096 * RATE, rel=0.05)


def test_a_later_load_on_the_same_link_waits_for_its_share():
    alone, both = scenario(), scenario(asked=(0.0, 0.0))
    policy = policy_named("level-1", alone.rate)
    single, pair = simulate(alone, policy)[0], simulate(both, policy)
    assert max(each.ttft_s for each in pair) > 1.5 * single.ttft_s


def test_of_several_variants_the_better_ones_bound_the_load():
    both = scenario(documents=variants_for(MODEL, [1000], ["cachegen", "kvwire"]))
    ways = [scenario(documents=variants_for(MODEL, [1000], [method])) for method in ("cachegen", "kvwire")]
    assert both.bounds[0].error == min(way.bounds[0].error for way in ways)


@pytest.mark.parametrize(
    "wrong",
    [{"documents": ()}, {"asked": ()}, {"start_s": -1.0}, {"rtt_s": inf}, {"bandwidth_error": 0.0}, {"leaves_s": 0.0},
     {"rate": constant(0.0)}],
)  # fmt: skip
def test_scenarios_that_cannot_be_played_are_refused(wrong):
    with pytest.raises(ArgumentError):
        scenario(**wrong)


@pytest.mark.parametrize("wrong", [{"fail": 1.5}, {"stall_s": inf}, {"noise": -1.0}, {"corrupt": float("nan")}])
def test_troubles_that_cannot_be_are_refused(wrong):
    with pytest.raises(ArgumentError):
        Trouble(**wrong)


@pytest.mark.parametrize("name", ["", "best", "level-", "level-9", "level-x", "level-²"])
def test_unknown_policies_are_told_with_those_there_are(name):
    with pytest.raises(NotFoundError, match="adaptive"):
        policy_named(name, constant(1e6))


def test_a_cpu_takes_turns_and_a_gpu_decodes_in_batches():
    assert settings_for(replace(SLOW, workers=1)).workers == 1
    assert settings_for(SLOW).workers == 2
    assert settings_for(SLOW).decode_batch > 1


def test_documents_need_a_method():
    with pytest.raises(ArgumentError, match="method"):
        variants_for(MODEL, [100], [])


class Slowed(World):
    """A world whose forward passes take five times as long between two instants."""

    between = (0.0, 0.0)

    def _start(self, lane, instruction, seconds):
        first, last = self.between
        if lane == "prefill" and first <= self._now < last:
            seconds = min(5 * seconds, last - self._now + max(0.0, seconds - (last - self._now) / 5))
        super()._start(lane, instruction, seconds)


@pytest.mark.parametrize("gbit", [1.0, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2])
def test_an_engine_that_becomes_slow_on_the_way_makes_nothing_late_that_the_coarsest_level_keeps(gbit, after_s):
    scene = Scenario(
        model=model_named("llama-3.1-8b"), machine=machine_named("a100"), rate=constant(gbit * 1.25e8),
        documents=variants_for(model_named("llama-3.1-8b"), (8192,) * 4),
        goal=Goal(objective="quality", deadline_s=0.5),
    )  # fmt: skip
    log = []
    controller = Controller(scene.estimates(), settings_for(scene.machine), record=log.append)
    world = Slowed(controller, scene.rate, scene.costs, rtt_s=scene.rtt_s)
    world.between = scene.begins_s + after_s, scene.begins_s + after_s + 0.3
    (outcome,) = world.run([LoadArrival(scene.begins_s, scene.documents, scene.goal, scene.query_tokens)])
    assert [each for entry in log for each in entry.instructions if isinstance(each, Recompute)]
    assert outcome.in_time


def test_a_load_waits_for_no_bytes_of_others_that_were_asked_for_behind_its_own():
    """What is left of the third load is computed in time, while the link brings much for the fourth."""
    model = model_named("llama-3.1-8b")
    scene = Scenario(
        model=model, machine=machine_named("h100"), documents=variants_for(model, (2048,) * 4), rate=constant(2.5e8),
        goal=Goal(objective="quality", deadline_s=0.5), asked=(0.471974, 0.533059, 0.677371, 0.987565, 1.305773),
    )  # fmt: skip
    assert all(outcome.in_time for outcome in simulate(scene, policy_named("adaptive", scene.rate)))
