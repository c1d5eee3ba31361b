"""Caches of every shape and dtype to blobs and back, at every level, by any number of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import (
    BlobDecoder,
    CacheGenProfile,
    KVCache,
    Ladder,
    Profile,
    decode,
    encode,
    fit_cachegen_profile,
    fit_profile,
    inspect,
    level_index,
    positions_off,
    positions_on,
)
from kvwire.errors import ArgumentError
from kvwire.types import LayerSpec, RopeRegime

from .measures import apart, measured
from .synthetic import GQA, LATENT, MIXED, MIXED_ROPES, ROPE, make_cache, make_hidden, make_statistics

SHAPES = {
    "MHA": ((LayerSpec(8, 8, 8, rope=0),) * 2, (ROPE,)),
    "GQA": (GQA, (ROPE,)),
    "MQA": ((LayerSpec(1, 16, 16, rope=0),) * 3, (ROPE,)),
    "mixed": (MIXED, MIXED_ROPES),
    "latent": (LATENT, (ROPE,)),
    "no positions": ((LayerSpec(2, 4, 6),) * 2, ()),
    "interleaved": ((LayerSpec(1, 3, 3, value_rope=0), LayerSpec(1, 2, 1)), (RopeRegime((0.375,), interleaved=True),)),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
shapes = pytest.mark.parametrize("shape", SHAPES)


def make(shape, tokens=50, seed=3, **kwargs):
    layers, ropes = SHAPES[shape]
    return make_cache(tokens, seed, layers=layers, ropes=ropes, **kwargs)


def limit(profile, *dtypes):
    """How far apart a cache may be at the finest lossy level, by method and dtypes on the way."""
    rounded = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.1}
    return (0.21 if isinstance(profile, CacheGenProfile) else 0.03) + sum(rounded.get(dtype, 0.0) for dtype in dtypes)


def farthest(cache, decoded):
    """Largest difference of any two elements; shapes agree."""
    assert [t.shape for t in (*cache.keys, *cache.values)] == [t.shape for t in (*decoded.keys, *decoded.values)]
    pairs = zip((*cache.keys, *cache.values), (*decoded.keys, *decoded.values), strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs if a.numel())


def same_bits(cache, decoded):
    pairs = zip((*cache.keys, *cache.values), (*decoded.keys, *decoded.values), strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
        if a.numel()
    )


@pytest.fixture(scope="module")
def profiles():
    """For each shape one that predicts, one that does not, one of CacheGen, none."""
    made = {}
    for name, (layers, ropes) in SHAPES.items():
        caches = [make(name, 200, seed) for seed in (1, 2)]
        made[name] = (
            fit_profile(caches, make_statistics(layers, ropes, words=True)),
            fit_profile(caches, make_statistics(layers, ropes)),
            fit_cachegen_profile(caches),
            None,
        )
    return made


@shapes
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 1), (1, 100), (2, 100), (50, 25), (5, 4096), (257, 100)])
def test_every_shape_and_length(profiles, shape, tokens, chunk):
    cache = make(shape, tokens)
    for profile in profiles[shape]:
        blob = encode(cache, profile, lossless=True, chunk_tokens=chunk)
        assert inspect(blob).chunks == -(-tokens // chunk)
        decoded = decode(blob, None, profile)
        assert apart(cache, decoded) < limit(profile)
        assert decoded.meta == cache.meta
        assert inspect(blob).meta == replace(cache.meta, positions="off")
        assert decoded.token_ids == cache.token_ids
        assert same_bits(cache, decode(blob, "lossless"))
        stated = [level.measured_error for level in inspect(blob).levels]
        assert stated == sorted(stated, reverse=True)
        assert inspect(blob).levels[-1].lossless


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["GQA", "mixed", "latent"])
def test_every_dtype_in_and_out(profiles, shape, dtype):
    cache = make(shape, 40, dtype=dtype)
    for profile in profiles[shape]:
        blob = encode(cache, profile, lossless=True, chunk_tokens=16)
        assert same_bits(cache, decode(blob, "lossless"))
        assert {t.dtype for t in decode(blob, None, profile).keys} == {dtype}
        for out in DTYPES:
            decoded = decode(blob, None, profile, dtype=out)
            assert {t.dtype for t in (*decoded.keys, *decoded.values)} == {out}
            assert decoded.meta.dtype == str(out)[6:]
            assert apart(cache, decoded) < limit(profile, dtype, out)
            assert apart(cache, decode(blob, "lossless", dtype=out)) < 0.01 + limit(None, out) - limit(None)


@shapes
def test_a_lossless_level_is_moved_to_where_it_is_wanted(shape):
    """Bit for bit where it stood, turned elsewhere, and the same whether it stood with positions or without."""
    cache = positions_on(make(shape), 11)
    blob = encode(cache, levels=0, lossless=True, chunk_tokens=20)
    assert [level.name for level in inspect(blob).levels] == ["lossless"]
    assert same_bits(cache, decode(blob, offset=11))
    for offset in (0, 30, None):
        wanted = positions_off(cache) if offset is None else positions_on(cache, offset)
        found = decode(blob, offset=offset)
        assert (found.meta.positions, found.meta.offset) == (wanted.meta.positions, offset or 0)
        assert farthest(wanted, found) < 1e-4
    off = positions_off(cache)
    unturned = encode(off, levels=0, lossless=True)
    assert same_bits(off, decode(unturned, offset=None))
    assert farthest(cache, decode(unturned, offset=11)) < 1e-4


def test_levels_that_decode_alone_are_read_alone(profiles):
    cache, profile = make("GQA", 90), profiles["GQA"][2]
    blob = encode(cache, profile, lossless=True, chunk_tokens=40)
    info = inspect(blob)
    assert info.method == "cachegen"
    assert [level.name for level in info.levels] == ["coarse", "default", "fine", "lossless"]
    assert all(level.independent for level in info.levels)
    for k, level in enumerate(info.levels):
        assert level.cumulative_bytes == info.header_bytes + level.bytes
        assert [s.level for s in info.reads(1, k)] == [k]
        decoder = BlobDecoder(blob[: info.header_bytes], profile)
        for chunk in (1, 0, 2):
            decoder.decode_chunk(chunk, [blob[s.offset : s.end] for s in info.reads(chunk, k)], k)
        assert same_bits(decoder.cache, decode(blob, k, profile))
    assert len(inspect(encode(cache, profile, 2)).levels) == 2
    for wrong in (0, 4, Ladder()):
        with pytest.raises(ArgumentError, match="levels"):
            encode(cache, profile, wrong)


def test_layered_levels_and_a_lossless_one(profiles):
    cache, profile = make("GQA", 90), profiles["GQA"][0]
    blob = encode(cache, profile, 2, lossless=True, chunk_tokens=40)
    info = inspect(blob)
    assert [level.independent for level in info.levels] == [False, False, True]
    assert [s.level for s in info.reads(0, 1)] == [0, 1]
    assert [s.level for s in info.reads(0, 2)] == [2]
    assert info.levels[2].cumulative_bytes == info.header_bytes + info.levels[2].bytes
    assert level_index(info, None) == 1
    assert level_index(info, -1) == 2
    assert info.chunk_bytes(0, 2) == info.segments[0][2].stored
    decoder = BlobDecoder(blob, level=2)
    for chunk in range(3):
        decoder.decode_chunk(chunk, [blob[s.offset : s.end] for s in info.reads(chunk, 2)], 2)
    assert same_bits(cache, decoder.cache)
    with pytest.raises(ArgumentError, match="made for a lossless level alone"):
        decoder.decode_chunk(0, [blob[s.offset : s.end] for s in info.reads(0, 1)], 1)
    with pytest.raises(ArgumentError, match="nothing to encode"):
        encode(cache, levels=0)


def test_a_long_document_of_a_tiny_model():
    layers, ropes = (LayerSpec(1, 2, 2, rope=0),), (RopeRegime((0.7,)),)
    cache = make_cache(20_000, layers=layers, ropes=ropes, dtype=torch.float16)
    profile = fit_profile([cache.slice(0, 1000)])
    blob = encode(cache, profile, lossless=True)
    assert inspect(blob).chunks == 79
    assert same_bits(cache, decode(blob, "lossless"))
    assert farthest(cache, decode(blob, None, profile)) < 0.3


# Pruned caches


def masks(cache, seed):
    """Every head keeps other tokens; the last layer keeps all."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        None if spec.kind == "none" else torch.rand(spec.kv_heads, cache.tokens, generator=generator) < 0.6
        for spec in cache.meta.layers
    ]
    return [*made[:-1], None]


@shapes
@pytest.mark.parametrize("tokens", [1, 70])
def test_pruned_entries_come_back_as_zeros(profiles, shape, tokens):
    whole = make(shape, tokens)
    kept = masks(whole, 5)
    cache = KVCache.from_tensors(whole.keys, whole.values, whole.meta, whole.token_ids, kept=kept)
    for profile in profiles[shape]:
        blob = encode(cache, profile, lossless=True, chunk_tokens=32)
        for level in (None, "lossless"):
            decoded = decode(blob, level, profile)
            for mine, mask in zip(decoded.kept or [None] * len(kept), cache.kept or [None] * len(kept), strict=True):
                assert (mine is None) == (mask is None or bool(mask.all()))
                assert mine is None or torch.equal(mine, mask)
            for layer, mask in enumerate(kept):
                for tensor in (decoded.keys[layer], decoded.values[layer]):
                    assert mask is None or not tensor[~mask].any()
            stated = inspect(blob).levels[level_index(inspect(blob), level)].measured_error
            if isinstance(profile, Profile):
                # Rows are rounded about as coarsely as the finest step, and stand at somewhat other than right angles.
                assert measured(cache, decoded, profile) < 1.4 * stated + 1e-6
            else:
                assert apart(cache, decoded) < limit(profile) + 0.1
        assert same_bits(cache, decode(blob, "lossless"))


def test_what_is_kept_is_read_from_the_head(profiles):
    """Of a few heads as bits, of many equal ones compressed."""
    cache = make("MHA", 600)
    mask = torch.zeros(8, 600, dtype=torch.bool)
    mask[:, ::100] = True
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=[mask, mask])
    blob, plain = (encode(c, profiles["MHA"][0], 1) for c in (pruned, cache))
    assert inspect(blob).header_bytes - inspect(plain).header_bytes < 200 < 2 * 600
    entries = decode(blob, None, profiles["MHA"][0]).kept
    assert all(torch.equal(each, mask) for each in entries)


# The same for everyone


@pytest.mark.parametrize("kind", ["predicted", "small", "cachegen", "inside", "head start"])
def test_threads_change_nothing(profiles, head_profile, kind):
    cache = make("GQA", 200, dtype=torch.bfloat16)
    hidden = make_hidden(cache) if kind == "head start" else None
    profile = (
        head_profile
        if hidden is not None
        else dict(zip(("predicted", "small", "cachegen"), profiles["GQA"], strict=False)).get(kind)
    )
    blobs = [
        encode(cache, profile, chunk_tokens=32, lossless=True, hidden=hidden, threads=threads)
        for threads in (1, 2, 3, None, 1)
    ]
    assert blobs == [blobs[0]] * 5
    for level in (0, None, "lossless"):
        first = decode(blobs[0], level, profile, hidden=hidden, threads=1)
        for threads in (1, 2, 3, 50):
            assert same_bits(first, decode(blobs[0], level, profile, hidden=hidden, threads=threads))


def test_threads_are_at_least_one(profiles):
    cache = make("GQA", 20)
    blob = encode(cache)
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match="threads"):
            encode(cache, threads=wrong)
        with pytest.raises(ArgumentError, match="threads"):
            decode(blob, threads=wrong)


def test_a_failing_chunk_fails_the_whole(profiles):
    """Whatever other threads do."""
    cache = make("GQA", 200)
    blob = bytearray(encode(cache, chunk_tokens=20))
    info = inspect(bytes(blob))
    blob[info.segments[7][0].offset + 20] ^= 1
    for threads in (1, 3):
        with pytest.raises(Exception, match="chunk 7 level 0"):
            decode(bytes(blob), threads=threads)


def test_positions_of_the_caller_for_values_too(profiles):
    cache = make("latent")
    blob = encode(cache, profiles["latent"][0])
    moved = decode(blob, None, profiles["latent"][0], offset=40)
    assert farthest(positions_on(cache, 40), moved) < 0.5
    assert farthest(positions_off(cache), decode(blob, None, profiles["latent"][0], offset=None)) < 0.5
    assert replace(moved.meta, offset=0) == cache.meta


def test_a_sink_among_ordinary_tokens_keeps_its_precision(monkeypatch):
    """A first token many times larger than the others: eight bits of its coefficients would not do."""
    caches = [make("GQA", 600, seed) for seed in (1, 2)]
    fitted = fit_profile(caches, make_statistics(), rank_cut=0)
    cache = positions_off(make("GQA", 100, 3))
    for tensor in (*cache.keys, *cache.values):
        tensor[:, 0] *= 30

    def error_of_the_sink():
        decoded = decode(encode(cache, fitted), None, fitted, dtype=torch.float32, offset=None)
        pairs = zip((*cache.keys, *cache.values), (*decoded.keys, *decoded.values), strict=True)
        return sum(float((a[:, 0] - b[:, 0]).square().sum()) for a, b in pairs)

    found = error_of_the_sink()
    monkeypatch.setattr("kvwire.codec.transform.analysis.HALVED_STEP", float("inf"))
    assert found < 1.1 * error_of_the_sink()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_pruned_cache_decodes_to_float8(dtype):
    cache = make("GQA", 40)
    kept = tuple(torch.rand(2, 40, generator=torch.Generator().manual_seed(layer)) < 0.5 for layer in range(4))
    pruned = KVCache.from_tensors(
        [k * m[..., None] for k, m in zip(cache.keys, kept, strict=True)],
        [v * m[..., None] for v, m in zip(cache.values, kept, strict=True)], cache.meta, cache.token_ids, kept=kept,
    )  # fmt: skip
    decoded = decode(encode(pruned), dtype=dtype)
    assert all(not bool(k.float()[~m].any()) for k, m in zip(decoded.keys, kept, strict=True))


def test_bytes_do_not_depend_on_what_a_profile_has_met_before():
    caches = [make("GQA", 200, seed) for seed in (1, 2)]
    data = fit_profile(caches, make_statistics(words=True)).data
    cache = make("GQA", 60, 5)
    cold, warm = Profile.from_bytes(data), Profile.from_bytes(data)
    for token in cache.token_ids:
        warm.expectations[0].rows(np.array([token]))
    assert encode(cache, cold) == encode(cache, warm)
