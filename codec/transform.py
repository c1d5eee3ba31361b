"""Caches to coefficients and back, group by group.

The transform is an attention-weighted Karhunen-Loeve transform (KVTC, arXiv 2511.01815, without the weights): in the
metric that attention puts on errors, coefficients are uncorrelated and all deserve the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.positions import regime_of, rotate, rotation
from kvwire.errors import CacheValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.profile import Group, Profile, Side
    from kvwire.types import CacheMeta, KVCache


def gather(cache: KVCache, side: Side, layers: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Tokens ``start`` to ``stop`` of some layers as float32 ``[tokens, width]``, positions taken off keys.

    Raises CacheValueError naming the layer that holds NaN or infinity.
    """
    parts = []
    for layer in layers:
        tensor = (cache.keys if side == "key" else cache.values)[layer][:, start:stop].detach()
        regime = regime_of(cache.meta, layer) if side == "key" and cache.meta.positions == "on" else None
        if regime is None:
            part = tensor.to("cpu", torch.float32)
        else:
            cos, sin = rotation(regime, cache.meta.offset + start, stop - start)
            part = rotate(tensor.cpu(), regime, cos, -sin)
        if not np.isfinite(part.numpy()).all():
            msg = f"layer {layer}'s {side}s hold NaN or infinity; prefill the document again in float32"
            raise CacheValueError(msg)
        parts.append(part.permute(1, 0, 2).reshape(stop - start, -1))
    return torch.cat(parts, 1)


def analyse(cache: KVCache, profile: Profile, start: int, stop: int) -> tuple[NDArray[np.float32], float]:
    """Coefficients of tokens ``start`` to ``stop`` and the weighted energy of what they stand for.

    Returns float32 ``[tokens, profile.rank]``, groups in order, and the energy about the mean in the attention metric,
    directions that the profile leaves out included.
    """
    parts, energy = [], 0.0
    for group in profile.groups:
        centred = gather(cache, group.side, group.layers, start, stop) - torch.from_numpy(group.mean)
        coefficients = _project(centred, group)
        parts.append(coefficients.numpy())
        energy += _energy(centred, group) if group.metric else energy_of(parts[-1])
    return np.concatenate(parts, axis=1), energy


def _project(centred: Tensor, group: Group) -> Tensor:
    """Coefficients ``[tokens, rank]`` of a group's elements ``[tokens, width]``, the mean taken off."""
    analysis = group.analysis
    return centred / torch.from_numpy(group.row_scale) if analysis is None else centred @ analysis


def energy_of(coefficients: NDArray[np.floating]) -> float:
    """Squared length of coefficients: the metric makes them orthonormal."""
    return float(np.square(coefficients, dtype=np.float32).sum(dtype=np.float64))


def _energy(centred: Tensor, group: Group) -> float:
    """Squared length of ``[tokens, width]`` in the group's metric."""
    total, start = 0.0, 0
    for block in group.metric:
        metric = torch.from_numpy(block)
        width = len(metric) if metric.ndim == 1 else metric.shape[0] * metric.shape[1]
        part = centred[:, start : start + width]
        if metric.ndim == 1:
            weighted = part * metric
        else:
            heads = part.reshape(len(part), metric.shape[0], 1, metric.shape[1])
            weighted = (heads @ metric).reshape(part.shape)
        total += float((weighted * part).sum(dtype=torch.float64))
        start += width
    return total


def synthesise(coefficients: Tensor, group: Group) -> Tensor:
    """Elements ``[tokens, width]`` from the first coefficients of a group, all others being zero.

    Only the coefficients given cost anything: the product runs over those rows of the synthesis matrix.
    """
    mean = torch.from_numpy(group.mean)
    given = coefficients.shape[1]
    if group.synthesis is None:
        out = mean.repeat(len(coefficients), 1)
        out[:, :given] += coefficients * torch.from_numpy(group.row_scale)[:given]
        return out
    return torch.addmm(mean, coefficients, group.synthesis[:given])


def scatter(
    elements: Tensor,
    group: Group,
    out: KVCache,
    meta: CacheMeta,
    start: int,
    turns: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Write a group's elements ``[tokens, width]`` into ``out`` from token ``start`` on, laid out as ``meta`` says.

    turns: for each regime index, float32 cosines and sines of exactly these tokens, by which keys are rotated; empty
    where positions stay off.
    """
    tokens, at = len(elements), 0
    for layer in group.layers:
        spec = meta.layers[layer]
        dim = spec.key_dim if group.side == "key" else spec.value_dim
        part = elements[:, at : at + spec.kv_heads * dim].reshape(tokens, spec.kv_heads, dim).permute(1, 0, 2)
        at += spec.kv_heads * dim
        if group.side == "key" and spec.rope is not None and turns:
            part = rotate(part, meta.ropes[spec.rope], *turns[spec.rope])
        target = (out.keys if group.side == "key" else out.values)[layer]
        target[:, start : start + tokens] = part
