"""Fit a profile: prediction from the text, the attention-weighted KLT of the rest, and the tables.

Caches and statistics give prediction and weights; caches alone give an unweighted KLT. Without caches, ``encode``
derives an identity transform from each cache.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvwire.codec.backend import SIDES, plane_width, planes_of
from kvwire.codec.entropy import kernels
from kvwire.codec.entropy.tables import (
    ALPHABET,
    CLASSES,
    CONTEXTS,
    POINTS,
    Tables,
    class_of,
    clip_class,
    column_classes,
    fit_tables,
)
from kvwire.codec.fitting.metric import plane_metrics, plane_weights, roots
from kvwire.codec.fitting.moments import Features, MomentSums, spans, tokens_of, trials_of_a_part
from kvwire.codec.fitting.regression import predict
from kvwire.codec.fitting.rounding import Precision, factor_of, round_rows
from kvwire.codec.fitting.sinks import learn_sinks
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.profile.group import Group, RoundedMatrices
from kvwire.codec.profile.profile import Profile
from kvwire.codec.transform.analysis import analyse, gather_planes
from kvwire.codec.transform.levels import Ladder, quantise, split_levels
from kvwire.errors import ArgumentError, CacheValueError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.fitting.moments import FeatureMoments, Moments
    from kvwire.codec.fitting.regression import Prediction
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.profile.group import Factor
    from kvwire.types import KVCache, LayerSpec

GROUP_WIDTH = 4096
"""Elements for one token in a group: keys and values of neighbouring layers are correlated."""
RANK_CUT = 0.15
"""Coefficients narrower than this many finest steps are left out: they are hardly ever coded and would take a fifth of
a profile's rows."""
CUT_MARGIN = 1.3
"""Other texts are expected to need at most this many times the rows that calibration needed for a level."""
_SHRINKAGE_TOKENS = 256
"""Tokens that the isotropic prior of the covariance is worth: short corpora keep every direction."""
_LARGE = 1024
"""Larger matrices use float32 for eigenvectors: energies are then accurate to a millionth of the largest."""
_COUNTED = 12 << 20
"""Coefficients that the entropy coder's tables are counted on, an equal share of every part of the texts."""
_TINY = 1e-20
"""Replaces zero in divisors."""
_RESOLUTION = 2.0**-20
"""Scatter below this share of the mean is rounding noise, whatever a layer's scale."""


class MomentKeeper(Protocol):
    """Stores a fit's sums over caches."""

    def recall(self, digest: Callable[[], str]) -> Mapping[str, NDArray[np.generic]] | None:
        """Return stored sums or None; raises KvwireError where they are damaged or of another ``digest()``."""

    def keep(self, arrays: Callable[[], Mapping[str, NDArray[np.generic]]], total: int) -> None:
        """Offer the sums after one more of ``total`` caches; they include the number of ``caches`` summed."""


def fit_profile(  # noqa: PLR0913 - settings, each with its default
    caches: Sequence[KVCache] | None = None,
    statistics: Statistics | None = None,
    *,
    group_width: int = GROUP_WIDTH,
    rank_cut: float = RANK_CUT,
    ladder: Ladder | None = None,
    text: bool = True,
    prefix_layers: int = 0,
    hidden: Sequence[Tensor] | None = None,
    keeper: MomentKeeper | None = None,
) -> Profile | None:
    """Fit a profile on calibration caches of one model (a few thousand tokens suffice).

    Args:
        caches: Documents' caches of one layout.
        statistics: The engine's metrics and token features; None for an unweighted fit without token features.
        group_width: Most elements for one token in a group of neighbouring layers' keys and values.
        rank_cut: See RANK_CUT; 0 keeps every direction, which costs the finest levels bits: rows of narrow coefficients
            are stored coarsely.
        ladder: The quality levels that the tables are tuned for; None for the default.
        text: Whether to predict from tokens, where statistics have token features and caches have token ids.
        prefix_layers: Number of the model's first layers whose output predicts the rest; 0 for none. Decoding then
            needs that output.
        hidden: That output, ``[tokens, size]`` for each cache, from ``engine.prefix_states``.
        keeper: Stores the sums over caches, so that an interrupted fit can resume; None to store nothing.

    Returns:
        The profile; None where the caches have no more than one token: ``encode(cache, profile=None)`` then uses the
        identity transform.

    Raises:
        MismatchError: The caches are of different models.
        ArgumentError: A setting is impossible.
    """
    if not caches or sum(map(tokens_of, caches)) <= 1:
        return None
    _check(caches, statistics, group_width, rank_cut)
    if (prefix_layers > 0) != (hidden is not None):
        raise ArgumentError("prefix_layers names the layers that hidden comes from: give both or neither")
    first = caches[0].meta
    ladder = ladder or Ladder()
    features = Features(caches, statistics.token_features if statistics and text else None, hidden)
    planes = group_planes(first.layers, group_width)
    seen, moments = _summed(caches, planes, features, keeper)
    weights = plane_weights(first.layers, statistics, planes, moments)
    exact = [plane_metrics(first.layers, statistics, *pair, weights) for pair in zip(planes, moments, strict=True)]
    factors = [tuple(map(_factor, blocks)) for blocks in exact]
    metrics = [list(map(_rounded, *pair)) for pair in zip(exact, factors, strict=True)]
    precision = Precision(ladder.steps[-1])
    prediction = predict(seen, moments, metrics, features.table, features.of_hidden, precision)
    predicted = prediction.of_groups(moments, seen, metrics, precision)
    groups = tuple(
        _basis(*each, seen.tokens, rank_cut * ladder.steps[-1], precision)
        for each in zip(planes, metrics, factors, predicted, strict=True)
    )
    notes: dict[str, str | int | float] = {
        "tokens": seen.tokens,
        "weighted": int(statistics is not None),
        "gradients": int(statistics is not None and len(statistics.gradients) > 0),
    }
    draft = Profile(
        first.model_id, first.model_revision, first.layers, groups, _no_counts(), notes, prediction.table,
        prefix_layers, features.of_hidden if prediction.features else 0,
    )  # fmt: skip
    draft, texts = learn_sinks(draft, caches, hidden, ladder.steps[-1])
    tables, coded = _count(texts, caches, ladder)
    return replace(draft, tables=tables, groups=_with_cuts(draft, coded))


def _with_cuts(profile: Profile, coded: NDArray[np.bool_]) -> tuple[Group, ...]:
    """Set each group's cuts to CUT_MARGIN times the rows that calibration chunks needed."""
    parts = np.split(coded, profile.first_columns[1:-1], axis=1)
    lasts = [[int(level.nonzero()[0].max(initial=-1)) + 1 for level in part] for part in parts]
    return tuple(
        replace(group, cuts=tuple(min(group.rank, math.ceil(CUT_MARGIN * last)) for last in levels))
        for group, levels in zip(profile.groups, lasts, strict=True)
    )


def _summed(
    caches: Sequence[KVCache], planes: Sequence[Sequence[Plane]], features: Features, keeper: MomentKeeper | None
) -> tuple[FeatureMoments, list[Moments]]:
    """Sum the moments, starting from stored sums of the first caches."""
    sums = MomentSums(planes, features, trials_of_a_part([cache.tokens for cache in caches]))
    known = keeper.recall(lambda: _fit_digest(caches, planes, features)) if keeper else None
    if known is not None:
        sums.resume(known)
    for number in range(sums.caches, len(caches)):
        sums.add(caches[number])
        if keeper:
            keeper.keep(sums.arrays, len(caches))
    return sums.finish()


def _fit_digest(caches: Sequence[KVCache], planes: Sequence[Sequence[Plane]], features: Features) -> str:
    """Digest all inputs of the sums: model, groups of planes, features and texts."""
    what = [caches[0].meta.config_digest(), planes, features.of_hidden, "without first tokens"]
    found = hashlib.sha256(json.dumps(what).encode())
    if features.table is not None:
        found.update(features.table.contiguous().numpy().data)
    for cache in caches:
        found.update(f"{cache.tokens} {cache.meta.offset} {cache.meta.positions} {cache.token_ids}\n".encode())
        if cache.token_ids is None:
            found.update(cache.keys[-1].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _check(caches: Sequence[KVCache], statistics: Statistics | None, group_width: int, rank_cut: float) -> None:
    if group_width < 1 or not 0 <= rank_cut < 1:
        raise ArgumentError(f"group_width must be at least 1 and rank_cut in [0, 1), got {group_width} and {rank_cut}")
    first = caches[0].meta
    if not all(cache.meta.shares_config(first) for cache in caches):
        raise MismatchError("calibration caches must all come from one model with one layout")
    if statistics and {len(statistics.query_metric), len(statistics.value_metric)} != {len(first.layers)}:
        msg = f"the statistics must name each of the {len(first.layers)} layers, with None where nothing is known"
        raise ArgumentError(msg)


def identity_profile(cache: KVCache, ladder: Ladder) -> Profile:
    """Derive a profile from one cache alone: a mean per element, a scale per plane, the identity as basis."""
    groups = tuple(_identity_group(cache, plane) for plane in planes_of(cache.meta.layers))
    draft = Profile("", "", cache.meta.layers, groups, _no_counts())
    return replace(draft, tables=count_tables([TextPredictor(draft, cache.tokens, None)], [cache], ladder))


def _identity_group(cache: KVCache, plane: Plane) -> Group:
    elements = gather_planes(cache, (plane,), 0, cache.tokens)
    held = cache.kept[plane[1]] if cache.kept else None
    if held is not None and held.any():  # pruned entries are zero and would bias the mean
        elements = elements[held.cpu().any(0)]
    mean = elements.mean(0, dtype=torch.float64).float()
    centred = elements - mean
    if not np.isfinite(centred.numpy()).all():
        raise CacheValueError(f"the {plane[0]}s of layer {plane[1]} are too large for float32; prefill them again")
    scale = max(_rms(centred), _RESOLUTION * _rms(mean), _TINY)
    spread = column_classes((centred / scale).numpy())
    row_scale = np.full(len(mean), scale, np.float32)
    return Group((plane,), _halved(mean, scale), _as_spread(spread), row_scale=row_scale)


def _halved(mean: Tensor, scale: float) -> NDArray[np.float32]:
    """Round a mean to float16 where that is harmless against the scatter: every blob carries it."""
    half = mean.half().float()
    close = bool(torch.isfinite(half).all()) and float((half - mean).abs().max()) <= scale / 16
    return (half if close else mean).numpy()


def _rms(values: Tensor) -> float:
    """Return the root mean square of any float32 values without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest else 0.0


def _as_spread(classes: NDArray[np.int64]) -> NDArray[np.int16]:
    return np.clip(classes, -1000, 1000).astype(np.int16)


def _no_counts() -> Tables:
    return fit_tables(np.zeros((CLASSES, ALPHABET)), np.zeros((CLASSES, CONTEXTS, 3)))


def group_planes(layers: tuple[LayerSpec, ...], group_width: int) -> list[tuple[Plane, ...]]:
    """Group planes of neighbouring layers that are transformed together."""
    runs: list[list[Plane]] = []
    room = 0
    for layer in range(len(layers)):
        planes = [plane for side in SIDES if plane_width(layers, plane := (side, layer))]
        width = sum(plane_width(layers, plane) for plane in planes)
        pieces = [planes] if width <= group_width else [[plane] for plane in planes]
        for piece in pieces:
            need = sum(plane_width(layers, plane) for plane in piece)
            if need > room:
                runs.append([])
                room = max(group_width, need)
            runs[-1] += piece
            room -= need
    return [tuple(sorted(run)) for run in runs if run]


def _basis(
    planes: tuple[Plane, ...],
    metric: list[Tensor],
    factors: tuple[Factor | None, ...],
    predicted: Prediction,
    tokens: int,
    cut: float,
    precision: Precision,
) -> Group:
    """Make a group: its synthesis rows are eigenvectors of the prediction residual's weighted covariance."""
    root, inverse = roots(metric)
    weighted = root.left_of(root.left_of(predicted.covariance).T)
    isotropic = weighted.diagonal().mean() * _SHRINKAGE_TOKENS / (tokens + _SHRINKAGE_TOKENS) * 1e-3
    weighted.diagonal().add_(isotropic)
    energies, vectors = _axes(weighted)
    # Only with at least as many tokens as directions can small energies mean empty directions.
    kept = max(1, int((energies.clamp(min=0).sqrt() >= cut).sum())) if tokens >= len(energies) else len(energies)
    spread = energies[:kept].clamp(min=0).sqrt()
    diagonals = [torch.diagonal(block, dim1=1, dim2=2).reshape(-1) for block in metric]
    rows = round_rows(inverse.left_of(vectors[:, :kept]).T, spread, torch.cat(diagonals).double(), precision)
    pairs = zip(metric, diagonals, factors, strict=True)
    blocks = tuple((diagonal if factor is None else block).numpy() for block, diagonal, factor in pairs)
    rounded = RoundedMatrices(rows, predicted.predictor, factors)
    mean, classes = predicted.mean.float().numpy(), _as_spread(class_of(spread.numpy()))
    predictor = None if predicted.predictor is None else predicted.predictor.values()
    return Group(planes, mean, classes, rows.values(), None, blocks, predictor, rounded)


def _axes(weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Return energies and directions, largest first; large matrices use float32, since float64 takes long."""
    dtype = torch.float32 if len(weighted) > _LARGE else torch.float64
    try:
        energies, vectors = torch.linalg.eigh(weighted.to(dtype))
    except RuntimeError:  # torch 2.6 allocates too little memory for LAPACK in float32
        energies, vectors = torch.linalg.eigh(weighted)
    return energies.double().flip(0), vectors.double().flip(1)


def _factor(block: Tensor) -> Factor | None:
    """Return a metric's stored factor; None for a diagonal metric, which is stored as it is."""
    return None if torch.equal(torch.diag_embed(torch.diagonal(block, dim1=1, dim2=2)), block) else factor_of(block)


def _rounded(block: Tensor, factor: Factor | None) -> Tensor:
    """Return the metric of a stored factor, so that the whole fit uses the rounded metric."""
    return block if factor is None else torch.from_numpy(factor.metric)


def count_tables(texts: Sequence[TextPredictor], caches: Sequence[KVCache], ladder: Ladder) -> Tables:
    """Fit the entropy coder's tables to the quantised calibration caches, all levels together."""
    return _count(texts, caches, ladder)[0]


def _count(
    texts: Sequence[TextPredictor], caches: Sequence[KVCache], ladder: Ladder
) -> tuple[Tables, NDArray[np.bool_]]:
    """Return the tables, and bool ``[levels, columns]``: whether any chunk codes a column at a level."""
    base, ternary = np.zeros((CLASSES, ALPHABET), np.int64), np.zeros((CLASSES, CONTEXTS, 3), np.int64)
    points = np.zeros((CLASSES, POINTS, 2))
    coded = np.zeros((len(ladder.steps), texts[0].profile.rank), np.bool_)
    parts = ((cache, text, *span) for cache, text in zip(caches, texts, strict=True) for span in spans(cache.tokens))
    share = min(1.0, _COUNTED / (sum(cache.tokens for cache in caches) * texts[0].profile.rank))
    for cache, text, start, stop in parts:
        counted = start + math.ceil(share * (stop - start))
        coefficients, _ = analyse(cache, text, start, counted, ladder.steps[-1], weighs=False)
        values, symbols = split_levels(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
        unit = column_classes(coefficients)
        for level, shift in enumerate(ladder.shifts):
            is_coded = values[level].any(axis=0)
            coded[level] |= is_coded
            classes = np.where(is_coded, clip_class(unit - shift), 0).astype(np.int32)
            kernels.count_base(values[level], classes, base)
            kernels.count_points(coefficients, values[level], classes, ladder.steps[level], points)
            if level:
                kernels.count_ternary(values[level - 1], symbols[level - 1], classes, ternary)
    return fit_tables(base, ternary, points), coded
