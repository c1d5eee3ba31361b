"""What an engine knows about a model that makes some errors in a cache matter more than others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvwire.types import KVCache


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
    """Attention's own metric on keys and values, layer by layer; None where the engine could not tell.

    Attributes:
        query_metric: For each layer float32 ``[kv_heads, key_dim, key_dim]``, the sum over the query heads that share a
            key head of E[q q^T], q rotated to where an un-rotated key meets it: an error in a key counts by the queries
            that will meet it.
        value_metric: For each layer float32 ``[kv_heads, value_dim, value_dim]``, the sum over those heads of W_o^T
            W_o: an error in a value counts by what the output projection makes of it.
        vocabulary: None where nothing is known of tokens, and then caches are not predicted from them.
        sensitivity: For each plane, ``("key" or "value", layer)``, the KL divergence that a share of noise in it
            causes; in any unit. Planes that are missing count as average.
    """

    query_metric: tuple[Tensor | None, ...]
    value_metric: tuple[Tensor | None, ...]
    vocabulary: Vocabulary | None = None
    sensitivity: Mapping[tuple[Literal["key", "value"], int], float] = field(default_factory=dict)
