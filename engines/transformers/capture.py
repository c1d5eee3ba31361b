"""Statistics for the profile: how strong queries are, and what the output projection makes of values.

Queries are seen where attention receives them, after any normalisation and rotation; a rotation does not change the
energy of a pair, so rotated queries serve.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.codec import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta, RopeRegime

_LOCK = threading.Lock()
"""The table of attention functions belongs to transformers and is shared: one capture at a time."""
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "wo", "c_proj")
SDPA = "sdpa"


class QueryRecorder:
    """Sums query energies and notes the attention module of each layer."""

    def __init__(self, meta: CacheMeta) -> None:
        """Start from nothing."""
        self._meta = meta
        self._energy: dict[int, Tensor] = {}
        self._tokens = 0
        self.modules: dict[int, torch.nn.Module] = {}

    def record(self, module: torch.nn.Module, query: Tensor) -> None:
        """Add a layer's queries ``[1, heads, tokens, key_dim]``."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._meta.layers):
            return
        self.modules[layer] = module
        energy = query[0].float().pow(2).sum(1).cpu()
        self._energy[layer] = self._energy[layer] + energy if layer in self._energy else energy

    def statistics(self) -> Statistics:
        """What was seen; None for layers that attention never showed."""
        energies, metrics = [], []
        for layer, spec in enumerate(self._meta.layers):
            energy = self._energy.get(layer)
            regime = None if spec.rope is None else self._meta.ropes[spec.rope]
            if energy is None or energy.shape[-1] != spec.key_dim or energy.shape[0] % spec.kv_heads:
                energies.append(None)
            else:
                shared = energy.reshape(spec.kv_heads, -1, spec.key_dim).sum(1)
                energies.append(shared if regime is None else _pair_mean(shared, regime))
            heads = 0 if energy is None else energy.shape[0]
            metrics.append(_value_metric(self.modules.get(layer), heads, spec.kv_heads, spec.value_dim))
        return Statistics(tuple(energies), tuple(metrics))


@contextmanager
def recording(recorder: QueryRecorder) -> Iterator[None]:
    """Show the recorder every query that sdpa attention receives while the block runs."""
    with _LOCK:
        inner = ALL_ATTENTION_FUNCTIONS[SDPA]

        def show(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            recorder.record(module, query)
            return inner(module, query, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS[SDPA] = show
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[SDPA]


def _pair_mean(energy: Tensor, regime: RopeRegime) -> Tensor:
    """Both halves of a rotated pair get their mean: positions will mix them."""
    width = regime.rotary_dim
    out = energy.clone()
    if regime.interleaved:
        pairs = out[:, :width].reshape(len(out), -1, 2).mean(2, keepdim=True)
        out[:, :width] = pairs.expand(-1, -1, 2).reshape(len(out), width)
    else:
        pairs = (out[:, : width // 2] + out[:, width // 2 : width]) / 2
        out[:, :width] = pairs.repeat(1, 2)
    return out


def _value_metric(module: torch.nn.Module | None, heads: int, kv_heads: int, value_dim: int) -> Tensor | None:
    """Sum over the query heads of a key head of W_o^T W_o, ``[kv_heads, value_dim, value_dim]``; None where W_o is not found."""
    if module is None:
        return None
    for name in _OUTPUT_NAMES:
        weight = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == heads * value_dim:  # noqa: PLR2004 - a matrix
            per_head = weight.detach().float().cpu().reshape(weight.shape[0], kv_heads, -1, value_dim)
            return torch.einsum("okgd,okge->kde", per_head, per_head)
    return None


def captures(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through the function that ``recording`` wraps."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == SDPA)  # noqa: SLF001 - transformers has no public name for it
