"""Attention masks in a model's form: 4-D, one per kind of layer, windows included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.capture import attention_of, uses_sdpa
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta

FULL, SLIDING = "full_attention", "sliding_attention"


def attention_mask(
    model: PreTrainedModel, meta: CacheMeta, visible: Tensor, rows: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """Convert a mask to a model's form: one, or one per kind of layer in hybrids."""
    windows = {spec.window for spec in meta.layers if spec.kind != "none"}
    formats = {window: in_format(model, within(visible, window, rows)) for window in windows}
    sliding = [window for window in windows if window is not None]
    named = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    if len(sliding) > 1 or (sliding and None in windows and not named):
        raise MismatchError("this model's layers have windows that it does not name; it cannot be run under a mask")
    if sliding and None in windows:
        return {FULL: formats[None], SLIDING: formats[sliding[0]]}
    return next(iter(formats.values()))


def within(visible: Tensor, window: int | None, rows: Tensor | None = None) -> Tensor:
    """Restrict a mask to a layer's window."""
    if window is None:
        return visible
    queries, keys = visible.shape[-2:]
    if rows is None:
        rows = torch.arange(keys - queries, keys, device=visible.device)
    return visible & (rows[:, None] - torch.arange(keys, device=visible.device) < window)


def in_format(model: PreTrainedModel, visible: Tensor) -> Tensor:
    """Convert one mask to the type of the model's attention."""
    shaped = visible[(None,) * (4 - visible.ndim)]
    if uses_sdpa(model):
        return shaped
    if attention_of(model) != "eager":
        msg = f"{attention_of(model)} attention takes no masks of this kind; open the model with sdpa or eager"
        raise MismatchError(msg)
    hidden = torch.zeros(shaped.shape, dtype=model.dtype, device=visible.device)
    return hidden.masked_fill_(~shaped, torch.finfo(model.dtype).min)
