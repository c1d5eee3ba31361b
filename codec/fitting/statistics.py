"""What an engine knows about a model that makes some errors in a cache matter more than others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvwire.codec.backend import Plane


@dataclass(frozen=True, eq=False)
class Statistics:
    """What weighs errors in keys and values; None, or nothing, where the engine could not tell.

    ``StatisticsBuilder`` makes it of queries, weights and gradients. Attention's own metric says what errors do to the
    output of one layer, gradients which of them reach the answer: a fit mixes both. Gradients tell how layers compare.

    Attributes:
        query_metric: For each layer float32 ``[kv_heads, key_dim, key_dim]``, the sum over the query heads that share a
            key head of E[q q^T], q rotated to where an un-rotated key meets it: an error in a key counts by the queries
            that will meet it.
        value_metric: For each layer float32 ``[kv_heads, value_dim, value_dim]``, the sum over those heads of W_o^T
            W_o: an error in a value counts by what the output projection makes of it.
        token_features: ``[vocabulary, n]`` float, what is known of tokens without their context; None where nothing is,
            and then caches are not predicted from them.
        gradients: For each plane, ``("key" or "value", layer)``, float32 ``[kv_heads, dim, dim]``, E[g g^T] over a
            document's tokens, g the gradient of the log-probability of tokens drawn from the model, by the token's
            un-rotated keys or its values; in any unit, each plane's own, large ones capped. Planes that are missing, or
            zero, have attention's metric alone.
        fisher: The same without a cap, and in one unit for all planes, which it compares. Planes that are missing, or
            zero, count as average.
    """

    query_metric: tuple[Tensor | None, ...]
    value_metric: tuple[Tensor | None, ...]
    token_features: Tensor | None = None
    gradients: Mapping[Plane, Tensor] = field(default_factory=dict)
    fisher: Mapping[Plane, Tensor] = field(default_factory=dict)
