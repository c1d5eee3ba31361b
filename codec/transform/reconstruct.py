"""From quantised values to the engine's tensors: the inverse transform and, in one pass, all that follows it.

On a CPU that multiplies bfloat16 numbers, the product of values and synthesis rows runs in them where the output has
that precision: whole numbers up to 256 and the rows as stored are bfloat16 numbers, so only the sum is rounded, to the
precision that the output has anyway, and before the expectation is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.profile.group import FIRST_ROWS, REPEATS
from kvwire.codec.transform.analysis import fast_bfloat16, plain, scatter_planes, synthesise, synthesised

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.format.segment import SegmentState
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, KVCache

_EXACT = 256
"""Whole numbers up to this are bfloat16 numbers."""
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
    """Write a group's keys and values of one chunk into a cache.

    Args:
        state: The chunk's quantised values.
        group: To write.
        columns: The group's among the chunk's coefficients.
        step: Of the quantiser.
        expected: See ``TextPredictor.expected``.
        out: To write into.
        meta: Of the blob.
        start: Token of ``out`` that the chunk's first one goes to.
        cos_sin: Of exactly these tokens; empty where positions stay off.
    """
    coded = state.classes[columns].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0  # the KLT has sorted them: what follows is zero
    columns = slice(columns.start, columns.start + last)
    targets = [(out.keys if side == "key" else out.values)[layer] for side, layer in group.planes]
    if group.rows is None or not all(map(plain, targets)):
        elements = synthesise(coefficients_of(state, columns, step), group, *expected)
        scatter_planes(elements, group.planes, out, meta, start, cos_sin)
        return
    halved = all(target.dtype == torch.bfloat16 for target in targets) and fast_bfloat16()
    product = _product(state, columns, group, halved=halved)
    _place(product, step, group, expected, targets, meta, start, cos_sin)


def coefficients_of(state: SegmentState, columns: slice, step: float) -> Tensor:
    """Dequantise coefficients.

    Args:
        state: The chunk's quantised values.
        columns: Which.
        step: Of the quantiser.

    Returns:
        float32 ``[tokens, columns]``.
    """
    values = state.values[:, columns]
    out = torch.empty(values.shape, dtype=torch.float32)
    value_kernels.dequantise(values, state.tables.sizes_of(state.classes[columns]), step, out.numpy())
    return out


def _product(state: SegmentState, columns: slice, group: Group, *, halved: bool) -> Tensor:
    """Values times synthesis rows ``[tokens, width]`` in units of a step, bfloat16 where ``halved``."""
    values = state.values[:, columns]
    sizes = state.tables.sizes_of(state.classes[columns])
    rows = group.rows
    if not halved or rows is None:
        return synthesised(coefficients_of(state, columns, 1.0), group)
    small = torch.empty(values.shape, dtype=torch.bfloat16)
    widest = np.empty(values.shape[1], np.uint32)
    value_kernels.to_bfloat16(values, sizes, small.view(torch.uint16).numpy(), widest)
    rows = rows[: values.shape[1]]
    wide = (widest > _EXACT).nonzero()[0]
    if not len(wide):
        return small @ rows
    # A wide column goes in several, one for each of its digits of eight bits: each is exact.
    first = min(FIRST_ROWS, group.rank)
    leads = int(wide[-1]) < first <= len(rows)  # the KLT has sorted them
    at = torch.arange(first) if leads else torch.from_numpy(wide)
    rest = torch.from_numpy(values)[:, at].long()
    carry = torch.div(rest + _EXACT // 2, _EXACT, rounding_mode="floor")
    small[:, at] = torch.where(carry == 0, small[:, at], (rest - _EXACT * carry).bfloat16())
    digits, scale = [], _EXACT
    while bool(carry.any()):
        rest, carry = carry, torch.div(carry + _EXACT // 2, _EXACT, rounding_mode="floor")
        digits.append((scale * (rest - _EXACT * carry)).bfloat16())
        scale *= _EXACT
    if leads and len(digits) <= REPEATS:
        # No copy of all rows, which would take longer than the product.
        several = group.repeated_rows[(REPEATS - len(digits)) * first :][: len(digits) * first + len(rows)]
    else:
        several = torch.cat([*[rows[at]] * len(digits), rows])
    return torch.cat([*digits, small], 1) @ several


def _place(
    product: Tensor,
    scale: float,
    group: Group,
    expected: tuple[Tensor, NDArray[np.uint32]],
    targets: list[Tensor],
    meta: CacheMeta,
    start: int,
    cos_sin: CosSin,
) -> None:
    expand = product.dtype == torch.bfloat16
    bits = (product.view(torch.uint16) if expand else product).numpy()
    rows, of_token = expected[0].numpy(), expected[1]
    unrotated = np.empty((len(of_token), 0), np.float32)
    at = 0
    for (side, layer), target in zip(group.planes, targets, strict=True):
        rotary = meta.layers[layer].rotary(side) if cos_sin else None
        cosines, sines, interleaved, first = unrotated, unrotated, False, 0
        if rotary is not None:
            regime, first = rotary
            cosines, sines = (each.numpy() for each in cos_sin[regime])
            interleaved = meta.ropes[regime].interleaved
        shrink = target.dtype == torch.bfloat16
        into = (target.view(torch.uint16) if shrink else target).numpy()
        value_kernels.place_elements(
            bits, expand, scale, rows, of_token, at, cosines, sines, interleaved, first, into, shrink, start
        )
        at += target.shape[0] * target.shape[2]
