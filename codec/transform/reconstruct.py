"""From quantised values to the engine's tensors: the inverse transform and, in one pass, all that follows it.

On a CPU that multiplies bfloat16 numbers, the product of values and synthesis rows runs in them where the output has
that precision: whole numbers up to 256 and the rows as stored are bfloat16 numbers, so only the sum is rounded, to the
precision that the output has anyway, and before the expectation is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.transform.analysis import bits_of, fast_bfloat16, plain, scatter_planes, synthesise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.format.segment import SegmentState
    from kvwire.codec.planes import Plane
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, KVCache

_EXACT = 256
"""Whole numbers up to this are bfloat16 numbers."""
_STRIP = 1024
"""Elements of a token that are made at a time, at least: more take memory, fewer take time."""
_MULTIPLE = 64
"""Columns of a product in bfloat16 come in multiples: oneDNN compiles and keeps a kernel for each shape it meets."""

CosSin = dict[int, tuple["Tensor", "Tensor"]]
"""For each regime index, float32 cosines and sines ``[tokens, pairs]``."""


def place_group(  # noqa: PLR0913, PLR0917 - the hub of decoding: what was decoded, what was expected, where it goes
    state: SegmentState,
    group: Group,
    columns: slice,
    step: float,
    expected: tuple[Tensor, NDArray[np.uint32]],
    out: KVCache,
    meta: CacheMeta,
    start: int,
    cos_sin: CosSin,
) -> None:
    """Write a group's keys and values of one chunk into a cache."""
    coded = state.classes[columns].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0  # the KLT has sorted them: what follows is zero
    columns = slice(columns.start, columns.start + last)
    targets = [(out.keys if side == "key" else out.values)[layer] for side, layer in group.planes]
    if group.is_identity or not all(map(plain, targets)):
        elements = synthesise(coefficients_of(state, columns, step), group, *expected)
        scatter_planes(elements, group.planes, out, meta, start, cos_sin)
        return
    halved = all(target.dtype == torch.bfloat16 for target in targets) and fast_bfloat16()
    factors = _factors(state, columns, group, halved=halved)
    first = 0
    for planes in _strips([target.shape[0] * target.shape[2] for target in targets]):
        width = sum(target.shape[0] * target.shape[2] for target in targets[planes])
        product = _product(factors, slice(first, first + width))
        _place(product, step, first, group.planes[planes], expected, targets[planes], meta, start, cos_sin)
        first += width


def coefficients_of(state: SegmentState, columns: slice, step: float) -> Tensor:
    """Dequantise coefficients."""
    values = state.values[:, columns]
    out = torch.empty(values.shape, dtype=torch.float32)
    value_kernels.dequantise(values, state.tables.sizes_of(state.classes[columns]), step, out.numpy())
    return out


def _strips(widths: list[int]) -> Iterator[slice]:
    """Planes that are multiplied together: a product of a few planes stays in a core's own cache."""
    begin, total = 0, 0
    for index, width in enumerate(widths):
        total += width
        if total >= _STRIP or index == len(widths) - 1:
            yield slice(begin, index + 1)
            begin, total = index + 1, 0


class _Factors(NamedTuple):
    """What is multiplied: ``values @ rows``, and in float32 ``large`` times the rows of the columns ``wide``."""

    values: Tensor
    rows: Tensor
    large: Tensor | None = None
    wide: Tensor | None = None


def _factors(state: SegmentState, columns: slice, group: Group, *, halved: bool) -> _Factors:
    """Values ``[tokens, n]`` and synthesis rows ``[n, width]``, whose product is the elements in units of a step.

    halved: in bfloat16, but for the values that are no bfloat16 numbers: few columns have such.
    """
    count = columns.stop - columns.start
    if not halved:
        return _Factors(coefficients_of(state, columns, 1.0), group.first_synthesis(count))
    group.first_rows(count)  # of a lazy profile, fetched by this
    count = min(-(-count // _MULTIPLE) * _MULTIPLE, group.rows_at_hand)  # beyond the last coded, values are zero
    rows, columns = group.first_rows(count), slice(columns.start, columns.start + count)
    values = state.values[:, columns]
    small = torch.empty(values.shape, dtype=torch.bfloat16)
    widest = np.empty(values.shape[1], np.uint32)
    sizes = state.tables.sizes_of(state.classes[columns])
    value_kernels.to_bfloat16(values, sizes, small.view(torch.uint16).numpy(), widest)
    wide = torch.from_numpy((widest > _EXACT).nonzero()[0])
    if not len(wide):
        return _Factors(small, rows)
    exact = torch.from_numpy(values)[:, wide]
    is_large = exact.abs() > _EXACT
    small[:, wide] = small[:, wide].masked_fill_(is_large, 0.0)
    return _Factors(small, rows, (exact * is_large).float(), wide)


def _product(factors: _Factors, strip: slice) -> Tensor:
    """The elements of some columns ``[tokens, strip]``; bfloat16 where all factors are."""
    product = factors.values @ factors.rows[:, strip]
    if factors.large is None or factors.wide is None:
        return product
    return product.float().addmm_(factors.large, factors.rows[:, strip][factors.wide].float())


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
