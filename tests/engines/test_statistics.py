"""Query energies and value metrics against the same numbers summed by hand."""

import threading

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError

from .families import FAMILIES, INTERLEAVED, config_of, documents, engine_of, make_config, make_model, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_both(family):
    engine = engine_of(family)
    statistics = engine.statistics(documents())
    assert len(statistics.query_energy) == len(statistics.value_metric) == len(engine.meta.layers)
    for spec, energy, metric in zip(engine.meta.layers, statistics.query_energy, statistics.value_metric, strict=True):
        assert energy.shape == (spec.kv_heads, spec.key_dim)
        assert energy.dtype == torch.float32
        assert bool((energy > 0).all())
        assert metric.shape == (spec.kv_heads, spec.value_dim, spec.value_dim)
        assert metric.dtype == torch.float32
        assert bool((torch.linalg.eigvalsh(metric) > -1e-4).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_halves_of_a_rotated_pair_weigh_the_same(family):
    engine = engine_of(family)
    for spec, energy in zip(engine.meta.layers, engine.statistics(documents()).query_energy, strict=True):
        if spec.rope is None:
            continue
        width = engine.meta.ropes[spec.rope].rotary_dim
        for pair in range(width // 2):
            halves = (2 * pair, 2 * pair + 1) if family in INTERLEAVED else (pair, pair + width // 2)
            assert torch.equal(energy[:, halves[0]], energy[:, halves[1]])


def test_query_energies_equal_those_of_rotated_projections():
    engine = engine_of("llama")
    model, config = engine.model, engine.model.config
    seen = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(index, out))
        for index, layer in enumerate(model.model.layers)
    ]
    heads, groups, dim = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads, 8
    wanted = torch.zeros(len(hooks), heads // groups, dim, dtype=torch.float64)
    count = 0
    for ids in documents():
        positions = torch.arange(len(ids))[None]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
            cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
        for layer, out in seen.items():
            queries = out[0].reshape(len(ids), heads, dim)
            turned = queries * cos[0][:, None] + torch.cat([-queries[..., 4:], queries[..., :4]], -1) * sin[0][:, None]
            for head in range(heads):
                wanted[layer, head // groups] += turned[:, head].double().pow(2).sum(0)
        count += len(ids)
    for hook in hooks:
        hook.remove()
    wanted /= count
    wanted = ((wanted[..., :4] + wanted[..., 4:]) / 2).repeat(1, 1, 2)
    for layer, energy in enumerate(engine.statistics(documents()).query_energy):
        assert torch.allclose(energy.double(), wanted[layer], rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "phi", "gpt-oss"])
def test_the_value_metric_equals_output_weights_squared(family):
    engine = engine_of(family)
    spec = engine.meta.layers[1]
    attention = engine.model.model.layers[1].self_attn
    weight = (attention.dense if family == "phi" else attention.o_proj).weight.detach().double()
    heads = weight.shape[1] // spec.value_dim
    wanted = torch.zeros(spec.kv_heads, spec.value_dim, spec.value_dim, dtype=torch.float64)
    for head in range(heads):
        part = weight[:, head * spec.value_dim : (head + 1) * spec.value_dim]
        wanted[head // (heads // spec.kv_heads)] += part.T @ part
    metric = engine.statistics(documents()).value_metric[1]
    assert torch.allclose(metric.double(), wanted, rtol=1e-5, atol=1e-5)


def test_energies_do_not_depend_on_how_much_was_seen():
    engine, ids = engine_of("llama"), tokens(20)
    once, twice = engine.statistics([ids]), engine.statistics([ids, ids])
    assert torch.allclose(once.query_energy[0], twice.query_energy[0], rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_threads_are_not_counted(family):
    engine, other = engine_of(family), TransformersEngine(make_model(config_of(family), seed=1))
    alone = engine.statistics(documents())
    running, stop = threading.Event(), threading.Event()

    def disturb():
        while not stop.is_set():
            other.prefill(documents())
            engine.prefill(documents())
            running.set()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        running.wait(10)
        disturbed = [engine.statistics(documents()) for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    for statistics in disturbed:
        for energy, wanted in zip(statistics.query_energy, alone.query_energy, strict=True):
            assert torch.allclose(energy, wanted, rtol=1e-5)


def test_transformers_is_left_as_it_was():
    engine = engine_of("llama")
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    engine.statistics(documents())
    with pytest.raises(ArgumentError):
        engine.statistics([tokens(4), []])
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping

    def own(*args, **kwargs):
        return ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"](*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        engine.statistics(documents())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_attention_that_cannot_be_watched_gives_none():
    falcon = make_model(make_config("FalconConfig", new_decoder_architecture=True, num_kv_heads=2, alibi=False))
    assert TransformersEngine(falcon).statistics(documents()) is None
    assert engine_of("llama").statistics([]) is None
