"""What rows of a prompt see, as a model takes it: 4-D, one for each kind of layer, windows included."""

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
    """A mask as a model takes it: one, or one for each kind of layer in hybrids.

    Args:
        model: The model that will be run.
        meta: Of its caches.
        visible: Bool ``[rows, columns]``, ``[heads, rows, columns]`` or ``[batch, heads, rows, columns]``: what a row
            sees in layers without a window.
        rows: int64 ``[rows]``, positions of the rows; columns stand at positions 0, 1, ... None: the last ones.

    Returns:
        ``[1 or batch, 1 or heads, rows, columns]``, or such by the names of kinds of layers.

    Raises:
        MismatchError: A 4-D mask cannot say what the model's layers need.
    """
    windows = {spec.window for spec in meta.layers if spec.kind != "none"}
    formats = {window: in_format(model, within(visible, window, rows)) for window in windows}
    sliding = [window for window in windows if window is not None]
    named = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    if len(sliding) > 1 or (sliding and None in windows and not named):
        msg = "this model's layers have windows that it does not name; it cannot be run under a mask"
        raise MismatchError(msg)
    if sliding and None in windows:
        return {FULL: formats[None], SLIDING: formats[sliding[0]]}
    return next(iter(formats.values()))


def within(visible: Tensor, window: int | None, rows: Tensor | None = None) -> Tensor:
    """What is left to see in a layer with a window.

    Args:
        visible: Bool ``[..., rows, columns]``.
        window: Tokens that the layer sees, the row's own included; None for all.
        rows: As in ``attention_mask``.

    Returns:
        Bool of the shape of ``visible``.
    """
    if window is None:
        return visible
    queries, keys = visible.shape[-2:]
    if rows is None:
        rows = torch.arange(keys - queries, keys, device=visible.device)
    return visible & (rows[:, None] - torch.arange(keys, device=visible.device) < window)


def in_format(model: PreTrainedModel, visible: Tensor) -> Tensor:
    """One mask in the type that the model's attention takes.

    Args:
        model: The model.
        visible: Bool ``[rows, columns]``, ``[heads, rows, columns]`` or ``[batch, heads, rows, columns]``.

    Returns:
        ``[1 or batch, 1 or heads, rows, columns]``: bool for sdpa, to be added for eager attention.

    Raises:
        MismatchError: The model's attention takes no masks of this kind.
    """
    shaped = visible[(None,) * (4 - visible.ndim)]
    if uses_sdpa(model):
        return shaped
    if attention_of(model) != "eager":
        msg = f"{attention_of(model)} attention takes no masks of this kind; open the model with sdpa or eager"
        raise MismatchError(msg)
    hidden = torch.zeros(shaped.shape, dtype=model.dtype, device=visible.device)
    return hidden.masked_fill_(~shaped, torch.finfo(model.dtype).min)
