"""Attention of some rows over a long cache, without copies of the cache for heads that share keys.

Under a mask, transformers repeats keys and values for every query head and computes all columns for every row, which on
a processor takes most of a short pass over a long prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64
"""Rows per product: neighbours, so that columns after the last of them can be skipped."""
_HARMLESS = frozenset({
    "dropout", "scaling", "sliding_window", "position_ids", "is_causal", "use_cache", "output_attentions",
    "cache_position", "logits_to_keep", "past_key_values", "past_key_value", "output_hidden_states",
})  # fmt: skip
"""Options of attention functions that have no effect under an explicit mask."""


def is_plain_attention(options: dict[str, Any]) -> bool:
    """Whether attention is only softmax over scaled products: no cap on scores, no sinks."""
    return all(name in _HARMLESS or value is None for name, value in options.items())


def scale_of(query: Tensor, options: dict[str, Any]) -> float:
    """Scale of products of queries and keys."""
    scaling = options.get("scaling")
    return float(scaling) if isinstance(scaling, (int, float)) else query.shape[-1] ** -0.5


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, ends: list[int], scale: float) -> Tensor:
    """Attention under a mask; equals ``scaled_dot_product_attention`` with keys repeated for each head."""
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    masks = 1 if mask.shape[1] == 1 else kv_heads  # one mask for all heads, or one for each
    seen = mask.expand(1, masks * (heads // kv_heads), rows, mask.shape[-1])
    out = query.new_empty(1, rows, heads, value.shape[-1])
    for start in range(0, rows, _ROWS):
        stop = min(rows, start + _ROWS)
        end = ends[stop - 1]
        # Heads that share keys are stacked as rows, which avoids copies.
        part = query[:, :, start:stop].reshape(1, kv_heads, -1, dim)
        visible = seen[:, :, start:stop, :end].reshape(1, masks, -1, end)
        mixed = scaled_dot_product_attention(part, key[:, :, :end], value[:, :, :end], visible, scale=scale)
        out[0, start:stop] = mixed.view(heads, stop - start, -1).transpose(0, 1)
    return out
