"""Caches whose layers and heads store different tokens, against the same with these entries taken away."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import positions_off
from kvwire.engines.transformers.attending import is_plain_attention, scale_of
from kvwire.engines.transformers.capture import recording
from kvwire.engines.transformers.plain import filled, tensors_of
from kvwire.errors import MismatchError
from kvwire.types import KVCache

from .families import FAMILIES, cache_error, engine_of, error_between, query, tokens

TOLERANCE = 1e-5
COUNT = 29
SHARED = ("gemma4",)  # layers that read others' caches
PAIRED = ("longcat",)  # two attentions to a layer
PLAIN = ["llama", "qwen3", "mistral", "gemma3", "gpt-neox", "phi", "cohere", "deepseek-v3", "smollm3"]


class Removing:
    """Attention of each head over nothing but what it stores, one query at a time."""

    def __init__(self, meta, kept):
        self.meta, self.kept = meta, kept

    def record(self, module, query, key, value, *_, **options):
        assert is_plain_attention(options)
        spec, kept = self.meta.layers[module.layer_idx], self.kept[module.layer_idx]
        heads, rows, columns = query.shape[1], query.shape[2], key.shape[2]
        stored = torch.ones(heads, columns, dtype=torch.bool)
        if kept is not None:
            stored[:, : kept.shape[1]] = kept.repeat_interleave(heads // spec.kv_heads, 0)
        out = torch.empty(1, rows, heads, value.shape[3])
        for head in range(heads):
            group = head * key.shape[1] // heads
            for row in range(rows):
                end = columns - rows + row + 1
                first = 0 if spec.window is None else max(0, end - spec.window)
                seen = [column for column in range(first, end) if stored[head, column]]
                scores = key[0, group, seen] @ query[0, head, row] * scale_of(query, options)
                out[0, row, head] = scores.softmax(-1) @ value[0, group, seen]
        return out


def pruned(engine, seed, share=0.6):
    (cache,) = engine.prefill([tokens(COUNT)])
    drawn = torch.Generator().manual_seed(seed)
    kept = [torch.rand(spec.kv_heads, COUNT, generator=drawn) < share for spec in cache.meta.layers]
    return KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=kept)


def taken_away(engine, cache, ids):
    """Logits and past of some tokens, where what was pruned does not exist."""
    past = filled(engine._pairs(replace(cache, kept=None)))
    with recording(Removing(cache.meta, cache.kept), engine.model):
        return engine.forward(past, ids, cache.tokens), past


@pytest.mark.parametrize("family", PLAIN)
def test_each_layer_and_head_sees_what_it_stores(family):
    engine, question = engine_of(family), query()
    cache = pruned(engine, 1)
    wanted, past = taken_away(engine, cache, question)
    whole = engine.forward(engine.past_key_values(replace(cache, kept=None)), question, COUNT)
    assert error_between(wanted, whole) > 1e-3
    hooks = [len(module._forward_pre_hooks) for module in engine.model.modules()]
    for each in (cache, positions_off(cache)):
        assert error_between(engine.forward(engine.own_past(each), question, COUNT), wanted) < TOLERANCE
    by_token, own = [], engine.growing_past(cache, cache)
    for at, token in enumerate(question):
        by_token.append(engine.forward(own, [token], COUNT + at)[-1])
    assert error_between(torch.stack(by_token), wanted) < TOLERANCE
    more = engine.extend(cache, question)
    for ours, (keys, _) in zip(more.keys, tensors_of(past), strict=True):
        assert error_between(ours, keys[0, :, COUNT:]) < TOLERANCE
    assert hooks == [len(module._forward_pre_hooks) for module in engine.model.modules()]


@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from(["llama", "gemma3", "deepseek-v3"]))
@settings(deadline=None, max_examples=15)
def test_any_holes_are_seen_by_none(seed, share, family):
    engine, question = engine_of(family), query()
    cache = pruned(engine, seed, share)
    assert error_between(
        engine.forward(engine.own_past(cache), question, COUNT), taken_away(engine, cache, question)[0]
    ) < TOLERANCE  # fmt: skip


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in (*PLAIN, *SHARED, *PAIRED)])
def test_what_is_written_into_holes_has_no_effect(family):
    """Families that cap scores, have sinks, or are models of another in the test above."""
    engine, question = engine_of(family), query()
    cache = pruned(engine, 2)
    poisoned = replace(
        cache, keys=[each.clone() for each in cache.keys], values=[each.clone() for each in cache.values]
    )
    for keys, values, mask in zip(poisoned.keys, poisoned.values, cache.kept, strict=True):
        keys[~mask] = values[~mask] = 50.0
    found = [engine.forward(engine.own_past(each), question, COUNT) for each in (cache, poisoned)]
    assert error_between(*found) < 1e-6
    whole = engine.forward(engine.past_key_values(replace(cache, kept=None)), question, COUNT)
    assert error_between(found[0], whole) > 1e-3


@pytest.mark.parametrize("family", [*SHARED, *PAIRED])
def test_models_whose_layers_are_not_their_caches_are_refused(family):
    engine = engine_of(family)
    cache = pruned(engine, 3)
    with pytest.raises(MismatchError, match="unpruned"):
        engine.forward(engine.own_past(cache), query(), COUNT)


def test_attention_without_masks_is_refused(monkeypatch):
    engine = engine_of("llama")
    cache = pruned(engine, 4)
    monkeypatch.setattr(engine.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(MismatchError, match="sdpa or eager"):
        engine.own_past(cache)


def test_attention_to_pruned_tokens_is_none():
    engine, question = engine_of("qwen3"), query()
    cache = pruned(engine, 5, 0.15)
    nowhere = ~torch.stack([mask.any(0) for mask in cache.kept]).any(0)
    assert nowhere.any()
    seen = engine.look(cache, question)
    assert not seen.attention[nowhere].any()
    assert not seen.influence[nowhere].any()
    assert (seen.attention[~nowhere] > 0).all()
    assert cache_error(engine.extend(cache, question), engine.extend(cache, question)) == 0
