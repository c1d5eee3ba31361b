"""The metric in which errors of keys and values are measured: attention's own, scaled so that layers compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.fitting.moments import Moments
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.planes import Plane
    from kvwire.types import LayerSpec

_METRIC_FLOOR = 1e-3
"""Directions that attention ignores keep this share of the mean weight, so that their errors stay bounded."""
_TINY = 1e-20
"""Stands for zero where something is divided by."""
_RESOLUTION = 2.0**-20
"""Scatter below this share of the mean is rounding noise, whatever a layer's scale."""
_SENSITIVITY_EXPONENT = 0.5
"""Measured sensitivities count by their square root: what noise in one plane alone does says only half of what errors
in all planes together do, and text differs."""


def plane_metrics(
    layers: tuple[LayerSpec, ...], statistics: Statistics | None, planes: tuple[Plane, ...], moments: Moments
) -> list[Tensor]:
    """Compute the attention metric of each plane, scaled so that its weighted energy is 1 for each element.

    Where the statistics know how sensitive the planes are, each plane's energy is scaled by that, 1 on average. A plane
    that hardly scatters about its mean is scaled by its mean instead, one that is zero by its metric.

    Args:
        layers: Of the model.
        statistics: Of the engine; None where nothing is known.
        planes: Of one group.
        moments: Of the group's elements.

    Returns:
        float32 ``[heads, dim, dim]`` or a diagonal ``[width]`` for each plane.
    """
    out, start = [], 0
    weights = _weights(statistics)
    for plane in planes:
        block = floored_metric(layers[plane[1]], statistics, plane)
        heads, dim, _ = block.shape
        width = heads * dim
        own = moments.covariance[start : start + width, start : start + width].reshape(heads, dim, heads, dim)
        mean = moments.mean[start : start + width].reshape(heads, dim)
        scatter = float(torch.einsum("hde,hdhe->", block, own))
        constant = float(torch.einsum("hde,hd,he->", block, mean, mean))
        trace = float(torch.diagonal(block, dim1=1, dim2=2).sum())
        energy = max(scatter, _RESOLUTION**2 * constant) or trace
        out.append((block * (width / energy * weights.get(plane, 1.0))).float())
        start += width
    return out


def _weights(statistics: Statistics | None) -> dict[Plane, float]:
    """Each plane's weight by its sensitivity, 1 on average."""
    known = {} if statistics is None else statistics.sensitivity
    raised = {plane: max(value, 0.0) ** _SENSITIVITY_EXPONENT for plane, value in known.items()}
    mean = sum(raised.values()) / max(1, len(raised))
    return {plane: max(value / mean, 0.05) for plane, value in raised.items()} if mean > 0 else {}


def floored_metric(spec: LayerSpec, statistics: Statistics | None, plane: Plane) -> Tensor:
    """Compute the attention metric of a plane, with a floor under its small directions.

    Args:
        spec: The plane's layer.
        statistics: Of the engine; None where nothing is known.
        plane: Its side and layer.

    Returns:
        float64 ``[heads, dim, dim]``; the unit matrix where the metric is not known.
    """
    side, layer = plane
    dim = spec.key_dim if side == "key" else spec.value_dim
    block = torch.eye(dim, dtype=torch.float64).repeat(spec.kv_heads, 1, 1)
    if statistics is not None:
        known = (statistics.query_metric if side == "key" else statistics.value_metric)[layer]
        if known is not None:
            given = known.double().cpu()
            if given.shape != block.shape or not np.isfinite(given.numpy()).all():
                msg = (
                    f"layer {layer}'s {side} statistics have another shape than its {side}s, or NaN; measure them again"
                )
                raise ArgumentError(msg)
            block = given
    mean_weight = float(torch.diagonal(block, dim1=1, dim2=2).mean())
    return block + max(_METRIC_FLOOR * mean_weight, _TINY) * torch.eye(dim, dtype=torch.float64)


def roots(metric: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Take the square root of a block-diagonal metric.

    Args:
        metric: Blocks of every plane.

    Returns:
        The symmetric root and its inverse, float64 ``[width, width]``.
    """
    direct, inverses = [], []
    for block in metric:
        for matrix in block.double():
            values, vectors = torch.linalg.eigh(matrix)
            values = values.clamp(min=float(values.max()) * 1e-9)
            direct.append(vectors @ torch.diag(values.sqrt()) @ vectors.T)
            inverses.append(vectors @ torch.diag(values.rsqrt()) @ vectors.T)
    return _block_diagonal(direct), _block_diagonal(inverses)


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    out = torch.zeros(2 * (sum(len(block) for block in blocks),), dtype=torch.float64)
    start = 0
    for block in blocks:
        out[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return out
