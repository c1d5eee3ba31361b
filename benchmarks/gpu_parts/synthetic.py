"""Profiles and caches made by formula, with statistics like those of fitted ones; no model's weights are needed.

A profile: an orthonormal basis for each group of layers, spreads that fall so that the default ladder codes about 10,
20, 36, 55 and 70 % of a token's elements at its five levels, a token table and predictors of random numbers, tables of
exact Laplacians. A cache: what the profile expects of random token ids, plus Laplacian coefficients of those spreads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec import Ladder, Profile, rotation
from kvwire.codec.backend import plane_width
from kvwire.codec.entropy.tables import ALPHABET, CLASSES, CONTEXTS, class_of, fit_tables
from kvwire.codec.fitting.fit import GROUP_WIDTH, group_planes
from kvwire.codec.profile.group import Group
from kvwire.codec.transform.analysis import scatter_planes
from kvwire.types import KVCache

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from gpu_parts.shapes import Shape
    from kvwire.codec.backend import Plane
    from kvwire.types import LayerSpec

VOCABULARY = 32768
"""Fewer tokens than the models have, to save memory; a text of 32k tokens does not meet more."""
FEATURES = 512
CODED = (0.10, 0.20, 0.36, 0.55, 0.70)
"""Coded coefficients over elements, level by level; the last is the rank over the width."""
_HALF_CODED = 0.12
"""Spread in steps at which a Laplacian column of 256 tokens is coded every other time."""
_LARGEST = 6.0
"""Spread of the first coefficient: the coefficients' mean energy for each element then is 0.7."""
_TABLE_SPREAD = 30.0
_PREDICTED_SPREAD = 0.7
_BLOCK = 2048
"""Tokens made at a time."""


@dataclass(frozen=True)
class Sizes:
    """What of a profile is smaller in checks than in measurements."""

    vocabulary: int = VOCABULARY
    features: int = FEATURES
    group_width: int = GROUP_WIDTH


TINY = Sizes(vocabulary=64, features=8, group_width=32)


def description() -> dict[str, object]:
    """How it all is made, for the results."""
    return {
        "profile": "synthetic: random orthonormal rows, spreads by formula, random table and predictors, Laplacian "
        "frequency tables; not fitted on anything",
        "caches": "synthetic: expectation of random token ids plus Laplacian coefficients of the profile's spreads, "
        "keys rotated, rounded to bfloat16",
        "vocabulary": VOCABULARY,
        "vocabulary_note": "smaller than the models' to save memory",
        "token_features": FEATURES,
        "group_width": GROUP_WIDTH,
        "coded_share_aimed_at": list(CODED),
    }


def spreads(width: int, ladder: Ladder | None = None) -> NDArray[np.float64]:
    """Standard deviation of each coefficient at unit step, descending, ``[rank]``, rank = 70 % of the width."""
    steps = (ladder or Ladder()).steps
    rank = max(1, round(CODED[-1] * width))
    shares = (np.arange(rank) + 0.5) / width
    corners = [_LARGEST, *(_HALF_CODED * step for step in steps)]
    return np.exp(np.interp(shares, [0.0, *CODED], np.log(corners)))


def make_profile(shape: Shape, device: torch.device, sizes: Sizes | None = None, seed: int = 1) -> Profile:
    """A profile of that shape; the arrays are made on ``device`` and handed over on the host."""
    sizes = sizes or Sizes()
    draw = torch.Generator(device).manual_seed(seed)
    table = (_TABLE_SPREAD * torch.randn(sizes.vocabulary, sizes.features, generator=draw, device=device)).round()
    bases: dict[int, Tensor] = {}
    groups = []
    for planes in group_planes(shape.specs, sizes.group_width):
        width = sum(plane_width(shape.specs, plane) for plane in planes)
        if width not in bases:
            bases[width] = _orthonormal(width, len(spreads(width)), draw)
        groups.append(_group(planes, shape.specs, bases[width], sizes.features, draw))
    meta = shape.meta("bfloat16")
    tables = fit_tables(np.zeros((CLASSES, ALPHABET)), np.zeros((CLASSES, CONTEXTS, 3)))
    return Profile(
        meta.model_id,
        meta.model_revision,
        meta.layers,
        tuple(groups),
        tables,
        {"synthetic": 1},
        table.clamp(-127, 127).to(torch.int8).cpu().numpy(),
    )


def _orthonormal(width: int, rank: int, draw: torch.Generator) -> Tensor:
    """float32 ``[rank, width]``, orthonormal rows."""
    return torch.linalg.qr(torch.randn(width, rank, generator=draw, device=draw.device))[0].T.contiguous()


def _group(
    planes: tuple[Plane, ...], specs: tuple[LayerSpec, ...], basis: Tensor, features: int, draw: torch.Generator
) -> Group:
    """A group whose rows are the basis in another order, each column with a sign of its own: orthonormal as well."""
    rank, width = basis.shape
    device = draw.device
    order = torch.randperm(rank, generator=draw, device=device)
    signs = torch.randint(0, 2, (width,), generator=draw, device=device) * 2.0 - 1
    predictor = torch.randn(features, width, generator=draw, device=device)
    predictor *= _PREDICTED_SPREAD / (_TABLE_SPREAD * math.sqrt(features))
    return Group(
        planes,
        torch.randn(width, generator=draw, device=device).cpu().numpy(),
        class_of(spreads(width)).astype(np.int16),
        (basis[order] * signs).bfloat16().cpu(),
        None,
        tuple(np.ones(plane_width(specs, plane), np.float32) for plane in planes),
        predictor.bfloat16().cpu(),
    )


def make_cache(
    shape: Shape,
    profile: Profile,
    tokens: int,
    device: torch.device,
    seed: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> KVCache:
    """A document's bfloat16 cache at positions from 0, on ``device``, with its token ids."""
    draw = torch.Generator(device).manual_seed(seed)
    table = torch.from_numpy(profile.table).to(device)
    weights = 1.0 / (5.0 + torch.arange(len(table), device=device))
    ids = torch.multinomial(weights, tokens, replacement=True, generator=draw)
    dtype, meta = torch.bfloat16, shape.meta("bfloat16")
    keys = [torch.empty(s.kv_heads, tokens, s.key_dim, dtype=dtype, device=device) for s in shape.specs]
    values = [torch.empty(s.kv_heads, tokens, s.value_dim, dtype=dtype, device=device) for s in shape.specs]
    cache = KVCache.from_tensors(keys, values, meta, ids.tolist())
    for group in profile.groups:
        _fill(cache, group, table[ids], draw)
    return cache


def _fill(cache: KVCache, group: Group, features: Tensor, draw: torch.Generator) -> None:
    """Write a group's planes: expectation, coefficients times rows, rotated; ``_BLOCK`` tokens at a time."""
    device = draw.device
    assert group.rows is not None
    assert group.predictor is not None
    rows, predictor = group.rows.to(device).float(), group.predictor.to(device).float()
    mean = torch.from_numpy(group.mean).to(device)
    scale = torch.from_numpy(spreads(group.width) / math.sqrt(2)).float().to(device)
    for start in range(0, cache.tokens, _BLOCK):
        tokens = min(_BLOCK, cache.tokens - start)
        even = torch.rand(tokens, group.rank, generator=draw, device=device) - 0.5
        coefficients = -even.sign() * torch.log1p(-(2 * even.abs()).clamp(max=1 - 1e-7)) * scale
        expected = (mean + features[start : start + tokens].float() @ predictor).bfloat16().float()
        cos_sin = {0: rotation(cache.meta.ropes[0], start, tokens, device)}
        scatter_planes(expected + coefficients @ rows, group.planes, cache, cache.meta, start, cos_sin)
