"""Statistics of a model that tell which errors in a cache matter more than others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvwire.codec.backend import Plane


@dataclass(frozen=True, eq=False)
class Statistics:
    """Weights of errors in keys and values; None, or missing, where the engine has no data.

    ``StatisticsBuilder`` computes it. Attention's metric measures an error's effect on the output of its layer,
    gradients its effect on the answer: a fit averages both. ``fisher`` weighs planes against each other.

    Attributes:
        query_metric: For each layer float32 ``[kv_heads, key_dim, key_dim]``, E[q q^T] summed over the query heads that
            share a key head, with q rotated by its distance to the key: it weighs key errors by the queries that meet
            them.
        value_metric: For each layer float32 ``[kv_heads, value_dim, value_dim]``, W_o^T W_o summed over those heads: it
            weighs value errors by their effect through the output projection.
        token_features: ``[vocabulary, n]`` float, features of tokens without context; None for no prediction from
            tokens.
        gradients: For each plane, ``("key" or "value", layer)``, float32 ``[kv_heads, dim, dim]``, E[g g^T] over a
            document's tokens. g is the gradient of the log-probability of tokens drawn from the model with respect to
            the token's un-rotated keys or its values, with large gradients capped. Each plane has a unit of its own.
            Missing or zero planes use attention's metric alone.
        fisher: The same without a cap and in one unit for all planes. Missing or zero planes count as average.
    """

    query_metric: tuple[Tensor | None, ...]
    value_metric: tuple[Tensor | None, ...]
    token_features: Tensor | None = None
    gradients: Mapping[Plane, Tensor] = field(default_factory=dict)
    fisher: Mapping[Plane, Tensor] = field(default_factory=dict)
