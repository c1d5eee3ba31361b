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
from kvwire.engines.transformers.latent import Expansion, Scatter, expansion_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.codec import Vocabulary
    from kvwire.types import CacheMeta, LayerSpec, Side

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

    Attributes:
        modules: Attention modules by number of the layer, as far as they were seen.
    """

    def __init__(self, meta: CacheMeta, model: PreTrainedModel) -> None:
        """Start from nothing."""
        self._meta = meta
        self._thread = threading.get_ident()
        self._modules = {id(module) for module in model.modules()}
        self._sums: dict[tuple[int, Side], Tensor] = {}
        self._counts: dict[tuple[int, Side], int] = {}
        self._heads: dict[int, int] = {}
        self._expansions: dict[int, Expansion | None] = {}
        self._latents: dict[int, Scatter] = {}
        self._draws = torch.Generator().manual_seed(0)
        self.modules: dict[int, torch.nn.Module] = {}

    def record(self, module: torch.nn.Module, query: Tensor) -> None:
        """Add a layer's queries.

        Args:
            module: The layer's attention.
            query: ``[1, heads, tokens, query_dim]``.
        """
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._meta.layers):
            return
        if threading.get_ident() != self._thread or id(module) not in self._modules:
            return
        self.modules[layer] = module
        self._heads[layer] = query.shape[1]
        spec, queries = self._meta.layers[layer], query[0].float().cpu()
        if spec.value_rope is None:
            self._add(layer, "key", queries)
            return
        if layer not in self._expansions:
            self._expansions[layer] = expansion_of(module, spec, query)
        expansion = self._expansions[layer]
        if expansion is not None:
            self._add(layer, "key", queries @ expansion.latent_to_keys.mT)
            self._add(layer, "value", queries @ expansion.rotated_to_keys.mT)

    def _add(self, layer: int, side: Side, queries: Tensor) -> None:
        """Queries ``[heads, tokens, dim]`` as they meet what the layer caches on one side."""
        spec = self._meta.layers[layer]
        rotary, dim = spec.rotary(side), spec.key_dim if side == "key" else spec.value_dim
        if not spec.kv_heads or queries.shape[-1] != dim or len(queries) % spec.kv_heads:
            return
        if rotary is not None:
            queries = torch.cat([self._turned_back(queries, spec, rotary) for _ in range(_DRAWS)], 1)
        total = (queries.mT @ queries).reshape(spec.kv_heads, -1, dim, dim).sum(1)
        place = layer, side
        self._sums[place] = self._sums[place] + total if place in self._sums else total
        self._counts[place] = self._counts.get(place, 0) + queries.shape[1]

    def _turned_back(self, queries: Tensor, spec: LayerSpec, rotary: tuple[int, int]) -> Tensor:
        regime, start = self._meta.ropes[rotary[0]], rotary[1]
        own = torch.arange(queries.shape[1], dtype=torch.float32)
        seen = own + 1 if spec.window is None else (own + 1).clamp(max=spec.window)
        met = own - (torch.rand(len(own), generator=self._draws) * seen).floor()
        angles = met[:, None] * torch.tensor(regime.inv_freq)[None]
        return rotate(queries, regime, angles.cos(), -angles.sin(), start)

    def record_cache(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add what a document cached: latents serve two purposes.

        Args:
            pairs: Keys and values, ``[1, kv_heads, tokens, dim]`` for each layer.
        """
        for layer, expansion in self._expansions.items():
            if expansion is not None:
                scatter = self._latents.setdefault(layer, Scatter(self._meta.layers[layer].key_dim))
                scatter.add(pairs[layer][0][0, 0].float().cpu())

    def statistics(self, vocabulary: Vocabulary | None = None) -> Statistics | None:
        """What was seen.

        Args:
            vocabulary: Features of tokens, to go with it.

        Returns:
            The statistics, with None for layers that attention never showed; None alone where nothing is known at all.
        """
        if not self.modules and vocabulary is None:
            return None
        layers = range(len(self._meta.layers))
        return Statistics(tuple(map(self._query_metric, layers)), tuple(map(self._value_metric, layers)), vocabulary)

    def _mean(self, layer: int, side: Side) -> Tensor | None:
        total = self._sums.get((layer, side))
        return None if total is None else total / self._counts[layer, side]

    def _query_metric(self, layer: int) -> Tensor | None:
        """How queries weigh keys, ``[kv_heads, key_dim, key_dim]``.

        A latent is made into values too: what the output projection makes of these weighs as much, over its scatter.
        """
        metric, expansion = self._mean(layer, "key"), self._expansions.get(layer)
        if metric is None or expansion is None or layer not in self._latents:
            return metric
        output = self._output_metric(layer, expansion.latent_to_values.shape[-1])
        if output is None:
            return metric
        of_values = (expansion.latent_to_values @ output @ expansion.latent_to_values.mT).sum(0, keepdim=True)
        covariance = self._latents[layer].covariance()
        energies = [float((part * covariance).sum()) for part in (metric, of_values)]
        return metric if min(energies) <= 0 else metric + of_values * (energies[0] / energies[1])

    def _value_metric(self, layer: int) -> Tensor | None:
        """How the output projection weighs values, ``[kv_heads, value_dim, value_dim]``.

        Values that carry positions are parts of keys, and queries weigh them. None where W_o is not found.
        """
        spec = self._meta.layers[layer]
        if spec.value_rope is not None:
            return self._mean(layer, "value")
        output = self._output_metric(layer, spec.value_dim)
        if output is None or not spec.kv_heads or len(output) % spec.kv_heads:
            return None
        return output.reshape(spec.kv_heads, -1, *output.shape[1:]).sum(1)

    def _output_metric(self, layer: int, value_dim: int) -> Tensor | None:
        """W_o^T W_o of each query head, ``[heads, value_dim, value_dim]``; None where W_o is not found."""
        heads = self._heads.get(layer, 0)
        for name in _OUTPUT_NAMES if heads else ():
            weight = getattr(getattr(self.modules[layer], name, None), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.shape[1:] == (heads * value_dim,):
                per_head = weight.detach().float().cpu().reshape(len(weight), heads, value_dim)
                return torch.einsum("ohd,ohe->hde", per_head, per_head)
        return None


@contextmanager
def recording(recorder: QueryRecorder, model: PreTrainedModel) -> Iterator[None]:
    """Show the recorder every query that the model's attention receives while the block runs.

    Args:
        recorder: What sums them.
        model: The model that is run in the block.
    """
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
