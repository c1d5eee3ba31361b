"""Statistics for the profile: how queries weigh keys, and how the output projection weighs values.

Queries are captured as attention receives them, after normalisation and rotation.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire._forks import lock_of_process
from kvwire.engines.transformers.latent import Expansion, Scatter, expansion_of
from kvwire.engines.transformers.plain import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.codec import Statistics
    from kvwire.types import CacheMeta

_LOCK = lock_of_process()
"""Attention functions of transformers are shared by all models: one capture at a time."""
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "wo")
_EAGER = "eager_attention_forward"
"""Name of plain attention in every modeling file of transformers."""
SDPA = "sdpa"
SHOWN = frozenset({SDPA, "eager"})
"""Attention implementations that take masks of any kind, and can be recorded and replaced."""


class Recorder(Protocol):
    """Receives the inputs of attention."""

    def record(self, module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
        """Record one layer's attention, or replace it.

        Args:
            module: The attention.
            query: ``[1, heads, tokens, query_dim]``.
            args: Further arguments of an attention function: keys, values, mask.
            kwargs: Its options, such as the scaling.

        Returns:
            The attention's output, ``[1, tokens, heads, value_dim]``; None: the model computes it.
        """
        ...


class QueryRecorder:
    """Sums query covariances of a model and records each layer's attention module.

    Only calls of the thread that created the recorder, and from its model's modules, count. Queries must be at
    positions from 0.

    Attributes:
        builder: Sums the covariances.
        modules: Recorded attention modules by layer.
    """

    def __init__(self, meta: CacheMeta, model: PreTrainedModel) -> None:
        """Start without samples."""
        from kvwire.codec import StatisticsBuilder  # only fits need it

        self._meta = meta
        self.builder = StatisticsBuilder(meta)
        self._thread = threading.get_ident()
        self._modules = {id(module) for module in model.modules()}
        self._heads: dict[int, int] = {}
        self._expansions: dict[int, Expansion | None] = {}
        self._latents: dict[int, Scatter] = {}
        self.modules: dict[int, torch.nn.Module] = {}

    def record(self, module: torch.nn.Module, query: Tensor, *_: object, **__: object) -> Tensor | None:
        """Add a layer's queries."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._meta.layers):
            return None
        if threading.get_ident() != self._thread or id(module) not in self._modules:
            return None
        self.modules[layer] = module
        self._heads[layer] = query.shape[1]
        spec, queries = self._meta.layers[layer], query[0].float().cpu()
        if spec.value_rope is None:
            self.builder.add_queries(layer, queries)
            return None
        if layer not in self._expansions:
            self._expansions[layer] = expansion_of(module, spec, query)
        expansion = self._expansions[layer]
        if expansion is not None:
            self.builder.add_queries(layer, queries @ expansion.latent_to_keys.mT)
            self.builder.add_queries(layer, queries @ expansion.rotated_to_keys.mT, "value")
        return None

    def record_cache(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add a document's cache: latents serve as keys and values."""
        for layer, expansion in self._expansions.items():
            if expansion is not None:
                scatter = self._latents.setdefault(layer, Scatter(self._meta.layers[layer].key_dim))
                scatter.add(pairs[layer][0][0, 0].float().cpu())

    def statistics(self, token_features: Tensor | None = None) -> Statistics:
        """Compute the statistics."""
        for layer in self.modules:
            spec = self._meta.layers[layer]
            weight = self._output_weight(layer, spec.value_dim)
            if weight is not None and spec.value_rope is None and spec.kv_heads and not len(weight) % spec.kv_heads:
                self.builder.set_output(layer, weight.transpose(0, 1).flatten(1))
        found = self.builder.build(token_features)
        metrics = (self._with_latent(layer, metric) for layer, metric in enumerate(found.query_metric))
        return replace(found, query_metric=tuple(metrics))

    def _with_latent(self, layer: int, metric: Tensor | None) -> Tensor | None:
        """How queries weigh what a layer caches as keys, ``[kv_heads, key_dim, key_dim]``.

        Latents are expanded to values, too; the output projection's weight of these is added, over their scatter.
        """
        expansion = self._expansions.get(layer)
        if metric is None or expansion is None or layer not in self._latents:
            return metric
        weight = self._output_weight(layer, expansion.latent_to_values.shape[-1])
        if weight is None:
            return metric
        output = torch.einsum("hod,hoe->hde", weight, weight)
        of_values = (expansion.latent_to_values @ output @ expansion.latent_to_values.mT).sum(0, keepdim=True)
        covariance = self._latents[layer].covariance()
        energies = [float((part * covariance).sum()) for part in (metric, of_values)]
        return metric if min(energies) <= 0 else metric + of_values * (energies[0] / energies[1])

    def _output_weight(self, layer: int, value_dim: int) -> Tensor | None:
        """W_o by query heads, float32 ``[heads, hidden, value_dim]``; None if not found."""
        heads = self._heads.get(layer, 0)
        for name in _OUTPUT_NAMES if heads else ():
            weight = getattr(getattr(self.modules[layer], name, None), "weight", None)
            if isinstance(weight, torch.Tensor) and is_plain(weight) and weight.shape[1:] == (heads * value_dim,):
                return weight.detach().float().cpu().reshape(len(weight), heads, value_dim).transpose(0, 1)
        return None


@contextmanager
def recording(recorder: Recorder, model: PreTrainedModel) -> Iterator[None]:
    """Show the recorder all attention inputs of the model in this context."""
    with _LOCK, ExitStack() as stack:
        if uses_sdpa(model):
            stack.enter_context(_watching_table(recorder))
        else:
            for modeling in _eager_modules(model):
                stack.enter_context(_watching_module(modeling, recorder))
        yield


@contextmanager
def _watching_table(recorder: Recorder) -> Iterator[None]:
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
def _watching_module(modeling: Any, recorder: Recorder) -> Iterator[None]:  # noqa: ANN401 - a modeling file
    before = getattr(modeling, _EAGER)
    setattr(modeling, _EAGER, _showing(before, recorder))
    try:
        yield
    finally:
        setattr(modeling, _EAGER, before)


def _showing(inner: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def show(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        found = recorder.record(module, query, *args, **kwargs)
        return inner(module, query, *args, **kwargs) if found is None else (found, None)

    return show


def _eager_modules(model: PreTrainedModel) -> list[Any]:
    """Modeling files with plain attention that this model may call."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _EAGER)]


def attention_of(model: PreTrainedModel) -> str:
    """Name of the model's attention implementation."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)  # noqa: SLF001 - it has no public name


def uses_sdpa(model: PreTrainedModel) -> bool:
    """Whether the model's attention is torch's scaled_dot_product_attention."""
    return attention_of(model) == SDPA
