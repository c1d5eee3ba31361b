"""Synthetic caches with the structure of real ones: low-rank signals that all layers share, means and noise.

A part of the signal depends on the token alone, so that its text predicts a cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec import CacheMeta, KVCache, Statistics, positions_off, positions_on
from kvwire.types import LayerSpec, RopeRegime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import Profile

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
LATENT = (LayerSpec(1, 16, 8, value_rope=0), LayerSpec(2, 12, 6, rope=0, key_rope_start=4))
"""Multi-head latent attention, whose values carry the positions; and keys whose rotary part comes last."""
VOCABULARY = 400
_RANK = 8


def make_words() -> torch.Tensor:
    """Features of every token, float32 ``[VOCABULARY, 12]``."""
    return torch.from_numpy(np.random.default_rng(5).standard_normal((VOCABULARY, 12))).float()


def draw_ids(rng: np.random.Generator, tokens: int) -> list[int]:
    """Token ids of a text: few are frequent, most are rare."""
    weights = 1.0 / (5.0 + np.arange(VOCABULARY))
    return rng.choice(VOCABULARY, tokens, p=weights / weights.sum()).tolist()


def make_cache(
    tokens: int = 96,
    seed: int = 0,
    *,
    layers: tuple[LayerSpec, ...] = GQA,
    ropes: tuple[RopeRegime, ...] = (ROPE,),
    dtype: torch.dtype = torch.float32,
    revision: str = "r1",
    ids: bool | Sequence[int] = True,
    scale: float = 1.0,
    positions: bool = True,
) -> KVCache:
    """A document's cache at positions from 0; the model is always the same, ``seed`` is the document.

    Five sixths of the signal's energy come from each token's own features, the rest is context. ids: those of the text,
    drawn anew where True, drawn and not told where False.
    """
    model, document = np.random.default_rng(7), np.random.default_rng(1000 + seed)
    token_ids = draw_ids(document, tokens) if isinstance(ids, bool) else list(ids)
    words = make_words().double().numpy()[token_ids] @ model.standard_normal((12, _RANK)) / np.sqrt(12)
    signal = (0.9 * words + 0.4 * document.standard_normal((tokens, _RANK))) * np.linspace(2.0, 0.2, _RANK)
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
    cache = KVCache.from_tensors(keys, values, meta, None if ids is False else token_ids)
    return positions_on(cache) if positions else cache


def make_statistics(
    layers: tuple[LayerSpec, ...] = GQA, ropes: tuple[RopeRegime, ...] = (ROPE,), *, words: bool = False
) -> Statistics:
    """Query metrics whose weights differ a hundredfold, and value metrics with a few strong directions.

    words: with the features of all tokens.
    """
    rng = np.random.default_rng(11)
    queries, metrics = [], []
    for spec in layers:
        turn = np.linalg.qr(rng.standard_normal((spec.kv_heads, spec.key_dim, spec.key_dim)))[0]
        weights = 10.0 ** rng.uniform(-1, 1, (spec.kv_heads, spec.key_dim))
        queries.append(torch.from_numpy(np.einsum("hde,he,hfe->hdf", turn, weights, turn)).float())
        out = rng.standard_normal((spec.kv_heads, 3, spec.value_dim))
        metrics.append(torch.from_numpy(np.einsum("hrd,hre->hde", out, out)).float())
    return Statistics(tuple(queries), tuple(metrics), make_words() if words else None)


def make_hidden(cache: KVCache) -> torch.Tensor:
    """Hidden states ``[tokens, 12]`` after some layers, which know most of the signal: the values' first elements."""
    layer = next(layer for layer, spec in enumerate(cache.meta.layers) if spec.kind != "none")
    flat = positions_off(cache).values[layer].permute(1, 0, 2).reshape(cache.tokens, -1).float()
    return torch.nn.functional.pad(flat, (0, 12))[:, :12].contiguous()


TINY = (
    LayerSpec(2, 4, 3, rope=0),
    LayerSpec(0, 0, 0, kind="none"),
    LayerSpec(1, 6, 4, "sliding", rope=1, window=8),
    LayerSpec(1, 5, 4, value_rope=0),
    LayerSpec(1, 6, 2, rope=0, key_rope_start=2),
)
TINY_ROPES = (RopeRegime((1.0, 0.125)), RopeRegime((0.5, 0.25), interleaved=True, attention_scaling=1.25, kind="yarn"))


def make_tiny(tokens: int, seed: int) -> KVCache:
    """41 numbers a token: what golden files hold."""
    return make_cache(tokens, seed, layers=TINY, ropes=TINY_ROPES, dtype=torch.float16)


def stored_plainly(profile: Profile) -> Profile:
    """The same numbers, but stored as they are: bfloat16 matrices, float32 metrics, the table by token."""
    return replace(profile, groups=tuple(replace(group, rounded=None) for group in profile.groups))


def in_8_bits(profile: Profile) -> Profile:
    """Each row as whole numbers up to 127 times a power of two, as earlier versions stored small profiles."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        step = torch.ldexp(torch.ones(len(rows), 1), torch.frexp(rows.float().abs().amax(1, keepdim=True))[1] - 7)
        return ((rows.float() / step).round().clamp(-127, 127) * step).bfloat16()

    groups = profile.groups
    return replace(profile, groups=tuple(replace(g, rows=rounded(g.rows), rounded=None) for g in groups))


DEEP = (LayerSpec(1, 2, 2), *(LayerSpec(1, 8, 8, rope=0) for _ in range(7)))
"""Eight layers: 116 numbers a token, of which the first layer's, where sinks are as other tokens, are few."""


def with_sinks(cache: KVCache, places: Sequence[int] = (0,), *, seed: int = 0, first: int = 1) -> KVCache:
    """The cache with attention sinks at places: the same small row, whatever the token, from the layer ``first`` on."""
    model, document = np.random.default_rng(21), np.random.default_rng(2000 + seed)
    plain = positions_off(cache)
    plain = replace(plain, keys=[each.clone() for each in plain.keys], values=[each.clone() for each in plain.values])
    for tensors in (plain.keys, plain.values):
        for layer, tensor in enumerate(tensors):
            row = 1.5 * model.standard_normal((len(tensor), 1, tensor.shape[2]))
            for at in places if layer >= first and tensor.numel() else ():
                tensor[:, at : at + 1] = torch.from_numpy(row + 0.01 * document.standard_normal(row.shape))
    return positions_on(plain, cache.meta.offset) if cache.meta.positions == "on" else plain
