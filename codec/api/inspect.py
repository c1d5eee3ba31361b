"""What a blob says about itself, without decoding it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.format.container import parse_header
from kvwire.errors import ArgumentError, CorruptError, TruncatedError

if TYPE_CHECKING:
    from kvwire.types import BlobInfo


def inspect(blob: bytes) -> BlobInfo:
    """What a blob, or its header alone, says about itself; raises as ``read_header`` does. Segments are not looked at."""
    return parse_header(blob).info


def verify(blob: bytes) -> BlobInfo:
    """Check a whole blob, every segment's checksum included, without decoding it.

    Raises TruncatedError, CorruptError or FormatVersionError.
    """
    info = parse_header(blob).info
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    damaged = [s for row in info.segments for s in row if crc32(blob[s.offset : s.end]) != s.crc32]
    if damaged or len(blob) > info.file_bytes:
        what = f"chunk {damaged[0].chunk} level {damaged[0].level}" if damaged else "what follows the blob's end"
        msg = f"{what} does not match its checksum or length; fetch the blob again or write it anew"
        raise CorruptError(msg)
    return info


def level_index(info: BlobInfo, level: int | str | None) -> int:
    """Index of a level given by index, name or None; raises ArgumentError naming the levels that exist.

    None is the finest that is not lossless, where there is one: the lossless one is many times larger.
    """
    names = [entry.name for entry in info.levels]
    if level is None:
        return max([i for i, entry in enumerate(info.levels) if not entry.lossless], default=len(names) - 1)
    if isinstance(level, str) and level in names:
        return names.index(level)
    if isinstance(level, int) and -len(names) <= level < len(names):
        return level % len(names)
    msg = f"no level {level!r}; this blob has {', '.join(f'{i} ({name})' for i, name in enumerate(names))}"
    raise ArgumentError(msg)
