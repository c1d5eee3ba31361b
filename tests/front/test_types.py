from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvwire
from kvwire.errors import ArgumentError, KvwireError
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime, digest_tokens


def _meta(**changes):
    layers = (LayerSpec(2, 8, 8, rope=0),)
    return replace(CacheMeta("name", "revision", "tok", "float32", layers, (RopeRegime((1.0, 0.1)),)), **changes)


def test_the_config_digest_knows_what_must_agree():
    digest = _meta().config_digest()
    for same in ({"model_id": "other"}, {"dtype": "bfloat16"}, {"offset": 5}, {"token_digest": "x"}):
        assert _meta(**same).config_digest() == digest
    assert _meta(ropes=(RopeRegime((1.0, 0.1 + 1e-9)),)).config_digest() == digest
    for other in ({"model_revision": "x"}, {"tokenizer_digest": "x"}, {"ropes": (RopeRegime((1.0, 0.11)),)}):
        assert _meta(**other).config_digest() != digest
    assert (
        _meta(model_revision="", model_id="a").config_digest() != _meta(model_revision="", model_id="b").config_digest()
    )


def test_token_digests_are_the_same_everywhere():
    known = "313a9de55e88265f756e61a8793c45193dade4a5b645f7f35082452e6b133604"
    assert digest_tokens([1, 2, 70000]) == digest_tokens((1, 2, 70000)) == known
    assert digest_tokens([1, 2]) != digest_tokens([2, 1])


def test_caches_are_checked_when_they_are_made():
    keys = [torch.zeros(2, 5, 8)]
    cache = KVCache.from_tensors(keys, keys, token_ids=range(5))
    assert (cache.tokens, cache.nbytes, cache.meta.dtype) == (5, 640, "float32")
    part = cache.slice(2, 4)
    assert (part.meta.offset, part.token_ids) == (2, (2, 3))
    assert part.keys[0].data_ptr() == cache.keys[0][:, 2:].data_ptr()
    for bad in ([], [torch.zeros(2, 4, 8)], [torch.zeros(5, 8)]):
        with pytest.raises(ArgumentError):
            KVCache.from_tensors(keys, bad)
    with pytest.raises(ArgumentError):
        KVCache.from_tensors(keys, keys, token_ids=[1])
    with pytest.raises(ArgumentError):
        RopeRegime(())


def test_the_front_door():
    assert set(kvwire.__all__) <= set(dir(kvwire))
    for name in kvwire.__all__:
        assert getattr(kvwire, name) is not None
    with pytest.raises(AttributeError):
        _ = kvwire.nothing
    assert issubclass(ArgumentError, KvwireError)
