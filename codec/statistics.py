"""What an engine knows about a model that makes some errors in a cache matter more than others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Attention's own metric on keys and values, layer by layer; None where the engine could not tell.

    query_energy[l]: ``[kv_heads, key_dim]`` float32, the sum over the query heads that share a key head of E[q^2],
    after any normalisation of queries; an error in a key counts by the queries that will meet it.
    value_metric[l]: ``[kv_heads, value_dim, value_dim]`` float32, the sum over those heads of W_o^T W_o: an error in a
    value counts by what the output projection makes of it.
    """

    query_energy: tuple[Tensor | None, ...]
    value_metric: tuple[Tensor | None, ...]
