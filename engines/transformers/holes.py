"""Passes over caches whose layers and heads store different tokens: a mask for each layer and head.

All tokens stay in the past, sliding layers' too, so that columns match in all layers; masks hide those not stored.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvwire.engines.transformers.capture import SHOWN, attention_of
from kvwire.engines.transformers.masks import in_format, within
from kvwire.engines.transformers.plain import tensors_of
from kvwire.engines.transformers.text import layers_of
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache

    from kvwire.types import CacheMeta, KVCache


def with_holes(past: DynamicCache, cache: KVCache, model: PreTrainedModel) -> DynamicCache:
    """Record which tokens each layer and head of a past stores; the others stay in it, masked."""
    if attention_of(model) not in SHOWN or getattr(model, "_compiled_call_impl", None) is not None:
        raise MismatchError(
            "this cache is pruned, and its layers and heads keep different tokens, which takes masks: open the model "
            "uncompiled, with sdpa or eager attention, or keep the cache unpruned"
        )
    numbers = [layer_number(layer) for layer in layers_of(model)]
    if numbers != list(range(len(cache.keys))) or not all(keys.numel() for keys in cache.keys):
        raise MismatchError(
            "this cache is pruned, its layers and heads keep different tokens, and some of the model's layers have no "
            "cache of their own, so that their masks are not known; keep it unpruned"
        )
    past.kept_by_layer = tuple(cache.kept or ())  # type: ignore[attr-defined]
    return past


@contextmanager
def masking(
    model: PreTrainedModel, meta: CacheMeta, kept: Sequence[Tensor | None], past: DynamicCache, tokens: int
) -> Iterator[None]:
    """In this context, layers see of a past what they store; of the pass over some tokens on top, all before each."""
    layers = layers_of(model)
    held, thread = tensors_of(past)[0][0].shape[2], threading.get_ident()

    def before(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401
        if threading.get_ident() != thread:
            return None
        number = layer_number(module)
        visible = _visible(model, meta, number, kept[number], (held, tokens))
        return inputs, {**named, "attention_mask": in_format(model, visible.to(_device(inputs, named)))}

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _device(inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.device:
    states = inputs[0] if inputs else named["hidden_states"]
    device: torch.device = states.device
    return device


def _visible(
    model: PreTrainedModel, meta: CacheMeta, layer: int, kept: Tensor | None, sizes: tuple[int, int]
) -> Tensor:
    """What the last tokens see in a layer, bool ``[heads or 1, tokens, columns]``."""
    held, tokens = sizes
    device = None if kept is None else kept.device
    columns = torch.arange(held + tokens, device=device)
    rows = columns[held:]
    visible = (columns <= rows[:, None])[None]
    if kept is not None:
        stored = torch.ones(len(kept), held + tokens, dtype=torch.bool, device=device)
        stored[:, : kept.shape[1]] = kept
        visible = visible & by_query_head(model, meta, layer, stored)[:, None]
    return within(visible, meta.layers[layer].window, rows)


def by_query_head(model: PreTrainedModel, meta: CacheMeta, layer: int, mask: Tensor) -> Tensor:
    """A mask ``[kv_heads, tokens]`` for each head that asks; for one, if all see the same."""
    if bool((mask == mask[:1]).all()):
        return mask[:1]
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    return mask.repeat_interleave(heads // meta.layers[layer].kv_heads, 0)


def layer_number(module: torch.nn.Module) -> int:
    """Number of a decoder layer in the cache."""
    found = {getattr(each, "layer_idx", None) for each in module.modules()}
    numbers = [number for number in found if isinstance(number, int)]
    if len(numbers) != 1:
        msg = "a layer of this model does not name its part of the cache (layer_idx); link unpruned documents"
        raise MismatchError(msg)
    return numbers[0]
