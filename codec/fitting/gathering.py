"""Sum an engine's queries, output projections and gradients to ``Statistics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.codec.backend import planes_of
from kvwire.codec.fitting.statistics import Statistics
from kvwire.codec.transform.positions import positions_off, rotate
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.types import CacheMeta, KVCache, LayerSpec, Side

_DRAWS = 4
"""Positions drawn for each query."""
_CAP = 0.95
"""Quantile of a document's tokens by gradient energy: larger gradients are scaled down to it."""
_MATRIX = 2
_TINY = 1e-300
"""Replaces zero in divisors."""


class StatisticsBuilder:
    """Gathers the statistics of one model; every part is optional, in any order.

    Example:
        >>> builder = StatisticsBuilder(engine.meta)
        >>> builder.add_queries(0, queries)  # for each layer and document
        >>> builder.set_output(0, attention.o_proj.weight)  # for each layer
        >>> fit_profile(caches, builder.build())
    """

    def __init__(self, meta: CacheMeta) -> None:
        """Start with no data.

        Args:
            meta: Layers and rotary regimes of the model's caches.
        """
        self._meta = meta
        self._sums: dict[Plane, Tensor] = {}
        self._counts: dict[Plane, int] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[Plane, Tensor] = {}
        self._fisher: dict[Plane, Tensor] = {}
        self._caches = 0
        self._draws = torch.Generator().manual_seed(0)

    def add_queries(self, layer: int, queries: Tensor, side: Side = "key") -> None:
        """Add the queries of one document as attention receives them: normalised, and rotated to positions from 0 on.

        Queries meet keys at any earlier position. Each is therefore rotated back by random positions that it sees,
        which gives its weights of an un-rotated key. Queries that do not fit the layer's cache are ignored.

        Args:
            layer: Index of the layer.
            queries: ``[heads, tokens, dim]`` of any float dtype; heads that share a key head are adjacent.
            side: The side that they meet; "value" where values carry positions, as with latent attention.
        """
        spec = self._meta.layers[layer]
        rotary, dim = spec.rotary(side), spec.key_dim if side == "key" else spec.value_dim
        if not spec.kv_heads or queries.shape[-1] != dim or len(queries) % spec.kv_heads:
            return
        queries = queries.detach().float().cpu()
        if rotary is not None:
            queries = torch.cat([self._turned_back(queries, spec, rotary) for _ in range(_DRAWS)], 1)
        total = (queries.mT @ queries).reshape(spec.kv_heads, -1, dim, dim).sum(1)
        place: Plane = (side, layer)
        self._sums[place] = self._sums[place] + total if place in self._sums else total
        self._counts[place] = self._counts.get(place, 0) + queries.shape[1]

    def _turned_back(self, queries: Tensor, spec: LayerSpec, rotary: tuple[int, int]) -> Tensor:
        regime, start = self._meta.ropes[rotary[0]], rotary[1]
        own = torch.arange(queries.shape[1], dtype=torch.float32)
        seen = own + 1 if spec.window is None else (own + 1).clamp(max=spec.window)
        met = own - (torch.rand(len(own), generator=self._draws) * seen).floor()
        angles = met[:, None] * torch.tensor(regime.inv_freq)[None]
        return rotate(queries, regime, angles.cos(), -angles.sin(), start)

    def set_output(self, layer: int, weight: Tensor) -> None:
        """Set a layer's output projection.

        Args:
            layer: Index of the layer.
            weight: W_o ``[hidden, heads * value_dim]``; heads that share a key head are adjacent.

        Raises:
            ArgumentError: The weight does not fit the layer's values.
        """
        spec = self._meta.layers[layer]
        each = spec.kv_heads * spec.value_dim
        if weight.dim() != _MATRIX or not each or weight.shape[1] % each:
            fits = f"{spec.kv_heads} heads of {spec.value_dim} values"
            raise ArgumentError(f"W_o of {list(weight.shape)} does not fit layer {layer}, which caches {fits}")
        per_head = weight.detach().float().cpu().reshape(len(weight), -1, spec.value_dim)
        metric = torch.einsum("ohd,ohe->hde", per_head, per_head)
        self._outputs[layer] = metric.reshape(spec.kv_heads, -1, *metric.shape[1:]).sum(1)

    def add_gradients(self, gradients: KVCache, leave_out: Sequence[int] = ()) -> None:
        """Add the gradients of a cache's tensors, of the log-probability of tokens drawn from the model.

        A few tokens hold most of the gradients' energy, and the harm of errors there soon grows slower than their
        square. So ``Statistics.gradients`` caps gradients at the 95th percentile of those above 0 and gives every
        cache the same weight in each plane: otherwise one text would dominate. ``Statistics.fisher``, without cap,
        compares planes.

        Args:
            gradients: Gradients in the cache's shape and at its positions.
            leave_out: Indices of tokens to ignore, such as attention sinks: the first token of each document.

        Raises:
            ArgumentError: The cache has no such token.
        """
        counted = torch.ones(gradients.tokens, dtype=torch.bool)
        if any(not 0 <= place < gradients.tokens for place in leave_out):
            msg = f"leave_out names tokens 0 to {gradients.tokens - 1} of the gradients, got {list(leave_out)}"
            raise ArgumentError(msg)
        counted[list(leave_out)] = False
        off = positions_off(gradients)
        self._caches += 1
        for plane in planes_of(self._meta.layers):
            rows = (off.keys if plane[0] == "key" else off.values)[plane[1]].detach().cpu().double()
            rows = rows[:, counted]
            energies = rows.square().sum((0, 2))
            some = energies[energies > 0]
            if not len(some):  # the layer does not affect the answer, or its window ends before
                continue
            information = rows.mT @ rows / rows.shape[1]
            self._fisher[plane] = self._fisher[plane] + information if plane in self._fisher else information
            rows = rows * (some.quantile(_CAP) / energies.clamp(min=_TINY)).clamp(max=1).sqrt()[None, :, None]
            products = rows.mT @ rows
            alike = products / _trace(products)
            self._gradients[plane] = self._gradients[plane] + alike if plane in self._gradients else alike

    def query_metric(self, layer: int, side: Side = "key") -> Tensor | None:
        """Return the mean of E[q q^T] over the queries given to ``add_queries``.

        Args:
            layer: Index of the layer.
            side: The side that the queries meet.

        Returns:
            float32 ``[kv_heads, dim, dim]``; None where no queries were given.
        """
        total = self._sums.get((side, layer))
        return None if total is None else total / self._counts[side, layer]

    def build(self, token_features: Tensor | None = None) -> Statistics:
        """Return all gathered statistics.

        Args:
            token_features: ``[vocabulary, n]``, features to predict caches from; None for none.

        Returns:
            The statistics, with None for layers without data.
        """
        layers = range(len(self._meta.layers))
        values = (
            self._outputs.get(layer) if spec.value_rope is None else self.query_metric(layer, "value")
            for layer, spec in enumerate(self._meta.layers)
        )
        gradients = {plane: (total / _trace(total)).float() for plane, total in self._gradients.items()}
        fisher = {plane: (total / self._caches).float() for plane, total in self._fisher.items()}
        return Statistics(tuple(map(self.query_metric, layers)), tuple(values), token_features, gradients, fisher)


def _trace(blocks: Tensor) -> Tensor:
    """Return the trace of all heads' blocks together."""
    return torch.diagonal(blocks, dim1=1, dim2=2).sum()
