"""A cache's tensors as a model takes them: its dtype, its devices, positions on, what was pruned left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.codec import positions_on
from kvwire.engines.transformers.fitting import kept_by_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvwire.engines.transformers.devices import Devices
    from kvwire.types import KVCache, Side


def tensors_for(
    cache: KVCache, dtype: torch.dtype, devices: Devices
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """A cache's tensors for one model.

    Args:
        cache: Of this model.
        dtype: Of the model.
        devices: Of the model.

    Returns:
        Keys and values ``[1, kv_heads, tokens, dim]`` of every layer, and the positions of their tokens, int64; None
        for the positions where nothing was pruned.

    Raises:
        MismatchError: The cache is pruned, and its layers and heads keep different tokens.
    """
    kept = kept_by_all(cache)
    placed = replace(cache, keys=_there(cache, "key", dtype, devices), values=_there(cache, "value", dtype, devices))
    if cache.meta.positions == "off":
        placed = positions_on(placed, cache.meta.offset)
    pairs = [
        (key[None].to(dtype), value[None].to(dtype)) for key, value in zip(placed.keys, placed.values, strict=True)
    ]
    if kept is not None:
        pairs = [(key[:, :, kept.to(key.device)], value[:, :, kept.to(key.device)]) for key, value in pairs]
    return pairs, kept


def _there(cache: KVCache, side: Side, dtype: torch.dtype, devices: Devices) -> list[Tensor]:
    """A cache's keys or values where the layers run, as they want them; what is still to be rotated as it is."""
    tensors = cache.keys if side == "key" else cache.values
    dtypes = [None if spec.rotary(side) else dtype for spec in cache.meta.layers]
    return [tensor.to(devices.layer(number), dtypes[number]) for number, tensor in enumerate(tensors)]
