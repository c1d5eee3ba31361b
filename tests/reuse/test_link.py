"""Linking as such: offsets, refusals and properties of shifts, on caches of random numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import positions_off
from kvwire.errors import ArgumentError, MismatchError, RopeRegimeError
from kvwire.reuse import LinkedPrompt, block_mask, link, moved
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime

from ..engines.families import LONGROPE, WINDOW, cache_error, engine_of, tokens

HALVES = RopeRegime((1.0, 0.3, 0.01))
PAIRS = RopeRegime((0.7, 0.05), interleaved=True, attention_scaling=1.3)
LAYERS = (LayerSpec(2, 8, 5, rope=0), LayerSpec(1, 4, 4, rope=1), LayerSpec(3, 6, 6))
META = CacheMeta("random", "revision", layers=LAYERS, ropes=(HALVES, PAIRS))

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)
offsets = st.integers(0, 3000)


def random_cache(count, seed=0, meta=META, *, ids=True):
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(spec.kv_heads, count, spec.key_dim, generator=generator) for spec in meta.layers]
    values = [torch.randn(spec.kv_heads, count, spec.value_dim, generator=generator) for spec in meta.layers]
    return KVCache.from_tensors(keys, values, meta, range(count) if ids else None)


@given(offsets, offsets, st.integers(1, 9), seeds)
def test_shifts_add_up(first, second, count, seed):
    cache = random_cache(count, seed)
    twice = moved(moved(cache, first), first + second)
    once = moved(cache, first + second)
    assert once.meta == twice.meta
    assert once.meta.offset == first + second
    assert cache_error(twice, once) < 2e-4 * (
        1 + (first + second) / 1000
    )  # angles are float32: they round with their size
    assert cache_error(moved(once, 0), cache) < 1e-5


@given(offsets, st.integers(1, 9), seeds)
def test_shifts_keep_lengths_and_whatever_carries_no_position(offset, count, seed):
    cache = random_cache(count, seed)
    shifted = moved(cache, offset)
    for spec, ours, theirs in zip(META.layers, shifted.keys, cache.keys, strict=True):
        assert torch.allclose(ours.norm(dim=-1), theirs.norm(dim=-1), rtol=1e-5)
        width = 0 if spec.rope is None else META.ropes[spec.rope].rotary_dim
        assert torch.equal(ours[..., width:], theirs[..., width:])
    assert all(ours is theirs for ours, theirs in zip(shifted.values, cache.values, strict=True))
    assert shifted.token_ids == cache.token_ids


@given(lengths, seeds)
def test_a_link_is_every_document_at_its_offset(counts, seed):
    caches = [random_cache(count, seed + index) for index, count in enumerate(counts)]
    linked, prompt = link(caches), LinkedPrompt(counts, META)
    assert linked.tokens == sum(counts)
    assert linked.token_ids == tuple(token for count in counts for token in range(count))
    for index, cache in enumerate(caches):
        start = sum(counts[:index])
        assert prompt.offset(index) == start
        assert prompt.document(index).meta.offset == start
        prompt.write(index, 0, cache)
        wanted = moved(cache, start)
        for ours, theirs in zip(linked.keys + linked.values, wanted.keys + wanted.values, strict=True):
            assert torch.equal(ours[:, start : start + cache.tokens], theirs)
    assert all(torch.equal(a, b) for a, b in zip(prompt.cache.keys, linked.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(prompt.cache.values, linked.values, strict=True))


@settings(max_examples=30)
@given(lengths, st.integers(0, 6))
def test_the_mask_lets_documents_see_themselves_and_the_query_see_all(counts, query):
    owner = [index for index, count in enumerate([*counts, query]) for _ in range(count)]
    mask = block_mask(counts, query)
    assert mask.shape == (len(owner), len(owner))
    for row, mine in enumerate(owner):
        for column, theirs in enumerate(owner):
            assert bool(mask[row, column]) == (column <= row and (mine == theirs or mine == len(counts)))


def test_a_cache_that_stands_right_is_not_copied():
    cache = random_cache(4)
    assert moved(cache, 0) is cache
    part = cache.slice(1, 3)
    assert moved(part, 1) is part


def test_a_link_of_two_types_takes_the_wider():
    cache = random_cache(4)
    half = KVCache([k.half() for k in cache.keys], [v.half() for v in cache.values], replace(META, dtype="float16"))
    assert link([half, half]).meta.dtype == "float16"
    linked = link([half, cache])
    assert linked.meta.dtype == "float32"
    assert {tensor.dtype for tensor in linked.keys + linked.values} == {torch.float32}


def test_token_ids_are_known_only_where_all_are():
    linked = link([random_cache(3), random_cache(4, ids=False)])
    assert linked.token_ids is None
    assert linked.meta.token_digest == ""
    elsewhere = random_cache(3, meta=replace(META, model_id="elsewhere"))  # another folder of the same model
    assert link([random_cache(3), elsewhere]).tokens == 6


def test_what_does_not_link():
    for use in (lambda: link([]), lambda: LinkedPrompt([], META), lambda: LinkedPrompt([3, 0], META)):
        with pytest.raises(ArgumentError):
            use()
    with pytest.raises(ArgumentError, match="positions count from 0"):
        moved(random_cache(3), -1)
    assert moved(random_cache(3), 1_000_000).meta.offset == 1_000_000
    ours, theirs = (engine_of(family).prefill([tokens(8)])[0] for family in ("llama", "llama-linear"))
    with pytest.raises(MismatchError):
        link([ours, theirs])
    with pytest.raises(MismatchError, match="another layout"):
        LinkedPrompt([8], ours.meta).write(0, 0, theirs)
    with pytest.raises(MismatchError):
        LinkedPrompt([3], META).write(0, 0, random_cache(3, meta=replace(META, model_revision="other")))


@pytest.mark.parametrize(
    "meta",
    [
        replace(META, model_revision="other"),
        replace(META, tokenizer_digest="other"),
        replace(META, ropes=(HALVES, replace(PAIRS, interleaved=False))),
    ],
    ids=["weights", "tokenizer", "rope"],
)
def test_caches_of_different_models_do_not_link(meta):
    with pytest.raises(MismatchError, match="encode all documents with one model"):
        link([random_cache(3), random_cache(3, meta=meta)])


def test_pieces_are_checked_against_their_document():
    prompt = LinkedPrompt([4, 5], META)
    for document, start, count in ((0, 2, 3), (0, -1, 2), (0, 5, 1), (1, 0, 6), (2, 0, 1), (-1, 0, 1)):
        with pytest.raises(ArgumentError):
            prompt.write(document, start, random_cache(count))
    assert not any(bool(key.any()) for key in prompt.cache.keys)
    for use in (lambda: prompt.document(2), lambda: prompt.offset(-1)):
        with pytest.raises(ArgumentError, match="documents 0 to 1"):
            use()


@pytest.mark.parametrize(("family", "limit"), [("llama-dynamic", WINDOW), ("phi3-longrope", LONGROPE)])
def test_prompts_past_the_limit_of_a_regime_are_refused(family, limit):
    engine = engine_of(family)
    first, second = engine.prefill([tokens(limit // 2), tokens(limit // 2 + 1, 1)])
    off = positions_off(second)
    uses = (
        lambda: link([first, second]),
        lambda: link([first, off]),
        lambda: LinkedPrompt([first.tokens, second.tokens], engine.meta),
        lambda: moved(second, limit // 2),
        lambda: moved(off, limit // 2),
        lambda: moved(KVCache(first.keys, first.values, replace(first.meta, offset=limit - 1)), 0),
    )
    for use in uses:
        with pytest.raises(RopeRegimeError, match="changes its frequencies"):
            use()
    fitting = link([first, second.slice(0, limit // 2)])
    assert fitting.tokens == limit
    with pytest.raises(ArgumentError, match="window"):
        engine.forward(engine.past_key_values(fitting), tokens(1), limit)
