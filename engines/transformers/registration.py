"""Learning a model's cache layout by running it: what each layer stores, and how its keys carry positions.

No family of models is named here. Some tokens are run at position 0 and further on; whichever rotation turns the first
keys into the second is the layer's regime. This finds partial rotary, interleaving, scaling, layers without positions
and frequencies that differ by layer type. Then the moved cache is continued and compared with a single pass, which
proves that storing, moving and reading back works for this very model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.codec import rotate, rotation
from kvwire.errors import CacheValueError, MismatchError, RopeRegimeError
from kvwire.types import LayerSpec, RopeRegime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

_TOKENS = 12
_DISTANCE = 37
"""Far enough that every fast pair turns several times, near enough for any window."""
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Relative; deep layers of half-precision models differ by nearly a per cent between runs at two offsets."""
_FREQUENCIES = "inv_freq"
_RANK = 4  # [batch, heads, tokens, dim]

Layers = list[tuple["Tensor", "Tensor"]]


def learn_layout(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], tuple[RopeRegime, ...]]:
    """The specs of all layers that store keys and values, and the distinct regimes that they use.

    Layers that borrow the cache of earlier ones store nothing and are not listed. Raises RopeRegimeError where keys
    depend on position in a way that no known rotation explains (learned or additive positions), or not at all
    (ALiBi), MismatchError where a layer stores something other than keys and values or attends in fixed blocks, and
    CacheValueError where the model computes NaN or infinity.
    """
    windows = _windows(model)
    count = max(1, min(_TOKENS, window_of(model) // 3))
    distance = max(1, min(_DISTANCE, window_of(model) - 2 * count))
    ids = _token_ids(model, 2 * count)
    whole = run(model, ids, 0)
    part = run(model, ids[:count], distance)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    candidates = list(dict.fromkeys(_candidates(model)))
    pairs = [((key[:, :count], value[:, :count]), moved) for (key, value), moved in zip(whole, part, strict=True)]
    for layer, (near, far) in enumerate(pairs):
        _check_finite(layer, (*near, *far))
    regimes = [
        _explain(layer, near[0], far[0], candidates, distance, tolerance) for layer, (near, far) in enumerate(pairs)
    ]
    for layer, (near, far) in enumerate(pairs):
        _check_values(layer, near[1], far[1], tolerance)
    used = tuple(dict.fromkeys(regime for regime in regimes if regime is not None))
    if not used:
        msg = (
            "no layer of this model puts positions into its keys by rotation (learned, ALiBi or none), "
            "so its caches cannot be moved; use a model with rotary positions"
        )
        raise RopeRegimeError(msg)
    _check_continues(model, ids, whole, part, regimes, distance, tolerance)
    specs = (
        LayerSpec(
            int(key.shape[0]), int(key.shape[2]), int(value.shape[2]), "sliding" if window else "full",
            None if regime is None else used.index(regime), window,
        )
        for (key, value), regime, window in zip(whole, regimes, windows, strict=False)
    )  # fmt: skip
    return tuple(specs), used


def window_of(model: PreTrainedModel) -> int:
    """Most positions that the configuration allows."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30)


def _token_ids(model: PreTrainedModel, count: int) -> list[int]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return [int(token) for token in torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def run(model: PreTrainedModel, ids: list[int], start: int, past: Layers | None = None) -> Layers:
    """Keys and values ``[heads, tokens, dim]`` of tokens at ``start`` on top of ``past``, for each storing layer.

    Whatever transformers raises over a cache or arguments that the model does not take becomes a MismatchError.
    """
    data = None if past is None else [(key[None].to(model.device), value[None].to(model.device)) for key, value in past]
    cache = DynamicCache(data)
    positions = torch.arange(start, start + len(ids), device=model.device)[None]
    tokens = torch.tensor([ids], device=model.device)
    try:
        model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        msg = f"this model does not run on a plain key-value cache, so kvwire cannot store its state ({error})"
        raise MismatchError(msg) from error
    before = 0 if past is None else past[0][0].shape[1]
    return [(key[:, before:].cpu(), value[:, before:].cpu()) for key, value in stored(cache, before + len(ids))]


def stored(cache: DynamicCache, tokens: int) -> Layers:
    """A batch-of-one cache as keys and values of each layer; raises MismatchError where a layer holds anything else."""
    out = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != _RANK or keys.shape[2] != tokens or values.shape[2] != tokens:
            msg = "a layer of this model stores something other than keys and values of every token; use another model"
            raise MismatchError(msg)
        out.append((keys[0], values[0]))
    if not out:
        msg = "this model fills no key-value cache; kvwire needs a decoder with attention"
        raise MismatchError(msg)
    return out


def _candidates(model: PreTrainedModel) -> Iterator[RopeRegime]:
    """Every set of rotary frequencies found in the model, paired in halves and interleaved."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith(_FREQUENCIES) or "original" in name:
                continue
            prefix = name[: -len(_FREQUENCIES)]
            kind = getattr(module, prefix + "rope_type", None) or getattr(module, "rope_type", "default")
            kind = kind.get(prefix.rstrip("_"), "default") if isinstance(kind, dict) else str(kind)
            scaling = float(getattr(module, prefix + "attention_scaling", 1.0))
            limit = _limit(model, kind, prefix.rstrip("_"))
            frequencies = tuple(float(value) for value in buffer.float().cpu())
            for interleaved in (False, True):
                yield RopeRegime(frequencies, interleaved, scaling, limit, kind)


def _limit(model: PreTrainedModel, kind: str, layer_type: str) -> int | None:
    """First position at which the frequencies change; None where they never do."""
    if "dynamic" in kind:
        return window_of(model)  # the length from which transformers rescales, whatever else the configuration says
    if kind != "longrope":
        return None
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type) or parameters
    original = parameters.get("original_max_position_embeddings")
    return int(original or getattr(config, "original_max_position_embeddings", None) or window_of(model))


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Each layer's sliding window, as transformers itself derives it from the configuration."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    chunked = "chunked_attention" in types if types else getattr(config, "attention_chunk_size", None)
    if chunked:
        msg = (
            "this model attends within fixed blocks of positions (chunked attention), which linked documents do not "
            "keep; use a model with full or sliding attention"
        )
        raise MismatchError(msg)
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        msg = f"transformers cannot lay out a cache for this model ({error}); use a decoder with attention"
        raise MismatchError(msg) from error
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _distance_between(ours: Tensor, theirs: Tensor) -> float:
    """Relative error of the typical token: the median, so that one token sent to another expert does not count for all.

    ours, theirs: ``[heads, tokens, dim]``.
    """
    scale = theirs.float().pow(2).sum((0, 2)).sqrt().clamp(min=1e-20)
    return float(((ours.float() - theirs.float()).pow(2).sum((0, 2)).sqrt() / scale).median())


def _check_finite(layer: int, tensors: tuple[Tensor, ...]) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        msg = f"layer {layer}: the model computes NaN or infinity; open it in float32, or check its weights"
        raise CacheValueError(msg)


def _check_values(layer: int, near: Tensor, far: Tensor, tolerance: float) -> None:
    if _distance_between(near, far) > tolerance:
        msg = (
            f"layer {layer}: what the model caches as values depends on position (multi-head latent attention does "
            "that), so it cannot be moved; use a model with plain keys and values"
        )
        raise MismatchError(msg)


def _explain(
    layer: int, near: Tensor, far: Tensor, candidates: list[RopeRegime], distance: int, tolerance: float
) -> RopeRegime | None:
    best, error = None, _distance_between(near, far)
    for regime in candidates:
        if regime.rotary_dim > near.shape[-1] or (regime.max_positions or distance + 1) <= distance:
            continue
        cos, sin = rotation(regime, distance, 1)
        left = _distance_between(rotate(near, regime, cos, sin), far)
        if left < error:
            best, error = regime, left
    if error > tolerance:
        msg = (
            f"layer {layer}: keys cannot be moved, the best rotation leaves {error:.2g} of them unexplained; "
            "this model's positions are not rotary (learned, additive or ALiBi), so its caches cannot be linked"
        )
        raise RopeRegimeError(msg)
    return best


def _check_continues(
    model: PreTrainedModel,
    ids: list[int],
    whole: Layers,
    part: Layers,
    regimes: list[RopeRegime | None],
    distance: int,
    tolerance: float,
) -> None:
    """The first tokens' cache, moved back to position 0 and continued, must give what one pass gives."""
    placed = []
    for (key, value), regime in zip(part, regimes, strict=True):
        if regime is not None:
            cos, sin = rotation(regime, -distance, 1)
            placed.append((rotate(key, regime, cos, sin).to(key.dtype), value))
        else:
            placed.append((key, value))
    count = part[0][0].shape[1]
    rest = run(model, ids[count:], count, placed)
    for layer, (ours, theirs) in enumerate(zip(rest, whole, strict=True)):
        error = max(_distance_between(a, b[:, count:]) for a, b in zip(ours, theirs, strict=True))
        if error > tolerance:
            msg = (
                f"layer {layer}: continuing from a cache differs by {error:.2g} from running the whole text; "
                "this model keeps state beside its keys and values, so its caches cannot be linked"
            )
            raise MismatchError(msg)
