"""Tiles of pairs of dimensions, which the last kernel of a GPU's decoding writes.

A pair is two dimensions that rotate together. Dimensions that do not rotate are paired as two halves, so that one
kernel serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvwire.types import PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.codec.gpu.profile import DeviceProfile
    from kvwire.types import CacheMeta, KVCache, RopeRegime

MOST_PAIRS = 64
"""Pairs of a tile: both halves of a head of 128."""
LEAST_PAIRS = 16
"""The narrowest product of tensor cores."""
_ALIGN = 8
"""Columns and outputs must be multiples of this many elements for 16-byte accesses."""
_MOST_TILES = 65535
"""CUDA's limit of a launch's second dimension."""
_ALIGNED_FIELDS = [3, 6, 7, 8, 9, 10, 11, 12, 13]
_ADDRESSES = [0, 1, 17]


class Plan(NamedTuple):
    """One launch.

    Attributes:
        first: Index of its first tile.
        tiles: Number of tiles.
        stride: Distance between neighbouring pairs' dimensions.
        groups: Indices of the tiles' groups.
    """

    first: int
    tiles: int
    stride: int
    groups: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of an output and their launches.

    Attributes:
        table: int64 ``[tiles, fields]`` on the host, see ``reconstruct_kernels.TILE_FIELDS``.
        plans: The launches.
        pairs: Pairs of the widest tile, rounded up to a power of two.
        aligned: Whether all rows and outputs allow 16-byte accesses.
    """

    table: NDArray[np.int64]
    plans: tuple[Plan, ...]
    pairs: int
    aligned: bool


class _Pairs(NamedTuple):
    """Pairs of dimensions ``(a + stride * j, b + stride * j)`` of a head; ``angle``: first cosine's index, or -1."""

    a: int
    b: int
    count_a: int
    count_b: int
    stride: int
    angle: int


def angle_columns(ropes: Sequence[RopeRegime]) -> list[int]:
    """Return where each regime's angles begin in a token's row, and the row's length."""
    return [int(at) for at in np.cumsum([0, *(regime.rotary_dim // 2 for regime in ropes)])]


def tiles_of(
    loaded: DeviceProfile,
    out: KVCache | PagedKVCache,
    meta: CacheMeta,
    groups: Sequence[int],
    *,
    rotated: bool,
    launches: int,
    addition: int = 0,
) -> Tiles:
    """Lay out the tiles of some groups in about ``launches`` launches, first layers first."""
    order = sorted(groups, key=lambda index: min(layer for _, layer in loaded.groups[index].planes))
    size = max(1, -(-len(order) // launches))
    rows: list[list[int]] = []
    plans: list[Plan] = []
    for at in range(0, len(order), size):
        piece = tuple(order[at : at + size])
        by_stride: dict[int, list[list[int]]] = {}
        for index in piece:
            for stride, row in _rows_of(index, loaded, out, meta, rotated=rotated, addition=addition):
                by_stride.setdefault(stride, []).append(row)
        for stride, listed in sorted(by_stride.items()):
            counts = [min(_MOST_TILES, len(listed) - first) for first in range(0, len(listed), _MOST_TILES)]
            plans += [Plan(len(rows) + _MOST_TILES * n, count, stride, piece) for n, count in enumerate(counts)]
            rows += listed
    table = np.array(rows, np.int64).reshape(len(rows), 18)
    widest = int(table[:, 8].max(initial=LEAST_PAIRS))
    aligned = not (table[:, _ALIGNED_FIELDS] % _ALIGN).any() and not (table[:, _ADDRESSES] % (2 * _ALIGN)).any()
    return Tiles(table, tuple(plans), 1 << (widest - 1).bit_length(), bool(aligned))


def _rows_of(
    index: int, loaded: DeviceProfile, out: KVCache | PagedKVCache, meta: CacheMeta, *, rotated: bool, addition: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield stride and table row of every tile of a group."""
    group = loaded.groups[index]
    rows, predictor = _address(group.rows), _address(group.predictor)
    features = 0 if group.predictor is None else loaded.features
    angles = angle_columns(meta.ropes)[-1]
    column = 0
    for plane in loaded.groups[index].planes:
        target, per_head, per_token, per_page = strides_of(out, plane)
        spec = meta.layers[plane[1]]
        dim = spec.key_dim if plane[0] == "key" else spec.value_dim
        for head in range(spec.kv_heads):
            for pairs in _pairs_of(plane, meta, dim, rotated=rotated):
                for first in range(0, pairs.count_a, MOST_PAIRS):
                    skip = first * pairs.stride
                    counts = [min(MOST_PAIRS, max(0, count - first)) for count in (pairs.count_a, pairs.count_b)]
                    a, b = pairs.a + skip, pairs.b + skip
                    yield pairs.stride, [
                        rows, predictor, group.mean.data_ptr(), len(group.mean), index, features,
                        column + a, column + b, *counts, per_token, per_page,
                        head * per_head + a, head * per_head + b,
                        pairs.angle + first if pairs.angle >= 0 else -1, angles,
                        addition, target.data_ptr(),
                    ]  # fmt: skip
            column += dim


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def strides_of(out: KVCache | PagedKVCache, plane: Plane) -> tuple[Tensor, int, int, int]:
    """Return a plane's tensor and its strides of a head, a token and a page (0 where it has no pages)."""
    target = (out.keys if plane[0] == "key" else out.values)[plane[1]]
    if isinstance(out, PagedKVCache):
        return target, target.stride(2), target.stride(1), target.stride(0)
    return target, target.stride(0), target.stride(1), 0


def _pairs_of(plane: Plane, meta: CacheMeta, dim: int, *, rotated: bool) -> Iterator[_Pairs]:
    """Yield a head's dimensions in pairs."""
    rotary = meta.layers[plane[1]].rotary(plane[0]) if rotated else None
    if rotary is None:
        yield from _halves(0, dim)
        return
    regime, start = meta.ropes[rotary[0]], rotary[1]
    count, angle = regime.rotary_dim // 2, angle_columns(meta.ropes)[rotary[0]]
    yield from _halves(0, start)
    if regime.interleaved:
        yield _Pairs(start, start + 1, count, count, 2, angle)
    else:
        yield _Pairs(start, start + count, count, count, 1, angle)
    yield from _halves(start + regime.rotary_dim, dim)


def _halves(start: int, stop: int) -> Iterator[_Pairs]:
    """Yield dimensions that do not rotate, paired as two halves."""
    if start < stop:
        half = (stop - start + 1) // 2
        yield _Pairs(start, start + half, half, stop - start - half, 1, -1)
