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

    from kvwire.codec.profile import Group, Profile
    from kvwire.types import KVCache


def gather(cache: KVCache, group: Group, start: int, stop: int) -> Tensor:
    """Tokens ``start`` to ``stop`` of a group's layers as float32 ``[tokens, width]``, positions taken off keys.

    Raises CacheValueError naming the layer that holds NaN or infinity.
    """
    parts = []
    for layer in group.layers:
        tensor = (cache.keys if group.side == "key" else cache.values)[layer][:, start:stop].detach()
        regime = regime_of(cache.meta, layer) if group.side == "key" and cache.meta.positions == "on" else None
        if regime is None:
            part = tensor.to("cpu", torch.float32)
        else:
            cos, sin = rotation(regime, cache.meta.offset + start, stop - start)
            part = rotate(tensor.cpu(), regime, cos, -sin)
        if not bool(torch.isfinite(part).all()):
            msg = f"layer {layer}'s {group.side}s hold NaN or infinity; prefill the document again, in float32 if need be"
            raise CacheValueError(msg)
        parts.append(part.permute(1, 0, 2).reshape(stop - start, -1))
    return torch.cat(parts, 1)


def analyse(cache: KVCache, profile: Profile, start: int, stop: int) -> NDArray[np.float32]:
    """Coefficients of tokens ``start`` to ``stop``: float32 ``[tokens, profile.rank]``, groups in order."""
    return np.concatenate(
        [analyse_group(gather(cache, group, start, stop), group).numpy() for group in profile.groups], axis=1
    )


def analyse_group(elements: Tensor, group: Group) -> Tensor:
    """Coefficients ``[tokens, rank]`` of a group's elements ``[tokens, width]``."""
    centred = elements - torch.from_numpy(group.mean)
    analysis = group.analysis
    return centred / torch.from_numpy(group.row_scale) if analysis is None else centred @ analysis


def synthesise(coefficients: Tensor, group: Group, columns: slice) -> Tensor:
    """Elements ``[tokens, width]`` from the coefficients of ``columns`` of a group, all others being zero.

    Only the coded columns cost anything: the product runs over those rows of the synthesis matrix.
    """
    mean = torch.from_numpy(group.mean)
    if group.synthesis is None:
        out = mean.repeat(len(coefficients), 1)
        out[:, columns] += coefficients * torch.from_numpy(group.row_scale)[columns]
        return out
    return torch.addmm(mean, coefficients, group.synthesis[columns])


def scatter(elements: Tensor, group: Group, out: KVCache, start: int, turns: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Write a group's elements ``[tokens, width]`` into ``out`` from token ``start`` on, keys rotated by their regime's ``turns``.

    turns: for each regime index, float32 cosines and sines of exactly these tokens; empty where positions stay off.
    """
    tokens, at = len(elements), 0
    for layer in group.layers:
        spec = out.meta.layers[layer]
        dim = spec.key_dim if group.side == "key" else spec.value_dim
        part = elements[:, at : at + spec.kv_heads * dim].reshape(tokens, spec.kv_heads, dim).permute(1, 0, 2)
        at += spec.kv_heads * dim
        if group.side == "key" and spec.rope is not None and turns:
            part = rotate(part, out.meta.ropes[spec.rope], *turns[spec.rope])
        target = (out.keys if group.side == "key" else out.values)[layer]
        target[:, start : start + tokens] = part
