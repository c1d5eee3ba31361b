from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvwire
from kvwire.codec.format.metadata_json import layers_from_json, layers_to_json, meta_from_json, meta_to_json
from kvwire.errors import ArgumentError, CorruptError, KvwireError
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


def test_the_config_digest_is_the_one_that_stores_hold():
    """Keys of stores begin with it: of all fields that count, as JSON."""
    for meta in (_meta(), _meta(model_revision=""), _meta(layers=(), ropes=())):
        told = asdict(meta)
        for name in ("positions", "offset", "token_digest", "dtype", *(["model_id"] if meta.model_revision else [])):
            del told[name]
        for rope in told["ropes"]:
            rope["inv_freq"] = [f"{value:.5e}" for value in rope["inv_freq"]]
        assert meta.config_digest() == sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_id": "other"}, {"dtype": "bfloat16"}, {"offset": 5}, {"model_revision": "x"}, {"model_revision": ""},
     {"model_revision": "", "model_id": "other"}, {"tokenizer_digest": "x"}, {"layers": ()},
     {"ropes": (RopeRegime((1.0, 0.1 + 1e-9)),)}, {"ropes": (RopeRegime((1.0, 0.11)),)}],
)  # fmt: skip
@pytest.mark.parametrize("revision", ["revision", ""])
def test_caches_share_a_config_where_their_digests_agree(changes, revision):
    one, other = _meta(model_revision=revision), _meta(**{"model_revision": revision, **changes})
    assert one.shares_config(other) == other.shares_config(one) == (one.config_digest() == other.config_digest())


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


_RAGGED = (LayerSpec(2, 8, 5), LayerSpec(3, 4, 4))


def _random(tokens=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(spec.kv_heads, tokens, spec.key_dim, generator=generator) for spec in _RAGGED]
    values = [torch.randn(spec.kv_heads, tokens, spec.value_dim, generator=generator) for spec in _RAGGED]
    masks = [torch.rand(spec.kv_heads, tokens, generator=generator) < 0.5 for spec in _RAGGED]
    return keys, values, masks


def _entries(keys, values, masks):
    return [
        [(mask.nonzero()[:, 0], key[mask], value[mask]) for key, value, mask in zip(*layer, strict=True)]
        for layer in zip(keys, values, masks, strict=True)
    ]


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_ragged_entries_come_back_as_they_were(tokens, seed):
    keys, values, masks = _random(tokens=tokens, seed=seed)
    layers = _entries(keys, values, masks)
    cache = KVCache.from_ragged(layers, tokens, token_ids=range(tokens))
    assert (cache.tokens, cache.token_ids) == (tokens, tuple(range(tokens)))
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in cache.meta.layers] == [(2, 8, 5), (3, 4, 4)]
    for layer, heads in enumerate(layers):
        assert torch.equal(cache.kept[layer], masks[layer])
        assert not cache.keys[layer][~masks[layer]].any()
        assert not cache.values[layer][~masks[layer]].any()
        for head, wanted in enumerate(heads):
            for ours, theirs in zip(cache.ragged(layer, head), wanted, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.dtype == theirs.dtype
    masked = KVCache.from_tensors(keys, values, token_ids=range(tokens), kept=masks)
    for ours, theirs in zip(masked.keys + masked.values, cache.keys + cache.values, strict=True):
        assert torch.equal(ours, theirs)


def test_what_was_not_pruned_is_ragged_all_the_same():
    keys, values, masks = _random()
    whole = KVCache.from_tensors(keys, values)
    assert whole.kept is None
    positions, own_keys, own_values = whole.ragged(1, 2)
    assert positions.tolist() == list(range(9))
    assert torch.equal(own_keys, keys[1][2])
    assert torch.equal(own_values, values[1][2])
    part = KVCache.from_tensors(keys, values, kept=[None, masks[1]])
    assert part.kept[0] is None
    assert torch.equal(part.ragged(0, 1)[1], keys[0][1])
    assert KVCache.from_tensors(keys, values, kept=[None, None]).kept is None


def test_heads_may_keep_nothing_and_layers_may_have_no_heads():
    empty = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 8), torch.zeros(0, 5))
    some = (torch.tensor([1, 3]), torch.ones(2, 8), torch.ones(2, 5))
    cache = KVCache.from_ragged([[empty, some], []], 4)
    assert [spec.kind for spec in cache.meta.layers] == ["full", "none"]
    assert cache.ragged(0, 0)[0].tolist() == []
    assert cache.ragged(0, 1)[0].tolist() == [1, 3]
    assert cache.kept[1] is None
    assert cache.tokens == 4
    part = cache.slice(1, 3)
    assert part.ragged(0, 1)[0].tolist() == [0]
    assert part.kept[1] is None


def test_slices_of_pruned_caches_keep_what_was_kept():
    keys, values, masks = _random()
    part = KVCache.from_tensors(keys, values, kept=[masks[0], None]).slice(2, 7)
    assert torch.equal(part.kept[0], masks[0][:, 2:7])
    assert part.kept[1] is None
    positions, own_keys, _ = part.ragged(0, 1)
    assert torch.equal(own_keys, keys[0][1][2:7][masks[0][1, 2:7]])
    assert torch.equal(positions, masks[0][1, 2:7].nonzero()[:, 0])


_GOOD = (torch.tensor([0, 2]), torch.ones(2, 8), torch.ones(2, 5))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ((torch.tensor([2, 0]), *_GOOD[1:]), "ascend"),
        ((torch.tensor([1, 1]), *_GOOD[1:]), "ascend"),
        ((torch.tensor([-1, 1]), *_GOOD[1:]), "lie in 0 to 3"),
        ((torch.tensor([1, 4]), *_GOOD[1:]), "lie in 0 to 3"),
        ((torch.tensor([0.0, 2.0]), *_GOOD[1:]), "int64"),
        ((torch.tensor([0, 1, 2]), *_GOOD[1:]), r"keys must be \[n, dim\]"),
        ((_GOOD[0], torch.ones(2, 7), _GOOD[2]), r"keys must be \[n, dim\]"),
        ((_GOOD[0], _GOOD[1], torch.ones(2)), r"values must be \[n, dim\]"),
        ((_GOOD[0], _GOOD[1], torch.ones(2, 5, dtype=torch.float64)), r"values must be \[n, dim\]"),
    ],
    ids=["descending", "twice", "negative", "beyond", "float", "count", "dim", "rank", "dtype"],
)
def test_entries_that_do_not_fit_are_refused(entries, reason):
    with pytest.raises(ArgumentError, match=f"layer 1, head 1: .*{reason}"):
        KVCache.from_ragged([[_GOOD, _GOOD], [_GOOD, entries]], 4)


def test_masks_that_do_not_fit_are_refused():
    keys, values, masks = _random()
    with pytest.raises(ArgumentError, match="names 1 layers"):
        KVCache.from_tensors(keys, values, kept=masks[:1])
    with pytest.raises(ArgumentError, match=r"layer 1: kept must be bool \(3, 9\)"):
        KVCache.from_tensors(keys, values, kept=[masks[0], masks[0]])
    with pytest.raises(ArgumentError, match="layer 0: kept must be bool"):
        KVCache.from_tensors(keys, values, kept=[masks[0].float(), masks[1]])
    with pytest.raises(ArgumentError, match="at least one layer"):
        KVCache.from_ragged([], 4)
    with pytest.raises(ArgumentError, match="at least one token"):
        KVCache.from_ragged([[_GOOD]], -1)
    for layer, head in ((0, 2), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(ArgumentError, match=f"no head {head} in layer {layer}"):
            KVCache.from_tensors(keys, values).ragged(layer, head)


_SPECS = (
    LayerSpec(2, 8, 8, rope=0),
    LayerSpec(2, 8, 8, "sliding", 1, 16),
    LayerSpec(0, 0, 0, "none"),
    LayerSpec(1, 16, 4, value_rope=0),
    LayerSpec(2, 8, 8, rope=0, key_rope_start=4),
    LayerSpec(2, 8, 8, rope=0, value_rope=1, key_rope_start=2),
)
_ROPES = (RopeRegime((1.0, 0.125)), RopeRegime((0.5, 0.25, 0.125), interleaved=True))


def test_layouts_come_back_from_json():
    rows = json.loads(json.dumps(layers_to_json(_SPECS)))
    assert layers_from_json(rows) == _SPECS
    assert [len(row) for row in rows] == [6, 6, 6, 8, 8, 8]
    meta = CacheMeta("name", layers=_SPECS, ropes=_ROPES, positions="off")
    assert meta_from_json(json.loads(json.dumps(meta_to_json(meta)))) == meta


@pytest.mark.parametrize(
    "row",
    [
        ["full", 2, 8, 8, 0],
        ["full", 2, 8, 8, 0, None, None],
        ["full", 2, 8, 8, 0, None, None, 0, 0],
        ["full", 2, 8, 8, None, None, -1, 0],
        ["full", 2, 8, 8, None, None, 1.0, 0],
        ["full", 2, 8, 8, None, None, True, 0],
        ["full", 2, 8, 8, 0, None, None, None],
        ["full", 2, 8, 8, 0, None, None, 1 << 21],
        ["full", 2, 8, 8, 0, None, None, "4"],
        [["full"], 2, 8, 8, 0, None],
    ],
    ids=str,
)
def test_impossible_layers_are_refused(row):
    with pytest.raises((ValueError, TypeError)):
        layers_from_json([row])


@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(2, 8, 8, rope=2),
        LayerSpec(2, 8, 8, value_rope=2),
        LayerSpec(2, 8, 3, value_rope=0),
        LayerSpec(2, 8, 8, rope=0, key_rope_start=5),
        LayerSpec(2, 8, 8, key_rope_start=4),
    ],
    ids=["no-rope", "no-value-rope", "values-too-narrow", "past-the-end", "start-without-rope"],
)
def test_rotary_parts_that_do_not_fit_are_refused(spec):
    raw = meta_to_json(CacheMeta("name", layers=(spec,), ropes=_ROPES))
    with pytest.raises(CorruptError, match="RoPE regime"):
        meta_from_json(raw)


def test_the_front_door():
    assert set(kvwire.__all__) <= set(dir(kvwire))
    for name in kvwire.__all__:
        assert getattr(kvwire, name) is not None
    with pytest.raises(AttributeError):
        _ = kvwire.nothing
    assert issubclass(ArgumentError, KvwireError)
