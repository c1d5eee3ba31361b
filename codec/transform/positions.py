"""Take rotary positions off a cache and put them on elsewhere.

Rotations keep the length of every pair, so a scale that the model multiplied into cos and sin (yarn, longrope) is
unaffected. All trigonometry runs in float32 for any dtype of the keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import RopeRegimeError

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.types import CacheMeta, KVCache, RopeRegime, Side


def rotation(regime: RopeRegime, start: int, tokens: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Compute the rotations from position 0 to ``start``, ``start + 1``, and so on.

    Args:
        regime: How the model rotates.
        start: First position; may be negative.
        tokens: Number of positions.
        device: Device of the result.

    Returns:
        Cosines and sines, float32 ``[tokens, rotary_dim / 2]`` each.

    Raises:
        RopeRegimeError: The regime changes its frequencies at a position.
    """
    last = max(abs(start), abs(start + tokens - 1)) if tokens else 0
    if regime.max_positions is not None and last >= regime.max_positions:
        raise RopeRegimeError(
            f"position {last} lies beyond {regime.max_positions}, where {regime.kind} RoPE changes its frequencies; "
            "keep the prompt shorter or recompute it from text"
        )
    inv_freq = torch.tensor(regime.inv_freq, dtype=torch.float32, device=device)
    positions = torch.arange(start, start + tokens, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq[None, :]
    return angles.cos(), angles.sin()


def rotate(keys: Tensor, regime: RopeRegime, cos: Tensor, sin: Tensor, start: int = 0) -> Tensor:
    """Rotate pairs of dimensions by given cosines and sines.

    Args:
        keys: ``[..., tokens, key_dim]``.
        regime: Which dimensions are pairs.
        cos: ``[tokens, rotary_dim / 2]``.
        sin: ``[tokens, rotary_dim / 2]``; ``-sin`` rotates back.
        start: First dimension of the rotary part; the others pass through.

    Returns:
        A new float32 tensor.
    """
    out = keys.to(torch.float32, copy=True)
    width = regime.rotary_dim
    part = out[..., start : start + width]
    if regime.interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : width // 2], part[..., width // 2 :]
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    return out


def shift_keys(keys: Tensor, rope: RopeRegime, offset: int, start: int = 0) -> Tensor:
    """Rotate cached keys so that they stand ``offset`` tokens further on.

    The trigonometry runs in float32. Source: KVLink section 2.2 (arXiv 2502.16002).

    Args:
        keys: ``[kv_heads, tokens, key_dim]``, rotated at their own positions; any float dtype.
        rope: How the model rotates.
        offset: In tokens; may be negative.
        start: First dimension of the rotary part.

    Returns:
        The same shape and dtype.

    Raises:
        RopeRegimeError: The move would cross the window at which the regime rescales.
    """
    cos, sin = rotation(rope, offset, 1, keys.device)
    return clamp_to(rotate(keys, rope, cos, sin, start), keys.dtype)


def clamp_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a float dtype; values beyond its range are clamped.

    Rotation enlarges an element by up to a factor of 1.42, and float8_e4m3fn turns larger values into NaN.
    """
    if tensor.dtype == dtype:
        return tensor
    most = torch.finfo(dtype).max
    return (tensor.clamp(-most, most) if most < torch.finfo(torch.bfloat16).max else tensor).to(dtype)


def positions_off(cache: KVCache) -> KVCache:
    """Take the positions out of a cache, as if every token stood at position 0.

    Args:
        cache: Positions on or off.

    Returns:
        A cache whose tensors with positions are float32; the others are unchanged.

    Raises:
        RopeRegimeError: A position is outside the regime's range.
    """
    if cache.meta.positions == "off":
        return cache
    return _rotated(cache, cache.meta.offset, sign=-1.0, dtype=torch.float32, meta=replace(cache.meta, positions="off"))


def positions_on(cache: KVCache, offset: int = 0) -> KVCache:
    """Put a cache, or move it, to positions ``offset``, ``offset + 1``, and so on.

    Args:
        cache: Positions on or off.
        offset: First position.

    Returns:
        A cache in the dtype of its tensors without positions: the values, or the keys with latent attention.
        float32 where all tensors carry positions.

    Raises:
        RopeRegimeError: A position is outside the regime's range.
    """
    off = positions_off(cache)
    sides: tuple[tuple[Side, list[Tensor]], ...] = (("value", off.values), ("key", off.keys))
    still = (
        tensor.dtype
        for side, tensors in sides
        for spec, tensor in zip(off.meta.layers, tensors, strict=True)
        if tensor.numel() and spec.rotary(side) is None
    )
    meta = replace(off.meta, positions="on", offset=offset)
    return _rotated(off, offset, sign=1.0, dtype=next(still, torch.float32), meta=meta)


def rows_off(rows: KVCache, positions: Tensor) -> KVCache:
    """Take the positions off tokens at arbitrary positions.

    Args:
        rows: Positions on; ``meta.offset`` is ignored.
        positions: int64 ``[tokens]``, the position of each, from 0.

    Returns:
        As from ``positions_off``, with offset 0.

    Raises:
        RopeRegimeError: A position is outside the regime's range.
    """
    meta = replace(rows.meta, positions="off", offset=0)
    return _rotated(rows, positions, sign=-1.0, dtype=torch.float32, meta=meta)


def rows_on(rows: KVCache, positions: Tensor) -> KVCache:
    """Put tokens at arbitrary positions.

    Args:
        rows: Positions off.
        positions: int64 ``[tokens]``, the position of each, from 0.

    Returns:
        Positions on, with ``meta.offset`` 0; tensors with positions are float32.

    Raises:
        RopeRegimeError: A position is outside the regime's range.
    """
    meta = replace(rows.meta, positions="on", offset=0)
    return _rotated(rows, positions, sign=1.0, dtype=torch.float32, meta=meta)


def _rotated(cache: KVCache, at: int | Tensor, *, sign: float, dtype: torch.dtype, meta: CacheMeta) -> KVCache:
    """Rotate a cache; ``at``: position of the first of consecutive tokens, or the position of each token."""
    turns: dict[tuple[RopeRegime, torch.device], tuple[Tensor, Tensor]] = {}

    def turn_of(regime: RopeRegime, device: torch.device) -> tuple[Tensor, Tensor]:
        if isinstance(at, int):
            return rotation(regime, at, cache.tokens, device)
        if (regime, device) not in turns:  # shared by layers
            cos, sin = rotation(regime, 0, int(at.max()) + 1, device)
            turns[regime, device] = cos[at.to(device)], sin[at.to(device)]
        return turns[regime, device]

    def rotated(side: Side, tensors: list[Tensor]) -> list[Tensor]:
        out = []
        for spec, tensor in zip(cache.meta.layers, tensors, strict=True):
            rotary = spec.rotary(side)
            if rotary is not None and tensor.numel():
                regime = cache.meta.ropes[rotary[0]]
                cos, sin = turn_of(regime, tensor.device)
                tensor = clamp_to(rotate(tensor, regime, cos, sign * sin, rotary[1]), dtype)  # noqa: PLW2901
            out.append(tensor)
        return out

    return replace(cache, keys=rotated("key", cache.keys), values=rotated("value", cache.values), meta=meta)
