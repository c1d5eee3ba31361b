"""Linear prediction of caches from features of their text: ridge regression of reduced rank.

All groups share one table of token features: features are projected on the directions that explain most of all groups'
weighted energy, and stored in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvwire.codec.fitting.rounding import round_predictor, table_steps
from kvwire.errors import CacheValueError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.fitting.moments import FeatureMoments, Moments
    from kvwire.codec.fitting.rounding import Precision
    from kvwire.codec.profile.group import QuantisedMatrix

MAX_TABLE_COLUMNS, LEAST_TABLE_COLUMNS = 512, 128
"""Most columns of the token table, and the columns that it may have even if they exceed ``ROWS_SHARE``."""
ROWS_SHARE, FREE_ENTRIES = 1 / 3, 1 << 22
"""The token table may have this share of the entries of all groups' rows, or ``FREE_ENTRIES`` if that is more: large
vocabularies get fewer columns."""
TABLE_CUT = 0.001
"""Least energy that a direction of the features must explain for one token, in squared steps of about the middle level:
less is below the quantisation error."""
LEAST_GAIN = 0.01
"""Least gain of prediction, in nats per element; below, the profile predicts nothing."""
_FLOOR = 1e-3
"""Energy of an element's quantisation error at about the finest levels; smaller residuals cost no bits."""
_RIDGES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Ridge strengths tried, relative to the features' mean variance."""
_ATTEMPTS = 16
_CLIP = 12.0
"""Table entries are clipped at this many root mean squares of the calibration text: rare tokens may have any entry."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """One group's predictor and its residual.

    Attributes:
        predictor: ``[features, width]``, rounded for storage; None without prediction.
        mean: float64 ``[width]``, added to the predictor's product.
        covariance: float64 ``[width, width]``, the residual's covariance.
    """

    predictor: QuantisedMatrix | None
    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Predictions:
    """The shared table and each group's weights.

    Attributes:
        table: int8 ``[vocabulary, r]``; None without prediction from tokens.
        basis: float64 ``[features, r + hidden]``, from raw features to the table's columns; hidden states unchanged.
        centre: float64 ``[features]``, subtracted from features in the table's columns already.
        weights: For each group float64 ``[r + hidden, width]``.
        excess: Factor by which residual energies are larger on text outside the fit.
    """

    table: NDArray[np.int8] | None
    basis: Tensor
    centre: Tensor
    weights: tuple[Tensor, ...]
    excess: float

    @property
    def features(self) -> int:
        """Number of features used; 0 without prediction."""
        return self.basis.shape[1]

    def of_groups(
        self, moments: Sequence[Moments], seen: FeatureMoments, metrics: Sequence[list[Tensor]], precision: Precision
    ) -> Iterator[Prediction]:
        """Round each group's weights and compute the residual's covariance, enlarged by ``excess``."""
        if not self.features:
            yield from (Prediction(None, each.mean, each.covariance) for each in moments)
            return
        reduced = self.basis.T @ seen.covariance @ self.basis
        centre = (seen.mean - self.centre) @ self.basis
        energy = reduced.diagonal() + centre.square()
        for each, weights, metric in zip(moments, self.weights, metrics, strict=True):
            cross = self.basis.T @ each.cross
            left = _left(each.covariance, cross, reduced, weights) + _quantised(metric, precision)
            rounded = round_predictor(weights, energy, left)
            used = rounded.values().double()
            covariance = _left(each.covariance, cross, reduced, used)
            yield Prediction(rounded, each.mean - centre @ used, covariance * self.excess)


def _left(covariance: Tensor, cross: Tensor, reduced: Tensor, weights: Tensor) -> Tensor:
    """Compute the residual's covariance from the covariances of elements, of both, and of features (``reduced``)."""
    shared = weights.T @ cross
    return covariance - shared - shared.T + weights.T @ reduced @ weights


def predict(
    seen: FeatureMoments,
    moments: Sequence[Moments],
    metrics: Sequence[list[Tensor]],
    table: Tensor | None,
    hidden: int,
    precision: Precision,
) -> Predictions:
    """Fit all groups' predictions.

    The ridge is chosen by validation on a held-out part of the vocabulary.
    """
    nothing = Predictions(None, torch.zeros(len(seen.mean), 0, dtype=torch.float64), seen.mean, (), 1.0)
    if not len(seen.mean):
        return nothing
    choice = _best_choice(seen, moments, metrics)
    if choice.gain < LEAST_GAIN:
        return nothing
    factor = _factor(seen.covariance, choice.ridge)
    fits = [torch.cholesky_solve(each.cross, factor) for each in moments]
    freedom = float(torch.cholesky_solve(seen.covariance, factor).trace())
    excess = 1 / max(1 - freedom / seen.tokens, 0.25)
    columns = _columns(seen, fits, moments, metrics, table, precision)
    weights = tuple(torch.cat([columns.down @ fit[: columns.count], fit[columns.count :]]) for fit in fits)
    basis = torch.zeros(len(seen.mean), columns.up.shape[1] + hidden, dtype=torch.float64)
    basis[: columns.count, : columns.up.shape[1]] = columns.up
    basis[columns.count :, columns.up.shape[1] :] = torch.eye(hidden, dtype=torch.float64)
    centre = seen.mean.clone()
    centre[columns.count :] = 0
    return Predictions(columns.entries, basis, centre, weights, excess)


def _factor(covariance: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of the covariance plus a ridge, which grows until the sum is definite."""
    unit = torch.eye(len(covariance), dtype=torch.float64)
    ridge = max(ridge, 1e-12 * float(covariance.diagonal().mean()))
    for power in range(_ATTEMPTS):
        factor: Tensor
        factor, failed_at = torch.linalg.cholesky_ex(covariance + ridge * 10.0**power * unit)
        if not int(failed_at):
            return factor
    msg = "the calibration's features cannot be regressed on; check the statistics and hidden states for huge values"
    raise CacheValueError(msg)


def _weighted(matrix: Tensor, metric: list[Tensor]) -> Tensor:
    """Multiply rows ``[n, width]`` by the metric's Cholesky factor: squared lengths become weighted energies."""
    parts, start = [], 0
    for block in metric:
        heads, dim, _ = block.shape
        part = matrix[:, start : start + heads * dim].reshape(-1, heads, dim)
        root = torch.linalg.cholesky(block.double()).to(part.dtype)
        parts.append(torch.einsum("nhd,hde->nhe", part, root).reshape(len(matrix), -1))
        start += heads * dim
    return torch.cat(parts, 1)


class _Choice(NamedTuple):
    """A ridge and its fit's gain in nats per element."""

    ridge: float
    gain: float


def _best_choice(seen: FeatureMoments, moments: Sequence[Moments], metrics: Sequence[list[Tensor]]) -> _Choice:
    """Choose the ridge whose fit on three quarters of the vocabulary predicts the tokens of the last quarter best.

    The measure is the logarithm of each element's residual energy plus ``_FLOOR``, which is proportional to bits.
    """
    best = _Choice(0.0, 0.0)
    if not len(seen.trials):
        return best
    before = sum(_worth(each.trials, metric) for each, metric in zip(moments, metrics, strict=True))
    elements = sum(each.trials.shape[1] for each in moments)
    variances, axes = torch.linalg.eigh(seen.covariance * seen.tokens - seen.apart)
    turned = [(axes.T @ (each.cross * seen.tokens - each.apart)).float() for each in moments]
    trials = seen.trials @ axes.float()
    for relative in _RIDGES:
        ridge = max(relative * float(variances.mean()), 1e-30)
        known = trials / (variances.clamp(min=0) + ridge).float()
        after = sum(
            _worth(each.trials - known @ cross, metric)
            for each, cross, metric in zip(moments, turned, metrics, strict=True)
        )
        if (before - after) / elements > best.gain:
            best = _Choice(ridge / seen.tokens, (before - after) / elements)
    return best


def _worth(residuals: Tensor, metric: list[Tensor]) -> float:
    """Sum half the logarithm of each weighted element's mean energy: an ideal coder's cost in nats per token."""
    energy = _weighted(residuals, metric).square().mean(0, dtype=torch.float64)
    return 0.5 * float((energy + _FLOOR).log().sum())


@dataclass(frozen=True, eq=False)
class _Columns:
    """The token table ``entries``, int8 ``[vocabulary, r]``; ``up`` maps raw features to it, ``down`` maps back.

    ``count``: number of raw token features.
    """

    count: int
    entries: NDArray[np.int8] | None
    up: Tensor
    down: Tensor


def _columns(
    seen: FeatureMoments,
    fits: list[Tensor],
    moments: Sequence[Moments],
    metrics: Sequence[list[Tensor]],
    table: Tensor | None,
    precision: Precision,
) -> _Columns:
    """Make the token table from the directions of the features that explain most energy, down to TABLE_CUT."""
    if table is None:
        return _Columns(0, None, torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0, 0, dtype=torch.float64))
    count = table.shape[1]
    variances, axes = torch.linalg.eigh(seen.covariance[:count, :count])
    root = variances.clamp(min=float(variances.max()) * 1e-9).sqrt()
    explained = torch.zeros(count, count, dtype=torch.float64)
    for fit, metric in zip(fits, metrics, strict=True):
        turned = _weighted(root[:, None] * (axes.T @ fit[:count]), metric)
        explained += turned @ turned.T
    energies, directions = torch.linalg.eigh(explained)
    rows = sum(fit.shape[1] ** 2 for fit in fits)
    room = int(max(ROWS_SHARE * rows, FREE_ENTRIES)) // len(table)
    most = min(MAX_TABLE_COLUMNS, max(LEAST_TABLE_COLUMNS, room))
    kept = max(1, min(most, int((energies > TABLE_CUT).sum())))
    chosen = directions.flip(1)[:, :kept]
    up, down = axes @ (chosen / root[:, None]), (chosen * root[:, None]).T @ axes.T
    entries = (table - seen.mean[:count].float()) @ up.float()
    width = sum(fit.shape[1] for fit in fits)
    finest = entries.abs().amax(0).clamp(min=1e-12, max=_CLIP) / 127
    scale = torch.maximum(
        finest, table_steps(_sensitivity(seen, fits, moments, metrics, down, precision), width).float()
    )
    stored: NDArray[np.int8] = (entries / scale).round().clamp(-127, 127).to(torch.int8).numpy()
    return _Columns(count, stored, up / scale.double(), scale.double()[:, None] * down)


def _sensitivity(
    seen: FeatureMoments,
    fits: list[Tensor],
    moments: Sequence[Moments],
    metrics: Sequence[list[Tensor]],
    down: Tensor,
    precision: Precision,
) -> Tensor:
    """Return each table column's squared effect on elements, relative to residual plus quantiser error."""
    total = torch.zeros(len(down), dtype=torch.float64)
    for fit, each, metric in zip(fits, moments, metrics, strict=True):
        left = _left(each.covariance, each.cross, seen.covariance, fit) + _quantised(metric, precision)
        columns = down @ fit[: down.shape[1]]
        factor = _factor(left, 0.0)
        total += torch.linalg.solve_triangular(factor, columns.T, upper=False).square().sum(0)
    return total


def _quantised(metric: list[Tensor], precision: Precision) -> Tensor:
    """Return the covariance of the quantiser's error in elements, which is white in the metric."""
    heads = (torch.linalg.inv(head.double()) for block in metric for head in block)
    whole: Tensor = torch.block_diag(*heads)  # type: ignore[no-untyped-call]
    return precision.error * whole
