"""Prefill, extend, forward and generate against the model run by hand."""

from dataclasses import replace

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvwire.codec import positions_off
from kvwire.engines.testing import EngineConformance
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, MismatchError, NotFoundError
from kvwire.types import KVCache

from .families import (
    FAMILIES,
    SLIDES,
    SLIDING,
    VOCABULARY,
    WINDOW,
    cache_error,
    config_of,
    documents,
    engine_of,
    error_between,
    make_model,
    query,
    tokens,
)

TOLERANCE = 1e-5


@torch.no_grad()
def own_logits(engine, ids):
    return engine.model(input_ids=torch.tensor([ids])).logits[0]


class TestTransformers(EngineConformance):
    tolerance = TOLERANCE

    @pytest.fixture(params=FAMILIES)
    def engine(self, request):
        return engine_of(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_the_models_own_cache(family):
    engine = engine_of(family)
    ids = documents()[0]
    (cache,) = engine.prefill([ids])
    own = DynamicCache(config=engine.model.config)
    with torch.no_grad():
        engine.model(input_ids=torch.tensor([ids]), past_key_values=own, use_cache=True)
    for spec, layer, key, value in zip(cache.meta.layers, own.layers, cache.keys, cache.values, strict=False):
        kept = len(ids) if spec.window is None else spec.window - 1
        assert error_between(key[:, -kept:], layer.keys[0]) < TOLERANCE
        assert error_between(value[:, -kept:], layer.values[0]) < TOLERANCE


def test_batches_hold_as_many_tokens_as_asked():
    engine = engine_of("llama")
    wanted = engine.prefill(documents())
    for batch_tokens in (1, 16, 30, 1000):
        for cache, other in zip(engine.prefill(documents(), batch_tokens=batch_tokens), wanted, strict=True):
            assert cache_error(cache, other) < TOLERANCE
            assert cache.keys[0].untyped_storage().nbytes() == cache.keys[0].numel() * 4  # it owns its memory
    assert engine.prefill([]) == []


def test_extend_takes_a_prefix_without_positions_and_keeps_only_what_is_new_alive():
    engine, ids = engine_of("gemma3"), tokens(29)
    whole = engine.extend(None, ids, offset=5)
    tail = engine.extend(positions_off(whole.slice(0, 17)), ids[17:])
    assert cache_error(tail, whole.slice(17, 29)) < TOLERANCE
    assert tail.keys[0].untyped_storage().nbytes() == tail.keys[0].numel() * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_on_a_cache_equals_the_whole_text(family):
    engine, ids, question = engine_of(family), tokens(29), query()
    (cache,) = engine.prefill([ids])
    wanted = own_logits(engine, ids + question)[-len(question) :]
    past = engine.past_key_values(cache)
    positions = torch.arange(len(ids), len(ids) + len(question))[None]
    with torch.no_grad():
        out = engine.model(input_ids=torch.tensor([question]), past_key_values=past, position_ids=positions)
    assert error_between(out.logits[0], wanted) < TOLERANCE
    ours = engine.forward(engine.past_key_values(positions_off(cache)), question, len(ids))
    assert error_between(ours, wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", *SLIDES])
def test_serving_takes_what_windows_see_and_leaves_the_cache_as_it_was(family):
    engine = engine_of(family)
    (cache,) = engine.prefill([tokens(29)])
    before = [key.clone() for key in cache.keys]
    past = engine.past_key_values(cache)
    for spec, layer in zip(engine.meta.layers, past.layers, strict=False):
        assert layer.keys.shape[2] == (29 if spec.window is None else SLIDING - 1)
    engine.forward(past, query(), 29)
    assert all(torch.equal(key, old) for key, old in zip(cache.keys, before, strict=True))
    assert cache.tokens == 29


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_generate_agree_with_transformers(family):
    engine, ids, question, new = engine_of(family), tokens(19), query(), 8
    whole = torch.tensor([ids + question])
    wanted = engine.model.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=new, do_sample=False, pad_token_id=0
    )[0, whole.shape[1] :].tolist()
    past = engine.past_key_values(engine.prefill([ids])[0])
    logits = engine.forward(past, question, len(ids), logits=1)
    assert logits.shape == (1, VOCABULARY)
    first = int(logits[-1].argmax())
    assert engine.generate(past, first, len(ids) + len(question), new) == wanted


def test_generation_stops_at_the_end_of_text_and_of_the_window():
    model = make_model(config_of("llama"))
    engine = TransformersEngine(model)
    ids = tokens(20)
    first = int(engine.forward(None, ids, 0, logits=1)[-1].argmax())

    def generate(start, count):
        past = engine.past_key_values(engine.prefill([ids])[0])
        return engine.generate(past, first, start, count)

    model.generation_config.eos_token_id = None
    free = generate(20, 6)
    assert len(free) == 6
    assert len(generate(WINDOW - 3, 6)) == 3
    model.generation_config.eos_token_id = [2, free[3]]
    stopped = generate(20, 6)
    assert stopped == free[: free.index(free[3]) + 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_causal_mask_changes_nothing(family):
    engine, ids = engine_of(family), tokens(29)
    visible = torch.ones(29, 29, dtype=torch.bool).tril()
    assert error_between(engine.masked_forward(ids, visible), own_logits(engine, ids)) < TOLERANCE


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ArgumentError, match="rows and columns"):
        engine_of("llama").masked_forward(tokens(5), torch.ones(5, 4, dtype=torch.bool))


def test_masks_have_the_form_that_the_model_takes():
    visible = torch.ones(4, 12, dtype=torch.bool).tril(8)
    full = engine_of("llama").attention_mask(visible)
    assert full.dtype == torch.bool
    assert full.shape == (1, 1, 4, 12)
    sliding = engine_of("mistral").attention_mask(visible)
    assert sliding[0, 0].sum(1).tolist() == [SLIDING] * 4
    both = engine_of("gemma3").attention_mask(visible)
    assert torch.equal(both["full_attention"], full)
    assert torch.equal(both["sliding_attention"], sliding)
    additive = engine_of("gemma2").attention_mask(visible)["full_attention"]
    assert additive.dtype == torch.float32
    assert torch.equal(additive[0, 0] == 0, visible)


def test_a_cache_of_another_model_is_refused():
    ours, theirs = engine_of("llama"), engine_of("qwen3")
    (cache,) = theirs.prefill([tokens(12)])
    for use in (ours.past_key_values, ours.check_fits, lambda cache: ours.extend(cache, tokens(3))):
        with pytest.raises(MismatchError, match="encode the documents with this model"):
            use(cache)
    (cache,) = ours.prefill([tokens(12)])
    ours.check_fits(cache)
    ours.check_fits(replace(cache, meta=replace(cache.meta, model_revision="")))
    with pytest.raises(MismatchError):
        ours.past_key_values(replace(cache, meta=replace(cache.meta, model_revision="other")))
    ours.check_fits(KVCache.from_tensors(cache.keys, cache.values))


@pytest.mark.parametrize("family", ["llama-linear", "llama"])
def test_a_cache_that_turns_otherwise_is_refused_where_weights_are_not_named(family):
    (cache,) = engine_of(family).prefill([tokens(12)])
    meta = replace(cache.meta, model_revision="")
    if family == "llama":
        meta = replace(meta, layers=(*meta.layers[:2], replace(meta.layers[2], rope=None)))
    with pytest.raises(MismatchError):
        engine_of("llama").check_fits(replace(cache, meta=meta))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([], "without tokens"), ([3] * (WINDOW + 1), "window"), ([3, VOCABULARY], "token ids"), ([3, -1], "token ids")],
    ids=["empty", "long", "high", "negative"],
)
def test_documents_that_cannot_be_run_are_refused(ids, reason):
    engine = engine_of("llama")
    for use in (
        lambda: engine.prefill([tokens(5), ids]),
        lambda: engine.extend(None, ids),
        lambda: engine.statistics([tokens(5), ids]),
        lambda: engine.forward(None, ids, 0),
        lambda: engine.masked_forward(ids, torch.ones(1, 1, dtype=torch.bool)),
    ):
        with pytest.raises(ArgumentError, match=reason):
            use()


def test_a_window_is_counted_from_position_zero():
    engine = engine_of("llama")
    assert engine.extend(None, tokens(10), offset=WINDOW - 10).meta.offset == WINDOW - 10
    with pytest.raises(ArgumentError, match="window"):
        engine.extend(None, tokens(10), offset=WINDOW - 9)
    with pytest.raises(ArgumentError, match="window"):
        engine.forward(engine.past_key_values(engine.prefill([tokens(10)])[0]), query(), WINDOW - 1)


def test_an_engine_without_a_tokenizer_works_with_ids():
    engine = engine_of("llama")
    assert not engine.has_tokenizer
    for use in (lambda: engine.tokenizer, lambda: engine.tokenize("text"), lambda: engine.detokenize([3])):
        with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
            use()
    assert engine.device == torch.device("cpu")
