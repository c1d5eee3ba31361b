"""Pruned caches: moved, linked and given to an engine, against the same with everything kept but hidden by a mask."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import positions_off, positions_on
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import LinkedPrompt, link, moved
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime

from ..engines.families import (
    FAMILIES,
    LENGTHS,
    SLIDES,
    SLIDING,
    cache_error,
    documents,
    engine_of,
    error_between,
    query,
    tokens,
)

TOLERANCE = 1e-5
UNPRUNED = [family for family in FAMILIES if family not in SLIDES]
LAYERS = (
    LayerSpec(2, 8, 5, rope=0),
    LayerSpec(0, 0, 0, "none"),
    LayerSpec(1, 12, 4, value_rope=1),
    LayerSpec(3, 10, 6, rope=1, key_rope_start=6),
)
META = CacheMeta(layers=LAYERS, ropes=(RopeRegime((1.0, 0.3, 0.01)), RopeRegime((0.7, 0.05), interleaved=True)))


def random_cache(count, seed=0, *, pruned=True):
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(spec.kv_heads, count, spec.key_dim, generator=generator) for spec in LAYERS]
    values = [torch.randn(spec.kv_heads, count, spec.value_dim, generator=generator) for spec in LAYERS]
    masks = [torch.rand(spec.kv_heads, count, generator=generator) < 0.5 for spec in LAYERS]
    return KVCache.from_tensors(keys, values, META, range(count), kept=[*masks[:3], None] if pruned else None)


def same_masks(ours, theirs):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@given(st.integers(1, 9), st.integers(0, 500), st.integers(0, 2**31))
def test_moving_keeps_what_was_kept(count, offset, seed):
    cache = random_cache(count, seed)
    whole = replace(random_cache(count, seed), kept=None)
    for turned, wanted in (
        (positions_off(cache), positions_off(whole)),
        (positions_on(positions_off(cache), offset), positions_on(positions_off(whole), offset)),
        (moved(cache, offset), moved(whole, offset)),
    ):
        assert same_masks(turned.kept, cache.kept)
        assert turned.meta == wanted.meta
        pairs = zip((*turned.keys, *turned.values), (*wanted.keys, *wanted.values), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        for keys, values, mask in zip(turned.keys, turned.values, turned.kept, strict=True):
            if mask is not None:
                assert not keys[~mask].any()
                assert not values[~mask].any()


def test_parts_that_rotate_are_turned_and_others_are_not():
    cache = random_cache(5, pruned=False)
    off = positions_off(replace(cache, meta=replace(META, offset=7)))
    assert torch.equal(off.values[0], cache.values[0])
    assert torch.equal(off.keys[2], cache.keys[2])
    assert torch.equal(off.keys[3][..., :6], cache.keys[3][..., :6])
    assert torch.equal(off.values[3], cache.values[3])
    for ours, theirs in ((off.values[2], cache.values[2]), (off.keys[3][..., 6:], cache.keys[3][..., 6:])):
        assert not torch.allclose(ours, theirs, atol=1e-2)
        assert torch.allclose(ours.norm(dim=-1), theirs.norm(dim=-1), rtol=1e-5)
    back = positions_on(off, 7)
    assert cache_error(back, cache) < TOLERANCE
    angle = torch.tensor(0.7 * 7)  # the first token's first pair
    first, second = cache.values[2][0, 0, 0], cache.values[2][0, 0, 1]
    assert torch.allclose(off.values[2][0, 0, 0], first * angle.cos() + second * angle.sin(), atol=1e-5)


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_link_keeps_what_its_documents_kept(pruned, seed):
    caches = [random_cache(3 + index, seed + index, pruned=each) for index, each in enumerate(pruned)]
    linked, prompt = link(caches), LinkedPrompt([cache.tokens for cache in caches], META)
    for index in reversed(range(len(caches))):
        cut = 2
        prompt.write(index, 0, caches[index].slice(0, cut))
        prompt.write(index, cut, caches[index].slice(cut, caches[index].tokens))
    if not any(pruned):
        assert linked.kept is prompt.cache.kept is None
        return
    assert same_masks(linked.kept, prompt.cache.kept)
    pairs = zip((*prompt.cache.keys, *prompt.cache.values), (*linked.keys, *linked.values), strict=True)
    assert all(torch.allclose(ours, theirs, atol=TOLERANCE) for ours, theirs in pairs if theirs.numel())
    at = 0
    for cache in caches:
        for layer, spec in enumerate(LAYERS):
            mask = None if cache.kept is None else cache.kept[layer]
            wanted = torch.ones(spec.kv_heads, cache.tokens, dtype=torch.bool) if mask is None else mask
            assert torch.equal(linked.kept[layer][:, at : at + cache.tokens], wanted)
        at += cache.tokens


def test_documents_written_in_place_say_what_they_keep():
    """As a decoder does that writes into the prompt itself; a whole piece may overwrite a pruned one."""
    caches = [random_cache(4, 1), random_cache(5, 2, pruned=False), random_cache(3, 3)]
    prompt, wanted = LinkedPrompt([4, 5, 3], META), link(caches)
    for index, cache in enumerate(caches):
        part, placed = prompt.document(index), moved(cache, prompt.offset(index))
        for ours, theirs in zip((*part.keys, *part.values), (*placed.keys, *placed.values), strict=True):
            if ours.numel():
                ours.copy_(theirs)
        if cache.kept is not None:
            prompt.keep(index, cache.kept)
    assert same_masks(prompt.cache.kept, wanted.kept)
    assert same_masks(prompt.document(2).kept[:1], caches[2].kept[:1])
    over = LinkedPrompt([5], META)
    for is_pruned in (True, False):
        over.write(0, 0, random_cache(5, pruned=is_pruned))
    assert all(bool(mask.all()) for mask in over.cache.kept)


def test_masks_that_do_not_fit_the_prompt_are_refused():
    prompt, kept = LinkedPrompt([4, 5], META), random_cache(5).kept
    for use in (
        lambda: prompt.keep(0, kept),
        lambda: prompt.keep(1, kept, 1),
        lambda: prompt.keep(1, kept, -1),
        lambda: prompt.keep(2, kept),
        lambda: prompt.keep(1, kept[:2]),
        lambda: prompt.keep(1, [kept[2], *kept[1:]]),
    ):
        with pytest.raises(ArgumentError, match="does not fit document"):
            use()
    assert prompt.cache.kept is None
    prompt.keep(1, kept)
    assert torch.equal(prompt.cache.kept[0][:, 4:], kept[0])


def pruned_alike(cache, dropped):
    keep = torch.ones(cache.tokens, dtype=torch.bool)
    keep[dropped] = False
    masks = [keep.expand(spec.kv_heads, -1) for spec in cache.meta.layers]
    return KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)


@pytest.mark.parametrize("family", UNPRUNED)
def test_a_cache_pruned_alike_everywhere_equals_hidden_tokens(family):
    engine, ids, question, dropped = engine_of(family), tokens(29), query(), [0, 3, 4, 17, 28]
    visible = torch.ones(35, 35, dtype=torch.bool).tril()
    visible[29:, dropped] = False
    wanted = engine.masked_forward(ids + question, visible)[29:]
    pruned = pruned_alike(engine.prefill([ids])[0], dropped)
    for cache in (pruned, positions_off(pruned)):
        past = engine.past_key_values(cache)
        assert past.get_seq_length() == 24
        assert error_between(engine.forward(past, question, 29), wanted) < TOLERANCE
    again = engine.extend(pruned, question)
    assert again.tokens == len(question)
    assert again.meta.offset == 29
    past, more = engine.past_key_values(pruned), []
    for at, token in enumerate(question):  # token by token
        more.append(engine.forward(past, [token], 29 + at)[-1])
    assert error_between(torch.stack(more), wanted) < TOLERANCE


def test_pruned_documents_link_and_answer():
    engine = engine_of("llama")
    caches = engine.prefill(documents())
    pruned = [pruned_alike(caches[0], [2, 3]), caches[1], pruned_alike(caches[2], [0])]
    hidden = [2, 3, LENGTHS[0] + LENGTHS[1]]
    whole, linked = link(caches), link(pruned)
    past = engine.past_key_values(linked)
    assert past.get_seq_length() == sum(LENGTHS) - len(hidden)
    wanted = engine.past_key_values(whole)
    keep = [token for token in range(sum(LENGTHS)) if token not in hidden]
    for ours, theirs in zip(past.layers, wanted.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys[:, :, keep], atol=1e-6)
        assert torch.equal(ours.values, theirs.values[:, :, keep])


def test_sliding_layers_need_only_what_their_window_sees():
    engine, ids, question = engine_of("gemma3"), tokens(29), query()
    (cache,) = engine.prefill([ids])
    masks = []
    for spec in cache.meta.layers:
        mask = torch.ones(spec.kv_heads, 29, dtype=torch.bool)
        if spec.window:
            mask[:, : 29 - SLIDING + 1] = False
        masks.append(mask)
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    wanted = engine.forward(engine.past_key_values(cache), question, 29)
    assert error_between(engine.forward(engine.past_key_values(pruned), question, 29), wanted) < TOLERANCE
    assert cache_error(engine.extend(pruned, question), engine.extend(cache, question)) < TOLERANCE
    masks[0] = masks[0].clone()
    masks[0][:, 29 - SLIDING + 1] = False
    narrow = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    with pytest.raises(MismatchError, match="pruned"):
        engine.past_key_values(narrow)


@pytest.mark.parametrize("where", ["head", "layer", "sliding"])
def test_caches_pruned_unevenly_do_not_fit_a_plain_cache(where):
    engine = engine_of("gemma3" if where == "sliding" else "llama")
    (cache,) = engine.prefill([tokens(29)])
    keep = torch.ones(cache.meta.layers[0].kv_heads, 29, dtype=torch.bool)
    keep[0 if where == "head" else slice(None), 4] = False
    masks = [keep] * 3 if where != "layer" else [keep, None, None]
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    with pytest.raises(MismatchError, match="run it with forward on own_past, keep it unpruned"):
        engine.past_key_values(pruned)


def test_whole_masks_are_no_pruning():
    engine = engine_of("gemma3")
    (cache,) = engine.prefill([tokens(29)])
    past = engine.past_key_values(pruned_alike(cache, []))
    assert torch.equal(past.layers[0].keys, engine.past_key_values(cache).layers[0].keys)
