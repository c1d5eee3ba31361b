"""The file of one extent: a header that says what it is, then the bytes.

Header, little-endian: magic, the object's name (32 bytes), start, length and the object's size (uint64 each; the size
is 2**64 - 1 where it was not known), CRC-32 of all of these and of the bytes. What does not fit is not served.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"kvwext1\n"
_FIELDS = struct.Struct("<8s32sQQQ")
_CRC = struct.Struct("<I")
_UNKNOWN = (1 << 64) - 1
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{1,16})-([0-9a-f]{1,16})\.ext")
_MODE = 0o600  # caches of conversations are private
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

HEADER_BYTES = _FIELDS.size + _CRC.size
"""Length of a file beyond its content."""


@dataclass(frozen=True)
class ExtentName:
    """What a file's name says.

    Attributes:
        name: The object.
        start: First byte.
        end: The byte after the last.
    """

    name: bytes
    start: int
    end: int

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return f"{self.name.hex()}-{self.start:x}-{self.end:x}.ext"

    @property
    def path(self) -> str:
        """Path below the tier's folder; 256 folders keep each of them short."""
        return f"{self.name[:1].hex()}/{self.file_name}"

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return HEADER_BYTES + self.end - self.start

    @classmethod
    def parse(cls, file_name: str) -> ExtentName | None:
        """Read a file's name."""
        match = _NAME.fullmatch(file_name)
        if match is None:
            return None
        start, end = int(match[2], 16), int(match[3], 16)
        named = cls(bytes.fromhex(match[1]), start, end)
        return named if start < end and named.file_name == file_name else None


def write_extent(path: Path, extent: ExtentName, size: int | None, data: bytes) -> None:
    """Write the file. It is not flushed: a crash may tear it, and the checksum tells."""
    fields = _FIELDS.pack(_MAGIC, extent.name, extent.start, len(data), _UNKNOWN if size is None else size)
    header = fields + _CRC.pack(crc32(data, crc32(fields)))
    descriptor = os.open(path, _CREATE_FLAGS, _MODE)
    try:
        left = [memoryview(header), memoryview(data)]
        while left:
            written = os.writev(descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
    finally:
        os.close(descriptor)


def read_extent(path: Path, extent: ExtentName) -> tuple[bytes, int | None]:
    """Read the file."""
    descriptor = os.open(path, _READ_FLAGS)
    try:
        header = os.read(descriptor, HEADER_BYTES)
        data = _read_fully(descriptor, extent.end - extent.start)
    finally:
        os.close(descriptor)
    if len(header) == HEADER_BYTES:
        fields = header[: _FIELDS.size]
        magic, name, start, length, size = _FIELDS.unpack(fields)
        (crc,) = _CRC.unpack(header[_FIELDS.size :])
        is_right = (magic, name, start, length) == (_MAGIC, extent.name, extent.start, extent.end - extent.start)
        if is_right and len(data) == length and crc32(data, crc32(fields)) == crc:
            return data, None if size == _UNKNOWN else size
    msg = "an extent's file is torn or rotten: drop it and read the bytes again"
    raise CorruptError(msg)


def _read_fully(descriptor: int, length: int) -> bytes:
    """The next bytes; fewer only where the file ends, one more where it goes on."""
    pieces = []
    left = length + 1
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
