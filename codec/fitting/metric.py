"""The metric of errors in keys and values: attention's and the gradients', scaled to compare layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.backend import plane_width
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.fitting.moments import Moments
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.types import LayerSpec

_METRIC_FLOOR = 0.01
"""Share of the mean weight added to every direction, so that errors stay bounded where attention's weight is 0."""
_TINY = 1e-20
"""Least weight added, for metrics that are zero."""
_RESOLUTION = 2.0**-20
"""Scatter below this share of the mean is rounding noise, whatever a layer's scale."""
_INFORMATION_EXPONENT = 0.75
"""A plane's weight is its Fisher energy to this power: on other texts, importance is spread more evenly."""
_LEAST_INFORMATION = 1e-3
"""Least weight of a plane, with a mean of 1: other texts may need a plane that calibration texts do not."""


def plane_weights(
    layers: tuple[LayerSpec, ...],
    statistics: Statistics | None,
    planes: Sequence[tuple[Plane, ...]],
    moments: Sequence[Moments],
) -> dict[Plane, float]:
    """Weigh planes by their energy in the Fisher information.

    That energy is the cost to the answer of small errors of a given share of a plane. It enters with a power below 1
    (benchmarks/ablation.md).
    """
    if statistics is None:
        return {}
    raised = {
        plane: (_energy(found, *parts) / plane_width(layers, plane)) ** _INFORMATION_EXPONENT
        for group, moment in zip(planes, moments, strict=True)
        for plane, parts in zip(group, _parts(layers, group, moment), strict=True)
        if (found := _of_gradients(layers[plane[1]], plane, statistics.fisher)) is not None
    }
    mean = sum(raised.values()) / max(1, len(raised))
    return {plane: max(value / mean, _LEAST_INFORMATION) for plane, value in raised.items()}


def plane_metrics(
    layers: tuple[LayerSpec, ...],
    statistics: Statistics | None,
    planes: tuple[Plane, ...],
    moments: Moments,
    weights: Mapping[Plane, float],
) -> list[Tensor]:
    """Compute the metric of each plane, scaled so that an element's mean energy equals the plane's weight.

    It is attention's metric, the gradients', or the mean of both at equal scale. Attention's alone ignores later
    layers; gradients alone follow the few tokens that hold most of their energy. A plane that hardly scatters is
    scaled by its mean instead, a plane of zeros by its metric's trace.
    """
    out = []
    for plane, (covariance, mean) in zip(planes, _parts(layers, planes, moments), strict=True):
        width = plane_width(layers, plane)
        blocks = _metrics_of(layers[plane[1]], statistics, plane)
        scaled = [block * (width / len(blocks) / _energy(block, covariance, mean)) for block in blocks]
        out.append((sum(scaled[1:], scaled[0]) * weights.get(plane, 1.0)).float())
    return out


def _metrics_of(spec: LayerSpec, statistics: Statistics | None, plane: Plane) -> list[Tensor]:
    """Return the metrics to average in a plane, at least one."""
    by_attention = _attention_metric(spec, statistics, plane)
    if statistics is None:
        return [by_attention]
    gradients = _of_gradients(spec, plane, statistics.gradients)
    if gradients is None:
        return [by_attention]
    known = (statistics.query_metric if plane[0] == "key" else statistics.value_metric)[plane[1]] is not None
    return [*([by_attention] if known else []), _floored(gradients)]


def _of_gradients(spec: LayerSpec, plane: Plane, known: Mapping[Plane, Tensor]) -> Tensor | None:
    """Return a plane's gradients; None where they are missing or zero."""
    found = _checked(spec, plane, known.get(plane), "gradients")
    return None if found is None or not float(torch.diagonal(found, dim1=1, dim2=2).sum()) > 0 else found


def _parts(
    layers: tuple[LayerSpec, ...], planes: tuple[Plane, ...], moments: Moments
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield covariance ``[heads, dim, heads, dim]`` and mean ``[heads, dim]`` of each plane of a group."""
    start = 0
    for plane in planes:
        spec = layers[plane[1]]
        heads, dim = spec.kv_heads, spec.key_dim if plane[0] == "key" else spec.value_dim
        rows = slice(start, start + heads * dim)
        yield moments.covariance[rows, rows].reshape(heads, dim, heads, dim), moments.mean[rows].reshape(heads, dim)
        start += heads * dim


def _energy(block: Tensor, covariance: Tensor, mean: Tensor) -> float:
    """Return the energy of a plane's elements in a metric, always above 0."""
    scatter = float(torch.einsum("hde,hdhe->", block, covariance))
    constant = float(torch.einsum("hde,hd,he->", block, mean, mean))
    trace = float(torch.diagonal(block, dim1=1, dim2=2).sum())
    return max(scatter, _RESOLUTION**2 * constant) or trace or 1.0


def _attention_metric(spec: LayerSpec, statistics: Statistics | None, plane: Plane) -> Tensor:
    """Return attention's metric of a plane with a floor, float64 ``[heads, dim, dim]``; the unit matrix by default."""
    side, layer = plane
    dim = spec.key_dim if side == "key" else spec.value_dim
    known = None
    if statistics is not None:
        metrics = statistics.query_metric if side == "key" else statistics.value_metric
        known = _checked(spec, plane, metrics[layer])
    return _floored(torch.eye(dim, dtype=torch.float64).repeat(spec.kv_heads, 1, 1) if known is None else known)


def _checked(spec: LayerSpec, plane: Plane, known: Tensor | None, what: str = "statistics") -> Tensor | None:
    """Return a plane's given metric in float64; raises ArgumentError where it does not fit the plane."""
    if known is None:
        return None
    dim = spec.key_dim if plane[0] == "key" else spec.value_dim
    given = known.double().cpu()
    if given.shape != (spec.kv_heads, dim, dim) or not np.isfinite(given.numpy()).all():
        raise ArgumentError(
            f"layer {plane[1]}'s {plane[0]} {what} have another shape than its {plane[0]}s, or NaN; measure them again"
        )
    return given


def _floored(block: Tensor) -> Tensor:
    mean_weight = float(torch.diagonal(block, dim1=1, dim2=2).mean())
    unit = torch.eye(block.shape[-1], dtype=torch.float64)
    return block + max(_METRIC_FLOOR * mean_weight, _TINY) * unit


@dataclass(frozen=True, eq=False)
class Blocks:
    """A block-diagonal matrix.

    Attributes:
        blocks: float64, square, in order.
    """

    blocks: list[Tensor]

    def left_of(self, matrix: Tensor) -> Tensor:
        """Multiply a matrix by this one from the left."""
        parts = torch.split(matrix, [len(block) for block in self.blocks])
        return torch.cat([block.to(part.dtype) @ part for block, part in zip(self.blocks, parts, strict=True)])


def roots(metric: list[Tensor]) -> tuple[Blocks, Blocks]:
    """Return the square root of a block-diagonal metric and its inverse."""
    direct, inverses = [], []
    for block in metric:
        for matrix in block.double():
            values, vectors = torch.linalg.eigh(matrix)
            values = values.clamp(min=float(values.max()) * 1e-9)
            direct.append(vectors @ torch.diag(values.sqrt()) @ vectors.T)
            inverses.append(vectors @ torch.diag(values.rsqrt()) @ vectors.T)
    return Blocks(direct), Blocks(inverses)
