"""Planes that a profile transforms together: their mean, their synthesis rows and the metric of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch

from kvwire.errors import CorruptError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvwire.codec.planes import Plane


@dataclass(frozen=True, eq=False)
class Group:
    """Planes (keys or values of some layers) that are transformed together.

    Attributes:
        planes: Each one's elements follow each other, KV head by KV head; width is their sum.
        mean: float32 ``[width]``.
        spread: int16 ``[rank]``, each coefficient's class at step 1.
        rows: Synthesis, bfloat16 ``[rank, width]``: products with quantised values are exact in float32. None for the
            identity.
        row_scale: float32 ``[width]`` of the identity; None for a basis.
        metric: The attention metric of each plane, symmetric blocks ``[heads, dim, dim]`` or a diagonal ``[width of the
            plane]``; the encoder's only.
        predictor: bfloat16 ``[features, width]``, what the text says of the elements; None where it says nothing.
    """

    planes: tuple[Plane, ...]
    mean: NDArray[np.float32]
    spread: NDArray[np.int16]
    rows: torch.Tensor | None = None
    row_scale: NDArray[np.float32] | None = None
    metric: tuple[NDArray[np.float32], ...] = ()
    predictor: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Coefficients for one token."""
        return len(self.spread)

    @property
    def width(self) -> int:
        """Elements for one token."""
        return len(self.mean)

    @property
    def scales(self) -> NDArray[np.float32]:
        """The identity's scale for each element."""
        return cast("NDArray[np.float32]", self.row_scale)

    @cached_property
    def synthesis(self) -> torch.Tensor | None:
        """float32 ``[rank, width]``, coefficients to elements; None for the identity."""
        return None if self.rows is None else self.rows.float()

    @cached_property
    def analysis(self) -> torch.Tensor | None:
        """float32 ``[width, rank]``, elements to the coefficients whose synthesis lies nearest in the metric.

        The basis was orthonormal in the metric before its rows were rounded. What rounding added matters in directions
        that attention hardly weighs, so the coefficients solve the normal equations of the rows as stored.
        """
        synthesis = self.synthesis
        return None if synthesis is None else analysis_of(synthesis, tuple(map(torch.from_numpy, self.metric)))

    @cached_property
    def halved_analysis(self) -> torch.Tensor:
        """``analysis`` in bfloat16."""
        return cast("torch.Tensor", self.analysis).bfloat16()  # the identity has none


def analysis_of(synthesis: torch.Tensor, metric: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compute ``Group.analysis`` on the device of its input.

    Args:
        synthesis: float32 ``[rank, width]``.
        metric: Of each plane.

    Returns:
        float32 ``[width, rank]``.

    Raises:
        CorruptError: The rows are not independent in the metric.
    """
    dual = _weighted(synthesis, metric).double()
    factor, failed_at = torch.linalg.cholesky_ex(synthesis.double() @ dual)
    if int(failed_at):
        msg = "the profile's basis is not independent in its own metric; fetch the profile again"
        raise CorruptError(msg)
    return torch.cholesky_solve(dual.T, factor).T.float().contiguous()


def _weighted(synthesis: torch.Tensor, metric: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The metric times the rows ``[rank, width]``, transposed: ``[width, rank]``."""
    out = synthesis.new_empty(synthesis.shape[::-1])
    start = 0
    for block in metric:
        heads, dim = (len(block), 1) if block.ndim == 1 else block.shape[:2]
        stop = start + heads * dim
        part = synthesis[:, start:stop].reshape(-1, heads, dim)
        weighted = part * block[:, None] if block.ndim == 1 else torch.einsum("rhd,hde->rhe", part, block)
        out[start:stop] = weighted.reshape(-1, heads * dim).T
        start = stop
    return out
