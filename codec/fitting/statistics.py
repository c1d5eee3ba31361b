"""What an engine knows about a model that makes some errors in a cache matter more than others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvwire.codec.planes import Plane
    from kvwire.types import KVCache


Weighting = Literal["mixed", "fisher"]
"""How a fit weighs errors, by what is known:

* ``mixed``: within a plane the mean of attention's metric and of capped gradients', planes by the root of their
  sensitivity to noise.
* ``fisher``: the Fisher information as it is, within planes and between them.
"""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What is known of tokens without their context.

    Attributes:
        features: ``[vocabulary, n]`` float.
        examples: A cache without positions, each of whose tokens stands for itself behind some ordinary text; not
            necessarily of every token.
    """

    features: Tensor
    examples: KVCache


@dataclass(frozen=True, eq=False)
class Statistics:
    """What weighs errors in keys and values; None, or nothing, where the engine could not tell.

    ``StatisticsBuilder`` makes it of queries, weights and gradients. Attention's own metric says what errors do to the
    output of one layer, gradients which of them reach the answer: a fit mixes both. How layers compare, noise tells.

    Attributes:
        query_metric: For each layer float32 ``[kv_heads, key_dim, key_dim]``, the sum over the query heads that share a
            key head of E[q q^T], q rotated to where an un-rotated key meets it: an error in a key counts by the queries
            that will meet it.
        value_metric: For each layer float32 ``[kv_heads, value_dim, value_dim]``, the sum over those heads of W_o^T
            W_o: an error in a value counts by what the output projection makes of it.
        vocabulary: None where nothing is known of tokens, and then caches are not predicted from them.
        sensitivity: For each plane, ``("key" or "value", layer)``, the KL divergence that a share of noise in it
            causes; in any unit. Planes that are missing count as average.
        gradients: For each plane float32 ``[kv_heads, dim, dim]``, E[g g^T] over a document's tokens, g the gradient of
            the log-probability of tokens drawn from the model, by the token's un-rotated keys or its values; in any
            unit, each plane's own, large ones capped. Planes that are missing, or zero, have attention's metric alone.
        fisher: The same without a cap, and in one unit for all planes.
        weighting: Which of this a fit is to follow. None suits every model best: an engine that can measures which one
            does (``choose_weighting``).
    """

    query_metric: tuple[Tensor | None, ...]
    value_metric: tuple[Tensor | None, ...]
    vocabulary: Vocabulary | None = None
    sensitivity: Mapping[Plane, float] = field(default_factory=dict)
    gradients: Mapping[Plane, Tensor] = field(default_factory=dict)
    fisher: Mapping[Plane, Tensor] = field(default_factory=dict)
    weighting: Weighting = "mixed"
