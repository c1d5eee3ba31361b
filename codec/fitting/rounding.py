"""Round a profile's matrices as finely as the quantiser's finest step needs.

The rounding error of rows, predictors and the token table is limited to a share of the error of coding or prediction.
Rows of wide coefficients need many bits, rows of narrow ones few.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec.profile.group import LARGEST, SMALL, Factor, QuantisedMatrix

if TYPE_CHECKING:
    from torch import Tensor

ROW_SHARE = 1.0
"""Error of rounding a row, as a share of a coefficient's quantiser error at the finest step. Other coefficients absorb
most of it, since the encoder solves for the rounded rows."""
TABLE_SHARE = 0.003
"""Error of rounding the token table, as a share of an element's prediction residual."""
PREDICTOR_SHARE = 0.006
"""Error of rounding the predictors, likewise."""
_COARSEST = 1.0
"""Largest step of a matrix row, in root mean squares of its entries: with larger steps, rows would become dependent."""
_BLOCK = 64
"""Columns rounded between two matrix products."""


class Precision(NamedTuple):
    """The precision that a profile needs.

    Attributes:
        step: The finest quantiser step.
    """

    step: float

    @property
    def error(self) -> float:
        """The quantiser's mean squared error of a coefficient."""
        return self.step**2 / 12


def factor_of(block: Tensor) -> Factor:
    """Round a metric's Cholesky factors to 8 bits with a step for each row."""
    lower = torch.linalg.cholesky(block.double())
    steps = (lower.abs().amax(2) / SMALL).float()
    entries = (lower / steps[:, :, None]).round().clamp(-SMALL, SMALL)
    diagonal = torch.diagonal(entries, dim1=1, dim2=2)
    diagonal.clamp_(min=1)
    rows, columns = np.tril_indices(block.shape[-1])
    return Factor(entries[:, rows, columns].to(torch.int8).numpy(), steps.numpy())


def round_rows(rows: Tensor, spread: Tensor, metric: Tensor, precision: Precision) -> QuantisedMatrix:
    """Round synthesis rows, with larger steps for coefficients of smaller spread."""
    columns = (metric * len(metric)).rsqrt().float()
    wanted = math.sqrt(ROW_SHARE) * precision.step / spread.clamp(min=1e-12)
    scaled = rows / columns
    steps = _row_steps(wanted, scaled)
    entries = (scaled / steps[:, None].double()).round()
    return _quantised_matrix(entries, steps, columns)


def _row_steps(wanted: Tensor, scaled: Tensor) -> Tensor:
    """Limit rows' steps, in units of the columns' steps, to the row's root mean square and to entries of 16 bits."""
    root = scaled.square().mean(1).sqrt()
    finest = (scaled.abs().amax(1) / (LARGEST - 1)).clamp(min=1e-30)
    return torch.maximum(torch.minimum(wanted, _COARSEST * root), finest).float()


def _quantised_matrix(entries: Tensor, rows: Tensor, columns: Tensor) -> QuantisedMatrix:
    whole = entries.clamp(-LARGEST, LARGEST).to(torch.int16).contiguous()
    return QuantisedMatrix(whole.numpy(), rows.numpy(), columns.numpy())


def table_steps(sensitivity: Tensor, width: int) -> Tensor:
    """Choose the steps of the token table's columns by their effect on elements."""
    share = TABLE_SHARE * width / max(1, len(sensitivity))
    return (12 * share / sensitivity.clamp(min=1e-30)).sqrt().clamp(max=_COARSEST)


def round_predictor(weights: Tensor, energy: Tensor, left: Tensor) -> QuantisedMatrix:
    """Round a predictor so that the error is small against the residual's covariance ``left``."""
    lower, conditional = _factors(left)
    columns = conditional.rsqrt().float()
    wanted = (12 * PREDICTOR_SHARE / (len(weights) * energy.clamp(min=1e-30))).sqrt()
    steps = _row_steps(wanted, weights / columns)
    return _quantised_matrix(round_with_feedback(weights, steps.double(), columns.double(), lower), steps, columns)


def _factors(left: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit lower L and diagonal D of the inverse L D L^T; the diagonal's inverse where Cholesky fails."""
    root, failed = torch.linalg.cholesky_ex(left)
    lower, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(root)) if not int(failed) else (root, failed)
    if int(failed) or int(failed_too):
        return torch.eye(len(left), dtype=torch.float64), 1 / left.diagonal().clamp(min=1e-30)
    diagonal = lower.diagonal().clone()
    return lower / diagonal, diagonal.square()


def round_with_feedback(matrix: Tensor, rows: Tensor, columns: Tensor, lower: Tensor) -> Tensor:
    """Round a matrix column by column from the last one, each column compensating the errors of those before.

    For a row's error e, ``e L D L^T e^T`` is then a twelfth of the squared step for each column, weighted by D. One
    matrix product applies the errors of earlier blocks of columns.
    """
    errors, entries = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for stop in range(matrix.shape[1], 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        lean = errors[:, stop:] @ lower[stop:, start:stop]
        for column in range(stop - 1, start - 1, -1):
            known = errors[:, column + 1 : stop] @ lower[column + 1 : stop, column]
            wanted = matrix[:, column] - lean[:, column - start] - known
            step = rows * columns[column]
            entries[:, column] = (wanted / step).round()
            errors[:, column] = entries[:, column] * step - matrix[:, column]
    return entries
