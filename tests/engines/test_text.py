"""What a model knows of a document from its text: head starts and features of tokens, for every family."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from kvwire.codec import positions_off
from kvwire.engines.transformers import text
from kvwire.engines.transformers.text import look_up, prefix_states
from kvwire.errors import ArgumentError, MismatchError

from .families import (
    FAMILIES,
    VOCABULARY,
    cache_error,
    config_of,
    documents,
    engine_of,
    error_between,
    make_model,
    tokens,
)

families = pytest.mark.parametrize("family", FAMILIES)


def layers_of(model):
    return model.get_decoder().layers


@torch.no_grad()
def states_of(engine, ids):
    """The model's own hidden states before the first layer and after each, the last layer's left out: it is normed."""
    states = engine.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    return [state[0].float() for state in states[:-1]]


@families
@pytest.mark.parametrize("count", [1, 2])
def test_a_head_start_is_the_models_own_hidden_states(family, count):
    engine, ids = engine_of(family), tokens(17)
    wanted = states_of(engine, ids)
    if count >= len(wanted):  # the last layer's output appears after the norm alone
        hidden = []
        hook = layers_of(engine.model)[count - 1].register_forward_hook(lambda _m, _i, out: hidden.append(out[0]))
        states_of(engine, ids)
        hook.remove()
        wanted.append(hidden[0] if hidden[0].ndim == 2 else hidden[0][0])
    wanted = torch.cat([state / state.square().mean(-1, keepdim=True).sqrt() for state in wanted[: count + 1]], 1)
    got = engine.prefix_states(ids, count)
    assert got.dtype == torch.float32
    assert got.shape == (17, (count + 1) * engine.model.config.hidden_size)
    assert error_between(got, wanted) < 1e-5
    assert torch.allclose(got.reshape(17, count + 1, -1).square().mean(-1), torch.ones(17, count + 1), rtol=1e-4)


@families
def test_a_head_start_runs_no_later_layer_and_leaves_no_hooks(family):
    engine, ran = engine_of(family), []
    layers = layers_of(engine.model)
    hooks = [layer.register_forward_pre_hook(lambda _m, _i, at=at: ran.append(at)) for at, layer in enumerate(layers)]
    before = [(dict(layer._forward_hooks), dict(layer._forward_pre_hooks)) for layer in layers]
    try:
        engine.prefix_states(tokens(9), 1)
        assert before == [(dict(layer._forward_hooks), dict(layer._forward_pre_hooks)) for layer in layers]
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == [0]


def test_other_threads_run_on_undisturbed():
    engine, stop, failures = engine_of("llama"), threading.Event(), []
    wanted = [engine.prefix_states(ids, 2) for ids in documents()]
    alone = engine.prefill(documents())

    def prefill():
        while not stop.is_set():
            try:
                caches = engine.prefill(documents())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the failure
                failures.append(error)
                return
            if any(cache_error(ours, theirs) > 1e-5 for ours, theirs in zip(caches, alone, strict=True)):
                failures.append("another cache")

    thread = threading.Thread(target=prefill)
    thread.start()
    try:
        for _ in range(10):
            for ids, states in zip(documents(), wanted, strict=True):
                assert torch.equal(engine.prefix_states(ids, 2), states)
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_head_starts_of_half_precision_are_float32():
    engine = engine_of("llama")
    half = make_model(config_of("llama")).to(torch.bfloat16)
    got = prefix_states(half, tokens(9), 2)
    assert got.dtype == torch.float32
    assert error_between(got, engine.prefix_states(tokens(9), 2)) < 0.1


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        *[(tokens(9), count, "1 to 3 layers") for count in (-1, 0, 4)],
        *[(ids, 1, None) for ids in ([], [VOCABULARY], [3] * 1000)],
    ],
)
def test_a_head_start_that_cannot_be_run_is_refused(ids, count, words):
    with pytest.raises(ArgumentError, match=words):
        engine_of("llama").prefix_states(ids, count)


def test_layers_that_hand_on_something_else_are_refused():
    model = make_model(config_of("llama"))
    inner = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **options: inner(hidden, **options)[:, :-1]
    with pytest.raises(MismatchError, match="prefix_layers=0"):
        prefix_states(model, tokens(9), 1)
    model = make_model(config_of("llama"))
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(MismatchError, match="not found"):
        prefix_states(model, tokens(9), 1)


def of_each_token(engine, context, ids):
    """Keys, positions off, and values of single tokens right behind the context: a cache for each."""
    (before,) = engine.prefill([context])
    return [positions_off(engine.extend(before, [token])) for token in ids]


@families
def test_features_are_one_row_for_each_token(family):
    engine = engine_of(family)
    features = engine.statistics(documents()).token_features
    assert features.shape == (VOCABULARY, min(VOCABULARY, engine.meta.elements_per_token, text.ATLAS_FEATURES))
    assert bool(torch.isfinite(features).all())


@families
def test_the_atlas_keeps_what_tells_entries_apart(family, monkeypatch):
    """Few tokens, as many components: distances are those between what single tokens cache behind the longest text."""
    monkeypatch.setattr(text, "ATLAS_TOKENS", 40)
    monkeypatch.setattr(text, "SMALL_VOCABULARY", 0)
    engine = engine_of(family)
    (context,) = engine.prefill([max(documents(), key=len)])
    features = look_up(engine.model, engine.meta, context, [])
    singles = of_each_token(engine, max(documents(), key=len), range(40))
    parts = []
    for side in ("keys", "values"):
        for layer in range(len(engine.meta.layers)):
            rows = torch.stack([getattr(each, side)[layer].float().flatten() for each in singles])
            if rows.shape[1]:
                parts.append((rows - rows.mean(0)) / (rows.std() + 1e-6))
    wanted = torch.cdist(torch.cat(parts, 1), torch.cat(parts, 1))
    got = torch.cdist(features[:40], features[:40])
    correlation = torch.corrcoef(torch.stack([got.flatten(), wanted.flatten()]))[0, 1]
    assert float(correlation) > 0.9999


@families
def test_a_vocabulary_too_large_to_run_is_told_from_embeddings(family, monkeypatch):
    monkeypatch.setattr(text, "ATLAS_TOKENS", 60)
    monkeypatch.setattr(text, "SMALL_VOCABULARY", 0)
    engine = engine_of(family)
    context, seen = engine.prefill([tokens(11)])[0], [90, 91, 90]
    ran: list[int] = []
    inner = text._entries
    monkeypatch.setattr(text, "_entries", lambda *given: ran.extend(given[-1].tolist()) or inner(*given))
    features = look_up(engine.model, engine.meta, context, seen)
    assert sorted(ran) == [*range(58), 90, 91]
    assert len(features) == VOCABULARY
    assert bool(torch.isfinite(features).all())
    rest = [token for token in range(VOCABULARY) if token not in ran]
    assert bool((features[rest].square().sum(1) > 0).all())


def test_tokens_that_were_not_run_are_guessed_by_their_embeddings(monkeypatch):
    """Tokens that share another's embedding share its atlas entry, run or not."""
    monkeypatch.setattr(text, "ATLAS_TOKENS", VOCABULARY - 8)
    model = make_model(config_of("llama"))
    weight = model.get_input_embeddings().weight
    weight.data[-8:] = weight.data[10:18]
    engine = engine_of("llama")
    features = look_up(model, replace(engine.meta, model_revision=""), engine.prefill([tokens(11)])[0], [])
    guessed, known = features[-8:], features[10:18]
    closest = torch.cdist(guessed, features[: VOCABULARY - 8]).argmin(1)
    assert closest.tolist() == list(range(10, 18))
    assert float((guessed - known).norm() / known.norm()) < 0.9


def test_axes_are_found_where_float32_is_refused(monkeypatch):
    """As torch 2.6 does for large matrices."""
    entries = torch.randn(30, 5, generator=torch.Generator().manual_seed(3)) * torch.arange(1, 6)
    wanted = text._principal(entries)
    real = torch.linalg.eigh

    def refusing(matrix):
        if matrix.dtype == torch.float32:
            raise RuntimeError
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", refusing)
    found = text._principal(entries)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.abs(), wanted.abs(), rtol=1e-4, atol=1e-4)
