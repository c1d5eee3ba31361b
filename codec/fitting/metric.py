"""The metric in which errors of keys and values are measured: attention's own, scaled so that layers compare."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.planes import plane_width
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvwire.codec.fitting.moments import Moments
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.planes import Plane
    from kvwire.types import LayerSpec

_METRIC_FLOOR = 0.01
"""Directions that attention ignores keep this share of the mean weight, so that their errors stay bounded."""
_TINY = 1e-20
"""Stands for zero where something is divided by."""
_RESOLUTION = 2.0**-20
"""Scatter below this share of the mean is rounding noise, whatever a layer's scale."""
_SENSITIVITY_EXPONENT = 0.5
"""Measured sensitivities count by their square root: what noise in one plane alone does says only half of what errors
in all planes together do, and text differs."""
_LEAST_SENSITIVITY = 0.05
"""Least weight of a plane, the mean plane's being 1: what calibration texts never need, others may."""
_FIRST_LAYER = 2.0
"""Times that the first layer's planes count: calibration texts leave little of them to code, so noise there seems
cheap. Text of another kind leaves more, and that led its divergence at the finest levels (docs/ablation.md)."""
_LEAST_INFORMATION = 1e-3
"""The same where gradients tell how planes compare."""


def plane_weights(
    layers: tuple[LayerSpec, ...],
    statistics: Statistics | None,
    planes: Sequence[tuple[Plane, ...]],
    moments: Sequence[Moments],
) -> dict[Plane, float]:
    """How much the planes matter: by the measured sensitivity, or by the energy that the Fisher information gives them.

    The latter is what the fit is to minimise, if errors are small; but a few tokens hold nearly all of the gradients'
    energy, and errors there soon stop to cost what their square says. Which is better depends on the model
    (docs/ablation.md).

    Args:
        layers: Of the model.
        statistics: Of the engine; None where nothing is known.
        planes: Of each group.
        moments: Of each group's elements.

    Returns:
        What each plane's energy is to be scaled by, about 1 on average. Planes that are missing count as average.
    """
    if statistics is None:
        return {}
    if statistics.weighting == "fisher":
        energies = {
            plane: _energy(found.double().cpu(), *parts) / plane_width(layers, plane)
            for group, moment in zip(planes, moments, strict=True)
            for plane, parts in zip(group, _parts(layers, group, moment), strict=True)
            if (found := statistics.fisher.get(plane)) is not None
        }
        return _scaled(energies, _LEAST_INFORMATION, geometric=True)
    known = {plane: value for plane, value in statistics.sensitivity.items() if math.isfinite(value)}
    raised = {plane: max(value, 0.0) ** _SENSITIVITY_EXPONENT for plane, value in known.items()}
    scaled = _scaled(raised, _LEAST_SENSITIVITY, geometric=False)
    return {plane: weight * (1.0 if plane[1] else _FIRST_LAYER) for plane, weight in scaled.items()}


def _scaled(weights: dict[Plane, float], least: float, *, geometric: bool) -> dict[Plane, float]:
    """Weights with a mean of 1. The geometric one suits those that lie far apart: most planes are below the other."""
    mean = sum(weights.values()) / max(1, len(weights))
    if mean <= 0:
        return {}
    scaled = {plane: max(value / mean, least) for plane, value in weights.items()}
    middle = math.exp(sum(map(math.log, scaled.values())) / len(scaled)) if geometric else 1.0
    return {plane: value / middle for plane, value in scaled.items()}


def plane_metrics(
    layers: tuple[LayerSpec, ...],
    statistics: Statistics | None,
    planes: tuple[Plane, ...],
    moments: Moments,
    weights: Mapping[Plane, float],
) -> list[Tensor]:
    """Compute the metric of each plane, scaled so that its weighted energy is its weight for each element.

    It is attention's, or that of gradients; where both are known their mean, each scaled alike. Attention's alone does
    not know what later layers make of an error, gradients alone follow the few tokens that hold most of them. Or it is
    the Fisher information, where ``Statistics.weighting`` says so. A plane that hardly scatters about its mean is
    scaled by its mean instead, one that is zero by its metric.

    Args:
        layers: Of the model.
        statistics: Of the engine; None where nothing is known.
        planes: Of one group.
        moments: Of the group's elements.
        weights: From ``plane_weights``.

    Returns:
        float32 ``[heads, dim, dim]`` or a diagonal ``[width]`` for each plane.
    """
    out = []
    for plane, (covariance, mean) in zip(planes, _parts(layers, planes, moments), strict=True):
        width = plane_width(layers, plane)
        blocks = _metrics_of(layers[plane[1]], statistics, plane)
        scaled = [block * (width / len(blocks) / _energy(block, covariance, mean)) for block in blocks]
        out.append((sum(scaled[1:], scaled[0]) * weights.get(plane, 1.0)).float())
    return out


def _metrics_of(spec: LayerSpec, statistics: Statistics | None, plane: Plane) -> list[Tensor]:
    """The metrics whose mean counts in a plane, one at least."""
    by_attention = floored_metric(spec, statistics, plane)
    if statistics is None:
        return [by_attention]
    fisher = statistics.weighting == "fisher"
    given = (statistics.fisher if fisher else statistics.gradients).get(plane)
    gradients = _checked(spec, plane, given, "gradients")
    if gradients is None or not float(torch.diagonal(gradients, dim1=1, dim2=2).sum()) > 0:
        return [by_attention]
    known = (statistics.query_metric if plane[0] == "key" else statistics.value_metric)[plane[1]] is not None
    return [*([by_attention] if known and not fisher else []), _floored(gradients)]


def _parts(
    layers: tuple[LayerSpec, ...], planes: tuple[Plane, ...], moments: Moments
) -> Iterator[tuple[Tensor, Tensor]]:
    """Covariance ``[heads, dim, heads, dim]`` and mean ``[heads, dim]`` of each plane of a group."""
    start = 0
    for plane in planes:
        spec = layers[plane[1]]
        heads, dim = spec.kv_heads, spec.key_dim if plane[0] == "key" else spec.value_dim
        rows = slice(start, start + heads * dim)
        yield moments.covariance[rows, rows].reshape(heads, dim, heads, dim), moments.mean[rows].reshape(heads, dim)
        start += heads * dim


def _energy(block: Tensor, covariance: Tensor, mean: Tensor) -> float:
    """Of a plane's elements in a metric, above 0."""
    scatter = float(torch.einsum("hde,hdhe->", block, covariance))
    constant = float(torch.einsum("hde,hd,he->", block, mean, mean))
    trace = float(torch.diagonal(block, dim1=1, dim2=2).sum())
    return max(scatter, _RESOLUTION**2 * constant) or trace or 1.0


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
    known = None
    if statistics is not None:
        metrics = statistics.query_metric if side == "key" else statistics.value_metric
        known = _checked(spec, plane, metrics[layer])
    return _floored(torch.eye(dim, dtype=torch.float64).repeat(spec.kv_heads, 1, 1) if known is None else known)


def _checked(spec: LayerSpec, plane: Plane, known: Tensor | None, what: str = "statistics") -> Tensor | None:
    """A plane's metric in float64, if there is any; refuses what does not fit the plane."""
    if known is None:
        return None
    dim = spec.key_dim if plane[0] == "key" else spec.value_dim
    given = known.double().cpu()
    if given.shape != (spec.kv_heads, dim, dim) or not np.isfinite(given.numpy()).all():
        msg = (
            f"layer {plane[1]}'s {plane[0]} {what} have another shape than its {plane[0]}s, or NaN; measure them again"
        )
        raise ArgumentError(msg)
    return given


def _floored(block: Tensor) -> Tensor:
    mean_weight = float(torch.diagonal(block, dim1=1, dim2=2).mean())
    unit = torch.eye(block.shape[-1], dtype=torch.float64)
    return block + max(_METRIC_FLOOR * mean_weight, _TINY) * unit


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
