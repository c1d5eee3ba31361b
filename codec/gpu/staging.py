"""Check segments and lay them out in one buffer, from which a GPU decodes.

The host reads headers and class lists but no symbols. All indices that kernels use are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zstandard

from kvwire.codec.entropy import slot_kernels
from kvwire.codec.format.segment import escapes_in, escapes_of, lanes_of, split_segment
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.format.header import Header
    from kvwire.codec.format.segment import ChunkSegments, SegmentParts
    from kvwire.codec.profile.profile import Profile

BLOCK = 64
"""Lanes of one program: two warps, so that few lanes still use many multiprocessors."""
MOST_SLOTS = 1 << 23
"""Slots of a token that a column's entry can index."""
_MOST_VALUES = (1 << 31) - 1
"""Values of a chunk: their indices are int32."""
SLOT_ALIGN = 16
"""Elements: a group's values begin at multiples of this, for 16-byte loads."""
_PART_ALIGN = 64
_LONGEST_LANE = 1 << 17
"""Symbols: twice the longest lane that kvwire's encoder writes."""
_FREE_ESCAPES, _MOST_UNPACKED = 1 << 16, 256
"""Bytes of escapes that are always unpacked, and above that the most bytes for each packed byte."""
NARROW_LEVELS = 6
"""Base symbols without escapes, refined five times, stay within int16."""


@dataclass(frozen=True, eq=False)
class ParsedChunk:
    """A parsed chunk; a slot is the place of a coded column among a token's values.

    Attributes:
        piece: The chunk's segments.
        start: Index of its first token.
        parts: The parts of each level's segment.
        classes: uint8 ``[levels, columns]``, each column's class at each level.
        slots: uint32 ``[columns]``, each column's slot.
        entries: uint32 of each level's coded columns, see ``decode_kernels.CLASS_SHIFT``.
        group_slots: int32 ``[groups, 2]``, where each group's slots begin and end.
        rows: int32 ``[slots]``, rows of the group's basis.
        sizes: float32 ``[slots, 2]``, sizes of values 1 and 2.
        escapes: int32, escaped base values, token by token.
    """

    piece: ChunkSegments
    start: int
    tokens: int
    parts: list[SegmentParts]
    classes: NDArray[np.uint8]
    slots: NDArray[np.uint32]
    entries: list[NDArray[np.uint32]]
    group_slots: NDArray[np.int32]
    rows: NDArray[np.int32]
    sizes: NDArray[np.float32]
    escapes: NDArray[np.int32]

    @property
    def width(self) -> int:
        """Number of slots of a token."""
        return len(self.rows)

    @property
    def values(self) -> int:
        """Number of values."""
        return self.tokens * self.width

    @property
    def wide(self) -> bool:
        """Whether values may exceed int16."""
        return len(self.escapes) > 0 or len(self.parts) > NARROW_LEVELS


def suits_gpu(piece: ChunkSegments, symbols: Sequence[int]) -> bool:
    """Return whether a GPU decodes a chunk fast and in little memory: always for kvwire's encoders.

    One thread decodes a lane, and escapes are unpacked before the GPU counts the stream's.
    """
    for data, count in zip(piece.segments, symbols, strict=True):
        lanes = lanes_of(data)
        if count > lanes * _LONGEST_LANE:
            return False
    packed = escapes_in(piece.segments[0])
    return _claimed(packed) <= max(_FREE_ESCAPES, _MOST_UNPACKED * len(packed))


def parse_chunk(piece: ChunkSegments, header: Header, profile: Profile, *, check: bool) -> ParsedChunk:
    """Parse a chunk's segments."""
    start, stop = header.info.chunk_span(piece.chunk)
    tokens, columns = stop - start, profile.rank
    classes = np.zeros((len(piece.segments), columns), np.uint8)
    below, coded = np.zeros(columns, np.uint8), 0
    parts: list[SegmentParts] = []
    for level, data in enumerate(piece.segments):
        part = split_segment(data, columns - coded)
        codes = np.frombuffer(part.classes, np.uint8)
        slot_kernels.enter_level(codes, profile.spread, header.levels[level].shift, below, classes[level])
        below, coded = classes[level], int(np.count_nonzero(classes[level]))
        raw = header.info.segments[piece.chunk][level].raw
        if check and tokens * coded != raw:
            raise CorruptError(
                f"chunk {piece.chunk} level {level} holds {tokens * coded} symbols, the index says {raw}; "
                "fetch it again"
            )
        if level and part.escapes:
            raise CorruptError("a refinement holds escapes: the segment is damaged, fetch it again")
        parts.append(part)
    escapes = _escapes(parts[0].escapes, tokens * int(np.count_nonzero(classes[0])))
    return describe_chunk(piece, start, tokens, parts, classes, escapes, profile)


def describe_chunk(
    piece: ChunkSegments,
    start: int,
    tokens: int,
    parts: list[SegmentParts],
    classes: NDArray[np.uint8],
    escapes: NDArray[np.int32],
    profile: Profile,
) -> ParsedChunk:
    """Assign slots to a chunk's coded columns and describe them."""
    finest, firsts = classes[-1], profile.first_columns
    slots = np.zeros(len(finest), np.uint32)
    group_slots = np.zeros((len(profile.groups), 2), np.int32)
    slot_kernels.assign_slots(finest, firsts, SLOT_ALIGN, slots, group_slots)
    width = -(-int(group_slots[-1, 1]) // SLOT_ALIGN) * SLOT_ALIGN
    if width > MOST_SLOTS or tokens * width > _MOST_VALUES:
        msg = f"a chunk of {tokens} tokens and {width} coded columns is beyond what GPUs decode; use backend='numba'"
        raise ArgumentError(msg)
    rows, sizes = np.zeros(width, np.int32), np.ones((width, 2), np.float32)
    slot_kernels.describe_slots(finest, slots, firsts, profile.tables.sizes, rows, sizes)
    entries = []
    for level, own in enumerate(classes):
        entries.append(np.empty(int(np.count_nonzero(own)), np.uint32))
        slot_kernels.entries_of(own, classes[level - 1] if level else np.ones_like(own), slots, entries[-1])
    return ParsedChunk(piece, start, tokens, parts, classes, slots, entries, group_slots, rows, sizes, escapes)


def _escapes(packed: bytes, most: int) -> NDArray[np.int32]:
    """Unpack the escapes that the list claims, at most ``most``; the GPU compares their number with the stream."""
    claimed = _claimed(packed)
    if claimed % 4 or claimed // 4 > most:
        raise CorruptError("the segment's escape list decompresses to another length than it should; fetch it again")
    return escapes_of(packed, claimed // 4)


def _claimed(packed: bytes) -> int:
    """Return the bytes that an escape list claims to unpack to."""
    try:
        return zstandard.get_frame_parameters(packed).content_size if packed else 0
    except zstandard.ZstdError as error:
        raise CorruptError(f"a segment's escape list does not decompress ({error}); fetch it again") from error


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """Chunks in one buffer on the host, ready to be copied and decoded; numbers are totals of all chunks.

    Attributes:
        buffer: uint8, pinned where a GPU will read it.
        parts: Offset, length in bytes and dtype of each part, by name.
        items: Work items.
        base_items: Work items of level 0, which come first.
        wide: Whether values are int32, else int16.
        blocks: Token blocks of the inverse transform.
        escaping: Chunks with escapes.
    """

    pieces: tuple[ParsedChunk, ...]
    buffer: Tensor
    parts: dict[str, tuple[int, int, torch.dtype]]
    items: int
    base_items: int
    streams: int
    values: int
    slots: int
    wide: bool
    blocks: int
    escaping: int

    def of(self, buffer: Tensor, name: str) -> Tensor:
        """Return a part of a buffer laid out like this one."""
        at, length, dtype = self.parts[name]
        return buffer[at : at + length].view(dtype)


def stage(
    parsed: Sequence[ParsedChunk], header: Header, *, rows: int, origin: int = 0, pinned: bool = False
) -> DeviceBatch:
    """Lay chunks out in one buffer.

    ``rows``: tokens of a block of the inverse transform; ``origin``: index of the first token in the output.
    """
    table = _Tables()
    for index, piece in enumerate(parsed):
        table.add(index, piece, header.levels[piece.piece.level].step, rows, origin)
    arrays = table.arrays(header)
    parts: dict[str, tuple[int, int, torch.dtype]] = {}
    at = 0
    for name, (dtype, listed) in arrays.items():
        length = sum(array.nbytes for array in listed)
        parts[name] = (at, length, dtype)
        at += -(-length // _PART_ALIGN) * _PART_ALIGN
    buffer = torch.empty(max(at, _PART_ALIGN), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    raw = buffer.numpy()
    for name, (_, listed) in arrays.items():
        begin = parts[name][0]
        for array in listed:
            raw[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            begin += array.nbytes
    return DeviceBatch(
        tuple(parsed),
        buffer,
        parts,
        items=table.items,
        base_items=table.base_items,
        streams=len(table.streams),
        values=table.values,
        slots=table.slots,
        wide=any(piece.wide for piece in parsed),
        blocks=len(table.blocks),
        escaping=len(table.escaping),
    )


class _Tables:
    """Builds a batch's descriptors; ``decode_kernels`` describes their fields, see STREAM_FIELDS there."""

    def __init__(self) -> None:
        self.streams: list[list[int]] = []
        self.escaping: list[list[int]] = []
        self.values = self.slots = 0
        self._chunks: list[list[int]] = []
        self._items: list[list[tuple[int, int]]] = []
        self.blocks: list[tuple[int, int]] = []
        self._words16: list[NDArray[Any]] = []
        self._words32: list[NDArray[Any]] = []
        self._entries: list[NDArray[np.uint32]] = []
        self._at16 = self._at32 = self._at_entry = self._tokens = 0
        self._group_slots: list[NDArray[np.int32]] = []
        self._slot_rows: list[NDArray[np.int32]] = []
        self._slot_sizes: list[NDArray[np.float32]] = []
        self._steps: list[float] = []
        self._ids: list[NDArray[np.int32]] = []

    @property
    def base_items(self) -> int:
        return len(self._items[0])

    @property
    def items(self) -> int:
        return sum(map(len, self._items))

    def add(self, index: int, piece: ParsedChunk, step: float, rows: int, origin: int) -> None:
        where = [piece.start + origin, self._tokens]
        self._chunks.append([self.values, piece.width, piece.tokens, self.slots, *where])
        for level, part in enumerate(piece.parts):
            self._add_stream(index, piece, level, part)
        self.blocks += [(index, first) for first in range(0, piece.tokens, rows)]
        self._group_slots.append(piece.group_slots)
        self._slot_rows.append(piece.rows)
        self._slot_sizes.append(piece.sizes)
        self._steps.append(step)
        self._ids.append(np.arange(piece.start, piece.start + piece.tokens, dtype=np.int32))
        self.values += piece.values
        self.slots += piece.width
        self._tokens += piece.tokens

    def _add_stream(self, index: int, piece: ParsedChunk, level: int, part: SegmentParts) -> None:
        lanes, stream, entries = len(part.states), len(self.streams), piece.entries[level]
        starts = np.zeros(lanes + 1, np.uint32)
        np.cumsum(part.counts, dtype=np.uint32, out=starts[1:])
        needed = -(-len(piece.parts[level - 1].states) // BLOCK) if level else 0
        words = part.words if len(part.words) else np.zeros(1, np.uint16)  # kernels always read one
        self.streams.append(
            [
                self._at16, len(words) - 1, self._at32, self._at32 + lanes, lanes, len(entries), self._at_entry,
                self.values, piece.width, piece.tokens, int(level == 0), needed, index, self.slots,
                len(piece.escapes),
            ]
        )  # fmt: skip
        self._words16.append(words)
        self._words32 += [part.states, starts]
        self._at16 += len(words)
        self._at32 += 2 * lanes + 1
        if level == 0 and len(piece.escapes):
            shape = [self.values, piece.width, piece.tokens, len(entries), self._at_entry]
            self.escaping.append([*shape, self._at32, len(piece.escapes), index, self.slots])
            self._words32.append(piece.escapes.view(np.uint32))
            self._at32 += len(piece.escapes)
        self._entries.append(entries)
        self._at_entry += len(entries)
        while len(self._items) <= level:
            self._items.append([])
        self._items[level] += [(stream, block) for block in range(-(-lanes // BLOCK))]

    def arrays(self, header: Header) -> dict[str, tuple[torch.dtype, list[NDArray[Any]]]]:
        """Return dtype and arrays of every part of the buffer by name."""
        where = np.concatenate(self._ids)
        ids = header.info.token_ids
        token_ids = np.zeros(len(where), np.int32) if ids is None else np.asarray(ids, np.int32)[where]
        return {
            "streams": (torch.int64, [np.array(self.streams, np.int64)]),
            "chunks": (torch.int64, [np.array(self._chunks, np.int64)]),
            "escaping": (torch.int64, [np.array(self.escaping, np.int64)]),
            "items": (torch.int32, [np.array([item for level in self._items for item in level], np.int32)]),
            "blocks": (torch.int32, [np.array(self.blocks, np.int32)]),
            "group_slots": (torch.int32, list(self._group_slots)),
            "slot_rows": (torch.int32, list(self._slot_rows)),
            "slot_sizes": (torch.float32, list(self._slot_sizes)),
            "steps": (torch.float32, [np.array(self._steps, np.float32)]),
            "tokens": (torch.int32, [where]),
            "token_ids": (torch.int32, [token_ids]),
            "entries": (torch.uint32, list(self._entries)),
            "words32": (torch.uint32, self._words32),
            "words16": (torch.uint16, self._words16),
        }
