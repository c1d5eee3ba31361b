"""Synthetic caches with the structure of real ones: low-rank signals that all layers share, means and noise."""

from __future__ import annotations

import numpy as np
import torch

from kvwire.codec import CacheMeta, KVCache, Statistics, positions_on
from kvwire.types import LayerSpec, RopeRegime

ROPE = RopeRegime(tuple(float(np.float32(10000.0 ** (-j / 4))) for j in range(4)))
GQA = tuple(LayerSpec(2, 8, 8, rope=0) for _ in range(4))
"""Four layers of two heads: 128 numbers a token."""
MIXED = (
    LayerSpec(2, 8, 4, rope=0),
    LayerSpec(0, 0, 0, kind="none"),
    LayerSpec(1, 12, 8, kind="sliding", rope=1, window=16),
    LayerSpec(3, 6, 10),
)
MIXED_ROPES = (ROPE, RopeRegime((0.5, 0.25, 0.125), interleaved=True, attention_scaling=1.2, max_positions=4096))
_RANK = 8


def make_cache(
    tokens: int = 96,
    seed: int = 0,
    *,
    layers: tuple[LayerSpec, ...] = GQA,
    ropes: tuple[RopeRegime, ...] = (ROPE,),
    dtype: torch.dtype = torch.float32,
    revision: str = "r1",
    ids: bool = True,
    scale: float = 1.0,
) -> KVCache:
    """A document's cache at positions from 0; the model is always the same, ``seed`` is the document."""
    model, document = np.random.default_rng(7), np.random.default_rng(1000 + seed)
    signal = document.standard_normal((tokens, _RANK)) * np.linspace(2.0, 0.2, _RANK)
    keys, values = [], []
    for spec in layers:
        for dim, out in ((spec.key_dim, keys), (spec.value_dim, values)):
            width = spec.kv_heads * dim
            mixing, mean = model.standard_normal((_RANK, width)), 2.0 * model.standard_normal(width)
            noise = 0.05 * document.standard_normal((tokens, width))
            made = torch.from_numpy(scale * (signal @ mixing + mean + noise))
            count = 0 if spec.kind == "none" else tokens
            out.append(made.reshape(tokens, spec.kv_heads, dim).permute(1, 0, 2)[:, :count].to(dtype).contiguous())
    meta = CacheMeta(
        model_id="synthetic", model_revision=revision, dtype=str(dtype)[6:], layers=layers, ropes=ropes, positions="off"
    )
    token_ids = document.integers(0, 50000, tokens).tolist() if ids else None
    return positions_on(KVCache.from_tensors(keys, values, meta, token_ids))


def make_statistics(layers: tuple[LayerSpec, ...] = GQA) -> Statistics:
    """Query energies that differ a hundredfold between dimensions, and value metrics with a few strong directions."""
    rng = np.random.default_rng(11)
    energies, metrics = [], []
    for spec in layers:
        energies.append(torch.from_numpy(10.0 ** rng.uniform(-1, 1, (spec.kv_heads, spec.key_dim))).float())
        out = rng.standard_normal((spec.kv_heads, 3, spec.value_dim))
        metrics.append(torch.from_numpy(np.einsum("hrd,hre->hde", out, out)).float())
    return Statistics(tuple(energies), tuple(metrics))


TINY = (LayerSpec(2, 4, 3, rope=0), LayerSpec(0, 0, 0, kind="none"), LayerSpec(1, 6, 4, "sliding", rope=1, window=8))
TINY_ROPES = (RopeRegime((1.0, 0.125)), RopeRegime((0.5, 0.25), interleaved=True, attention_scaling=1.25, kind="yarn"))


def make_tiny(tokens: int, seed: int) -> KVCache:
    """24 numbers a token: what golden files hold."""
    return make_cache(tokens, seed, layers=TINY, ropes=TINY_ROPES, dtype=torch.float16)
