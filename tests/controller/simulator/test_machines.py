from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.controller.simulator import MACHINES, MODELS, costs, machine_named, model_named
from kvwire.controller.simulator.machines import A100, CPU, H100, H200
from kvwire.controller.simulator.models import DEEPSEEK_V3, DEMO, LLAMA_3_1_8B, LLAMA_3_1_70B
from kvwire.errors import ArgumentError, NotFoundError

LLAMA_70B_FP8 = replace(LLAMA_3_1_70B, weight_bytes=1)


@pytest.mark.parametrize(
    ("model", "machine", "tokens", "measured_s"),
    [
        (LLAMA_3_1_8B, A100, 500, 0.0483),
        (LLAMA_70B_FP8, H100.group(2), 500, 0.0478),
        (LLAMA_70B_FP8, H100.group(2), 5000, 0.4068),
    ],
)
def test_published_prefill_times_are_met(model, machine, tokens, measured_s):
    assert costs(model, machine).prefill.seconds(tokens) == pytest.approx(measured_s, rel=0.08)


def test_the_published_rate_of_a_node_with_experts_is_met():
    node = replace(H100.group(8), memory_bytes=H200.memory_bytes)  # the report spreads the weights over four nodes
    assert 2000 / costs(DEEPSEEK_V3, node).prefill.marginal(2000, 0) == pytest.approx(52_300, rel=0.05)


def test_the_measured_costs_of_the_demonstration_come_out():
    found = costs(DEMO, CPU)
    assert (found.prefill.base_s, found.prefill.token_s, found.prefill.pair_s) == pytest.approx(
        (8.9e-3, 9.5e-5, 1.4e-7)
    )
    assert (found.decode.base_s, found.decode.token_s, found.decode.byte_s) == pytest.approx((1.07e-3, 1.1e-5, 1.3e-7))
    assert CPU.workers == 1


@pytest.mark.parametrize("name", sorted(MODELS))
def test_more_processors_are_faster_and_decoding_beats_prefill(name):
    model = model_named(name)
    groups = [machine for machine in (H200, H200.group(4), H200.group(8)) if fits(model, machine)]
    seconds = [costs(model, machine).prefill.seconds(32_768) for machine in groups]
    assert seconds == sorted(seconds, reverse=True)
    if model is not DEMO:
        found = costs(model, groups[-1])
        assert found.decode.token_s < found.prefill.token_s


def fits(model, machine):
    return model.parameters * model.weight_bytes <= machine.processors * machine.memory_bytes


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="larger group"):
        costs(LLAMA_3_1_70B, MACHINES["h100"])
    with pytest.raises(ArgumentError, match="single machines"):
        MACHINES["4xh100"].group(2)


def test_raw_bytes_are_decoded_by_copying():
    gpu, cpu = costs(LLAMA_3_1_8B, H100, raw=True).decode, costs(DEMO, CPU, raw=True).decode
    assert gpu.seconds(256, 25_000_000) == pytest.approx(1e-3)
    assert cpu.seconds(256, 5_000_000) == pytest.approx(1e-3)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(NotFoundError, match="8xh200"):
        machine_named("h300")
    with pytest.raises(NotFoundError, match="deepseek-v3"):
        model_named("gpt")
    assert machine_named("8xh200").processors == 8


def test_caches_have_their_published_sizes():
    sizes = {name: model.cache_elements for name, model in MODELS.items()}
    assert sizes["demo"] == 3072
    assert sizes["llama-3.1-8b"] == 65_536
    assert sizes["llama-3.1-70b"] == 163_840
    assert sizes["deepseek-v3"] == 61 * 576
    assert DEEPSEEK_V3.cache_bytes == 70_272  # 70 KB, as DeepSeek states


def test_prefill_operations_count_every_pair_once():
    whole = LLAMA_3_1_8B.prefill_flops(3000)
    parts = LLAMA_3_1_8B.prefill_flops(1000) + LLAMA_3_1_8B.prefill_flops(2000, 1000)
    assert parts == pytest.approx(whole)
    assert LLAMA_3_1_8B.pair_flops == 4 * 32 * 32 * 128


def test_impossible_shapes_are_refused():
    with pytest.raises(ArgumentError):
        replace(DEMO, layers=0)
    with pytest.raises(ArgumentError):
        replace(DEMO, active_parameters=DEMO.parameters + 1)
