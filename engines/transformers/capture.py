"""Statistics for the profile: how queries weigh keys, and what the output projection makes of values.

Queries are seen where attention receives them, after any normalisation and rotation.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.codec import Statistics, rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.codec import Vocabulary
    from kvwire.types import CacheMeta, LayerSpec

_LOCK = threading.Lock()
"""The attention functions belong to transformers and are shared by all models: one capture at a time."""
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "wo")
_EAGER = "eager_attention_forward"
"""What every modeling file of transformers calls its own plain attention."""
SDPA = "sdpa"
_DRAWS = 4
"""Positions drawn for each query."""


class QueryRecorder:
    """Sums query covariances of one model and notes the attention module of each layer.

    Only calls from the thread that made the recorder, and from modules of its model, count. Queries must stand at
    positions from 0. They meet keys at any position before them, so each is turned back by positions drawn at random
    from those that it sees: what is left is how it weighs an un-rotated key.
    """

    def __init__(self, meta: CacheMeta, model: PreTrainedModel) -> None:
        """Start from nothing."""
        self._meta = meta
        self._thread = threading.get_ident()
        self._modules = {id(module) for module in model.modules()}
        self._sums: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._draws = torch.Generator().manual_seed(0)
        self.modules: dict[int, torch.nn.Module] = {}

    def record(self, module: torch.nn.Module, query: Tensor) -> None:
        """Add a layer's queries ``[1, heads, tokens, key_dim]``."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._meta.layers):
            return
        if threading.get_ident() != self._thread or id(module) not in self._modules:
            return
        self.modules[layer] = module
        spec = self._meta.layers[layer]
        queries = query[0].float().cpu()
        if spec.rope is not None and queries.shape[-1] == spec.key_dim:
            queries = torch.cat([self._turned_back(queries, spec) for _ in range(_DRAWS)], 1)
        total = queries.transpose(1, 2) @ queries
        self._sums[layer] = self._sums[layer] + total if layer in self._sums else total
        self._tokens[layer] = self._tokens.get(layer, 0) + queries.shape[1]

    def _turned_back(self, queries: Tensor, spec: LayerSpec) -> Tensor:
        regime = self._meta.ropes[spec.rope or 0]
        own = torch.arange(queries.shape[1], dtype=torch.float32)
        seen = own + 1 if spec.window is None else (own + 1).clamp(max=spec.window)
        met = own - (torch.rand(len(own), generator=self._draws) * seen).floor()
        angles = met[:, None] * torch.tensor(regime.inv_freq)[None]
        return rotate(queries, regime, angles.cos(), -angles.sin())

    def statistics(self, vocabulary: Vocabulary | None = None) -> Statistics | None:
        """What was seen; None for layers that attention never showed, and None alone where it showed no layer."""
        if not self._sums:
            return None
        layers = range(len(self._meta.layers))
        return Statistics(tuple(map(self._query_metric, layers)), tuple(map(self._value_metric, layers)), vocabulary)

    def _query_metric(self, layer: int) -> Tensor | None:
        spec, total = self._meta.layers[layer], self._sums.get(layer)
        if total is None or total.shape[-1] != spec.key_dim or total.shape[0] % spec.kv_heads:
            return None
        return total.reshape(spec.kv_heads, -1, spec.key_dim, spec.key_dim).sum(1) / self._tokens[layer]

    def _value_metric(self, layer: int) -> Tensor | None:
        """Sum over the query heads of a key head of W_o^T W_o, ``[kv_heads, value_dim, value_dim]``.

        None where W_o is not found.
        """
        spec, total = self._meta.layers[layer], self._sums.get(layer)
        if total is None or total.shape[0] % spec.kv_heads:
            return None
        for name in _OUTPUT_NAMES:
            weight = getattr(getattr(self.modules[layer], name, None), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.shape[1:] == (total.shape[0] * spec.value_dim,):
                per_head = weight.detach().float().reshape(weight.shape[0], spec.kv_heads, -1, spec.value_dim)
                return torch.einsum("okgd,okge->kde", per_head, per_head).cpu()
        return None


@contextmanager
def recording(recorder: QueryRecorder, model: PreTrainedModel) -> Iterator[None]:
    """Show the recorder every query that the model's attention receives while the block runs."""
    with _LOCK, ExitStack() as stack:
        if uses_sdpa(model):
            stack.enter_context(_watching_table(recorder))
        else:
            for modeling in _eager_modules(model):
                stack.enter_context(_watching_module(modeling, recorder))
        yield


@contextmanager
def _watching_table(recorder: QueryRecorder) -> Iterator[None]:
    table: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping  # noqa: SLF001 - the only way back to what was there
    missing = object()
    before = table.get(SDPA, missing)
    table[SDPA] = _showing(ALL_ATTENTION_FUNCTIONS[SDPA], recorder)
    try:
        yield
    finally:
        if before is missing:
            del table[SDPA]
        else:
            table[SDPA] = before


@contextmanager
def _watching_module(modeling: Any, recorder: QueryRecorder) -> Iterator[None]:  # noqa: ANN401 - a modeling file
    before = getattr(modeling, _EAGER)
    setattr(modeling, _EAGER, _showing(before, recorder))
    try:
        yield
    finally:
        setattr(modeling, _EAGER, before)


def _showing(inner: Callable[..., Any], recorder: QueryRecorder) -> Callable[..., Any]:
    def show(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        recorder.record(module, query)
        return inner(module, query, *args, **kwargs)

    return show


def _eager_modules(model: PreTrainedModel) -> list[Any]:
    """The modeling files whose plain attention this model may call."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _EAGER)]


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation that the model runs."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)  # noqa: SLF001 - it has no public name


def uses_sdpa(model: PreTrainedModel) -> bool:
    """Whether the model's attention is torch's scaled_dot_product_attention."""
    return attention_of(model) == SDPA
