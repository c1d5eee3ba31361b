"""Gradients by cached keys and values: against differences, against the KL divergence, and what is made of them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from kvwire.codec import StatisticsBuilder, fit_profile, planes_of, positions_off, positions_on
from kvwire.engines import calibration as gathering
from kvwire.engines.transformers import TransformersEngine
from kvwire.engines.transformers.backward import _draw
from kvwire.errors import ArgumentError

from .families import config_of, engine_of, make_model, tokens

CONTEXT, REST = 24, 12


def precise(family):
    """A model in float64, whose differences mean something."""
    return TransformersEngine(make_model(config_of(family)).double())


def moved(cache, direction, by):
    """A cache that is changed along a direction."""
    keys = [key + by * way for key, way in zip(cache.keys, direction.keys, strict=True)]
    values = [value + by * way for value, way in zip(cache.values, direction.values, strict=True)]
    return replace(cache, keys=keys, values=values)


def some_direction(cache, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensors):
        return [
            torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) for tensor in tensors
        ]

    return replace(cache, keys=drawn(cache.keys), values=drawn(cache.values))


def dot(one, other):
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return sum(float((a.double() * b.double()).sum()) for a, b in pairs)


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "phi", "glm", "gemma2", "gemma4", "youtu", "minicpm3"])
def test_gradients_are_what_differences_tell(family):
    engine, ids = precise(family), tokens(CONTEXT + REST)
    (cache,) = engine.prefill([ids[:CONTEXT]])
    predicted = engine.forward(engine.past_key_values(cache), ids[CONTEXT:], CONTEXT).log_softmax(-1)
    drawn = _draw(predicted.float(), 3)[:, None]

    def total(by):
        logits = engine.forward(engine.past_key_values(moved(cache, way, by)), ids[CONTEXT:], CONTEXT)
        return float(logits.log_softmax(-1).gather(1, drawn).sum()) / REST**0.5

    way = some_direction(cache)
    slope = (total(1e-3) - total(-1e-3)) / 2e-3
    assert dot(engine.cache_gradients(cache, ids[CONTEXT:], seed=3), way) == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_gradients_foretell_the_kl_divergence_of_small_errors():
    """Mean square over draws: the Fisher information, half of which is the KL divergence."""
    engine, ids = precise("llama"), tokens(CONTEXT + REST)
    (cache,) = engine.prefill([ids[:CONTEXT]])
    way = some_direction(cache)
    exact, changed = (
        engine.forward(engine.past_key_values(each), ids[CONTEXT:], CONTEXT).log_softmax(-1)
        for each in (cache, moved(cache, way, 1e-3))
    )
    kl = float((exact.exp() * (exact - changed)).sum(-1).mean())
    draws = [dot(engine.cache_gradients(cache, ids[CONTEXT:], seed=seed), way) ** 2 for seed in range(400)]
    assert 1e-6 / 2 * sum(draws) / len(draws) == pytest.approx(kl, rel=0.2)


def test_draws_follow_the_distribution():
    chances = torch.tensor([0.1, 0.0, 0.6, 0.3])
    drawn = torch.cat([_draw(chances.log().expand(500, 4), seed) for seed in range(8)])
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert shares[1] == 0
    assert torch.allclose(shares, chances, atol=0.03)
    assert torch.equal(_draw(chances.log().expand(9, 4), 5), _draw(chances.log().expand(9, 4), 5))


@pytest.mark.parametrize("family", ["llama", "gemma2", "youtu", "gpt-oss", "deepseek-v3"])
def test_statistics_hold_a_metric_of_each_plane(family):
    engine, documents = engine_of(family), [tokens(120, seed) for seed in range(4)]
    statistics = engine.statistics(documents, tokens=False)
    assert set(statistics.fisher) == set(statistics.gradients) == set(planes_of(engine.meta.layers))
    for (side, layer), metric in statistics.gradients.items():
        spec = engine.meta.layers[layer]
        dim = spec.key_dim if side == "key" else spec.value_dim
        assert metric.shape == (spec.kv_heads, dim, dim)
        assert float(torch.linalg.eigvalsh(metric).min()) > -1e-5 * float(metric.abs().max())
        assert float(metric.diagonal(dim1=1, dim2=2).sum()) > 0
    again = engine.statistics(documents, tokens=False)
    assert all(torch.equal(again.gradients[plane], metric) for plane, metric in statistics.gradients.items())
    assert not engine.statistics(documents, tokens=False, sensitivity=False).gradients


def test_a_model_without_a_way_back_goes_without_gradients(monkeypatch, caplog):
    engine, documents = engine_of("llama"), [tokens(100, seed) for seed in range(4)]

    def refuse(*_, **__):
        msg = "derivative for aten::something is not implemented"
        raise NotImplementedError(msg)

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    with caplog.at_level(logging.WARNING, "kvwire.engines"):
        statistics = engine.statistics(documents, tokens=False)
    assert not statistics.gradients
    assert not statistics.fisher
    assert all(metric is not None for metric in (*statistics.query_metric, *statistics.value_metric))
    assert "something is not implemented" in caplog.text
    with pytest.raises(ArgumentError, match="cannot backpropagate"):
        engine.cache_gradients(engine.prefill([tokens(9)])[0], tokens(4))


def test_what_was_gathered_before_a_failure_counts(caplog):
    class Failing(TransformersEngine):
        calls = 0

        def cache_gradients(self, cache, token_ids, *, seed=0):
            self.calls += 1
            if self.calls > 2:
                msg = "out of memory"
                raise ArgumentError(msg)
            return super().cache_gradients(cache, token_ids, seed=seed)

    engine = Failing(make_model(config_of("llama")))
    builder, documents = StatisticsBuilder(engine.meta), [tokens(100, seed) for seed in range(4)]
    assert gathering.gather_gradients(engine, documents, builder) == 2
    assert "gradients of only 2 caches" in caplog.text
    assert "out of memory" in caplog.text
    assert set(builder.build().gradients) == set(planes_of(engine.meta.layers))


def test_float16_gradients_do_not_vanish():
    ids, found = tokens(CONTEXT + REST), []
    for dtype in (torch.float32, torch.float16):
        engine = TransformersEngine(make_model(config_of("llama")).to(dtype))
        (cache,) = engine.prefill([ids[:CONTEXT]])
        gradients = engine.cache_gradients(cache, ids[CONTEXT:], seed=1)
        found.append(torch.cat([part.flatten() for part in (*gradients.keys, *gradients.values)]))
    exact, half = found
    assert half.dtype == torch.float32
    assert float((exact != 0).float().mean()) - float((half != 0).float().mean()) < 0.01
    assert float(torch.nn.functional.cosine_similarity(exact, half, dim=0)) > 0.99


def test_one_loud_text_does_not_decide():
    """Each cache counts alike, and a few loud tokens count as the others' loudest."""
    engine = engine_of("llama")
    (cache,) = engine.prefill([tokens(40)])
    off = positions_off(cache)
    quiet, loud = some_direction(off, 1), some_direction(off, 2)
    one_loud_token = [part.clone() for part in quiet.values]
    for part in one_loud_token:
        part[:, 7] *= 1e4
    builders = [StatisticsBuilder(engine.meta) for _ in range(3)]
    for builder, scale in zip(builders[:2], (1.0, 1e6), strict=True):
        builder.add_gradients(quiet)
        builder.add_gradients(replace(loud, keys=[scale * part for part in loud.keys]))
    builders[2].add_gradients(replace(quiet, values=one_loud_token))
    alike, scaled, token = (builder.build().gradients for builder in builders)
    assert all(torch.allclose(alike[plane], scaled[plane], atol=1e-6) for plane in alike)
    assert float(token["value", 0].abs().max()) < 20 * float(alike["value", 0].abs().max())


def test_fisher_is_the_mean_of_squares():
    engine = engine_of("llama")
    builder, expected = StatisticsBuilder(engine.meta), {}
    for seed in range(2):
        ids = tokens(40, seed)
        gradients = engine.cache_gradients(engine.prefill([ids[:30]])[0], ids[30:])
        builder.add_gradients(gradients)
        off = positions_off(gradients)
        for side, layer in planes_of(engine.meta.layers):
            rows = (off.keys if side == "key" else off.values)[layer].double()
            squares = torch.einsum("htd,hte->hde", rows, rows) / 30
            expected[side, layer] = expected.get((side, layer), 0) + squares / 2
    fisher = builder.build().fisher
    assert set(fisher) == set(expected)
    assert all(torch.allclose(fisher[plane].double(), wanted, rtol=1e-5) for plane, wanted in expected.items())


def test_what_is_left_out_changes_nothing():
    """Sinks: huge gradients there are those of no tokens at all."""
    engine = engine_of("llama")
    (cache,) = engine.prefill([tokens(40)])
    quiet = some_direction(positions_off(cache), 1)

    def built(gradients, **options):
        builder = StatisticsBuilder(engine.meta)
        builder.add_gradients(gradients, **options)
        return builder.build()

    loud = replace(quiet, keys=[part.clone() for part in quiet.keys], values=[part.clone() for part in quiet.values])
    for part in (*loud.keys, *loud.values):
        part[:, [0, 17]] *= 1e6
    rest = built(loud, leave_out=(0, 17))
    assert float(built(loud).fisher["key", 0].abs().max()) > 1e6 * float(rest.fisher["key", 0].abs().max())
    kept = torch.tensor([place for place in range(40) if place not in (0, 17)])
    wanted = built(
        replace(
            quiet,
            keys=[part[:, kept] for part in quiet.keys],
            values=[part[:, kept] for part in quiet.values],
            token_ids=None,
        )
    )
    for found, other in ((rest.fisher, wanted.fisher), (rest.gradients, wanted.gradients)):
        assert set(found) == set(other)
        assert all(torch.equal(found[plane], other[plane]) for plane in other)
    assert not built(loud, leave_out=range(40)).fisher
    for wrong in (-1, 40):
        with pytest.raises(ArgumentError, match=r"tokens 0 to 39 .* got"):
            built(loud, leave_out=(wrong,))


def test_the_first_token_of_every_document_does_not_count():
    class Loud(TransformersEngine):
        """Its gradients at the first tokens of documents are huge."""

        loudness, calls = 1e8, 0

        def cache_gradients(self, cache, token_ids, *, seed=0):
            found = super().cache_gradients(cache, token_ids, seed=seed)
            for part in (*found.keys, *found.values):
                part[:, ([0], [0], [0, 25, 50])[self.calls]] *= self.loudness
            self.calls += 1
            return found

    loud, quiet = Loud(make_model(config_of("llama"))), engine_of("llama")
    found = []
    for engine in (loud, quiet):
        builder = StatisticsBuilder(engine.meta)
        assert gathering.gather_gradients(engine, [tokens(100, seed) for seed in range(3)], builder) == 3
        found.append(builder.build())
    for plane, wanted in found[1].fisher.items():
        assert torch.allclose(found[0].fisher[plane], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_fisher_compares_planes_in_any_unit():
    engine, documents = engine_of("llama"), [tokens(100, seed) for seed in range(4)]
    statistics, caches = engine.statistics(documents), engine.prefill(documents)

    def weight(factors):
        """Of the key plane of layer 1, against that of layer 0."""
        fisher = {plane: factors.get(plane, 1.0) * found for plane, found in statistics.fisher.items()}
        fitted = fit_profile(caches, replace(statistics, fisher=fisher))
        heads = [torch.from_numpy(block) for group in fitted.groups for block in group.metric]
        planes = [plane for group in fitted.groups for plane in group.planes]
        energy = {plane: float(block.abs().sum()) for plane, block in zip(planes, heads, strict=True)}
        return energy["key", 1] / energy["key", 0]

    usual = weight({})
    assert weight(dict.fromkeys(statistics.fisher, 2.0**20)) == pytest.approx(usual)
    assert weight({("key", 1): 64.0}) == pytest.approx(64**0.75 * usual, rel=0.05)


def test_planes_without_gradients_have_attention_alone():
    engine, documents = engine_of("llama"), [tokens(100, seed) for seed in range(4)]
    statistics = engine.statistics(documents)
    silent = {plane: torch.zeros_like(metric) for plane, metric in statistics.gradients.items()}
    caches = engine.prefill(documents)
    without, zeros = (fit_profile(caches, replace(statistics, gradients=given)) for given in ({}, silent))
    pairs = zip(without.groups, zeros.groups, strict=True)
    assert all(torch.equal(one.rows, other.rows) for one, other in pairs)


def test_gradients_turn_back_as_keys_do():
    """What an error in an un-rotated key costs: its gradient is the rotated key's, turned back."""
    engine, ids = precise("llama"), tokens(CONTEXT + REST)
    (cache,) = engine.prefill([ids[:CONTEXT]])
    off = positions_off(cache)
    way = some_direction(off)
    turned = positions_on(replace(way, meta=replace(way.meta, positions="off")), 0)
    gradients = engine.cache_gradients(cache, ids[CONTEXT:])
    assert dot(positions_off(gradients), way) == pytest.approx(dot(gradients, turned), rel=1e-5)
