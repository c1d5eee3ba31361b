"""Query and value metrics against the same numbers summed by hand."""

import threading

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.codec import rotate, rotation
from kvwire.engines.transformers import TransformersEngine
from kvwire.engines.transformers.capture import recording
from kvwire.errors import ArgumentError

from .families import (
    FAMILIES,
    INTERLEAVED,
    LATENT,
    SLIDING,
    VOCABULARY,
    config_of,
    documents,
    engine_of,
    make_config,
    make_model,
    tokens,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_both(family):
    engine = engine_of(family)
    statistics = engine.statistics(documents(), tokens=False)
    assert len(statistics.query_metric) == len(statistics.value_metric) == len(engine.meta.layers)
    for spec, of_keys, of_values in zip(
        engine.meta.layers, statistics.query_metric, statistics.value_metric, strict=True
    ):
        for metric, dim in ((of_keys, spec.key_dim), (of_values, spec.value_dim)):
            assert metric.shape == (spec.kv_heads, dim, dim)
            assert metric.dtype == torch.float32
            assert torch.allclose(metric, metric.mT, rtol=1e-4, atol=1e-5 * float(metric.abs().max()))
            values = torch.linalg.eigvalsh(metric)
            assert float(values.min()) > -1e-5 * float(values.max())
            assert float(values.max()) > 0
    assert statistics.token_features is None


def queries_of(family):
    """What attention receives, layer by layer, with positions from 0: ``[tokens of all documents, heads, dim]``."""
    engine, seen = engine_of(family), {}

    class Recorder:
        def record(self, module, query, *_, **__):
            seen.setdefault(module.layer_idx, []).append(query[0].transpose(0, 1).double())

    with recording(Recorder(), engine.model), torch.no_grad():
        for ids in documents():
            engine.model(input_ids=torch.tensor([ids]), use_cache=False)
    return {layer: torch.cat(queries) for layer, queries in seen.items()}


def by_key_head(spec, per_head):
    """Sums ``[heads, ...]`` over the query heads that share a key head."""
    return per_head.reshape(spec.kv_heads, -1, *per_head.shape[1:]).sum(1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LATENT])
def test_turning_queries_keeps_the_energy_of_every_pair(family):
    """Turned back by whatever positions were drawn, pairs keep their summed energy: this much is exact."""
    engine, queries = engine_of(family), queries_of(family)
    checked = 0
    for layer, (spec, metric) in enumerate(
        zip(engine.meta.layers, engine.statistics(documents(), tokens=False).query_metric, strict=True)
    ):
        energy = by_key_head(spec, queries[layer].square().mean(0))
        diagonal = metric.diagonal(dim1=1, dim2=2).double()
        width = 0 if spec.rope is None else engine.meta.ropes[spec.rope].rotary_dim
        assert torch.allclose(diagonal[:, width:], energy[:, width:], rtol=1e-4)
        for pair in range(width // 2):
            first, second = (2 * pair, 2 * pair + 1) if family in INTERLEAVED else (pair, pair + width // 2)
            wanted = energy[:, first] + energy[:, second]
            assert torch.allclose(diagonal[:, first] + diagonal[:, second], wanted, rtol=1e-4)
            checked += 1
    assert checked


@pytest.mark.parametrize("family", ["smollm3", "phi", "glm"])
def test_what_carries_no_position_has_its_plain_covariance(family):
    """A layer without rotation altogether, and the dimensions behind the rotary part of others."""
    engine, queries = engine_of(family), queries_of(family)
    metrics = engine.statistics(documents(), tokens=False).query_metric
    layer = len(metrics) - 1  # smollm3's has no positions
    spec = engine.meta.layers[layer]
    width = 0 if spec.rope is None else engine.meta.ropes[spec.rope].rotary_dim
    assert spec.key_dim > width
    part = queries[layer][..., width:]
    wanted = by_key_head(spec, torch.einsum("thd,the->hde", part, part) / len(part))
    got = metrics[layer][:, width:, width:].double()
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_the_query_metric_is_what_scores_suffer():
    """An error in an un-rotated key, turned to a place that a query sees, changes the score by the metric's measure."""
    engine = engine_of("llama")
    spec, regime = engine.meta.layers[1], engine.meta.ropes[0]
    queries = queries_of("llama")[1].float()
    lengths = [len(ids) for ids in documents()]
    error = torch.randn(spec.key_dim, generator=torch.Generator().manual_seed(5))
    total = torch.zeros(spec.kv_heads, dtype=torch.float64)
    for part in torch.split(queries, lengths):
        placed = rotate(error.expand(1, len(part), -1), regime, *rotation(regime, 0, len(part)))[0]
        scores = torch.einsum("thd,sd->hts", part, placed).double().square()
        causal = torch.ones(len(part), len(part), dtype=torch.float64).tril()
        mean = (scores * causal).sum(2) / causal.sum(1)
        total += by_key_head(spec, mean.sum(1))
    wanted = total / sum(lengths)
    metric = engine.statistics(documents(), tokens=False).query_metric[1]
    got = torch.einsum("d,hde,e->h", error, metric, error).double()
    assert torch.allclose(got, wanted, rtol=0.2)  # positions are drawn, not all summed
    unturned = torch.einsum("thd,the->hde", queries, queries) / len(queries)
    plain = torch.einsum("d,hde,e->h", error, by_key_head(spec, unturned), error).double()
    assert float((got - wanted).abs().sum()) < float((plain - wanted).abs().sum()) / 2


@pytest.mark.parametrize("family", LATENT)
def test_queries_are_absorbed_into_latents(family):
    """By the weights of a layer: what a change of its latent and of its rotated part does to scores and outputs."""
    engine, queries = engine_of(family), queries_of(family)
    config, spec = engine.model.config, engine.meta.layers[1]
    statistics = engine.statistics(documents(), tokens=False)
    modules = [m for m in engine.model.modules() if getattr(m, "layer_idx", None) == 1 and hasattr(m, "kv_b_proj")]
    attention, heads, nope = modules[0], config.num_attention_heads, config.qk_nope_head_dim
    weight = attention.kv_b_proj.weight.detach().double().reshape(heads, -1, spec.key_dim)
    absorbed = torch.einsum("thn,hnr->thr", queries[1][..., :nope], weight[:, :nope])
    of_keys = torch.einsum("thr,ths->rs", absorbed, absorbed) / len(absorbed)
    output = attention.o_proj.weight.detach().double().reshape(-1, heads, config.v_head_dim)
    through = torch.einsum("ohv,hvr->ohr", output, weight[:, nope:])
    of_values = torch.einsum("ohr,ohs->rs", through, through)
    latents = torch.cat([cache.keys[1][0] for cache in engine.prefill(documents())]).double()
    energies = [float((metric * latents.T.cov(correction=0)).sum()) for metric in (of_keys, of_values)]
    wanted = of_keys + of_values * energies[0] / energies[1]
    assert torch.allclose(statistics.query_metric[1][0].double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.max()))
    rotated = queries[1][..., nope:].square().sum((0, 1)) / len(queries[1])
    got = statistics.value_metric[1][0].diagonal().double()
    width = spec.value_dim
    for pair in range(width // 2):
        first, second = (2 * pair, 2 * pair + 1) if family in INTERLEAVED else (pair, pair + width // 2)
        assert torch.allclose(got[first] + got[second], rotated[first] + rotated[second], rtol=1e-4)


def test_latent_attention_that_does_not_show_its_expansion_has_no_metrics(monkeypatch):
    monkeypatch.setattr("kvwire.engines.transformers.latent._EXPANSION", "something_else")
    statistics = engine_of("youtu").statistics(documents(), tokens=False)
    assert statistics.query_metric == statistics.value_metric == (None, None, None)


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
    metric = engine.statistics(documents(), tokens=False).value_metric[1]
    assert torch.allclose(metric.double(), wanted, rtol=1e-5, atol=1e-5)


def test_energies_do_not_depend_on_how_much_was_seen():
    engine, ids = engine_of("smollm3"), tokens(20)  # its last layer needs no draws
    once, twice = engine.statistics([ids], tokens=False), engine.statistics([ids, ids], tokens=False)
    assert torch.allclose(once.query_metric[3], twice.query_metric[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_threads_are_not_counted(family):
    engine, other = engine_of(family), TransformersEngine(make_model(config_of(family), seed=1))
    alone = engine.statistics(documents(), tokens=False)
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
        disturbed = [engine.statistics(documents(), tokens=False) for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    for statistics in disturbed:
        for metric, wanted in zip(statistics.query_metric, alone.query_metric, strict=True):
            assert torch.allclose(metric, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


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


def test_attention_that_cannot_be_watched_gives_no_weights():
    falcon = make_model(make_config("FalconConfig", new_decoder_architecture=True, num_kv_heads=2, alibi=False))
    engine = TransformersEngine(falcon)
    statistics = engine.statistics(documents())
    assert statistics.query_metric == statistics.value_metric == (None, None, None)
    assert len(statistics.token_features) == VOCABULARY
    assert engine.statistics(documents(), tokens=False) is None
    assert engine_of("llama").statistics([]) is None


def test_a_head_that_is_called_the_decoder_is_none():
    options = {"sliding_window": SLIDING, "global_attn_every_n_layers": 3}
    engine = TransformersEngine(make_model(make_config("ModernBertDecoderConfig", **options)))
    assert engine.can_stop
    assert len(engine.statistics(documents()).token_features) == VOCABULARY
    assert engine.prefix_states(documents()[0], 1).shape[-1] == 2 * engine.model.config.hidden_size
