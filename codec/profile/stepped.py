"""Matrices as whole numbers times a step for each row and one for each column: how profiles store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 32767
"""Largest entry."""
SMALL = 127
"""Entries up to this fit one byte."""


@dataclass(frozen=True, eq=False)
class Stepped:
    """A matrix ``entries[i, j] * row_steps[i] * column_steps[j]``.

    Attributes:
        entries: int16 ``[rows, columns]``.
        row_steps: float32 ``[rows]``, above 0.
        column_steps: float32 ``[columns]``, above 0.
    """

    entries: NDArray[np.int16]
    row_steps: NDArray[np.float32]
    column_steps: NDArray[np.float32]

    def values(self) -> torch.Tensor:
        """The matrix as the codec uses it.

        Returns:
            bfloat16 ``[rows, columns]``: the products in float32, from left to right, then rounded once.
        """
        out = torch.from_numpy(self.entries).float()
        out *= torch.from_numpy(self.row_steps)[:, None]
        out *= torch.from_numpy(self.column_steps)
        return out.bfloat16()

    @property
    def wide_rows(self) -> int:
        """Rows up to the last one with an entry that needs two bytes."""
        wide = np.flatnonzero((np.abs(self.entries.astype(np.int32)) > SMALL).any(axis=1))
        return int(wide[-1]) + 1 if len(wide) else 0


def values_naive(matrix: Stepped) -> torch.Tensor:
    """Compute ``Stepped.values`` entry by entry: its readable twin.

    Args:
        matrix: Few entries.

    Returns:
        bfloat16 of the same shape.
    """
    rows = [
        [np.float32(entry) * row * column for entry, column in zip(line, matrix.column_steps, strict=True)]
        for line, row in zip(matrix.entries, matrix.row_steps, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float32).reshape(matrix.entries.shape).bfloat16()


@dataclass(frozen=True, eq=False)
class Factor:
    """The metric of one plane by its Cholesky factors: entry times step of its row, below and on each diagonal.

    Attributes:
        entries: int8 ``[heads, dim * (dim + 1) / 2]``, row by row.
        steps: float32 ``[heads, dim]``, above 0.
    """

    entries: NDArray[np.int8]
    steps: NDArray[np.float32]

    def metric(self) -> NDArray[np.float32]:
        """Multiply out.

        Returns:
            float32 ``[heads, dim, dim]``, symmetric and never indefinite.

        Raises:
            CorruptError: Entries and steps do not belong together.
        """
        heads, dim = self.steps.shape
        if self.entries.shape != (heads, dim * (dim + 1) // 2):
            msg = "a metric's factor in the profile has another shape than its steps; fetch the profile again"
            raise CorruptError(msg)
        lower = np.zeros((heads, dim, dim), np.float32)
        rows, columns = np.tril_indices(dim)
        with np.errstate(over="ignore", invalid="ignore"):  # readers check what comes out
            lower[:, rows, columns] = self.entries * self.steps[:, rows]
            product: NDArray[np.float32] = lower @ lower.transpose(0, 2, 1)
        return np.tril(product) + np.tril(product, -1).transpose(0, 2, 1)


@dataclass(frozen=True, eq=False)
class SteppedGroup:
    """What a group's matrices were rounded to; the group has the same as numbers.

    Attributes:
        rows: Of the synthesis.
        predictor: None where the text says nothing.
        factors: Of each plane's metric; None for a diagonal one.
    """

    rows: Stepped
    predictor: Stepped | None
    factors: tuple[Factor | None, ...]
