"""The plain cache of transformers, filled from tensors and read as such; and which weights are plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from transformers import PreTrainedConfig
    from transformers.cache_utils import Cache


def filled(pairs: Iterable[tuple[Tensor, Tensor]], config: PreTrainedConfig | None = None) -> DynamicCache:
    """Make a cache that holds some keys and values.

    Args:
        pairs: Keys and values ``[batch, kv_heads, tokens, dim]``; empty ones stand for layers without any.
        config: The model's, so that sliding layers keep only what they see; None: every layer keeps every token.

    Returns:
        The cache.
    """
    cache = DynamicCache(config=config)
    for layer, (keys, values) in enumerate(pairs):
        fill(cache, layer, keys, values)
    return cache


def fill(cache: Cache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Put keys and values into a layer of a cache, which copies them.

    Args:
        cache: A cache of any kind.
        layer: Number of the layer.
        keys: ``[batch, kv_heads, tokens, dim]``; empty for a layer without any.
        values: Likewise.
    """
    if keys.numel():
        cache.update(keys, values, layer)


def tensors_of(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer; learning the layout saw that they exist.

    Args:
        cache: Filled by the model.

    Returns:
        ``[batch, kv_heads, tokens, dim]``, twice for each layer.
    """
    first = next(keys for keys, *_ in cache if keys is not None)
    batch, _, tokens, _ = first.shape
    none = first.new_zeros(batch, 0, tokens, 0)
    return [(none, none) if keys is None else (keys, values) for keys, values, *_ in cache]


def empty_layer(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer that stores nothing.

    Args:
        tokens: Length of the cache.

    Returns:
        ``[0, tokens, 0]``, twice.
    """
    return torch.zeros(0, tokens, 0), torch.zeros(0, tokens, 0)


def is_plain(weight: Tensor) -> bool:
    """Whether a weight's numbers are what it multiplies by: neither quantised nor offloaded.

    Args:
        weight: Of a model, in whichever form it was loaded.

    Returns:
        True for floating point in memory.
    """
    is_number = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
    return is_number and type(weight) in {torch.Tensor, torch.nn.Parameter}
