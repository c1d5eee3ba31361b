"""Whether a cache fits a model, and its tensors as the model takes them: dtype, devices, positions on, no holes."""

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
    """Tokens that every layer and head of a pruned cache keeps.

    A sliding layer need only keep what its window still sees.
    """
    layers = zip(cache.meta.layers, cache.kept or (), strict=False)
    counted = [(spec, mask.cpu()) for spec, mask in layers if mask is not None]
    counted = [(spec, mask) for spec, mask in counted if not mask[:, _seen(spec, cache.tokens) :].all()]
    if not counted:
        return None
    first = counted[0][1][0]
    attending = [spec for spec in cache.meta.layers if spec.kind != "none"]
    alike = len(counted) == len(attending) and all(bool((mask == first).all()) for _, mask in counted)
    if alike and any(spec.window is not None for spec in attending):
        msg = (
            "this cache is pruned, and layers of the model see a window, which counts positions that a plain "
            "transformers cache would not have; run it with forward on own_past, keep it unpruned, or give its entries "
            "(cache.ragged) to an engine with paged attention"
        )
        raise MismatchError(msg)
    if not alike:
        msg = (
            "this cache is pruned, and its layers and heads keep different tokens, which a plain transformers cache "
            "cannot hold; keep it unpruned, or give its entries (cache.ragged) to an engine with paged attention"
        )
        raise MismatchError(msg)
    return first.nonzero()[:, 0]


def gaps_of(cache: KVCache) -> Tensor | None:
    """What all layers and heads of a cache hold alike, where some layers see a window, so that gaps have to stay."""
    attending = [spec.kind != "none" for spec in cache.meta.layers]
    masks = [mask for mask, counts in zip(cache.kept or (), attending, strict=False) if counts]
    first = masks[0] if masks else None
    if first is None or all(spec.window is None for spec in cache.meta.layers) or bool(first.all()):
        return None
    return first[0] if all(mask is not None and bool((mask == first[:1]).all()) for mask in masks) else None


def _seen(spec: LayerSpec, tokens: int) -> int:
    """First token that a layer still sees when the next one comes."""
    return 0 if spec.window is None else max(0, tokens - spec.window + 1)


def check_fits(theirs: CacheMeta, ours: CacheMeta) -> None:
    """Refuse a cache of another model."""
    shapes = [(s.kv_heads, s.key_dim, s.value_dim) for s in theirs.layers]
    same = shapes == [(s.kv_heads, s.key_dim, s.value_dim) for s in ours.layers] and _turn_alike(theirs, ours)
    digests = (theirs.tokenizer_digest, ours.tokenizer_digest)
    if all(digests) and digests[0] != digests[1]:
        msg = "the cache's text was read by another tokenizer than this engine's; encode the documents with this one"
        raise MismatchError(msg)
    if not same or (theirs.model_revision and ours.model_revision and theirs.model_revision != ours.model_revision):
        msg = (
            f"the cache was computed by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), "
            f"this engine runs {ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); "
            "encode the documents with this model"
        )
        raise MismatchError(msg)


def _turn_alike(theirs: CacheMeta, ours: CacheMeta) -> bool:
    """Whether two models of one layout rotate their keys alike; a cache without regimes is taken at its word."""
    for their_spec, our_spec in zip(theirs.layers if theirs.ropes else (), ours.layers, strict=False):
        for side in _SIDES:
            their_turn, our_turn = their_spec.rotary(side), our_spec.rotary(side)
            if (their_turn is None) != (our_turn is None):
                return False
            if their_turn is None or our_turn is None:
                continue
            if their_turn[1] != our_turn[1] or not _regimes_alike(theirs.ropes[their_turn[0]], ours.ropes[our_turn[0]]):
                return False
    return True


def _regimes_alike(theirs: RopeRegime, ours: RopeRegime) -> bool:
    if theirs.interleaved != ours.interleaved or theirs.rotary_dim != ours.rotary_dim:
        return False
    pairs = zip(theirs.inv_freq, ours.inv_freq, strict=True)
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
    """A cache's keys or values where the layers run, as they want them; what is still to be rotated as it is."""
    tensors = cache.keys if side == "key" else cache.values
    dtypes = [None if spec.rotary(side) else dtype for spec in cache.meta.layers]
    return [tensor.to(devices.layer(number), dtypes[number]) for number, tensor in enumerate(tensors)]
