"""From quantised values to the engine's tensors: the inverse transform, then prediction and rotation in one pass.

The transform sorts columns by energy. The first columns are multiplied as a matrix; the later ones are mostly zeros,
so each of their values adds its row. On a CPU that multiplies bfloat16, the matrix product runs in bfloat16 where the
output has that precision, or where callers accept it and the step is far coarser. Whole numbers up to 256 and the
stored rows are exact in bfloat16, so only the sum is rounded, before the prediction is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.transform.analysis import HALVED_STEP, bits_of, fast_bfloat16, plain, scatter_planes, synthesise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.format.segment import SegmentState
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, KVCache

_EXACT = 256
"""Whole numbers up to this are exact in bfloat16."""
_STRIP = 1024
"""Least elements of a token computed at a time: more take memory, fewer take time."""
_MULTIPLE = 64
"""Columns of a matrix product are a multiple of this: oneDNN compiles and keeps a kernel for each shape."""

_LISTED_COST = 6
"""Cost of adding one value's row, in values of a matrix product: between 4 in float32 and 8 in bfloat16."""
_SHORT_SUMS = 3072
"""Elements of a token: groups up to this width, of small models, are fast enough with sums in float32."""
_NO_LIMIT = 2**31 - 1

CosSin = dict[int, tuple["Tensor", "Tensor"]]
"""For each regime index, float32 cosines and sines ``[tokens, pairs]``."""


def place_group(  # noqa: PLR0913, PLR0917 - joins decoded values, prediction and output
    state: SegmentState,
    group: Group,
    columns: slice,
    step: float,
    expected: tuple[Tensor, NDArray[np.uint32]],
    out: KVCache,
    meta: CacheMeta,
    start: int,
    cos_sin: CosSin,
    *,
    rounded: bool = False,
) -> None:
    """Write a group's keys and values of one chunk into a cache.

    ``rounded``: sums may have bfloat16's precision where the step is coarse, for any dtype of the output.
    """
    coded = state.classes[columns].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0  # the KLT sorts columns: later ones are zero
    columns = slice(columns.start, columns.start + last)
    targets = [(out.keys if side == "key" else out.values)[layer] for side, layer in group.planes]
    if group.is_identity or not all(map(plain, targets)):
        elements = synthesise(coefficients_of(state, columns, step), group, *expected)
        scatter_planes(elements, group.planes, out, meta, start, cos_sin)
        return
    if not last:
        factors = _Factors(torch.zeros(state.values.shape[0], 0), group.first_synthesis(0))
    else:
        in_bfloat16 = all(target.dtype == torch.bfloat16 for target in targets) or (
            rounded and step >= HALVED_STEP and group.width > _SHORT_SUMS
        )
        factors = _factors(state, columns, group, halved=in_bfloat16 and fast_bfloat16())
    first = 0
    for planes in _strips([target.shape[0] * target.shape[2] for target in targets]):
        width = sum(target.shape[0] * target.shape[2] for target in targets[planes])
        product = _product(factors, slice(first, first + width))
        _place(product, step, first, group.planes[planes], expected, targets[planes], meta, start, cos_sin)
        first += width


def coefficients_of(state: SegmentState, columns: slice, step: float) -> Tensor:
    """Dequantise coefficients, float32 ``[tokens, columns]``."""
    values = state.values[:, columns]
    out = torch.empty(values.shape, dtype=torch.float32)
    value_kernels.dequantise(values, state.tables.sizes_of(state.classes[columns]), step, out.numpy())
    return out


def _strips(widths: list[int]) -> Iterator[slice]:
    """Yield runs of planes that are multiplied together: the product of a few planes fits a core's own cache."""
    begin, total = 0, 0
    for index, width in enumerate(widths):
        total += width
        if total >= _STRIP or index == len(widths) - 1:
            yield slice(begin, index + 1)
            begin, total = index + 1, 0


class _Listed(NamedTuple):
    """Single values, column by column: the end of each column's list, their tokens, the values, and synthesis rows."""

    ends: NDArray[np.int64]
    tokens: NDArray[np.uint32]
    values: NDArray[np.float32]
    rows: Tensor


class _Factors(NamedTuple):
    """Factors of the product ``values @ rows``, and single values whose rows are added in float32."""

    values: Tensor
    rows: Tensor
    listed: _Listed | None = None


def _factors(state: SegmentState, columns: slice, group: Group, *, halved: bool) -> _Factors:
    """Return factors ``[tokens, n]`` and ``[n, width]`` whose product is the elements in units of a step.

    ``halved``: the factors are bfloat16; values that are not exact in bfloat16 are listed.
    """
    count = columns.stop - columns.start
    rows = group.first_rows(count)
    values, sizes = state.values[:, columns], state.tables.sizes_of(state.classes[columns])
    limit = _EXACT if halved else _NO_LIMIT
    nonzero, beyond = np.empty(count, np.uint32), np.empty(count, np.uint32)
    value_kernels.count_values(values, limit, nonzero, beyond)
    dense = _dense(nonzero, len(values))
    wide = min(-(-dense // _MULTIPLE) * _MULTIPLE, group.loaded_rows)  # columns past the last coded one are zero
    first_values = state.values[:, columns.start : columns.start + wide]
    first_sizes = state.tables.sizes_of(state.classes[columns.start : columns.start + wide])
    if halved:
        matrix, first_rows = torch.empty(len(values), wide, dtype=torch.bfloat16), group.first_rows(wide)
        value_kernels.to_bfloat16(first_values, first_sizes, limit, matrix.view(torch.uint16).numpy())
    else:
        matrix, first_rows = torch.empty(len(values), wide), group.first_synthesis(wide)
        value_kernels.dequantise(first_values, first_sizes, 1.0, matrix.numpy())
    counts = np.concatenate((beyond[:dense], nonzero[dense:])).astype(np.int64)
    ends, total = np.cumsum(counts) - counts, int(counts.sum())
    if not total:
        return _Factors(matrix, first_rows)
    tokens, listed = np.empty(total, np.uint32), np.empty(total, np.float32)
    value_kernels.list_values(values, sizes, dense, limit, ends, tokens, listed)
    return _Factors(matrix, first_rows, _Listed(ends, tokens, listed, rows))


def _dense(nonzero: NDArray[np.uint32], tokens: int) -> int:
    """Choose how many first columns are multiplied as a matrix so that matrix and list take the least time."""
    steps = np.minimum(np.arange(0, len(nonzero) + _MULTIPLE, _MULTIPLE), len(nonzero))
    after = np.append(np.cumsum(nonzero[::-1], dtype=np.int64)[::-1], 0)
    return int(steps[np.argmin(steps * tokens + _LISTED_COST * after[steps])])


def _product(factors: _Factors, strip: slice) -> Tensor:
    """Compute the elements of some columns ``[tokens, strip]``; bfloat16 where all factors are."""
    product = factors.values @ factors.rows[:, strip]
    if factors.listed is None:
        return product
    ends, tokens, values, rows = factors.listed
    out = product.float()
    value_kernels.add_listed(ends, tokens, values, *bits_of(rows), strip.start, out.numpy())
    return out


def _place(  # noqa: PLR0913, PLR0917 - as above
    product: Tensor,
    scale: float,
    first: int,
    planes: Sequence[Plane],
    expected: tuple[Tensor, NDArray[np.uint32]],
    targets: list[Tensor],
    meta: CacheMeta,
    start: int,
    cos_sin: CosSin,
) -> None:
    (bits, expand), (rows, expand_rows), of_token = bits_of(product), bits_of(expected[0]), expected[1]
    unrotated = np.empty((len(of_token), 0), np.float32)
    at = 0
    for (side, layer), target in zip(planes, targets, strict=True):
        rotary = meta.layers[layer].rotary(side) if cos_sin else None
        cosines, sines, interleaved, begin = unrotated, unrotated, False, 0
        if rotary is not None:
            regime, begin = rotary
            cosines, sines = (each.numpy() for each in cos_sin[regime])
            interleaved = meta.ropes[regime].interleaved
        value_kernels.place_elements(
            bits, expand, scale, at, rows, expand_rows, of_token, first + at, cosines, sines, interleaved, begin,
            *bits_of(target), start,
        )  # fmt: skip
        at += target.shape[0] * target.shape[2]
