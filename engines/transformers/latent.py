"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) from the cache's point of view.

Such a layer caches a latent, from which every head's keys and values are made, and a rotated part that all heads' keys
share. Attention receives the expanded keys; errors in the cache are weighed by queries absorbed into the latent. The
expansion is linear, so running it on unit vectors gives its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.types import LayerSpec

_EXPANSION = "expand_kv"
"""Method from cache to keys and values in every modeling file with latent attention."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """Output of one layer's expansion for a unit in each cached dimension, float32.

    Attributes:
        latent_to_keys: ``[heads, key_dim, query_dim]``.
        rotated_to_keys: ``[heads, value_dim, query_dim]``.
        latent_to_values: ``[heads, key_dim, head_value_dim]``.
    """

    latent_to_keys: Tensor
    rotated_to_keys: Tensor
    latent_to_values: Tensor


@torch.no_grad()
def expansion_of(module: torch.nn.Module, spec: LayerSpec, like: Tensor) -> Expansion | None:
    """The expansion of an attention module that caches a latent."""
    expand = getattr(module, _EXPANSION, None)
    if spec.value_rope is None or spec.kv_heads != 1 or expand is None:
        return None
    latent = torch.eye(spec.key_dim, dtype=like.dtype, device=like.device)[None, None]
    rotated = torch.eye(spec.value_dim, dtype=like.dtype, device=like.device)[None, None]
    try:
        from_latent = expand(latent, latent.new_zeros(1, 1, spec.key_dim, spec.value_dim))
        from_rotated = expand(rotated.new_zeros(1, 1, spec.value_dim, spec.key_dim), rotated)
    except (TypeError, ValueError, RuntimeError):  # an unrelated method of that name
        return None
    return Expansion(*(tensor[0].float().cpu() for tensor in (from_latent[0], from_rotated[0], from_latent[1])))


class Scatter:
    """Covariance of vectors that come in pieces."""

    def __init__(self, dim: int) -> None:
        """Start without rows."""
        self._count = 0
        self._sum = torch.zeros(dim, dtype=torch.float64)
        self._products = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Add vectors."""
        self._count += len(rows)
        self._sum += rows.sum(0)
        self._products += (rows.T @ rows).double()

    def covariance(self) -> Tensor:
        """About the mean, float32 ``[dim, dim]``."""
        count = max(1, self._count)
        return (self._products / count - torch.outer(self._sum, self._sum) / count**2).float()
