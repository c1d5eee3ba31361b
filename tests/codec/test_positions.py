"""Positions off and on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvwire.codec import CacheMeta, KVCache, positions_off, positions_on, rotate, rotation, shift_keys
from kvwire.errors import RopeRegimeError
from kvwire.types import LayerSpec, RopeRegime

FREQUENCIES = tuple(10000.0 ** (-j / 4) for j in range(4))
REGIMES = {
    "half-split": RopeRegime(FREQUENCIES),
    "interleaved": RopeRegime(FREQUENCIES, interleaved=True),
    "partial": RopeRegime(FREQUENCIES[:2]),
    "scaled": RopeRegime(FREQUENCIES, attention_scaling=1.3),
}
regimes = pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES.keys())


def keys_at(tokens=20, seed=0):
    return torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(seed))


def cache_of(regime, tokens=20, offset=0, dtype=torch.float32):
    spec = LayerSpec(2, 8, 8, rope=0)
    meta = CacheMeta(layers=(spec,), ropes=(regime,), offset=offset)
    return KVCache.from_tensors([keys_at(tokens).to(dtype)], [keys_at(tokens, 1).to(dtype)], meta, range(tokens))


@regimes
@pytest.mark.parametrize("offset", [0, 7, 1000])
def test_off_then_on_changes_nothing(regime, offset):
    cache = cache_of(regime, offset=offset)
    off = positions_off(cache)
    assert off.meta.positions == "off"
    on = positions_on(off, offset)
    assert (on.meta.positions, on.meta.offset) == ("on", offset)
    torch.testing.assert_close(on.keys[0], cache.keys[0], atol=1e-6, rtol=1e-6)
    assert on.values[0] is cache.values[0]
    assert positions_off(off) is off


@regimes
def test_shifting_keys_is_rotating_them_directly(regime):
    plain = keys_at()
    here = rotate(plain, regime, *rotation(regime, 5, 20))
    for offset in (0, 3, 100, -5):
        there = rotate(plain, regime, *rotation(regime, 5 + offset, 20))
        torch.testing.assert_close(shift_keys(here, regime, offset), there, atol=2e-5, rtol=1e-5)


def test_a_cache_with_positions_is_moved_from_where_it_stands():
    cache = cache_of(REGIMES["half-split"], offset=11)
    moved = positions_on(cache, 40)
    expected = shift_keys(cache.keys[0], cache.meta.ropes[0], 29)
    torch.testing.assert_close(moved.keys[0], expected, atol=2e-5, rtol=1e-5)
    plain = replace(cache, meta=replace(cache.meta, layers=(LayerSpec(2, 8, 8),)))
    assert positions_off(plain).keys[0] is cache.keys[0]  # without positions


def test_low_precision_keys_keep_their_dtype_and_what_does_not_turn_stays():
    cache = cache_of(REGIMES["half-split"], dtype=torch.bfloat16)
    off = positions_off(cache)
    assert off.keys[0].dtype == torch.float32
    assert positions_on(off).keys[0].dtype == torch.bfloat16
    assert shift_keys(cache.keys[0], cache.meta.ropes[0], 4).dtype == torch.bfloat16
    plain = keys_at()
    turned = rotate(plain, REGIMES["partial"], *rotation(REGIMES["partial"], 3, 20))
    assert torch.equal(turned[..., 4:], plain[..., 4:])
    assert not torch.equal(turned[..., :4], plain[..., :4])


def test_rotation_does_what_the_formula_says():
    regime = REGIMES["half-split"]
    key = torch.zeros(1, 1, 8)
    key[..., 1], key[..., 5] = 3.0, 4.0
    turned = rotate(key, regime, *rotation(regime, 2, 1))
    angle = torch.tensor(2.0 * FREQUENCIES[1])
    assert turned[0, 0, 1].item() == pytest.approx((3 * angle.cos() - 4 * angle.sin()).item())
    assert turned[0, 0, 5].item() == pytest.approx((4 * angle.cos() + 3 * angle.sin()).item())


def test_positions_beyond_the_regime_are_refused():
    regime = replace(REGIMES["half-split"], max_positions=64)
    rotation(regime, 44, 20)
    for start in (45, -64, 1000):
        with pytest.raises(RopeRegimeError, match="beyond 64"):
            rotation(regime, start, 20)
    with pytest.raises(RopeRegimeError):
        positions_on(cache_of(regime), 50)
    with pytest.raises(RopeRegimeError):
        shift_keys(keys_at(), regime, 64)
