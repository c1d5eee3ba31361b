"""A checked bundle of named arrays: how profiles are stored. See docs/format.md."""

from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.codec.layout import MAX_JSON_BYTES, pack_json, unpack_json
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = (1, 0)
_PROLOGUE = struct.Struct("<8sHHIQIIII")
"""magic, major, minor, incompatible flags, file bytes, CRC-32 of everything after the prologue, metadata stored, raw, reserved."""
_DTYPES = ("<f2", "<f4", "<i2", "<u2")


def pack_arrays(magic: bytes, head: dict[str, Any], arrays: dict[str, NDArray[np.generic]]) -> bytes:
    """Serialise a JSON head and little-endian arrays; the same input gives the same bytes."""
    listed, parts = [], []
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        listed.append([name, array.dtype.str.replace("|", "<"), list(array.shape)])
        parts.append(array.tobytes())
    meta, raw = pack_json({"arrays": listed, "head": head})
    body = meta + b"".join(parts)
    prologue = _PROLOGUE.pack(magic, *VERSION, 0, _PROLOGUE.size + len(body), zlib.crc32(body), len(meta), raw, 0)
    return prologue + body


def unpack_arrays(magic: bytes, data: bytes, what: str) -> tuple[dict[str, Any], dict[str, NDArray[np.generic]]]:
    """Read ``pack_arrays``; raises TruncatedError, CorruptError or FormatVersionError."""
    if len(data) < _PROLOGUE.size:
        msg = f"the {what} ends within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    found, major, minor, flags, size, crc, meta_stored, meta_raw, _ = _PROLOGUE.unpack_from(data)
    if found != magic:
        msg = f"this is no kvwire {what}: it does not begin with the {what}'s signature"
        raise CorruptError(msg)
    if major != VERSION[0] or flags:
        msg = f"{what} format {major}.{minor} (flags {flags:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    if len(data) < size:
        msg = f"the {what} ends after {len(data)} of {size} bytes; fetch it again"
        raise TruncatedError(msg, size)
    body = memoryview(data)[_PROLOGUE.size :]
    if len(data) != size or zlib.crc32(body) != crc:
        msg = f"the {what}'s checksum does not match its content; fetch it again"
        raise CorruptError(msg)
    if meta_stored > min(len(body), MAX_JSON_BYTES):
        msg = f"the {what}'s metadata is longer than the {what}; fetch it again"
        raise CorruptError(msg)
    meta = unpack_json(bytes(body[:meta_stored]), meta_raw, what)
    try:
        arrays = _arrays(meta["arrays"], body[meta_stored:])
        return dict(meta["head"]), arrays
    except (KeyError, TypeError, ValueError) as error:
        msg = f"the {what}'s array list is damaged ({error}); fetch it again"
        raise CorruptError(msg) from error


def _arrays(listed: list[list[Any]], body: memoryview) -> dict[str, NDArray[np.generic]]:
    out: dict[str, NDArray[np.generic]] = {}
    start = 0
    for name, dtype, shape in listed:
        if dtype not in _DTYPES or any(type(n) is not int or n < 0 for n in shape) or name in out:
            msg = f"array {name!r}"
            raise ValueError(msg)
        count = math.prod(shape)
        stop = start + count * np.dtype(dtype).itemsize
        if stop > len(body):
            msg = f"array {name!r} runs past the end"
            raise ValueError(msg)
        out[name] = np.frombuffer(body[start:stop], dtype).reshape(shape)
        start = stop
    if start != len(body):
        msg = "bytes are left over"
        raise ValueError(msg)
    return out
