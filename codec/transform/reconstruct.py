"""From quantised values to the engine's tensors: the inverse transform, then prediction and rotation in one pass.

The transform sorts columns by energy. The first columns are multiplied as a matrix; the later ones are mostly zeros,
so each of their values adds its row. Where callers accept it, a CPU that multiplies bytes does so for the columns
between, which hold small values: values and rows are rounded to 8 bits, and their product is exact. That adds 0.1 to
0.4 % to the quantiser's squared error, less at coarse levels (SmolLM2-135M-Instruct, a novel and an encyclopaedia).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.profile.group import SMALL
from kvwire.codec.transform.analysis import bits_of, plain, scatter_planes, synthesise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.format.segment import SegmentState
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, KVCache

_SMALL = 7
"""Values up to this are multiplied as bytes; larger ones in float32."""
_POINTS = 16
"""Parts of a whole number in a byte: sizes 1 and 2 have points between whole numbers."""
_STRIP = 1024
"""Least elements of a token computed at a time: more take memory, fewer take time."""
_MULTIPLE = 64
"""Columns of a matrix product are a multiple of this: oneDNN compiles and keeps a kernel for each shape."""

_LISTED_COST = 6
"""Cost of adding one value's row, in values of a matrix product in float32."""
_BYTE_COST = 0.2
"""Cost of one value in a product of bytes, likewise."""
_SHORT_SUMS = 3072
"""Elements of a token: groups up to this width, of small models, are fast enough in float32."""
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

    ``rounded``: values and rows may be rounded far more finely than the quantiser's step.
    """
    coded = state.classes[columns].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0  # the KLT sorts columns: later ones are zero
    columns = slice(columns.start, columns.start + last)
    targets = [(out.keys if side == "key" else out.values)[layer] for side, layer in group.planes]
    if group.is_identity or not all(map(plain, targets)):
        elements = synthesise(coefficients_of(state, columns, step), group, *expected)
        scatter_planes(elements, group.planes, out, meta, start, cos_sin)
        return
    rounded = rounded or all(target.dtype == torch.bfloat16 for target in targets)
    factors = _factors(state, columns, group, in_bytes=rounded and group.width > _SHORT_SUMS and multiplies_bytes())
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


class _Bytes(NamedTuple):
    """Factors of a product of bytes: values ``[tokens, n]``, rows ``[n, width]``, and the step of each element."""

    values: Tensor
    rows: Tensor
    steps: Tensor


class _Factors(NamedTuple):
    """Factors ``values @ rows`` of the first columns, those in bytes, and the single values whose rows are added."""

    values: Tensor
    rows: Tensor
    products: tuple[_Bytes, ...]
    listed: _Listed | None


def _factors(state: SegmentState, columns: slice, group: Group, *, in_bytes: bool) -> _Factors:
    """Return factors ``[tokens, n]`` and ``[n, width]`` whose product is the elements in units of a step."""
    count, tokens = columns.stop - columns.start, len(state.values)
    all_rows = group.first_rows(count)
    wide = slice(columns.start, columns.start + min(_round_up(count), group.loaded_rows))  # the columns added are zero
    limit = _SMALL if in_bytes else _NO_LIMIT
    values, sizes = state.values[:, wide], state.tables.sizes_of(state.classes[wide])
    nonzero, beyond = np.empty(count, np.uint32), np.empty(count, np.uint32)
    value_kernels.count_values(values[:, :count], limit, nonzero, beyond)
    first = _cheapest(beyond, tokens, 1 - _BYTE_COST) if in_bytes else _cheapest(nonzero, tokens, 1.0)
    dense = max(first, _cheapest(nonzero, tokens, _BYTE_COST)) if in_bytes else first
    end = min(_round_up(first), values.shape[1])
    matrix = torch.empty(tokens, end)
    value_kernels.dequantise(values[:, :end], sizes[:, :end], 1.0, matrix.numpy())
    rows = group.first_rows(end) if in_bytes else group.first_synthesis(end)
    span = slice(end, max(end, min(_round_up(dense), values.shape[1])))
    products = tuple(_products(values[:, span], sizes[:, span], group, end))
    counts = np.concatenate((beyond[first:dense], nonzero[dense:])).astype(np.int64)
    ends, total = np.cumsum(counts) - counts, int(counts.sum())
    if not total:
        return _Factors(matrix, rows, products, None)
    at, listed = np.empty(total, np.uint32), np.empty(total, np.float32)
    value_kernels.list_values(values[:, first:], sizes[:, first:], dense - first, limit, ends, at, listed)
    return _Factors(matrix, rows, products, _Listed(ends, at, listed, all_rows[first:]))


def _round_up(columns: int) -> int:
    return -(-columns // _MULTIPLE) * _MULTIPLE


def _cheapest(listed: NDArray[np.uint32], tokens: int, cost: float) -> int:
    """Choose how many first columns cost least as a matrix when the listed values of the others are added."""
    steps = np.append(np.arange(0, len(listed), _MULTIPLE), len(listed))
    after = np.append(np.cumsum(listed[::-1], dtype=np.int64)[::-1], 0)
    return int(steps[np.argmin(cost * steps * tokens + _LISTED_COST * after[steps])])


def _products(values: NDArray[np.int32], sizes: NDArray[np.float32], group: Group, first: int) -> Iterator[_Bytes]:
    """Yield the factors in bytes of columns that begin at ``first``; each piece of rows has its own steps."""
    if not values.shape[1]:
        return
    matrix = torch.empty(values.shape, dtype=torch.int8)
    value_kernels.to_bytes(values, sizes, _SMALL, _POINTS, matrix.numpy())
    for begin, rows, steps in group.rows_in_bytes(first + values.shape[1]):
        low, high = max(begin, first), min(begin + len(rows), first + values.shape[1])
        if low < high:
            part = matrix[:, low - first : high - first].contiguous()
            yield _Bytes(part, rows[low - begin : high - begin], steps / _POINTS)


def _product(factors: _Factors, strip: slice) -> Tensor:
    """Compute the elements of some columns ``[tokens, strip]`` in units of a step."""
    out = factors.values @ factors.rows[:, strip].float()
    for part in factors.products:
        product = torch._int_mm(part.values, part.rows[:, strip])  # noqa: SLF001 - the only product of bytes
        value_kernels.add_product(product.numpy(), part.steps[strip].numpy(), out.numpy())
    if factors.listed is not None:
        ends, tokens, values, rows = factors.listed
        value_kernels.add_listed(ends, tokens, values, *bits_of(rows), strip.start, out.numpy())
    return out


@cache
def multiplies_bytes() -> bool:
    """Return whether the processor multiplies and adds bytes natively, and oneDNN may use that.

    Without such instructions, or told to leave them alone, oneDNN adds pairs of products in 16 bits, which overflow.
    """
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    if not (known and known() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    largest = torch.full((_MULTIPLE, _MULTIPLE), SMALL, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == _MULTIPLE * SMALL**2).all())  # noqa: SLF001 - as above


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
