"""A checked file of named arrays, in which profiles are stored. See docs/format.md."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.format.metadata_json import decompress, pack_json, unpack_json
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

VERSION = (1, 0)
MAX_PACKED_BYTES = 1 << 20
"""Largest raw size of a compressed array without ``PACKED``: tables and means are far smaller."""
MAX_PACKED_TOTAL = 16 << 20
"""The same for all arrays of a file together: a profile inside a blob of a hundred wide layers needs 2 MiB."""
PACKED = 1
"""Incompatible flag: larger arrays may be compressed, too, and all compressed arrays are in byte planes."""
SECTIONS = 2
"""Incompatible flag: arrays are in sections with digests of their own, so that a reader may fetch the first ones."""
MOST_SECTIONS = 16
MOST_PACKED = 16
"""Most bytes that one byte of a larger array's frame may unpack to: more would let a short file claim much memory."""
_PROLOGUE = struct.Struct("<8sHHIIQIII")
"""Magic, major, minor, incompatible flags, compatible flags, file bytes, CRC-32, metadata stored, metadata raw."""
_CRC_AT = 28
_LEVEL = 6
"""zstd level of small arrays: level 19 takes fifteen times as long and saves 0.3 % of a profile's arrays, level 16
seven times as long and saves 1.3 % (ebook-llama-14m)."""
_LITERALS = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
)
"""Large arrays repeat single values, not sequences: short matches are chance and cost more than they save."""
_DTYPES = ("<f2", "<f4", "<i2", "<u2", "|i1")

Arrays = dict[str, "NDArray[np.generic]"]
Listed = list[list[Any]]
"""Name, dtype, shape and stored bytes of each array, in storage order."""


class Section(NamedTuple):
    """One section of a file.

    Attributes:
        start: Offset of its first byte in the file.
        end: Offset after its last byte.
        sha256: Hexadecimal digest of its bytes.
        listed: The arrays in it.
    """

    start: int
    end: int
    sha256: str
    listed: Listed


class Description(NamedTuple):
    """The description of a file before its first array.

    Attributes:
        head: JSON fields.
        listed: All arrays.
        sections: All sections; empty without the flag.
        start: Offset of the first array.
        size: Bytes of the file.
        packed: Whether compressed arrays are in byte planes.
    """

    head: dict[str, Any]
    listed: Listed
    sections: tuple[Section, ...]
    start: int
    size: int
    packed: bool


def pack_arrays(
    magic: bytes,
    head: dict[str, Any],
    arrays: Arrays,
    *,
    packed: bool = False,
    sections: Sequence[Collection[str]] = (),
) -> bytes:
    """Serialise named arrays; the same input gives the same bytes."""
    names = [name for section in sections or [arrays] for name in sorted(section)]
    listed, parts, budget = [], [], MAX_PACKED_TOTAL
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        large = packed and array.nbytes > MAX_PACKED_BYTES
        parts.append(_packed(array) if large else _smaller(_in_planes(array) if packed else array.tobytes(), budget))
        if len(parts[-1]) == array.nbytes:
            parts[-1] = array.tobytes()
        elif not large:
            budget -= array.nbytes
        listed.append([name, array.dtype.newbyteorder("=").str.replace("=", "<"), list(array.shape), len(parts[-1])])
    metadata: dict[str, Any] = {"arrays": listed, "head": head}
    if sections:
        stored = dict(zip(names, parts, strict=True))
        metadata["sections"] = [_section_entry([stored[name] for name in sorted(section)]) for section in sections]
    meta, raw = pack_json(metadata)
    size = _PROLOGUE.size + len(meta) + sum(map(len, parts))
    flags = (PACKED if packed else 0) | (SECTIONS if sections else 0)
    blank = _PROLOGUE.pack(magic, *VERSION, flags, 0, size, 0, len(meta), raw)
    crc = crc32(meta, crc32(blank))
    for part in () if sections else parts:
        crc = crc32(part, crc)
    return b"".join([_PROLOGUE.pack(magic, *VERSION, flags, 0, size, crc, len(meta), raw), meta, *parts])


def _section_entry(parts: list[bytes]) -> list[Any]:
    """Return a section's metadata: number of arrays, bytes and SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [len(parts), sum(map(len, parts)), digest.hexdigest()]


def _in_planes(array: NDArray[np.generic]) -> bytes:
    """Return the lowest byte of every element, then the next bytes, and so on."""
    return np.ascontiguousarray(array.reshape(-1, 1).view(np.uint8).T).tobytes()


def _off_planes(raw: bytes, size: int) -> bytes:
    """Undo ``_in_planes`` for elements of ``size`` bytes."""
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(size, -1).T).tobytes()


def _packed(array: NDArray[np.generic]) -> bytes:
    """Return a large array's frame, or the array where the frame is no shorter or readers would refuse it."""
    frame = zstandard.ZstdCompressor(compression_params=_LITERALS).compress(_in_planes(array))
    return frame if len(frame) < array.nbytes <= MOST_PACKED * len(frame) else array.tobytes()


def _smaller(raw: bytes, budget: int) -> bytes:
    """Return the shorter of an array and its zstd frame; the array where readers would refuse a frame."""
    if len(raw) > min(MAX_PACKED_BYTES, budget):
        return raw
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)
    return packed if len(packed) < len(raw) else raw


def unpack_arrays(magic: bytes, data: bytes, what: str) -> tuple[dict[str, Any], Arrays]:
    """Read ``pack_arrays``."""
    file = describe(magic, data, what)
    if len(data) < file.size:
        raise TruncatedError(f"the {what} ends after {len(data)} of {file.size} bytes; fetch it again", file.size)
    if len(data) != file.size:
        msg = f"the {what}'s checksum does not match its content: it is longer than it says; fetch it again"
        raise CorruptError(msg)
    body = memoryview(data)
    if not file.sections:
        return file.head, read_listed(file.listed, body[file.start :], what, packed=file.packed)
    arrays: Arrays = {}
    for number, section in enumerate(file.sections):
        part = body[section.start : section.end]
        if hashlib.sha256(part).hexdigest() != section.sha256:
            raise CorruptError(f"the {what}'s checksum does not match its content in section {number}; fetch it again")
        arrays |= read_listed(section.listed, part, what, packed=file.packed)
    return file.head, arrays


def describe(magic: bytes, data: bytes, what: str) -> Description:
    """Read a file's description; of a file with sections, the bytes before the first section suffice."""
    flags, size, meta_stored, meta_raw = _prologue(magic, data, what)
    start = _PROLOGUE.size + meta_stored
    meta = unpack_json(bytes(memoryview(data)[_PROLOGUE.size : start]), meta_raw, what)
    try:
        listed, packed = meta["arrays"], bool(flags & PACKED)
        _check_claims(listed, packed=packed)
        sections = _sections(meta["sections"], listed, start, size) if flags & SECTIONS else ()
        return Description(dict(meta["head"]), listed, sections, start, size, packed)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(what, error) from error


def read_listed(listed: Listed, body: memoryview, what: str, *, packed: bool) -> Arrays:
    """Read consecutive arrays."""
    out: Arrays = {}
    start = 0
    try:
        for name, dtype, shape, stored in listed:
            raw, part = _raw(dtype, shape), body[start : start + stored]
            if stored < raw:
                unpacked = decompress(bytes(part), raw, what)
                part = memoryview(_off_planes(unpacked, np.dtype(dtype).itemsize) if packed else unpacked)
            out[name] = np.frombuffer(part, dtype).reshape(shape)
            start += stored
    except (ValueError, OverflowError) as error:
        raise _damaged(what, error) from error
    if start != len(body):
        raise _damaged(what, "bytes are left over")
    return out


def _damaged(what: str, problem: object) -> CorruptError:
    return CorruptError(f"the {what}'s array list is damaged ({problem}); fetch it again")


def _prologue(magic: bytes, data: bytes, what: str) -> tuple[int, int, int, int]:
    """Check prologue and CRC-32; return flags, file bytes, and stored and raw bytes of the metadata."""
    if data[: len(magic)] != magic[: len(data)] or not data:
        raise CorruptError(f"this is no kvwire {what}: it does not begin with the {what}'s signature")
    if len(data) < _PROLOGUE.size:
        raise TruncatedError(f"the {what} ends within its header; fetch it again", _PROLOGUE.size)
    _, major, minor, flags, _, size, crc, meta_stored, meta_raw = _PROLOGUE.unpack_from(data)
    if major != VERSION[0] or flags & ~(PACKED | SECTIONS):
        msg = f"{what} format {major}.{minor} (flags {flags:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    needed = min(size, _PROLOGUE.size + meta_stored) if flags & SECTIONS else size
    if len(data) < needed:
        raise TruncatedError(f"the {what} ends after {len(data)} of {needed} bytes; fetch it again", needed)
    blank = bytearray(data[: _PROLOGUE.size])
    blank[_CRC_AT : _CRC_AT + 4] = bytes(4)
    longer = len(data) != size and not flags & SECTIONS
    covered = memoryview(data)[_PROLOGUE.size : needed]
    if longer or needed < _PROLOGUE.size or crc32(covered, crc32(blank)) != crc:
        raise CorruptError(f"the {what}'s checksum does not match its content; fetch it again")
    if meta_stored > size - _PROLOGUE.size:
        raise CorruptError(f"the {what}'s metadata is longer than the {what}; fetch it again")
    return flags, size, meta_stored, meta_raw


def _raw(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _check_claims(listed: Listed, *, packed: bool) -> None:
    """Raise ValueError or TypeError where an entry is invalid or claims too much memory for its stored bytes."""
    names, budget = set[str](), MAX_PACKED_TOTAL
    for name, dtype, shape, stored in listed:
        counts_fit = all(type(n) is int and n >= 0 for n in (*shape, stored))
        if type(name) is not str or name in names or dtype not in _DTYPES or not counts_fit:
            raise ValueError(f"array {name!r}")
        names.add(name)
        raw = _raw(dtype, shape)
        if stored > raw:
            raise ValueError(f"array {name!r} has another size than its shape says")
        if stored < raw:
            large = packed and raw > MAX_PACKED_BYTES
            budget -= 0 if large else raw
            if (raw > MOST_PACKED * stored if large else raw > MAX_PACKED_BYTES) or budget < 0:
                raise ValueError(f"array {name!r} claims more than a compressed array may hold")


def _sections(raw: list[list[Any]], listed: Listed, start: int, size: int) -> tuple[Section, ...]:
    """Assign the arrays to the sections; raises ValueError or TypeError where they do not fill them."""
    if not 1 <= len(raw) <= MOST_SECTIONS:
        raise ValueError(f"{len(raw)} sections")
    out: list[Section] = []
    first = 0
    for count, stored, sha256 in raw:
        own = listed[first : first + count] if type(count) is int and count >= 0 else []
        if type(stored) is not int or type(sha256) is not str or len(own) != count or sum(r[3] for r in own) != stored:
            raise ValueError(f"the arrays of section {len(out)} do not fill it")
        out.append(Section(start, start + stored, sha256, own))
        start, first = start + stored, first + count
    if first != len(listed) or start != size:
        raise ValueError("arrays or bytes are left over")
    return tuple(out)


def typed(array: NDArray[np.generic], *kinds: str) -> Any:  # noqa: ANN401 - an array of one of the kinds
    """Return a copy in native byte order; raises ValueError where the array has another dtype."""
    if array.dtype.str[1:] not in kinds:
        raise ValueError(f"an array is of type {array.dtype}, not {' or '.join(kinds)}")
    return array.astype(array.dtype.newbyteorder("="))
