"""Learning a model's cache layout by running it: what each layer stores, and how its keys carry positions.

No family of models is named here. A few tokens are run at position 0 and further on; whichever rotation turns the first
keys into the second is the layer's regime. This finds partial rotary, interleaving, scaling, layers without positions
and frequencies that differ by layer type, and it proves that shifting works for this very model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.codec import rotate, rotation
from kvwire.errors import MismatchError, RopeRegimeError
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


def learn_layout(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], tuple[RopeRegime, ...]]:
    """The specs of all layers and the distinct regimes that they use.

    Raises RopeRegimeError where a layer's keys depend on position in a way that no known rotation explains (learned or
    additive positions), MismatchError where a layer stores something other than keys and values.
    """
    near, far = _keys(model, 0), _keys(model, _DISTANCE)
    candidates = list(dict.fromkeys(_candidates(model)))
    windows = _windows(model)
    used: list[RopeRegime] = []
    specs = []
    for layer, ((key, value), (moved, _)) in enumerate(zip(near, far, strict=True)):
        regime = _explain(layer, key, moved, candidates, _TOLERANCE.get(model.dtype, 8e-2))
        if regime is not None and regime not in used:
            used.append(regime)
        window = windows[layer] if layer < len(windows) else None
        specs.append(
            LayerSpec(
                int(key.shape[0]), int(key.shape[2]), int(value.shape[2]), "sliding" if window else "full",
                None if regime is None else used.index(regime), window,
            )
        )  # fmt: skip
    return tuple(specs), tuple(used)


@torch.no_grad()
def _keys(model: PreTrainedModel, offset: int) -> list[tuple[Tensor, Tensor]]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, _TOKENS), generator=generator).to(model.device)
    cache = DynamicCache()
    positions = torch.arange(offset, offset + _TOKENS, device=model.device)[None]
    model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    out = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:  # noqa: PLR2004 - [batch, heads, tokens, dim]
            msg = "a layer of this model caches something other than keys and values of every token; kvwire cannot store it"
            raise MismatchError(msg)
        out.append((keys[0].cpu(), values[0].cpu()))
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
            limit = _limit(model, module) if kind in ("dynamic", "longrope") else None
            frequencies = tuple(float(value) for value in buffer.float().cpu())
            for interleaved in (False, True):
                yield RopeRegime(frequencies, interleaved, scaling, limit, kind)


def _limit(model: PreTrainedModel, module: torch.nn.Module) -> int:
    config = model.config.get_text_config(decoder=True)
    original = getattr(config, "original_max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    original = original or parameters.get("original_max_position_embeddings")
    return int(original or getattr(module, "original_max_seq_len", 0) or config.max_position_embeddings)


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Each layer's sliding window, as transformers itself derives it from the configuration."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]


def _explain(layer: int, near: Tensor, far: Tensor, candidates: list[RopeRegime], tolerance: float) -> RopeRegime | None:
    scale = float(far.float().norm()) or 1.0
    best, error = None, float((near.float() - far.float()).norm()) / scale
    for regime in candidates:
        if regime.rotary_dim > near.shape[-1]:
            continue
        cos, sin = rotation(regime, _DISTANCE, 1)
        distance = float((rotate(near, regime, cos, sin) - far.float()).norm()) / scale
        if distance < error:
            best, error = regime, distance
    if error > tolerance:
        msg = (
            f"layer {layer}: keys cannot be moved, the best rotation leaves {error:.2g} of them unexplained; "
            "this model's positions are not rotary (learned, additive or ALiBi), so its caches cannot be linked"
        )
        raise RopeRegimeError(msg)
    return best
