"""Positions of tokens that do not follow each other, against the same tokens of a whole cache."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import positions_off, positions_on, rows_off, rows_on
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime

LAYERS = (
    LayerSpec(2, 8, 5, rope=0),
    LayerSpec(0, 0, 0, "none"),
    LayerSpec(1, 12, 4, value_rope=1),
    LayerSpec(3, 10, 6, rope=1, key_rope_start=6),
)
META = CacheMeta(layers=LAYERS, ropes=(RopeRegime((1.0, 0.3, 0.01)), RopeRegime((0.7, 0.05), interleaved=True)))


def some(cache, rows):
    keys, values = ([part[:, rows] if part.numel() else part for part in side] for side in (cache.keys, cache.values))
    return KVCache(keys, values, cache.meta)


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(0, 200), st.integers(0, 2**31))
def test_rows_turn_as_a_whole_cache_does(chosen, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        [torch.randn(spec.kv_heads, 20, width, generator=generator) for spec, width in zip(LAYERS, widths, strict=True)]
        for widths in ([spec.key_dim for spec in LAYERS], [spec.value_dim for spec in LAYERS])
    )
    off = KVCache(keys, values, CacheMeta(layers=LAYERS, ropes=META.ropes, positions="off"))
    rows = torch.tensor(sorted(chosen))
    whole = positions_on(off, offset)
    placed = rows_on(some(off, rows), rows + offset)
    back = rows_off(some(whole, rows), rows + offset)
    assert (placed.meta.positions, back.meta.positions, back.meta.offset) == ("on", "off", 0)
    for ours, theirs in ((placed, some(whole, rows)), (back, some(positions_off(whole), rows))):
        for a, b in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
