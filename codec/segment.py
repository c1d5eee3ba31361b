"""One segment: one level of one chunk, as bytes. Exactly specified in docs/format.md.

A column (a coefficient over the chunk's tokens) enters the stream at the first level at which any of its symbols is not
zero; that level's segment names its class. From then on every level refines it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from kvwire.codec import _kernels
from kvwire.codec.layout import decompress
from kvwire.codec.rans import MAX_LANES, Lanes, decode_base, decode_ternary, encode_base, encode_ternary, lanes_for
from kvwire.codec.tables import BIAS, ESCAPE, GRID_PER_LEVEL, Tables, clip_class
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER = struct.Struct("<IIIHH")
"""words, class bytes, escape bytes, lanes, reserved."""


@dataclass(eq=False)
class ChunkState:
    """What encoder and decoder both know of a chunk after some levels.

    spread: class of each column at unit step, from the profile. classes: 0 while a column is not coded, else its class
    at the latest level. values: int32 ``[tokens, columns]``, the quantised coefficients at the latest level.
    """

    tokens: int
    spread: NDArray[np.int64]
    tables: Tables
    classes: NDArray[np.int64] = field(init=False)
    values: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with nothing coded."""
        self.classes = np.zeros(len(self.spread), np.int64)
        self.values = np.zeros((self.tokens, len(self.spread)), np.int32)

    @property
    def columns(self) -> NDArray[np.uint32]:
        """Indices of the coded columns, ascending."""
        return np.flatnonzero(self.classes).astype(np.uint32)


def encode_segment(state: ChunkState, level: int, shift: int, wanted: NDArray[np.int64], values: NDArray[np.int32]) -> tuple[bytes, int]:
    """Write level ``level`` of a chunk and advance ``state`` to it; returns the bytes and the number of symbols.

    values: quantised at this level, ``[tokens, columns]``; wanted: the class that suits each column at this level.
    """
    fresh = (state.classes == 0) & values.any(axis=0)
    open_columns = state.classes == 0
    deltas = np.zeros(int(open_columns.sum()), np.uint8)
    expected = clip_class(state.spread - shift)
    chosen = clip_class(wanted)
    deltas[fresh[open_columns]] = _zigzag(chosen[fresh] - expected[fresh]) + 1
    state.classes = np.where(state.classes > 0, clip_class(state.classes + GRID_PER_LEVEL), 0)
    state.classes[fresh] = chosen[fresh]
    columns = state.columns
    lanes = lanes_for(state.tokens * len(columns))
    escapes = b""
    if level == 0:
        picked = values[:, columns]
        symbols = np.where(np.abs(picked) < BIAS, picked + BIAS, ESCAPE).astype(np.uint8)
        symbols[state.tables.base[state.classes[columns] - 1][np.arange(len(columns)), symbols] == 0] = ESCAPE
        stream = encode_base(symbols, state.classes[columns], state.tables, lanes)
        escapes = picked[symbols == ESCAPE].astype("<i4").tobytes()
    else:
        contexts = np.empty((state.tokens, len(columns)), np.uint8)
        _kernels.contexts_of(state.values, columns, contexts)
        remainder = values[:, columns] - 3 * state.values[:, columns]
        symbols = (1 + np.where(state.values[:, columns] < 0, -remainder, remainder)).astype(np.uint8)
        stream = encode_ternary(symbols, contexts, state.classes[columns], state.tables, lanes)
    state.values = values
    return _pack(deltas.tobytes(), escapes, stream), symbols.size


def _pack(classes: bytes, escapes: bytes, stream: Lanes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=True, write_checksum=False)
    packed_classes = compressor.compress(classes) if classes else b""
    packed_escapes = compressor.compress(escapes) if escapes else b""
    header = _HEADER.pack(len(stream.words), len(packed_classes), len(packed_escapes), len(stream.states), 0)
    lanes = stream.states.astype("<u4").tobytes() + stream.counts.astype("<u2").tobytes()
    return header + packed_classes + packed_escapes + lanes + stream.words.astype("<u2").tobytes()


def decode_segment(state: ChunkState, level: int, shift: int, data: bytes, *, check: bool = True) -> None:
    """Advance ``state`` by one level from a segment's bytes; raises CorruptError where they cannot be what was written.

    ``check=False`` lets a stream pass whose lanes do not end as they began; sizes are always checked.
    """
    classes, escapes, stream = _unpack(data, int((state.classes == 0).sum()))
    deltas = np.frombuffer(classes, np.uint8).astype(np.int64)
    open_columns = np.flatnonzero(state.classes == 0)
    fresh = open_columns[deltas > 0]
    state.classes = np.where(state.classes > 0, clip_class(state.classes + GRID_PER_LEVEL), 0)
    state.classes[fresh] = clip_class(clip_class(state.spread[fresh] - shift) + _unzigzag(deltas[deltas > 0] - 1))
    columns = state.columns
    if level == 0:
        symbols = decode_base(stream, state.classes[columns], state.tables, state.tokens, check=check)
        _kernels.place(state.values, columns, symbols)
        _place_escapes(state.values, columns, symbols, escapes)
    else:
        contexts = np.empty((state.tokens, len(columns)), np.uint8)
        _kernels.contexts_of(state.values, columns, contexts)
        symbols = decode_ternary(stream, contexts, state.classes[columns], state.tables, check=check)
        _kernels.refine(state.values, columns, symbols)


def _unpack(data: bytes, open_columns: int) -> tuple[bytes, bytes, Lanes]:
    if len(data) < _HEADER.size:
        msg = "a segment ends within its header: it is damaged, fetch it again"
        raise CorruptError(msg)
    words, class_bytes, escape_bytes, lanes, _ = _HEADER.unpack_from(data)
    at = _HEADER.size
    if at + class_bytes + escape_bytes + 6 * lanes + 2 * words != len(data) or not 1 <= lanes <= MAX_LANES:
        msg = "a segment's parts do not add up to its length: it is damaged, fetch it again"
        raise CorruptError(msg)
    classes = decompress(data[at : at + class_bytes], open_columns, "segment's class list") if class_bytes else b""
    if len(classes) != open_columns:
        msg = "a segment's class list has the wrong length: it is damaged, fetch it again"
        raise CorruptError(msg)
    at += class_bytes
    escapes = data[at : at + escape_bytes]
    at += escape_bytes
    states = np.frombuffer(data, "<u4", lanes, at).astype(np.uint32)
    counts = np.frombuffer(data, "<u2", lanes, at + 4 * lanes).astype(np.uint16)
    if int(counts.sum(dtype=np.int64)) != words:
        msg = "a segment's lanes do not add up to its words: it is damaged, fetch it again"
        raise CorruptError(msg)
    return classes, escapes, Lanes(states, counts, np.frombuffer(data, "<u2", words, at + 6 * lanes).astype(np.uint16))


def _place_escapes(values: NDArray[np.int32], columns: NDArray[np.uint32], symbols: NDArray[np.uint8], packed: bytes) -> None:
    tokens, index = np.nonzero(symbols == ESCAPE)
    raw = decompress(packed, 4 * len(tokens), "segment's escape list") if packed else b""
    if len(raw) != 4 * len(tokens):
        msg = "a segment's escape list has the wrong length: it is damaged, fetch it again"
        raise CorruptError(msg)
    values[tokens, columns[index]] = np.frombuffer(raw, "<i4")


def _zigzag(delta: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.where(delta >= 0, 2 * delta, -2 * delta - 1).astype(np.uint8)


def _unzigzag(code: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(code % 2 == 0, code // 2, -(code + 1) // 2)

