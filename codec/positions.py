"""Positions off and on: rotary embeddings taken out of cached keys and put back elsewhere.

Rotations keep the length of every pair, so a scale that the model multiplied into cos and sin (yarn, longrope) stays
where it is and needs no care. All trigonometry runs in float32 whatever the dtype of the keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import RopeRegimeError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.types import CacheMeta, RopeRegime


def rotation(regime: RopeRegime, start: int, tokens: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines that rotate position 0 to ``start``, ``start + 1``, ...

    Returns two float32 ``[tokens, rotary_dim / 2]``. ``start`` may be negative. Raises RopeRegimeError at
    positions where the regime uses other frequencies.
    """
    last = max(abs(start), abs(start + tokens - 1)) if tokens else 0
    if regime.max_positions is not None and last >= regime.max_positions:
        msg = (
            f"position {last} lies beyond {regime.max_positions}, where {regime.kind} RoPE changes its frequencies; "
            "keep the prompt shorter or recompute it from text"
        )
        raise RopeRegimeError(msg)
    inv_freq = torch.tensor(regime.inv_freq, dtype=torch.float32, device=device)
    positions = torch.arange(start, start + tokens, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq[None, :]
    return angles.cos(), angles.sin()


def rotate(keys: Tensor, regime: RopeRegime, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of ``keys`` ``[..., tokens, key_dim]`` by given cosines and sines.

    Dimensions past the rotary part pass through. Returns float32, a new tensor. Pass ``-sin`` to rotate back.
    """
    out = keys.to(torch.float32, copy=True)
    width = regime.rotary_dim
    part = out[..., :width]
    if regime.interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : width // 2], part[..., width // 2 :]
    turned = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
    return out


def shift_keys(keys: Tensor, rope: RopeRegime, offset: int) -> Tensor:
    """Rotate cached keys so that they stand ``offset`` tokens further on.

    keys: ``[kv_heads, tokens, key_dim]``, rotated at their own positions; any float dtype.
    offset: tokens; may be negative. Returns the same shape and dtype; the trigonometry runs in float32.
    Raises RopeRegimeError where the move would cross the window at which the regime rescales.
    Source: KVLink section 2.2 (arXiv 2502.16002).
    """
    cos, sin = rotation(rope, offset, 1, keys.device)
    return rotate(keys, rope, cos, sin).to(keys.dtype)


def regime_of(meta: CacheMeta, layer: int) -> RopeRegime | None:
    """The rotary regime of a layer, or None where its keys carry no position."""
    index = meta.layers[layer].rope
    return None if index is None else meta.ropes[index]


def positions_off(cache: KVCache) -> KVCache:
    """Take the positions out of a cache: keys as float32, as if every token stood at position 0; values as they are."""
    if cache.meta.positions == "off":
        return cache
    return _turned(cache, cache.meta.offset, sign=-1.0, dtype=torch.float32, meta=replace(cache.meta, positions="off"))


def positions_on(cache: KVCache, offset: int = 0) -> KVCache:
    """Put a cache at positions ``offset``, ``offset + 1``, ...; keys and values in the dtype of the values.

    A cache that has positions is moved from where it stands.
    """
    off = positions_off(cache)
    dtype = next((value.dtype for value in cache.values if value.numel()), torch.float32)
    return _turned(off, offset, sign=1.0, dtype=dtype, meta=replace(off.meta, positions="on", offset=offset))


def _turned(cache: KVCache, start: int, *, sign: float, dtype: torch.dtype, meta: CacheMeta) -> KVCache:
    keys = []
    for layer, key in enumerate(cache.keys):
        regime = regime_of(cache.meta, layer)
        if regime is None or not key.numel():
            keys.append(key if regime is None else key.to(dtype))
            continue
        cos, sin = rotation(regime, start, cache.tokens, key.device)
        keys.append(rotate(key, regime, cos, sign * sin).to(dtype))
    return KVCache(keys, list(cache.values), meta, cache.token_ids)
