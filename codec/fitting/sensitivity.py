"""Noise such as the quantiser makes, put into one plane of a cache: what tells how much that plane matters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.codec.fitting.metric import floored_metric, roots
from kvwire.codec.transform.analysis import gather_planes, scatter_planes
from kvwire.codec.transform.positions import positions_off

if TYPE_CHECKING:
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.planes import Plane
    from kvwire.types import KVCache


def perturbed(cache: KVCache, plane: Plane, statistics: Statistics, share: float) -> KVCache:
    """Copy a cache, positions off, with noise in the keys or values of one layer.

    The noise is white in the attention metric, as quantisation's is. The same call gives the same noise.

    Args:
        cache: The exact one.
        plane: Which keys or values.
        statistics: Of the engine.
        share: Energy of the noise as a share of the plane's weighted energy.

    Returns:
        The copy.
    """
    spec = cache.meta.layers[plane[1]]
    metric = floored_metric(spec, statistics, plane)
    elements = gather_planes(cache, (plane,), 0, cache.tokens)
    root, inverse = (each.float() for each in roots([metric]))
    energy = ((elements - elements.mean(0)) @ root).square().mean()
    noise = torch.randn(elements.shape, generator=torch.Generator().manual_seed(0))
    off = positions_off(cache)
    keys, values = list(off.keys), list(off.values)
    changed = keys if plane[0] == "key" else values
    changed[plane[1]] = changed[plane[1]].clone()
    out = replace(off, keys=keys, values=values)
    scatter_planes(elements + (share * energy).sqrt() * noise @ inverse, (plane,), out, out.meta, 0, {})
    return out
