"""Encoded, decoded and continued: every family's logits are those of the cache that was encoded."""

import functools

import pytest
import torch

from kvwire.codec import decode, encode, fit_profile, positions_off
from kvwire.reuse import block_mask, link, moved

from .families import FAMILIES, LENGTHS, cache_error, documents, engine_of, query, tokens

families = pytest.mark.parametrize("family", FAMILIES)
NEAR = 0.08
"""Relative error of the middling question token's logits at the finest layered level: random models exaggerate."""


@functools.cache
def profile_of(family):
    engine = engine_of(family)
    texts = [tokens(50, 200 + seed) for seed in range(6)]
    return fit_profile(engine.prefill(texts), engine.statistics(texts))


def middling_error(ours, theirs):
    """Median over tokens ``[tokens, vocabulary]``: routers may send some to other experts."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())


@families
def test_a_decoded_cache_is_continued_like_the_original(family):
    engine, profile, ids, question = engine_of(family), profile_of(family), tokens(45), query()
    (cache,) = engine.prefill([ids])
    blob = encode(cache, profile, chunk_tokens=16, lossless=True, threads=1)
    wanted = engine.forward(engine.past_key_values(cache), question, 45)

    def logits(level, offset=0):
        decoded = decode(blob, level, profile, offset=offset, threads=1)
        return engine.forward(engine.past_key_values(decoded), question, 45)

    assert torch.equal(logits("lossless"), wanted)
    fine = logits(-2)
    assert middling_error(fine, wanted) < NEAR
    assert middling_error(logits(0), wanted) > 3 * middling_error(fine, wanted)
    assert middling_error(logits(-2, None), fine) < 1e-3


@families
def test_positions_go_on_where_the_decoder_is_told(family):
    engine, profile = engine_of(family), profile_of(family)
    (cache,) = engine.prefill([tokens(33)])
    blob = encode(positions_off(cache), profile, threads=1)
    near, off = (decode(blob, profile=profile, offset=offset, threads=1) for offset in (0, None))
    for offset in (0, 7):
        placed = decode(blob, profile=profile, offset=offset, threads=1)
        assert placed.meta.offset == offset
        assert cache_error(placed, moved(near, offset)) < 1e-4
        assert cache_error(moved(off, offset), placed) < 1e-4
    bare = decode(encode(cache, threads=1), threads=1)  # without a profile
    assert cache_error(bare, cache) < 0.2


@families
def test_decoded_documents_link_like_one_masked_pass(family):
    engine, profile = engine_of(family), profile_of(family)
    whole = [token for ids in documents() for token in ids]
    blobs = [encode(cache, profile, threads=1) for cache in engine.prefill(documents())]
    linked = link([decode(blob, profile=profile, offset=None, threads=1) for blob in blobs])
    wanted = engine.masked_forward(whole + query(), block_mask(LENGTHS, len(query())))[-len(query()) :]
    got = engine.forward(engine.past_key_values(linked), query(), linked.tokens)
    assert middling_error(got, wanted) < NEAR
