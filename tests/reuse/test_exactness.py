"""Moving, linking and recomputing are exact: each against one pass of the model, for every family."""

from dataclasses import replace

import pytest
import torch

from kvwire.codec import positions_off
from kvwire.engines.transformers import TransformersEngine
from kvwire.reuse import LinkedPrompt, block_mask, link, moved
from kvwire.types import KVCache

from ..engines.families import (
    FAMILIES,
    LENGTHS,
    SLIDES,
    SLIDING,
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
SEEN = 1e-2
"""A difference that shows that two things are not the same."""
TOTAL = sum(LENGTHS)


def whole_text():
    return [token for ids in documents() for token in ids]


def linked_logits(engine, cache):
    return engine.forward(engine.past_key_values(cache), query(), cache.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shift_equals_encoding_at_the_offset(family):
    engine, ids, offset = engine_of(family), tokens(23), 37
    direct = engine.extend(None, ids, offset=offset)
    (near,) = engine.prefill([ids])
    shifted = moved(near, offset)
    assert shifted.meta == direct.meta
    assert cache_error(shifted, direct) < TOLERANCE
    assert cache_error(near, direct) > SEEN
    assert cache_error(moved(direct, 0), near) < TOLERANCE
    assert cache_error(moved(positions_off(near), offset), direct) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_linking_equals_one_masked_pass(family):
    engine = engine_of(family)
    visible = block_mask(LENGTHS, len(query()))
    wanted = engine.masked_forward(whole_text() + query(), visible)[-len(query()) :]
    caches = engine.prefill(documents())
    assert error_between(linked_logits(engine, link(caches)), wanted) < TOLERANCE
    if family not in SLIDES:  # where few layers look back as far as the first documents
        keys = [torch.cat(parts, 1) for parts in zip(*(cache.keys for cache in caches), strict=True)]
        values = [torch.cat(parts, 1) for parts in zip(*(cache.values for cache in caches), strict=True)]
        unmoved = KVCache(keys, values, caches[0].meta)
        assert error_between(linked_logits(engine, unmoved), wanted) > SEEN
        causal = torch.ones_like(visible).tril()
        assert error_between(engine.masked_forward(whole_text() + query(), causal)[-len(query()) :], wanted) > SEEN


@pytest.mark.parametrize("family", SLIDES)
def test_windows_narrow_the_mask_of_sliding_layers(family):
    """A hand-made mask, row by row, against the engine's; then a window wider than the prompt makes a difference."""
    engine = engine_of(family)
    visible = block_mask(LENGTHS, len(query()))
    masks = engine.attention_mask(visible)
    sliding = (masks["sliding_attention"] if isinstance(masks, dict) else masks)[0, 0]
    seen = sliding if sliding.dtype == torch.bool else sliding == 0
    for row in range(len(visible)):
        for column in range(len(visible)):
            assert bool(seen[row, column]) == (bool(visible[row, column]) and row - column < SLIDING)
    config = config_of(family)
    config.sliding_window = 120
    wide = TransformersEngine(make_model(config))
    assert {spec.window for spec in wide.meta.layers} >= {120}
    wanted = wide.masked_forward(whole_text() + query(), visible)[-len(query()) :]
    assert error_between(linked_logits(wide, link(wide.prefill(documents()))), wanted) < TOLERANCE
    assert error_between(engine.masked_forward(whole_text() + query(), visible)[-len(query()) :], wanted) > SEEN


@pytest.mark.parametrize("family", SLIDES)
def test_a_window_reaches_across_short_documents(family):
    engine, lengths = engine_of(family), (15, 3, 2, 4)
    texts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    flat = [token for ids in texts for token in ids]
    wanted = engine.masked_forward(flat + query(), block_mask(lengths, len(query())))[-len(query()) :]
    linked = link(engine.prefill(texts))
    assert error_between(linked_logits(engine, linked), wanted) < TOLERANCE
    steps = engine.past_key_values(linked)  # token by token, as in generation
    for index, token in enumerate(query()):
        logits = engine.forward(steps, [token], linked.tokens + index)[-1]
        assert error_between(logits, wanted[index]) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_everything_equals_a_full_prefill(family):
    engine, ids = engine_of(family), whole_text()
    prompt = LinkedPrompt([TOTAL], engine.meta)
    for start in range(0, TOTAL, 10):
        stop = min(start + 10, TOTAL)
        prefix = prompt.cache.slice(0, start) if start else None
        prompt.write(0, start, engine.extend(prefix, ids[start:stop]))
    assert cache_error(prompt.cache, engine.prefill([ids])[0]) < TOLERANCE
    wanted = engine.forward(None, ids + query(), 0)[-len(query()) :]
    assert error_between(linked_logits(engine, prompt.cache), wanted) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_contiguous_chunks_join_without_a_trace(family):
    engine, ids = engine_of(family), whole_text()
    (cache,) = engine.prefill([ids])
    joined = link([cache.slice(0, 10), cache.slice(10, 27), cache.slice(27, TOTAL)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(joined.keys, cache.keys, strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(joined.values, cache.values, strict=True))
    assert joined.meta == cache.meta
    wanted = engine.forward(None, ids + query(), 0)[-len(query()) :]
    assert error_between(linked_logits(engine, joined), wanted) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_written_in_pieces_equals_a_link(family):
    engine = engine_of(family)
    caches = engine.prefill(documents())
    prompt, wanted = LinkedPrompt(LENGTHS, engine.meta), link(caches)
    for document in (2, 0, 1):
        for start, stop in ((6, LENGTHS[document]), (0, 6)):
            piece = caches[document].slice(start, stop)
            prompt.write(document, start, positions_off(piece) if document == 1 else piece)
    mixed = link([positions_off(caches[0]), caches[1], positions_off(caches[2])])
    assert cache_error(prompt.cache, wanted) < TOLERANCE
    assert cache_error(mixed, wanted) < TOLERANCE
    assert mixed.meta == wanted.meta
    assert prompt.cache.meta == replace(wanted.meta, token_digest="")
