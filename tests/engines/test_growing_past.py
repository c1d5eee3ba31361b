"""A past that grows into the memory behind a prompt, beside the one of transformers that copies everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvwire.engines.transformers import plain
from kvwire.engines.transformers.plain import GrowingLayer

from .families import documents, engine_of, query

HEADS, DIM = 2, 4


def appended(layer, count, generator):
    shape = (1 if layer.keys is None else layer.keys.shape[0], HEADS, count, DIM)
    return layer.update(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def changed(layer, what, count, generator):
    """One of the things that happen to a layer."""
    if what == "append":
        return appended(layer, count, generator)
    if what == "crop":
        layer.crop(-min(count, layer.get_seq_length() - 1))
    elif what == "repeat":
        layer.batch_repeat_interleave(2)
    elif what == "select":
        layer.batch_select_indices(torch.tensor([0]))
    elif what == "reorder":
        layer.reorder_cache(torch.arange(layer.keys.shape[0]).flip(0))
    elif what == "first":
        layer.keys, layer.values = layer.keys[:1], layer.values[:1]
    elif what == "reset":
        layer.reset()
        return appended(layer, count, generator)
    return layer.keys, layer.values


def layers_of(held, room):
    """The same rows in a layer that copies and in one with so much room behind them, and that memory."""
    whole = [torch.randn(HEADS, held + room, DIM) for _ in range(2)]
    plain, growing = DynamicLayer(), GrowingLayer(*whole, held)
    plain.update(*(part[None, :, :held].clone() for part in whole))
    growing.lazy_initialization(whole[0][None], whole[1][None])
    growing.keys, growing.values = (part[None, :, :held] for part in whole)
    return plain, growing, whole


THINGS = ("append", "append", "append", "crop", "repeat", "select", "reorder", "first", "reset")
STEP = st.tuples(st.sampled_from(THINGS), st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(held=st.integers(1, 12), room=st.integers(0, 20), steps=st.lists(STEP, max_size=8))
def test_it_holds_what_a_layer_that_copies_holds(held, room, steps):
    plain, growing, whole = layers_of(held, room)
    before = [part[:, :held].clone() for part in whole]
    for number, (what, count) in enumerate(steps):
        if what == "repeat" and plain.keys.shape[0] > 4:
            continue
        found = [changed(each, what, count, torch.Generator().manual_seed(number)) for each in (plain, growing)]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert growing.get_seq_length() == plain.get_seq_length()
    assert all(torch.equal(part[:, :held], rows) for part, rows in zip(whole, before, strict=True))


def test_it_does_not_move_while_there_is_room():
    _, growing, whole = layers_of(5, 6)
    for _ in range(3):
        keys, values = appended(growing, 2, None)
    assert (keys.data_ptr(), values.data_ptr()) == (whole[0].data_ptr(), whole[1].data_ptr())
    keys, _ = appended(growing, 1, None)
    assert keys.data_ptr() != whole[0].data_ptr()
    moved = {appended(growing, 1, None)[0].data_ptr() for _ in range(20)}
    growing.crop(-growing.get_seq_length() + 1)
    moved |= {appended(growing, 1, None)[0].data_ptr() for _ in range(20)}
    assert moved == {keys.data_ptr()}  # and then there is room for many, all of it its own


def test_other_strides_are_other_memory():
    whole = torch.randn(HEADS, 10, DIM)
    part = whole.flatten()[: HEADS * 4 * DIM].view(1, HEADS, 4, DIM)
    growing, new = GrowingLayer(whole, whole, 4), torch.randn(1, HEADS, 2, DIM)
    growing.lazy_initialization(part, part)
    growing.keys, growing.values = part, part
    expected = torch.cat((part, new), 2)
    assert torch.equal(growing.update(new, new)[0], expected)


def test_what_keeps_more_than_keys_and_values_stays_what_it_is(monkeypatch):
    class Counting(DynamicLayer):
        def update(self, *states, **options):
            self.count = getattr(self, "count", 0) + 1
            return super().update(*states, **options)

    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    expected = engine.forward(engine.past_key_values(cache), query(), cache.tokens)

    def counting(**options):
        past = DynamicCache(**options)
        past.layers = [Counting() for _ in past.layers]
        return past

    monkeypatch.setattr(plain, "DynamicCache", counting)
    past = engine.growing_past(cache, whole)
    assert torch.equal(engine.forward(past, query(), cache.tokens), expected)
    assert [layer.count for layer in past.layers] == [1] * len(past.layers)


def test_compiled_models_run_as_ever():
    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    expected = engine.forward(engine.past_key_values(cache), query(), cache.tokens)
    model = torch.compile(engine.model, backend="eager", fullgraph=True)
    past, at = engine.growing_past(cache, whole), torch.arange(cache.tokens, cache.tokens + len(query()))
    with torch.no_grad():
        found = model(input_ids=torch.tensor([query()]), position_ids=at[None], past_key_values=past).logits[0]
    assert torch.allclose(found, expected, atol=1e-5)
    torch.compiler.reset()


def test_gradients_leave_the_prompt_alone():
    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    past, at = engine.growing_past(cache, whole), torch.arange(cache.tokens, cache.tokens + len(query()))
    engine.model(input_ids=torch.tensor([query()]), position_ids=at[None], past_key_values=past).logits.sum().backward()
    assert not any(tensor.requires_grad for tensor in (*whole.keys, *whole.values))
    engine.model.zero_grad()


def test_what_is_cropped_into_the_prompt_leaves_it_as_it_is():
    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    for past in (engine.growing_past(cache, whole), engine.own_past(cache)):
        for layer in past.layers:
            layer.crop(-3)
        engine.forward(past, query(), cache.tokens - 3)
    assert all(torch.equal(*pair) for pair in zip(before, (*cache.keys, *cache.values), strict=True))


def prompt_with_room(engine, room):
    (document,) = engine.prefill([documents()[0]])
    whole = engine.allocate(document.tokens + room)
    for target, source in zip((*whole.keys, *whole.values), (*document.keys, *document.values), strict=True):
        if target.numel():
            target[:, : document.tokens] = source
    return whole.slice(0, document.tokens), whole


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("room", [100, len(query()) + 2, 1])
def test_a_question_and_its_answer_are_the_same(family, room):  # gemma3 has layers with a window, and copies
    engine = engine_of(family)
    cache, whole = prompt_with_room(engine, room)
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    logits, answers = [], []
    pasts = engine.past_key_values(cache), engine.own_past(cache), engine.growing_past(cache, whole)
    for past in pasts:
        logits.append(engine.forward(past, query(), cache.tokens))
        answers.append(engine.generate(past, 7, cache.tokens + len(query()), 12))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert answers[0] == answers[1] == answers[2]
    assert all(torch.equal(*pair) for pair in zip(before, (*cache.keys, *cache.values), strict=True))
    if (family, room) == ("llama", 100):  # nothing of the prompt was copied
        for layer, keys, values in zip(pasts[2].layers, cache.keys, cache.values, strict=True):
            assert (layer.keys.data_ptr(), layer.values.data_ptr()) == (keys.data_ptr(), values.data_ptr())


def test_other_pasts_of_the_prompt_are_not_disturbed():
    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    others = [tuple(reversed(query())), query()[1:]]
    expected = [engine.forward(engine.past_key_values(cache), ids, cache.tokens) for ids in (query(), *others)]
    growing, own = engine.growing_past(cache, whole), [engine.own_past(cache) for _ in others]
    found = [engine.forward(growing, query(), cache.tokens)]
    found += [engine.forward(past, ids, cache.tokens) for past, ids in zip(own, others, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    at = cache.tokens + len(query())
    after = engine.past_key_values(cache)
    engine.forward(after, query(), cache.tokens)
    assert torch.equal(engine.forward(growing, [5], at), engine.forward(after, [5], at))


def test_only_room_behind_the_very_prompt_is_written_to():
    engine = engine_of("llama")
    cache, whole = prompt_with_room(engine, 40)
    _, foreign = prompt_with_room(engine, 40)
    before = [part.clone() for part in (*foreign.keys, *foreign.values)]
    for room in (foreign, whole.slice(1, whole.tokens), cache):
        expected = engine.forward(engine.past_key_values(cache), query(), cache.tokens)
        assert torch.equal(engine.forward(engine.growing_past(cache, room), query(), cache.tokens), expected)
    assert all(torch.equal(*pair) for pair in zip(before, (*foreign.keys, *foreign.values), strict=True))
