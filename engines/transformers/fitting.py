"""Checks that a cache fits a model, and converts its tensors: dtype, devices, positions on, no gaps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.codec import positions_on
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvwire.engines.transformers.devices import Devices
    from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime, Side

_SIDES: tuple[Side, ...] = ("key", "value")


def kept_by_all(cache: KVCache) -> Tensor | None:
    """Tokens that every layer and head of a pruned cache stores.

    Sliding layers need only those in their window.
    """
    pruned = _pruned(cache)
    if not pruned:
        return None
    if holes_differ(cache):
        raise MismatchError(
            "this cache is pruned, and its layers and heads keep different tokens, which a plain transformers cache "
            "cannot hold; run it with forward on own_past, keep it unpruned, or give its entries (cache.ragged) to an "
            "engine with paged attention"
        )
    if any(spec.window is not None for spec in cache.meta.layers if spec.kind != "none"):
        raise MismatchError(
            "this cache is pruned, and layers of the model have windows, which count positions that a plain "
            "transformers cache lacks; run it with forward on own_past, keep it unpruned, or give its entries "
            "(cache.ragged) to an engine with paged attention"
        )
    return pruned[0][0].nonzero()[:, 0]


def holes_differ(cache: KVCache) -> bool:
    """Whether layers or heads of a pruned cache lack different tokens."""
    pruned = _pruned(cache)
    attending = sum(spec.kind != "none" for spec in cache.meta.layers)
    return bool(pruned) and (
        len(pruned) < attending or any(bool((mask != pruned[0][:1]).any()) for mask in pruned)
    )  # fmt: skip


def _pruned(cache: KVCache) -> list[Tensor]:
    """Masks of layers that lack tokens which the next one would see."""
    layers = zip(cache.meta.layers, cache.kept or (), strict=False)
    masks = [(spec, mask.cpu()) for spec, mask in layers if mask is not None]
    return [mask for spec, mask in masks if not mask[:, _seen(spec, cache.tokens) :].all()]


def gaps_of(cache: KVCache) -> Tensor | None:
    """Tokens that all layers and heads store, if some layers have windows, so that gaps have to stay; else None."""
    attending = [spec.kind != "none" for spec in cache.meta.layers]
    masks = [mask for mask, counts in zip(cache.kept or (), attending, strict=False) if counts]
    first = masks[0] if masks else None
    if first is None or all(spec.window is None for spec in cache.meta.layers) or bool(first.all()):
        return None
    return first[0] if all(mask is not None and bool((mask == first[:1]).all()) for mask in masks) else None


def _seen(spec: LayerSpec, tokens: int) -> int:
    """First token that a layer can attend to from the next one."""
    return 0 if spec.window is None else max(0, tokens - spec.window + 1)


def check_fits(cache: CacheMeta, model: CacheMeta) -> None:
    """Refuse a cache of another model."""
    shapes = [(s.kv_heads, s.key_dim, s.value_dim) for s in cache.layers]
    same = shapes == [(s.kv_heads, s.key_dim, s.value_dim) for s in model.layers] and _turn_alike(cache, model)
    digests = (cache.tokenizer_digest, model.tokenizer_digest)
    if all(digests) and digests[0] != digests[1]:
        msg = "the cache's text was read by another tokenizer than this engine's; encode the documents with this one"
        raise MismatchError(msg)
    if not same or (cache.model_revision and model.model_revision and cache.model_revision != model.model_revision):
        raise MismatchError(
            f"the cache was computed by model {cache.model_id!r} ({cache.model_revision[:12] or 'unnamed'}), "
            f"this engine runs {model.model_id!r} ({model.model_revision[:12] or 'unnamed'}); "
            "encode the documents with this model"
        )


def _turn_alike(cache: CacheMeta, model: CacheMeta) -> bool:
    """Whether two models of one layout rotate keys alike; true for a cache without regimes."""
    for cache_spec, model_spec in zip(cache.layers if cache.ropes else (), model.layers, strict=False):
        for side in _SIDES:
            cache_turn, model_turn = cache_spec.rotary(side), model_spec.rotary(side)
            if (cache_turn is None) != (model_turn is None):
                return False
            if cache_turn is None or model_turn is None:
                continue
            if cache_turn[1] != model_turn[1] or not _regimes_alike(
                cache.ropes[cache_turn[0]], model.ropes[model_turn[0]]
            ):
                return False
    return True


def _regimes_alike(first: RopeRegime, second: RopeRegime) -> bool:
    if first.interleaved != second.interleaved or first.rotary_dim != second.rotary_dim:
        return False
    pairs = zip(first.inv_freq, second.inv_freq, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-12) for a, b in pairs)  # processors differ in last bits


def tensors_for(
    cache: KVCache, dtype: torch.dtype, devices: Devices
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """A cache's tensors for one model."""
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
    """A cache's keys or values on the layers' devices, in the model's dtype unless still to be rotated."""
    tensors = cache.keys if side == "key" else cache.values
    dtypes = [None if spec.rotary(side) else dtype for spec in cache.meta.layers]
    return [tensor.to(devices.layer(number), dtypes[number]) for number, tensor in enumerate(tensors)]
