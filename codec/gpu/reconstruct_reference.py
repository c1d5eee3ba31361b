"""The inverse transform on any device in plain tensor operations.

It is the readable twin of ``reconstruct_kernels.place`` and serves where that cannot: profiles without a basis, and
outputs in float8 or float64. It waits for the device to learn which chunks are damaged.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvwire.codec.backend import SIDES
from kvwire.codec.gpu.tiles import angle_columns
from kvwire.codec.transform.analysis import scatter_planes
from kvwire.types import KVCache, PagedKVCache

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.gpu.batch import UploadedBatch
    from kvwire.codec.gpu.profile import DeviceProfile
    from kvwire.codec.gpu.staging import ParsedChunk
    from kvwire.codec.transform.reconstruct import CosSin
    from kvwire.types import CacheMeta


def reconstruct_reference(
    batch: UploadedBatch,
    index: int,
    hidden: Tensor | None,
    loaded: DeviceProfile,
    out: KVCache | PagedKVCache,
    meta: CacheMeta,
    angles: tuple[Tensor, Tensor],
) -> None:
    """Write a group's elements of a batch's undamaged chunks."""
    begin = first_token = 0
    flags = batch.flags.tolist()
    for piece, flag in zip(batch.staged.pieces, flags, strict=True):
        values = batch.values[begin : begin + piece.values].view(piece.tokens, piece.width)
        begin += piece.values
        span = slice(first_token, first_token + piece.tokens)
        first_token = span.stop
        if flag:
            continue
        elements = _elements(batch, piece, values, index, hidden, loaded, span)
        columns = angle_columns(meta.ropes)
        shown = [slice(*pair) for pair in pairwise(columns)] if angles[0].numel() else []
        cos_sin = {regime: (angles[0][span, at], angles[1][span, at]) for regime, at in enumerate(shown)}
        planes = loaded.groups[index].planes
        if isinstance(out, PagedKVCache):
            _scatter_to_pages(elements, planes, out, meta, piece, cos_sin)
        else:
            scatter_planes(elements, planes, out, meta, piece.start, cos_sin)


def _elements(
    batch: UploadedBatch,
    piece: ParsedChunk,
    values: Tensor,
    index: int,
    hidden: Tensor | None,
    loaded: DeviceProfile,
    span: slice,
) -> Tensor:
    """Return a group's elements of a chunk, float32 ``[tokens, width]``, not rotated."""
    group = loaded.groups[index]
    begin, stop = piece.group_slots[index].tolist()
    first = sum(each.width for each in batch.staged.pieces[: batch.staged.pieces.index(piece)])
    slots = slice(first + begin, first + stop)
    q = values[:, begin:stop].int()
    sizes = batch.part("slot_sizes").view(-1, 2)[slots]
    size = q.abs().float()
    size = torch.where(q.abs() == 1, sizes[:, 0], torch.where(q.abs() == 2, sizes[:, 1], size))  # noqa: PLR2004
    coefficients = torch.where(q < 0, -size, size) * batch.part("steps")[batch.staged.pieces.index(piece)]
    rows = batch.part("slot_rows")[slots].long()
    expected = group.mean.repeat(piece.tokens, 1)
    if group.predictor is not None:
        if loaded.table is not None:
            said = (
                loaded.table[batch.part("token_ids")[span].long()].float() @ group.predictor[: loaded.features].float()
            )
            expected = (expected + said).bfloat16().float()
        if hidden is not None:
            part = hidden[piece.start : piece.start + piece.tokens]
            expected += part @ group.predictor[loaded.features :].float()
    if group.rows is not None:
        return expected.addmm_(coefficients, group.rows[rows].float())
    if group.scales is not None:
        expected[:, rows] += coefficients * group.scales[rows]
    return expected


def _scatter_to_pages(
    elements: Tensor, planes: tuple[Plane, ...], out: PagedKVCache, meta: CacheMeta, piece: ParsedChunk, cos_sin: CosSin
) -> None:
    nothing = elements.new_empty(0)
    sides = {side: [nothing] * len(meta.layers) for side in SIDES}
    for side, layer in planes:
        spec = meta.layers[layer]
        dim = spec.key_dim if side == "key" else spec.value_dim
        dtype = (out.keys if side == "key" else out.values)[layer].dtype
        sides[side][layer] = torch.empty(spec.kv_heads, piece.tokens, dim, dtype=dtype, device=elements.device)
    whole = KVCache(sides["key"], sides["value"], meta)
    scatter_planes(elements, planes, whole, meta, 0, cos_sin)
    for side, layer in planes:
        out.put(side, layer, piece.start, sides[side][layer])
