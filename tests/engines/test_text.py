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
def test_a_head_start_runs_no_later_layer(family):
    engine, ran = engine_of(family), []
    hooks = [
        layer.register_forward_pre_hook(lambda _m, _i, index=index: ran.append(index))
        for index, layer in enumerate(layers_of(engine.model))
    ]
    try:
        engine.prefix_states(tokens(9), 1)
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == [0]


def test_a_head_start_leaves_no_hooks():
    model = make_model(config_of("llama"))
    model(input_ids=torch.tensor([tokens(9)]))
    hooks = [(dict(layer._forward_hooks), dict(layer._forward_pre_hooks)) for layer in layers_of(model)]
    prefix_states(model, tokens(9), 2)
    assert hooks == [(dict(layer._forward_hooks), dict(layer._forward_pre_hooks)) for layer in layers_of(model)]


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


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_head_start_of_no_or_too_many_layers_is_refused(count):
    with pytest.raises(ArgumentError, match="1 to 3 layers"):
        engine_of("llama").prefix_states(tokens(9), count)


@pytest.mark.parametrize("ids", [[], [VOCABULARY], [3] * 1000], ids=["empty", "high", "long"])
def test_a_head_start_of_a_text_that_cannot_be_run_is_refused(ids):
    with pytest.raises(ArgumentError):
        engine_of("llama").prefix_states(ids, 1)


def test_layers_that_hand_on_something_else_are_refused():
    model = make_model(config_of("llama"))
    inner = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **options: inner(hidden, **options)[:, :-1]
    with pytest.raises(MismatchError, match="no head start"):
        prefix_states(model, tokens(9), 1)
    model = make_model(config_of("llama"))
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(MismatchError, match="not to be found"):
        prefix_states(model, tokens(9), 1)


def of_each_token(engine, context, ids):
    """Keys, positions off, and values of single tokens right behind the context: a cache for each."""
    (before,) = engine.prefill([context])
    return [positions_off(engine.extend(before, [token])) for token in ids]


@families
def test_examples_are_what_single_tokens_cache(family):
    engine = engine_of(family)
    longest = max(documents(), key=len)
    vocabulary = engine.statistics(documents()).vocabulary
    examples = vocabulary.examples
    assert examples.meta.positions == "off"
    assert examples.meta.layers == engine.meta.layers
    assert sorted(examples.token_ids) == list(range(VOCABULARY))
    for at in (0, 7, VOCABULARY - 1):
        (wanted,) = of_each_token(engine, longest, [examples.token_ids[at]])
        assert cache_error(examples.slice(at, at + 1), wanted) < 1e-4


@families
def test_features_are_one_row_for_each_token(family):
    engine = engine_of(family)
    features = engine.statistics(documents()).vocabulary.features
    embedding = engine.model.get_input_embeddings().weight.detach()
    size = embedding.shape[1]
    elements = engine.meta.elements_per_token
    assert features.shape == (VOCABULARY, size + min(VOCABULARY, elements, text.ATLAS_FEATURES))
    assert bool(torch.isfinite(features).all())
    scale = embedding.square().mean(-1, keepdim=True).sqrt()
    living = scale[:, 0] > 0  # a padding token's embedding may be zeros
    assert torch.allclose(features[living, :size], (embedding / scale)[living], rtol=1e-4, atol=1e-5)


def test_the_atlas_keeps_what_tells_entries_apart():
    """Few tokens, as many components: distances between atlas entries are those between scaled examples."""
    engine = engine_of("qwen3")
    vocabulary = engine.statistics(documents()).vocabulary
    examples = vocabulary.examples
    parts = []
    for tensor in (*examples.keys, *examples.values):
        rows = tensor.permute(1, 0, 2).reshape(VOCABULARY, -1)
        parts.append((rows - rows.mean(0)) / rows.std())
    wanted = torch.cdist(torch.cat(parts, 1), torch.cat(parts, 1))
    atlas = vocabulary.features[torch.tensor(examples.token_ids), engine.model.config.hidden_size :]
    got = torch.cdist(atlas, atlas)
    correlation = torch.corrcoef(torch.stack([got.flatten(), wanted.flatten()]))[0, 1]
    assert float(correlation) > 0.9999


@families
def test_a_vocabulary_too_large_to_run_is_told_from_embeddings(family, monkeypatch):
    monkeypatch.setattr(text, "ATLAS_TOKENS", 60)
    engine = engine_of(family)
    context, seen = engine.prefill([tokens(11)])[0], [90, 91, 90]
    vocabulary = look_up(engine.model, engine.meta, context, seen)
    ran = sorted(vocabulary.examples.token_ids)
    assert ran == [*range(58), 90, 91]
    assert len(vocabulary.features) == VOCABULARY
    assert bool(torch.isfinite(vocabulary.features).all())
    rest = [token for token in range(VOCABULARY) if token not in ran]
    atlas = vocabulary.features[:, engine.model.get_input_embeddings().weight.shape[1] :]
    assert bool((atlas[rest].square().sum(1) > 0).all())


def test_tokens_that_were_not_run_are_guessed_by_their_embeddings(monkeypatch):
    """Tokens that share another's embedding share its atlas entry, run or not."""
    monkeypatch.setattr(text, "ATLAS_TOKENS", VOCABULARY - 8)
    model = make_model(config_of("llama"))
    weight = model.get_input_embeddings().weight
    weight.data[-8:] = weight.data[10:18]
    engine = engine_of("llama")
    features = look_up(model, replace(engine.meta, model_revision=""), engine.prefill([tokens(11)])[0], []).features
    size = weight.shape[1]
    assert torch.equal(features[-8:, :size], features[10:18, :size])
    guessed, known = features[-8:, size:], features[10:18, size:]
    closest = torch.cdist(guessed, features[: VOCABULARY - 8, size:]).argmin(1)
    assert closest.tolist() == list(range(10, 18))
    assert float((guessed - known).norm() / known.norm()) < 0.9


def test_samples_and_batches_change_nothing(monkeypatch):
    """A part of the tokens is kept whole, in batches of one: entries are the same as all at once."""
    engine = engine_of("gemma3")
    context = engine.prefill([tokens(11)])[0]
    whole = look_up(engine.model, engine.meta, context, [])
    monkeypatch.setattr(text, "SAMPLE_TOKENS", 40)
    monkeypatch.setattr(text, "_BATCH_BYTES", 1)
    part = look_up(engine.model, engine.meta, context, [])
    assert part.examples.tokens == 40
    places = [whole.examples.token_ids.index(token) for token in part.examples.token_ids]
    for ours, theirs in zip(part.examples.keys, whole.examples.keys, strict=True):
        assert error_between(ours, theirs[:, places]) < 1e-4
    size = engine.model.config.hidden_size
    assert part.features.shape == (VOCABULARY, size + 40)
    assert bool((part.features[:, size:].square().sum(1) > 0).all())


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
