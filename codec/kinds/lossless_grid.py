"""Contents of a lossless segment: dtypes, blocks of columns, rows, and frequency tables of column classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.entropy.exponent_kernels import Fields
from kvwire.codec.entropy.tables import CONTEXTS, POINTS, PROBABILITY_BITS, Tables
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from typing import NoReturn

    from numpy.typing import NDArray

    from kvwire.types import LayerSpec

FORMATS = {
    torch.float64: Fields.of(11, 52),
    torch.float32: Fields.of(8, 23),
    torch.bfloat16: Fields.of(8, 7),
    torch.float16: Fields.of(5, 10),
    torch.float8_e4m3fn: Fields.of(4, 3),
    torch.float8_e4m3fnuz: Fields.of(4, 3),
    torch.float8_e5m2: Fields.of(5, 2),
    torch.float8_e5m2fnuz: Fields.of(5, 2),
}
"""Bit fields of every dtype that a lossless segment can hold."""
MAX_CLASSES = 32
FLIP = 128
"""Added to a column's class in its byte where its signs are flipped."""
_TOTAL = 1 << PROBABILITY_BITS


@dataclass(frozen=True, eq=False)
class ClassTables(Tables):
    """Base tables of up to MAX_CLASSES classes, without refinements."""

    @classmethod
    def of(cls, base: NDArray[np.uint16]) -> ClassTables:
        """Check a segment's frequencies and make tables of them."""
        if not (base.sum(axis=1, dtype=np.int64) == _TOTAL).all():
            raise_damaged("has frequencies that do not add up to 4096")
        return cls(base, np.zeros((len(base), CONTEXTS, 3), np.uint16), np.zeros((len(base), POINTS), np.uint16))


@dataclass(frozen=True)
class Block:
    """Place of one layer's keys or values in a segment.

    Attributes:
        heads: Number of KV heads.
        dim: Elements of each head.
        stream: 0 for a row per token, 1 for distinct rows only.
        first: Index of the first column in its stream.
        columns: The block's columns among those of all blocks.
        fields: Bit fields of its numbers.
        raw_start: Index of its first raw bit.
    """

    heads: int
    dim: int
    stream: int
    first: int
    columns: slice
    fields: Fields
    raw_start: int

    @property
    def in_stream(self) -> slice:
        """The block's columns in its stream."""
        return slice(self.first, self.first + self.heads * self.dim)


@dataclass(frozen=True, eq=False)
class Grid:
    """The bits that a segment stores: blocks of columns over all tokens (stream 0) or over distinct rows (stream 1).

    Attributes:
        fields: Bit fields of the dtype.
        shapes: ``(heads, dim)`` of each block.
        codes: ``[tokens]``; 0 for a new row, k for a copy of row k - 1.
        shared: Bool ``[blocks]``; whether the block uses the codes.
        spares: ``[blocks]``, number of lowest mantissa bits that are zero in all its numbers.
    """

    fields: Fields
    shapes: list[tuple[int, int]]
    codes: NDArray[np.int64]
    shared: NDArray[np.bool_]
    spares: NDArray[np.int64]

    @classmethod
    def plain(cls, fields: Fields, shapes: list[tuple[int, int]], tokens: int) -> Grid:
        """Make the grid without repeated rows and without spare bits."""
        blocks = len(shapes)
        return cls(fields, shapes, np.zeros(tokens, np.int64), np.zeros(blocks, np.bool_), np.zeros(blocks, np.int64))

    @cached_property
    def fresh(self) -> NDArray[np.intp]:
        """Indices of the tokens with a new row."""
        return np.flatnonzero(self.codes == 0)

    @cached_property
    def sources(self) -> NDArray[np.int64]:
        """Row index of each token."""
        return np.where(self.codes == 0, np.cumsum(self.codes == 0), self.codes) - 1

    @property
    def rows(self) -> tuple[int, int]:
        """Number of rows of the two streams."""
        return len(self.codes), len(self.fresh)

    @cached_property
    def stream_of(self) -> NDArray[np.int64]:
        """Stream index of each column."""
        return np.repeat(self.shared.astype(np.int64), [heads * dim for heads, dim in self.shapes])

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks in order."""
        ends, raw, out = [0, 0], 0, []
        for (heads, dim), stream, spare in zip(self.shapes, map(int, self.shared), map(int, self.spares), strict=True):
            width, fields = heads * dim, self.fields._replace(spare=spare)
            among = slice(sum(ends), sum(ends) + width)
            out.append(Block(heads, dim, stream, ends[stream], among, fields, raw))
            ends[stream] += width
            raw += self.rows[stream] * width * fields.raw
        return out

    @property
    def raw_bits(self) -> int:
        """Number of raw bits of all blocks."""
        last = self.blocks[-1]
        return last.raw_start + self.rows[last.stream] * last.heads * last.dim * last.fields.raw

    def matrices(self) -> list[NDArray[np.uint8]]:
        """Allocate the symbols of both streams, ``[rows, columns]``."""
        return [
            np.empty((rows, int((self.stream_of == stream).sum())), np.uint8) for stream, rows in enumerate(self.rows)
        ]


def block_shapes(layers: tuple[LayerSpec, ...]) -> list[tuple[int, int]]:
    """List ``(heads, dim)`` of the blocks of a layout."""
    cached = [spec for spec in layers if spec.kind != "none"]
    return [(spec.kv_heads, dim) for spec in cached for dim in (spec.key_dim, spec.value_dim)]


def escaped_in(symbols: NDArray[np.uint8], fields: Fields) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return row and column indices of the numbers whose exponent is escaped."""
    if fields.exponent <= fields.distance:
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    escape = np.uint8(fields.escape << 7 - fields.distance)
    row, column = np.divmod(np.flatnonzero((symbols & escape) == escape), symbols.shape[1])
    return row, column


def raise_damaged(what: str) -> NoReturn:
    """Raise CorruptError for a damaged segment."""
    raise CorruptError(f"a lossless segment {what}: it is damaged, fetch it again")
