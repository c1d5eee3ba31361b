"""The blob's head: header, metadata, index, token ids. Exactly specified in docs/format.md.

Everything here is read from strangers: sizes are compared with what the input can pay for before anything is allocated.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.codec.layout import MAX_JSON_BYTES, meta_from_json, meta_to_json, pack_json, unpack_json
from kvwire.codec.quantiser import MAX_LEVELS
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError
from kvwire.types import BlobInfo, LevelInfo, SegmentInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvwire.types import CacheMeta

MAGIC = b"\x89KVW\r\n\x1a\n"
VERSION = (1, 0)
ALIGNMENT = 64
MAX_HEAD_BYTES = 16 << 20
MAX_CHUNK_TOKENS = 4096
CODEC_LANES = 1
"""Segment codec: layered coefficients in private-lane rANS."""
MISSING = 0xFFFF_FFFF_FFFF_FFFF
_PROLOGUE = struct.Struct("<8sHHIIQQIIIIIBBHI")
"""magic, major, minor, incompatible, compatible, head bytes, file bytes, head CRC-32, metadata stored, metadata raw, tokens,
chunk tokens, levels, bits of a token id (0: unknown), reserved, bytes of the profile inside."""
_CRC_AT = 36
_ENTRY = np.dtype(
    [
        ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("crc32", "<u4"),
        ("codec", "<u2"), ("flags", "<u2"), ("error", "<f4"), ("reserved", "<u4"),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """A level as the encoder made it: name, quantiser step, and the classes to subtract at that step."""

    name: str
    step: float
    shift: int


@dataclass(frozen=True, eq=False)
class Head:
    """A parsed head: what every reader sees (``info``) and what the decoder alone needs."""

    info: BlobInfo
    levels: tuple[Level, ...]
    profile_bytes: bytes


@dataclass(frozen=True, eq=False)
class Draft:
    """What the encoder hands to ``pack_blob``: segments[chunk][level] as (stored bytes, raw symbols, error)."""

    meta: CacheMeta
    token_ids: tuple[int, ...] | None
    tokens: int
    chunk_tokens: int
    levels: tuple[Level, ...]
    profile_digest: str
    profile_bytes: bytes
    segments: Sequence[Sequence[tuple[bytes, int, float]]]


def pack_blob(draft: Draft) -> bytes:
    """Lay out a whole blob."""
    metadata, metadata_raw = pack_json(
        {
            "meta": meta_to_json(draft.meta),
            "levels": [[level.name, level.step, level.shift] for level in draft.levels],
            "profile": draft.profile_digest,
        }
    )
    bits, ids = _pack_ids(draft.token_ids, draft.tokens)
    cells = len(draft.segments) * len(draft.levels)
    used = _PROLOGUE.size + len(metadata) + cells * _ENTRY.itemsize + len(ids) + len(draft.profile_bytes)
    head_bytes = -(-used // ALIGNMENT) * ALIGNMENT
    index, end = _index(draft, head_bytes)
    prologue = _PROLOGUE.pack(
        MAGIC, *VERSION, 0, 0, head_bytes, end, 0, len(metadata), metadata_raw, draft.tokens, draft.chunk_tokens,
        len(draft.levels), bits, 0, len(draft.profile_bytes),
    )  # fmt: skip
    head = bytearray(prologue + metadata + index.tobytes() + ids + draft.profile_bytes + bytes(head_bytes - used))
    head[_CRC_AT : _CRC_AT + 4] = struct.pack("<I", zlib.crc32(head))
    return bytes(head) + b"".join(data for chunk in draft.segments for data, _, _ in chunk)


def _index(draft: Draft, offset: int) -> tuple[NDArray[np.void], int]:
    index = np.zeros((len(draft.segments), len(draft.levels)), _ENTRY)
    for row, chunk in enumerate(draft.segments):
        for level, (data, raw, error) in enumerate(chunk):
            index[row, level] = (offset, len(data), raw, zlib.crc32(data), CODEC_LANES, 0, error, 0)
            offset += len(data)
    return index, offset


def read_head(data: bytes, *, check: bool = True) -> BlobInfo:
    """What a blob says about itself, from its first bytes.

    Raises TruncatedError (whose ``needed`` says how many bytes to bring) where ``data`` ends too early, CorruptError
    where the head's checksum or content is wrong, FormatVersionError where the version or a flag is unknown.
    ``check=False`` leaves the checksum out.
    """
    return parse_head(data, check=check).info


def parse_head(data: bytes, *, check: bool = True) -> Head:
    """``read_head`` for the decoder."""
    fields = _prologue(data, check=check)
    head_bytes, file_bytes, meta_stored, meta_raw, tokens, chunk_tokens, levels, bits, profile_size = fields
    chunks = -(-tokens // chunk_tokens)
    id_bytes = _id_bytes(tokens, bits)
    used = _PROLOGUE.size + meta_stored + chunks * levels * _ENTRY.itemsize + id_bytes + profile_size
    if not used <= head_bytes < used + ALIGNMENT:
        msg = "the blob's head does not add up to its length; fetch it again"
        raise CorruptError(msg)
    at = _PROLOGUE.size
    metadata = unpack_json(bytes(data[at : at + meta_stored]), meta_raw, "blob")
    at += meta_stored
    index = np.frombuffer(data, _ENTRY, chunks * levels, at).reshape(chunks, levels)
    at += index.nbytes
    ids = _unpack_ids(data[at : at + id_bytes], tokens, bits)
    profile_bytes = bytes(data[at + id_bytes : at + id_bytes + profile_size])
    meta = meta_from_json(metadata.get("meta", {}))
    parsed = _levels(metadata.get("levels"), levels)
    segments = _segments(index, head_bytes, file_bytes)
    info = BlobInfo(
        VERSION, meta, tokens, chunk_tokens, head_bytes, file_bytes, str(metadata.get("profile", "")),
        _level_infos(parsed, segments, head_bytes, tokens * meta.elements_per_token, chunk_tokens), segments, ids,
    )  # fmt: skip
    return Head(info, parsed, profile_bytes)


def _prologue(data: bytes, *, check: bool) -> tuple[int, ...]:
    if not data[: len(MAGIC)] == MAGIC[: len(data)] or not data:
        msg = "this is no kvwire blob: it does not begin with the blob's signature"
        raise CorruptError(msg)
    if len(data) < _PROLOGUE.size:
        msg = "the blob ends within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    (_, major, minor, incompatible, _, head_bytes, file_bytes, crc, meta_stored, meta_raw, tokens, chunk_tokens,
     levels, bits, _, profile_size) = _PROLOGUE.unpack_from(data)  # fmt: skip
    if major != VERSION[0] or incompatible:
        msg = f"blob format {major}.{minor} (flags {incompatible:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    if not _PROLOGUE.size <= head_bytes <= min(MAX_HEAD_BYTES, file_bytes):
        msg = f"the blob claims a head of {head_bytes} bytes; fetch it again"
        raise CorruptError(msg)
    if len(data) < head_bytes:
        msg = f"the blob's head ends after {len(data)} of {head_bytes} bytes; fetch it again"
        raise TruncatedError(msg, head_bytes)
    head = bytearray(data[:head_bytes])
    head[_CRC_AT : _CRC_AT + 4] = bytes(4)
    if check and zlib.crc32(head) != crc:
        msg = "the blob's head does not match its checksum; fetch it again"
        raise CorruptError(msg)
    sound = tokens and 1 <= chunk_tokens <= MAX_CHUNK_TOKENS and 1 <= levels <= MAX_LEVELS and bits <= 32  # noqa: PLR2004
    if not sound or meta_raw > MAX_JSON_BYTES:
        msg = "the blob's header holds impossible numbers; fetch it again"
        raise CorruptError(msg)
    return head_bytes, file_bytes, meta_stored, meta_raw, tokens, chunk_tokens, levels, bits, profile_size


def _levels(rows: Any, count: int) -> tuple[Level, ...]:  # noqa: ANN401 - JSON
    try:
        levels = tuple(Level(str(name), float(step), int(shift)) for name, step, shift in rows)
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"the blob's levels are damaged ({error}); fetch it again"
        raise CorruptError(msg) from error
    if len(levels) != count or any(not (math.isfinite(level.step) and level.step > 0) for level in levels):
        msg = "the blob's levels are damaged; fetch it again"
        raise CorruptError(msg)
    return levels


def _segments(index: NDArray[np.void], head_bytes: int, file_bytes: int) -> tuple[tuple[SegmentInfo, ...], ...]:
    """Index entries in payload order: no gap, no overlap, nothing past the end."""
    rows, expected = [], head_bytes
    for chunk, row in enumerate(index.tolist()):
        cells = []
        for level, (offset, stored, raw, crc, codec, flags, error, _) in enumerate(row):
            if offset == MISSING:
                break
            if offset != expected or offset + stored > file_bytes or flags:
                msg = f"chunk {chunk} level {level} lies where it cannot; fetch the blob's head again"
                raise CorruptError(msg)
            if codec != CODEC_LANES:
                msg = f"chunk {chunk} level {level} is coded in way {codec}, unknown to this kvwire; upgrade kvwire"
                raise FormatVersionError(msg)
            expected = offset + stored
            cells.append(SegmentInfo(chunk, level, offset, stored, raw, crc, codec, error))
        rows.append(tuple(cells))
    if expected != file_bytes:
        msg = "the blob's segments do not add up to its length; fetch it again"
        raise CorruptError(msg)
    return tuple(rows)


def _level_infos(
    levels: tuple[Level, ...],
    segments: tuple[tuple[SegmentInfo, ...], ...],
    head_bytes: int,
    elements: int,
    _chunk_tokens: int,
) -> tuple[LevelInfo, ...]:
    out, cumulative = [], head_bytes
    for index, level in enumerate(levels):
        here = [row[index] for row in segments if len(row) > index]
        size = sum(segment.stored for segment in here)
        cumulative += size
        error = sum(segment.error for segment in here) / max(1, len(here))
        bits = 8.0 * cumulative / max(1, elements)
        out.append(LevelInfo(level.name, level.step, size, cumulative, bits, error))
    return tuple(out)


def _pack_ids(ids: tuple[int, ...] | None, tokens: int) -> tuple[int, bytes]:
    if ids is None:
        return 0, bytes(tokens)
    bits = max(8, max(ids).bit_length())
    wide = np.asarray(ids, "<u4").view(np.uint8).reshape(-1, 4)
    flat = np.unpackbits(wide, axis=1, bitorder="little")[:, :bits]
    return bits, np.packbits(flat.ravel(), bitorder="little").tobytes()


def _id_bytes(tokens: int, bits: int) -> int:
    """At least a byte for each token, known or not: a blob cannot claim tokens that it does not pay for."""
    return -(-tokens * max(8, bits) // 8)


def _unpack_ids(data: bytes, tokens: int, bits: int) -> tuple[int, ...] | None:
    if not bits:
        return None
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: tokens * max(8, bits)].reshape(tokens, -1)
    wide = np.zeros((tokens, 32), np.uint8)
    wide[:, : flat.shape[1]] = flat
    return tuple(np.packbits(wide, axis=1, bitorder="little").view("<u4").ravel().tolist())
