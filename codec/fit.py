"""Fitting a profile: the attention-weighted KLT, how wide its coefficients spread, and the tables.

It degrades with what is known: caches and statistics give the attention-weighted KLT, caches alone an unweighted one,
and without caches the identity remains, which ``encode`` derives from each cache by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec import _kernels
from kvwire.codec.profile import SIDES, Group, Profile, Side, side_widths
from kvwire.codec.quantiser import Ladder, quantise, split_levels
from kvwire.codec.tables import ALPHABET, CLASSES, CONTEXTS, Tables, class_of, clip_class, column_classes, fit_tables
from kvwire.codec.transform import analyse, gather
from kvwire.errors import ArgumentError, CacheValueError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.statistics import Statistics
    from kvwire.types import KVCache, LayerSpec

GROUP_WIDTH = 2048
"""Elements for one token in a group: neighbouring layers share what is common, the eigenproblem takes seconds."""
RANK_CUT = 0.05
"""Coefficients narrower than this many of the finest steps are left out: they would never be coded."""
_METRIC_FLOOR = 1e-3
"""Directions that attention ignores keep this share of the mean weight, so that their errors stay bounded."""
_SHRINKAGE_TOKENS = 256
"""The covariance leans on an isotropic one as if that many tokens had been seen: short corpora keep every direction."""
_TINY = 1e-20
"""Stands for zero where something is divided by."""
_RESOLUTION = 2.0**-20
"""Scatter below this share of the mean is rounding noise, whatever a layer's scale."""
_CHUNK = 1024
"""Tokens gathered at a time."""


def fit_profile(
    caches: Sequence[KVCache] | None = None,
    statistics: Statistics | None = None,
    *,
    group_width: int = GROUP_WIDTH,
    rank_cut: float = RANK_CUT,
    ladder: Ladder | None = None,
) -> Profile | None:
    """Learn a profile from calibration caches of one model (a few thousand tokens will do).

    caches: documents' caches, all of one layout. statistics: the engine's query energies and value metrics.
    group_width: elements for one token up to which neighbouring layers are transformed together. rank_cut: see
    RANK_CUT; 0 keeps every direction. ladder: the quality levels that the tables are tuned for.
    Returns None where there are no caches, or a single token in all: ``encode(cache, profile=None)`` then uses the
    identity transform.
    Raises MismatchError where the caches are of different models, ArgumentError where a setting is impossible.
    """
    if not caches or sum(cache.tokens for cache in caches) <= 1:
        return None
    if group_width < 1 or not 0 <= rank_cut < 1:
        msg = f"group_width must be at least 1 and rank_cut in [0, 1), got {group_width} and {rank_cut}"
        raise ArgumentError(msg)
    first = caches[0].meta
    if any(cache.meta.config_digest() != first.config_digest() for cache in caches):
        msg = "calibration caches must all come from one model with one layout"
        raise MismatchError(msg)
    if statistics and {len(statistics.query_energy), len(statistics.value_metric)} != {len(first.layers)}:
        msg = f"the statistics must name each of the {len(first.layers)} layers, with None where nothing is known"
        raise ArgumentError(msg)
    ladder = ladder or Ladder()
    groups = tuple(
        _fit_group(caches, statistics, side, layers, rank_cut * ladder.steps[-1])
        for side in SIDES
        for layers in _group_layers(first.layers, side, group_width)
    )
    draft = Profile(first.model_id, first.model_revision, first.layers, groups, _no_counts())
    tokens = sum(cache.tokens for cache in caches)
    notes: dict[str, str | int | float] = {"tokens": tokens, "weighted": int(statistics is not None)}
    tables = count_tables(draft, caches, ladder)
    return Profile(draft.model_id, draft.model_revision, draft.layers, draft.groups, tables, notes)


def identity_profile(cache: KVCache, ladder: Ladder) -> Profile:
    """A profile derived from one cache alone: per-element means, one scale for each layer, no rotation of the basis."""
    groups = tuple(
        _identity_group(cache, side, layer)
        for side in SIDES
        for layer, width in enumerate(side_widths(cache.meta.layers, side))
        if width
    )
    draft = Profile("", "", cache.meta.layers, groups, _no_counts())
    return Profile("", "", draft.layers, draft.groups, count_tables(draft, [cache], ladder))


def _identity_group(cache: KVCache, side: Side, layer: int) -> Group:
    elements = gather(cache, side, (layer,), 0, cache.tokens)
    mean = elements.mean(0, dtype=torch.float64).float()
    centred = elements - mean
    _check_finite(centred, side, (layer,))
    scale = max(_rms(centred), _RESOLUTION * _rms(mean), _TINY)
    spread = column_classes((centred / scale).numpy())
    return Group(side, (layer,), _halved(mean, scale), np.full(len(mean), scale, np.float32), _as_spread(spread))


def _halved(mean: Tensor, scale: float) -> NDArray[np.float32]:
    """The mean as float16 has it, where that is close against the scatter: it travels in every blob."""
    half = mean.half().float()
    close = bool(torch.isfinite(half).all()) and float((half - mean).abs().max()) <= scale / 16
    return (half if close else mean).numpy()


def _rms(values: Tensor) -> float:
    """Root of the mean square, of any float32 without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest else 0.0


def _check_finite(values: Tensor, side: Side, layers: tuple[int, ...]) -> None:
    if not np.isfinite(values.numpy()).all():
        msg = f"the {side}s of layers {layers[0]} to {layers[-1]} are too large for float32; prefill them again"
        raise CacheValueError(msg)


def _as_spread(classes: NDArray[np.int64]) -> NDArray[np.int16]:
    return np.clip(classes, -1000, 1000).astype(np.int16)


def _no_counts() -> Tables:
    return fit_tables(np.zeros((CLASSES, ALPHABET)), np.zeros((CLASSES, CONTEXTS, 3)))


def _group_layers(layers: tuple[LayerSpec, ...], side: Side, group_width: int) -> list[tuple[int, ...]]:
    """Runs of neighbouring layers whose widths add up to at most ``group_width``; a wider layer stands alone."""
    runs: list[list[int]] = []
    room = 0
    for layer, width in enumerate(side_widths(layers, side)):
        if not width:
            continue
        if width > room:
            runs.append([])
            room = max(group_width, width)
        runs[-1].append(layer)
        room -= width
    return [tuple(run) for run in runs]


def _fit_group(
    caches: Sequence[KVCache], statistics: Statistics | None, side: Side, layers: tuple[int, ...], cut: float
) -> Group:
    pieces = [
        gather(cache, side, layers, start, min(start + _CHUNK, cache.tokens))
        for cache in caches
        for start in range(0, cache.tokens, _CHUNK)
    ]
    tokens = sum(len(piece) for piece in pieces)
    mean = torch.stack([piece.sum(0, dtype=torch.float64) for piece in pieces]).sum(0).div(tokens).float()
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for piece in pieces:
        centred = piece - mean
        covariance += (centred.T @ centred).double()
    covariance /= tokens
    _check_finite(covariance, side, layers)
    blocks = [_metric_block(caches[0].meta.layers[layer], statistics, side, layer) for layer in layers]
    metric = _balanced(blocks, mean.double(), covariance)
    return _basis(side, layers, mean, covariance, metric, tokens, cut)


def _metric_block(spec: LayerSpec, statistics: Statistics | None, side: Side, layer: int) -> Tensor:
    """The attention metric of a layer, float64 ``[heads, dim, dim]``, floored; the unit matrix where it is unknown."""
    dim = spec.key_dim if side == "key" else spec.value_dim
    block = torch.eye(dim, dtype=torch.float64).repeat(spec.kv_heads, 1, 1)
    if statistics is not None:
        known = (statistics.query_energy if side == "key" else statistics.value_metric)[layer]
        if known is not None:
            given = known.double().cpu()
            given = torch.diag_embed(given) if side == "key" else given
            if given.shape != block.shape or not np.isfinite(given.numpy()).all():
                msg = (
                    f"layer {layer}'s {side} statistics have another shape than its {side}s, or NaN; measure them again"
                )
                raise ArgumentError(msg)
            block = given
    mean_weight = float(torch.diagonal(block, dim1=1, dim2=2).mean())
    return block + max(_METRIC_FLOOR * mean_weight, _TINY) * torch.eye(dim, dtype=torch.float64)


def _balanced(blocks: list[Tensor], mean: Tensor, covariance: Tensor) -> list[Tensor]:
    """Each layer's metric, float32, scaled so that its weighted energy is 1 for each element.

    A layer that hardly scatters about its mean is scaled by its mean instead, one that is zero by its metric.
    """
    out, start = [], 0
    for block in blocks:
        heads, dim, _ = block.shape
        width = heads * dim
        own = covariance[start : start + width, start : start + width].reshape(heads, dim, heads, dim)
        scatter = float(torch.einsum("hde,hdhe->", block, own))
        constant = float(torch.einsum("hde,hd,he->", block, *(2 * [mean[start : start + width].reshape(heads, dim)])))
        trace = float(torch.diagonal(block, dim1=1, dim2=2).sum())
        energy = max(scatter, _RESOLUTION**2 * constant) or trace
        out.append((block * (width / energy)).float())
        start += width
    return out


def _basis(
    side: Side,
    layers: tuple[int, ...],
    mean: Tensor,
    covariance: Tensor,
    metric: list[Tensor],
    tokens: int,
    cut: float,
) -> Group:
    """Eigenvectors of the weighted covariance, as synthesis rows; see ``Group``."""
    root, inverse = _roots(metric)
    weighted = root @ covariance @ root
    isotropic = weighted.diagonal().mean() * _SHRINKAGE_TOKENS / (tokens + _SHRINKAGE_TOKENS) * 1e-3
    weighted.diagonal().add_(isotropic)
    energies, vectors = torch.linalg.eigh(weighted)
    energies, vectors = energies.flip(0), vectors.flip(1)
    # Only many tokens can tell that a direction is empty; a few leave most directions unseen.
    kept = max(1, int((energies.clamp(min=0).sqrt() >= cut).sum())) if tokens >= len(energies) else len(energies)
    rows = (inverse @ vectors[:, :kept]).T.float()
    row_scale = rows.abs().amax(1).clamp(min=1e-20)
    spread = class_of(energies[:kept].clamp(min=0).sqrt().numpy())
    blocks = tuple(_compact(block).contiguous().numpy() for block in metric)
    unit_rows = (rows / row_scale[:, None]).numpy().astype(np.float16)
    return Group(side, layers, mean.numpy(), row_scale.numpy(), _as_spread(spread), unit_rows, blocks)


def _compact(block: Tensor) -> Tensor:
    """A diagonal metric as a vector: keys' always is."""
    diagonal = torch.diagonal(block, dim1=1, dim2=2)
    return diagonal.reshape(-1) if torch.equal(torch.diag_embed(diagonal), block) else block


def _roots(metric: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Block-diagonal symmetric square root of the metric, and its inverse, float64."""
    roots, inverses = [], []
    for block in metric:
        for matrix in block.double():
            values, vectors = torch.linalg.eigh(matrix)
            values = values.clamp(min=float(values.max()) * 1e-9)
            roots.append(vectors @ torch.diag(values.sqrt()) @ vectors.T)
            inverses.append(vectors @ torch.diag(values.rsqrt()) @ vectors.T)
    return _block_diagonal(roots), _block_diagonal(inverses)


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    out = torch.zeros(2 * (sum(len(block) for block in blocks),), dtype=torch.float64)
    start = 0
    for block in blocks:
        out[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return out


def count_tables(profile: Profile, caches: Sequence[KVCache], ladder: Ladder) -> Tables:
    """Tables counted from what the quantiser makes of the calibration caches, all levels of the ladder together."""
    base, ternary = np.zeros((CLASSES, ALPHABET), np.int64), np.zeros((CLASSES, CONTEXTS, 3), np.int64)
    for cache in caches:
        for start in range(0, cache.tokens, _CHUNK):
            coefficients, _ = analyse(cache, profile, start, min(start + _CHUNK, cache.tokens))
            values, symbols = split_levels(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
            unit = column_classes(coefficients)
            for level, shift in enumerate(ladder.shifts):
                classes = np.where(values[level].any(axis=0), clip_class(unit - shift), 0).astype(np.int32)
                _kernels.count_base(values[level], classes, base)
                if level:
                    _kernels.count_ternary(values[level - 1], symbols[level - 1], classes, ternary)
    return fit_tables(base, ternary)
