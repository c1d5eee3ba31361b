"""A segment: the bytes of one level of one chunk. Specified in docs/format.md.

A column (a coefficient over the chunk's tokens) enters at the first level with a symbol other than zero; that level's
segment names the column's class. Every later level refines it.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from kvwire.codec.entropy import kernels
from kvwire.codec.entropy.rans import (
    MAX_LANES,
    Lanes,
    decode_base,
    decode_ternary,
)
from kvwire.codec.entropy.tables import ESCAPE, GRID_PER_LEVEL, LARGEST, Tables, clip_class
from kvwire.codec.format.metadata_json import decompress
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_HEADER = struct.Struct("<IIIHH")
"""Words, class bytes, escape bytes, lanes, reserved."""


@dataclass(frozen=True, eq=False)
class ChunkSegments:
    """A chunk to decode, already checked against the index.

    Attributes:
        chunk: Index of the chunk in the blob.
        level: Index of the level to decode.
        segments: The segments that ``BlobInfo.reads`` names for that level, in order.
    """

    chunk: int
    level: int
    segments: Sequence[bytes]


@dataclass(eq=False)
class SegmentState:
    """The shared state of encoder and decoder after some levels of a chunk.

    Attributes:
        spread: int64 ``[columns]``, class of each column at unit step, from the profile.
        tables: The entropy coder's tables.
        classes: int64 ``[columns]``, class of each column at the latest level; 0 while it is not coded.
        values: int32 ``[tokens, columns]``, quantised coefficients at the latest level.
    """

    tokens: int
    spread: NDArray[np.int64]
    tables: Tables
    classes: NDArray[np.int64] = field(init=False)
    values: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        """Start with no coded column."""
        self.classes = np.zeros(len(self.spread), np.int64)
        self.values = np.zeros((self.tokens, len(self.spread)), np.int32)

    @property
    def columns(self) -> NDArray[np.uint32]:
        """Indices of the coded columns in ascending order."""
        return np.flatnonzero(self.classes).astype(np.uint32)

    def contexts(self) -> NDArray[np.uint8]:
        """Compute the contexts of the next refinement, uint8 ``[tokens, columns]``."""
        columns = self.columns
        out = np.empty((self.tokens, len(columns)), np.uint8)
        kernels.contexts_of(self.values, columns, out)
        return out

    def enter(self, fresh: NDArray[np.intp], classes: NDArray[np.int64]) -> None:
        """Go one level up: raise the classes of coded columns by a level and add the entering ones."""
        self.classes = np.where(self.classes > 0, clip_class(self.classes + GRID_PER_LEVEL), 0)
        self.classes[fresh] = classes


def pack_segment(classes: bytes, escapes: bytes, stream: Lanes) -> bytes:
    """Join a segment's parts; see docs/format.md, section 4."""
    packed_classes, packed_escapes = _compressed(classes), _compressed(escapes)
    header = _HEADER.pack(len(stream.words), len(packed_classes), len(packed_escapes), len(stream.states), 0)
    lanes = np.asarray(stream.states, "<u4"), np.asarray(stream.counts, "<u2"), np.asarray(stream.words, "<u2")
    return b"".join((header, packed_classes, packed_escapes, *(part.tobytes() for part in lanes)))


_own = threading.local()


def _compressed(data: bytes) -> bytes:
    """Return a zstd frame, or nothing for nothing; making a compressor takes longer than using it."""
    if not data:
        return b""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(level=19, write_content_size=True, write_checksum=False)
    packed: bytes = _own.compressor.compress(data)
    return packed


def decode_segment(state: SegmentState, level: int, shift: int, data: bytes, *, check: bool = True) -> int:
    """Decode a segment and advance the state by its level; return the number of symbols."""
    open_columns = np.flatnonzero(state.classes == 0)
    classes, escapes, stream = _unpack(data, len(open_columns))
    codes = np.frombuffer(classes, np.uint8).astype(np.int64)
    fresh = open_columns[codes > 0]
    state.enter(fresh, clip_class(clip_class(state.spread[fresh] - shift) + _unzigzag(codes[codes > 0] - 1)))
    columns = state.columns
    if level == 0:
        symbols = decode_base(stream, state.classes[columns], state.tables, state.tokens, check=check)
        kernels.place(state.values, columns, symbols)
        _place_escapes(state.values, columns, symbols, escapes)
    elif escapes:
        raise CorruptError("a refinement holds escapes: the segment is damaged, fetch it again")
    else:
        symbols = decode_ternary(stream, state.contexts(), state.classes[columns], state.tables, check=check)
        kernels.refine(state.values, columns, symbols)
    return symbols.size


class SegmentParts(NamedTuple):
    """The parts of a segment's bytes.

    Attributes:
        classes: Class codes of the open columns.
        escapes: Packed escapes.
        states: Little-endian uint32 ``[lanes]``.
        counts: Little-endian uint16 ``[lanes]``, words of each lane.
        words: Little-endian uint16, lane after lane.
    """

    classes: bytes
    escapes: bytes
    states: NDArray[np.uint32]
    counts: NDArray[np.uint16]
    words: NDArray[np.uint16]


def split_segment(data: bytes, open_columns: int) -> SegmentParts:
    """Split a segment into its parts; checks lengths, not yet the streams."""
    if len(data) < _HEADER.size:
        raise CorruptError("a segment ends within its header: it is damaged, fetch it again")
    words, class_bytes, escape_bytes, lanes, _ = _HEADER.unpack_from(data)
    at = _HEADER.size
    if at + class_bytes + escape_bytes + 6 * lanes + 2 * words != len(data) or not 1 <= lanes <= MAX_LANES:
        raise CorruptError("a segment's parts do not add up to its length: it is damaged, fetch it again")
    classes = _list(data[at : at + class_bytes], open_columns, "class")
    at += class_bytes
    escapes = data[at : at + escape_bytes]
    at += escape_bytes
    states = np.frombuffer(data, "<u4", lanes, at)
    counts = np.frombuffer(data, "<u2", lanes, at + 4 * lanes)
    if int(counts.sum(dtype=np.int64)) != words:
        raise CorruptError("a segment's lanes do not add up to its words: it is damaged, fetch it again")
    return SegmentParts(classes, escapes, states, counts, np.frombuffer(data, "<u2", words, at + 6 * lanes))


def lanes_of(data: bytes) -> int:
    """Read the number of lanes from a segment's header; 0 where it is too short."""
    return int(_HEADER.unpack_from(data)[3]) if len(data) >= _HEADER.size else 0


def escapes_in(data: bytes) -> bytes:
    """Return a segment's packed escapes; empty where its header is too short."""
    if len(data) < _HEADER.size:
        return b""
    _, class_bytes, escape_bytes, _, _ = _HEADER.unpack_from(data)
    return data[_HEADER.size + class_bytes :][:escape_bytes]


def _unpack(data: bytes, open_columns: int) -> tuple[bytes, bytes, Lanes]:
    parts = split_segment(data, open_columns)
    stream = Lanes(parts.states.astype(np.uint32), parts.counts.astype(np.uint16), parts.words.astype(np.uint16))
    return parts.classes, parts.escapes, stream


def _list(packed: bytes, length: int, name: str) -> bytes:
    """Decompress a list whose length is known; an empty list is stored as no bytes."""
    raw = decompress(packed, length, f"segment's {name} list") if packed else b""
    if len(raw) != length:
        raise CorruptError(f"a segment's {name} list has the wrong length: it is damaged, fetch it again")
    return raw


def _place_escapes(
    values: NDArray[np.int32], columns: NDArray[np.uint32], symbols: NDArray[np.uint8], packed: bytes
) -> None:
    tokens, index = np.nonzero(symbols == ESCAPE)
    values[tokens, columns[index]] = escapes_of(packed, len(tokens))


def escapes_of(packed: bytes, count: int) -> NDArray[np.int32]:
    """Unpack a known number of escapes, int32."""
    escaped = np.frombuffer(_list(packed, 4 * count, "escape"), "<i4")
    if escaped.size and not -LARGEST < int(escaped.min()) <= int(escaped.max()) < LARGEST:
        raise CorruptError("a segment escapes to values that no encoder writes: it is damaged, fetch it again")
    return escaped


def _unzigzag(code: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(code % 2 == 0, code // 2, -(code + 1) // 2)
