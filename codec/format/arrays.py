"""A checked bundle of named arrays: how profiles are stored. See docs/format.md."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.format.metadata_json import decompress, pack_json, unpack_json
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = (1, 0)
MAX_PACKED_BYTES = 1 << 20
"""Raw size up to which an array may be compressed: tables and means are far below. Of larger ones ``PACKED`` tells."""
MAX_PACKED_TOTAL = 16 << 20
"""The same for all arrays of a file together: the profile inside a blob of a hundred wide layers needs two."""
PACKED = 1
"""Incompatible flag: larger arrays may be compressed, too, and all compressed ones lie in planes of bytes."""
MOST_PACKED = 16
"""Bytes that a byte of a larger array's frame may stand for: more would let a short file claim much memory."""
_PROLOGUE = struct.Struct("<8sHHIIQIII")
"""magic, major, minor, incompatible flags, compatible flags, file bytes, CRC-32, metadata stored, metadata raw."""
_CRC_AT = 28
_DTYPES = ("<f2", "<f4", "<i2", "<u2", "|i1")

Arrays = dict[str, "NDArray[np.generic]"]


def pack_arrays(magic: bytes, head: dict[str, Any], arrays: Arrays, *, packed: bool = False) -> bytes:
    """Serialise named arrays; the same input gives the same bytes.

    Args:
        magic: First eight bytes of the file.
        head: What JSON can hold.
        arrays: By name; zstd-compressed where that helps.
        packed: Compress large ones, too, in planes of bytes; see ``PACKED``.

    Returns:
        The file.
    """
    listed, parts, budget = [], [], MAX_PACKED_TOTAL
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        large = packed and array.nbytes > MAX_PACKED_BYTES
        parts.append(_packed(array) if large else _smaller(_in_planes(array) if packed else array.tobytes(), budget))
        if len(parts[-1]) == array.nbytes:
            parts[-1] = array.tobytes()
        elif not large:
            budget -= array.nbytes
        listed.append([name, array.dtype.newbyteorder("=").str.replace("=", "<"), list(array.shape), len(parts[-1])])
    meta, raw = pack_json({"arrays": listed, "head": head})
    body = meta + b"".join(parts)
    size = _PROLOGUE.size + len(body)
    flags = PACKED if packed else 0
    blank = _PROLOGUE.pack(magic, *VERSION, flags, 0, size, 0, len(meta), raw)
    crc = crc32(body, crc32(blank))
    return _PROLOGUE.pack(magic, *VERSION, flags, 0, size, crc, len(meta), raw) + body


def _in_planes(array: NDArray[np.generic]) -> bytes:
    """The lowest byte of every element, then the next one of every element, and so on."""
    return np.ascontiguousarray(array.reshape(-1, 1).view(np.uint8).T).tobytes()


def _off_planes(raw: bytes, size: int) -> bytes:
    """Undo ``_in_planes`` of elements of ``size`` bytes."""
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(size, -1).T).tobytes()


def _packed(array: NDArray[np.generic]) -> bytes:
    """The frame of a large array, or the array itself where that would be no shorter or too short to be believed.

    Level 1: entries have nothing in common but how often each occurs, and looking for more takes long and costs bytes.
    """
    frame = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(_in_planes(array))
    return frame if len(frame) < array.nbytes <= MOST_PACKED * len(frame) else array.tobytes()


def _smaller(raw: bytes, budget: int) -> bytes:
    """The array itself or its zstd frame, whichever is shorter; frames only where a reader accepts them."""
    if len(raw) > min(MAX_PACKED_BYTES, budget):
        return raw
    packed = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)
    return packed if len(packed) < len(raw) else raw


def unpack_arrays(magic: bytes, data: bytes, what: str) -> tuple[dict[str, Any], Arrays]:
    """Read ``pack_arrays``.

    Args:
        magic: First eight bytes that the file must have.
        data: The file.
        what: What it is called in messages.

    Returns:
        The JSON part and the arrays by name.

    Raises:
        TruncatedError: The file ends too early.
        CorruptError: It is damaged, or of another kind.
        FormatVersionError: A later version wrote it.
    """
    meta_stored, meta_raw, packed = _prologue(magic, data, what)
    body = memoryview(data)[_PROLOGUE.size :]
    meta = unpack_json(bytes(body[:meta_stored]), meta_raw, what)
    try:
        arrays = _arrays(meta["arrays"], body[meta_stored:], what, packed=packed)
        return dict(meta["head"]), arrays
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        msg = f"the {what}'s array list is damaged ({error}); fetch it again"
        raise CorruptError(msg) from error


def _prologue(magic: bytes, data: bytes, what: str) -> tuple[int, int, bool]:
    """Check what comes before the metadata; returns the metadata's stored and raw length, and whether it is packed."""
    if data[: len(magic)] != magic[: len(data)] or not data:
        msg = f"this is no kvwire {what}: it does not begin with the {what}'s signature"
        raise CorruptError(msg)
    if len(data) < _PROLOGUE.size:
        msg = f"the {what} ends within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    _, major, minor, flags, _, size, crc, meta_stored, meta_raw = _PROLOGUE.unpack_from(data)
    if major != VERSION[0] or flags & ~PACKED:
        msg = f"{what} format {major}.{minor} (flags {flags:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    if len(data) < size:
        msg = f"the {what} ends after {len(data)} of {size} bytes; fetch it again"
        raise TruncatedError(msg, size)
    blank = bytearray(data[: _PROLOGUE.size])
    blank[_CRC_AT : _CRC_AT + 4] = bytes(4)
    if len(data) != size or crc32(memoryview(data)[_PROLOGUE.size :], crc32(blank)) != crc:
        msg = f"the {what}'s checksum does not match its content; fetch it again"
        raise CorruptError(msg)
    if meta_stored > size - _PROLOGUE.size:
        msg = f"the {what}'s metadata is longer than the {what}; fetch it again"
        raise CorruptError(msg)
    return meta_stored, meta_raw, bool(flags & PACKED)


def _arrays(listed: list[list[Any]], body: memoryview, what: str, *, packed: bool) -> Arrays:
    out: Arrays = {}
    start, budget = 0, MAX_PACKED_TOTAL
    for name, dtype, shape, stored in listed:
        counts_fit = all(type(n) is int and n >= 0 for n in (*shape, stored))
        if type(name) is not str or name in out or dtype not in _DTYPES or not counts_fit:
            msg = f"array {name!r}"
            raise ValueError(msg)
        raw = math.prod(shape) * np.dtype(dtype).itemsize
        part = body[start : start + stored]
        if len(part) != stored or stored > raw:
            msg = f"array {name!r} has another size than its shape says"
            raise ValueError(msg)
        if stored < raw:
            large = packed and raw > MAX_PACKED_BYTES
            budget -= 0 if large else raw
            if (raw > MOST_PACKED * stored if large else raw > MAX_PACKED_BYTES) or budget < 0:
                msg = f"array {name!r} claims more than a compressed array may hold"
                raise ValueError(msg)
            unpacked = decompress(bytes(part), raw, what)
            part = memoryview(_off_planes(unpacked, np.dtype(dtype).itemsize) if packed else unpacked)
        out[name] = np.frombuffer(part, dtype).reshape(shape)
        start += stored
    if start != len(body):
        msg = "bytes are left over"
        raise ValueError(msg)
    return out
