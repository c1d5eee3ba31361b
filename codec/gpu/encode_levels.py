"""Coefficients on the device to levels: quantised, split, measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.backend import interpreted
from kvwire.codec.entropy.tables import CLASSES, FINEST_SCALE, GRID_PER_LEVEL
from kvwire.codec.gpu import encode_kernels as kernels
from kvwire.codec.transform.quantiser import RATIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.gpu.profile import DeviceProfile

COLUMN_BLOCK = 128
ROW_BLOCK = 4
_ROWS = 1024
"""Tokens quantised at a time: what float32 takes stays small against the batch."""


def quantised(coefficients: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Quantise as ``transform.quantiser.quantise`` does, without its check."""
    out = torch.empty(coefficients.shape, dtype=torch.int32, device=coefficients.device)
    sizes = [torch.zeros((), dtype=torch.float32, device=coefficients.device)]
    for part, target in zip(torch.split(coefficients, _ROWS), torch.split(out, _ROWS), strict=True):
        scaled = part * float(np.float32(1.0 / step))
        if scaled.numel():
            sizes.append(scaled.abs().amax())
        target.copy_(scaled.round_())
    return out, torch.stack(sizes).amax()


def measured(coefficients: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Measure every column of every chunk."""
    chunks, columns = len(bounds) - 1, coefficients.shape[1]
    ends = torch.tensor(bounds, device=coefficients.device)
    magnitudes, squares = torch.empty(2, chunks, columns, dtype=torch.float32, device=coefficients.device)
    block = block_of(COLUMN_BLOCK, columns)
    kernels.measure[(chunks, -(-columns // block))](coefficients, ends, magnitudes, squares, columns, BLOCK=block)
    scale = (magnitudes / ends.diff()[:, None]).double() * math.sqrt(2)
    grid = GRID_PER_LEVEL * torch.log(scale.clamp(min=1e-30) / FINEST_SCALE) / math.log(3.0)
    return grid.round_().long() + 1, squares


@dataclass(frozen=True, eq=False)
class Batch:
    """Chunks that follow each other, quantised, with all that their segments say, on the device.

    Attributes:
        bounds: Chunk i has rows ``bounds[i]`` to ``bounds[i + 1]``.
        values: int32 ``[tokens, columns]`` of the last level.
        symbols: uint8 ``[tokens, levels, columns]``, see ``encode_kernels.split``.
        classes: uint8 ``[chunks, levels, columns]``, 0 while a column is not coded.
        entry: uint8 ``[chunks, columns]``, the level at which a column enters (one beyond the last: never).
        codes: uint8 ``[chunks, columns]``, its byte in the class list there.
    """

    bounds: tuple[int, ...]
    values: Tensor
    symbols: Tensor
    classes: Tensor
    entry: Tensor
    codes: Tensor


def split_values(
    values: Tensor, unit: Tensor, bounds: tuple[int, ...], shifts: tuple[int, ...], known: DeviceProfile
) -> Batch:
    """Split quantised values into levels and decide where columns enter and in which class."""
    (tokens, columns), chunks, levels = values.shape, len(bounds) - 1, len(shifts)
    symbols = torch.empty(tokens, levels, columns, dtype=torch.uint8, device=values.device)
    size = torch.empty(chunks, columns, dtype=torch.int32, device=values.device)
    ends = torch.tensor(bounds, device=values.device)
    block = block_of(COLUMN_BLOCK, columns)
    grid = (chunks, -(-columns // block))
    kernels.split[grid](values, ends, symbols, size, columns, LEVELS=levels, ROWS=ROW_BLOCK, BLOCK=block)
    entry = torch.zeros_like(size)
    for _ in shifts:
        entry += size == 0
        size = coarser(size)
    coded, codes = torch.zeros_like(unit), torch.zeros_like(unit)
    classes = torch.empty(chunks, levels, columns, dtype=torch.uint8, device=values.device)
    for level, shift in enumerate(shifts):
        fresh, chosen = entry == level, (unit - shift).clamp(1, CLASSES)
        delta = chosen - (known.spread - shift).clamp(1, CLASSES)
        codes = torch.where(fresh, torch.where(delta >= 0, 2 * delta, -2 * delta - 1) + 1, codes)
        risen = torch.where(coded > 0, (coded + GRID_PER_LEVEL).clamp(1, CLASSES), 0)
        coded = torch.where(fresh, chosen, risen)
        classes[:, level] = coded
    return Batch(bounds, values, symbols, classes, entry.to(torch.uint8), codes.to(torch.uint8))


def squared_errors(coefficients: Tensor, batch: Batch, steps: tuple[float, ...], known: DeviceProfile) -> Tensor:
    """Measure every chunk decoded at every level."""
    chunks, levels, columns = batch.classes.shape
    missed = torch.empty(batch.classes.shape, dtype=torch.float32, device=coefficients.device)
    ends = torch.tensor(batch.bounds, device=coefficients.device)
    sizes = torch.tensor(steps, dtype=torch.float32, device=coefficients.device)
    block = block_of(COLUMN_BLOCK, columns)
    grid = (chunks, -(-columns // block), levels)
    kernels.squared_errors[grid](
        coefficients,
        batch.values,
        ends,
        batch.classes,
        known.sizes,
        sizes,
        missed,
        columns,
        LEVELS=levels,
        ROWS=ROW_BLOCK,
        BLOCK=block,
    )
    return missed.sum(2, dtype=torch.float64)


def coarser(values: Tensor) -> Tensor:
    """Go one level down."""
    return torch.div(values + 1, RATIO, rounding_mode="floor")


def block_of(usual: int, count: int) -> int:
    """Choose the elements of a program; the interpreter takes as long for many as for few, so there one does all."""
    return 1 << max(0, count - 1).bit_length() if interpreted() else usual
