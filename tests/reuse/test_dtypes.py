"""Every float dtype and every shape of layer through positions, links and the codec's first and last step."""

from dataclasses import replace

import pytest
import torch

from kvwire.codec import decode, encode, fit_profile, positions_off, positions_on, rotation, shift_keys
from kvwire.codec.transform.analysis import gather_planes, scatter_planes
from kvwire.reuse import LinkedPrompt, link, moved
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime

from ..engines.families import cache_error, engine_of, error_between, query, tokens

# multi-head, grouped, one shared head, nothing, latent, a rotary part that comes last; no two layers of one shape
LAYERS = (
    LayerSpec(4, 8, 8, rope=0),
    LayerSpec(2, 12, 6, rope=0, window=4, kind="sliding"),
    LayerSpec(1, 8, 16),
    LayerSpec(0, 0, 0, "none"),
    LayerSpec(1, 16, 4, value_rope=1),
    LayerSpec(2, 10, 3, rope=1, key_rope_start=6),
)
ROPES = (RopeRegime((1.0, 0.3, 0.01)), RopeRegime((0.7, 0.05), interleaved=True))
PLANES = tuple((side, layer) for side in ("key", "value") for layer, spec in enumerate(LAYERS) if spec.kv_heads)
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROUNDING = {torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative rounding of one element, with a margin."""
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(dtype, tokens=7, *, size=1.0, offset=11):
    generator = torch.Generator().manual_seed(3)
    keys = [size * torch.randn(s.kv_heads, tokens, s.key_dim, generator=generator) for s in LAYERS]
    values = [size * torch.randn(s.kv_heads, tokens, s.value_dim, generator=generator) for s in LAYERS]
    most = min(torch.finfo(dtype).max, 1e38)
    keys, values = ([tensor.clamp(-most, most).to(dtype) for tensor in side] for side in (keys, values))
    meta = CacheMeta(dtype=str(dtype).removeprefix("torch."), layers=LAYERS, ropes=ROPES, offset=offset)
    return KVCache.from_tensors(keys, values, meta, range(tokens))


def widened(cache):
    return replace(cache, keys=[key.float() for key in cache.keys], values=[value.float() for value in cache.values])


def close(ours, theirs, dtype):
    """Up to the rounding of the narrow type: relative to the longest pair that an element is turned with."""
    for a, b in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        if b.numel():
            bound = ROUNDING.get(dtype, 1e-6) * b.float().norm(dim=-1, keepdim=True)
            assert bool(((a.float() - b.float()).abs() <= bound).all())


@dtypes
def test_positions_come_off_in_float32_and_back_in_the_dtype(dtype):
    cache = make(dtype)
    off, wanted = positions_off(cache), positions_off(widened(cache))
    for side, ours, theirs in (("key", off.keys, wanted.keys), ("value", off.values, wanted.values)):
        for spec, a, b in zip(LAYERS, ours, theirs, strict=True):
            assert torch.equal(a.float(), b)
            assert a.dtype == (torch.float32 if spec.rotary(side) else dtype)
    back = positions_on(off, 11)
    assert {tensor.dtype for tensor in (*back.keys, *back.values)} == {dtype}
    assert back.meta == cache.meta
    close(back, cache, dtype)


@dtypes
def test_moves_and_links_keep_the_dtype(dtype):
    cache = make(dtype, offset=0)
    wide = widened(cache)
    far = moved(cache, 40)
    assert {tensor.dtype for tensor in (*far.keys, *far.values)} == {dtype}
    close(far, moved(wide, 40), dtype)
    linked, wanted = link([cache, cache]), link([wide, wide])
    assert {tensor.dtype for tensor in (*linked.keys, *linked.values)} == {dtype}
    assert linked.meta.dtype == str(dtype).removeprefix("torch.")
    close(linked, wanted, dtype)
    prompt = LinkedPrompt([7, 7], cache.meta, dtype=dtype)
    prompt.write(1, 0, cache)
    prompt.write(0, 0, positions_off(cache))
    close(prompt.cache, wanted, dtype)


@dtypes
def test_what_rotation_lengthens_stays_finite(dtype):
    """Pairs at the end of the range: turned, they would leave it, and float8_e4m3fn would make NaN of that."""
    most = torch.finfo(dtype).max
    keys = torch.full((1, 3, 6), min(most, 1e30)).to(dtype)
    turned = shift_keys(keys, ROPES[0], 5)
    assert turned.dtype == dtype
    assert bool(torch.isfinite(turned.float()).all())
    cache = make(dtype, size=min(most, 1e30))
    for placed in (positions_on(positions_off(cache), 30), moved(cache, 30), link([moved(cache, 0), cache])):
        assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in (*placed.keys, *placed.values))


@dtypes
@pytest.mark.parametrize("positions", ["on", "off"])
def test_elements_come_back_as_they_were(dtype, positions):
    cache = make(dtype)
    rows = gather_planes(cache, PLANES, 2, 6)
    off = positions_off(widened(cache)).slice(2, 6)
    parts = [(off.keys if side == "key" else off.values)[layer] for side, layer in PLANES]
    assert rows.dtype == torch.float32
    assert torch.allclose(rows, torch.cat([part.permute(1, 0, 2).reshape(4, -1) for part in parts], 1), atol=1e-6)
    if positions == "off":
        wanted, turns = off, {}
    else:
        wanted, turns = cache.slice(2, 6), {index: rotation(rope, 13, 4) for index, rope in enumerate(ROPES)}
    out = replace(make(dtype), keys=[], values=[])
    for spec in LAYERS:
        out.keys.append(torch.zeros(spec.kv_heads, 7, spec.key_dim, dtype=dtype))
        out.values.append(torch.zeros(spec.kv_heads, 7, spec.value_dim, dtype=dtype))
    scatter_planes(rows, PLANES, out, cache.meta, 2, turns)
    close(out.slice(2, 6), wanted, dtype)
    for tensor in (*out.keys, *out.values):
        assert not tensor[:, :2].float().any()
        assert not tensor[:, 6:].float().any()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_elements_beyond_a_narrow_range_are_clamped(dtype):
    cache = make(dtype)
    rows = torch.full((7, gather_planes(cache, PLANES, 0, 1).shape[1]), 1e30)
    scatter_planes(rows, PLANES, cache, cache.meta, 0, {})
    for tensor in (*cache.keys, *cache.values):
        assert bool((tensor.float() == torch.finfo(dtype).max).all())


@dtypes
def test_blobs_hold_every_dtype_and_shape(dtype):
    cache, profile = make(dtype, 40), fit_profile([make(dtype, 60)])
    for blob, level in ((encode(cache, profile, threads=1), -1), (encode(cache, lossless=True, threads=1), -1)):
        decoded = decode(blob, level, profile, offset=11, threads=1)
        assert (decoded.meta.layers, decoded.meta.dtype, decoded.meta.offset) == (LAYERS, cache.meta.dtype, 11)
        assert {tensor.dtype for tensor in (*decoded.keys, *decoded.values)} == {dtype}
        assert cache_error(widened(decoded), widened(cache)) < 0.1
    exact = zip((*decoded.keys, *decoded.values), (*cache.keys, *cache.values), strict=True)
    assert all(torch.equal(ours.double(), theirs.double()) for ours, theirs in exact if theirs.numel())


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "gemma3"])
@dtypes
def test_an_engine_takes_caches_of_any_dtype(family, dtype):
    """Stored narrowly, continued in the model's own type: as good as the storage."""
    engine, ids, question = engine_of(family), tokens(29), query()
    (cache,) = engine.prefill([ids])
    narrow = replace(
        cache, keys=[key.to(dtype) for key in cache.keys], values=[value.to(dtype) for value in cache.values]
    )
    wanted = engine.forward(engine.past_key_values(cache), question, 29)
    rounded = engine.forward(engine.past_key_values(widened(narrow)), question, 29)
    for stored in (narrow, positions_off(narrow)):
        past = engine.past_key_values(stored)
        assert past.layers[0].keys.dtype == torch.float32
        got = engine.forward(past, question, 29)
        assert error_between(got, rounded) < 1e-5
    assert error_between(rounded, wanted) < 30 * ROUNDING.get(dtype, 1e-6)
    assert cache_error(engine.extend(narrow, question), engine.extend(widened(narrow), question)) < 1e-5
