"""How far decoded caches are from what was encoded."""

from __future__ import annotations

import numpy as np
import torch

from kvwire.codec import positions_off
from kvwire.codec.transform.analysis import gather_planes


def measured(cache, decoded, profile):
    """Weighted squared error for each element, computed from tensors alone."""
    error = 0.0
    was, now = positions_off(cache), positions_off(decoded)
    for group in profile.groups:
        gap = gather_planes(was, group.planes, 0, cache.tokens) - gather_planes(now, group.planes, 0, cache.tokens)
        blocks = [torch.from_numpy(block).double() for block in group.metric]
        metric = torch.block_diag(*[torch.diag(b) if b.ndim == 1 else torch.block_diag(*b) for b in blocks])
        error += float(((gap.double() @ metric) * gap).sum())
    return error / (cache.tokens * cache.meta.elements_per_token)


def apart(cache, decoded):
    """Root mean square of all elements' differences, over that of the elements."""
    sides = [
        torch.cat([t.double().flatten() for t in (*c.keys, *c.values)]) if c.tokens else torch.zeros(0)
        for c in (cache, decoded)
    ]
    return float((sides[0] - sides[1]).norm() / sides[0].norm())


def drawn(rng, frequencies):
    """A symbol for each row of frequencies, drawn by them."""
    ends = np.cumsum(frequencies, axis=-1)
    return (rng.integers(0, 4096, ends.shape[:-1])[..., None] >= ends).sum(-1).astype(np.uint8)
