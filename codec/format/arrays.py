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
"""Raw size up to which an array may be compressed: tables and means are far below, matrices do not compress anyway."""
MAX_PACKED_TOTAL = 16 << 20
"""The same for all arrays of a file together: the profile inside a blob of a hundred wide layers needs two."""
_PROLOGUE = struct.Struct("<8sHHIIQIII")
"""magic, major, minor, incompatible flags, compatible flags, file bytes, CRC-32, metadata stored, metadata raw."""
_CRC_AT = 28
_DTYPES = ("<f2", "<f4", "<i2", "<u2", "|i1")

Arrays = dict[str, "NDArray[np.generic]"]


def pack_arrays(magic: bytes, head: dict[str, Any], arrays: Arrays) -> bytes:
    """Serialise named arrays; the same input gives the same bytes.

    Args:
        magic: First eight bytes of the file.
        head: What JSON can hold.
        arrays: By name; zstd-compressed where that helps.

    Returns:
        The file.
    """
    listed, parts, budget = [], [], MAX_PACKED_TOTAL
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        parts.append(_smaller(array.tobytes(), budget))
        budget -= array.nbytes if len(parts[-1]) < array.nbytes else 0
        listed.append([name, array.dtype.newbyteorder("=").str.replace("=", "<"), list(array.shape), len(parts[-1])])
    meta, raw = pack_json({"arrays": listed, "head": head})
    body = meta + b"".join(parts)
    size = _PROLOGUE.size + len(body)
    blank = _PROLOGUE.pack(magic, *VERSION, 0, 0, size, 0, len(meta), raw)
    crc = crc32(body, crc32(blank))
    return _PROLOGUE.pack(magic, *VERSION, 0, 0, size, crc, len(meta), raw) + body


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
    meta_stored, meta_raw = _prologue(magic, data, what)
    body = memoryview(data)[_PROLOGUE.size :]
    meta = unpack_json(bytes(body[:meta_stored]), meta_raw, what)
    try:
        arrays = _arrays(meta["arrays"], body[meta_stored:], what)
        return dict(meta["head"]), arrays
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        msg = f"the {what}'s array list is damaged ({error}); fetch it again"
        raise CorruptError(msg) from error


def _prologue(magic: bytes, data: bytes, what: str) -> tuple[int, int]:
    """Check everything that comes before the metadata; returns the metadata's stored and raw length."""
    if data[: len(magic)] != magic[: len(data)] or not data:
        msg = f"this is no kvwire {what}: it does not begin with the {what}'s signature"
        raise CorruptError(msg)
    if len(data) < _PROLOGUE.size:
        msg = f"the {what} ends within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    _, major, minor, flags, _, size, crc, meta_stored, meta_raw = _PROLOGUE.unpack_from(data)
    if major != VERSION[0] or flags:
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
    return meta_stored, meta_raw


def _arrays(listed: list[list[Any]], body: memoryview, what: str) -> Arrays:
    out: Arrays = {}
    start, budget = 0, MAX_PACKED_TOTAL
    for name, dtype, shape, stored in listed:
        if dtype not in _DTYPES or any(type(n) is not int or n < 0 for n in (*shape, stored)) or name in out:
            msg = f"array {name!r}"
            raise ValueError(msg)
        raw = math.prod(shape) * np.dtype(dtype).itemsize
        part = body[start : start + stored]
        if len(part) != stored or stored > raw:
            msg = f"array {name!r} has another size than its shape says"
            raise ValueError(msg)
        if stored < raw:
            budget -= raw
            if raw > MAX_PACKED_BYTES or budget < 0:
                msg = f"array {name!r} claims more than a compressed array may hold"
                raise ValueError(msg)
            part = memoryview(decompress(bytes(part), raw, what))
        out[name] = np.frombuffer(part, dtype).reshape(shape)
        start += stored
    if start != len(body):
        msg = "bytes are left over"
        raise ValueError(msg)
    return out
