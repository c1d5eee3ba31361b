"""Read and verify what a blob says about itself, without decoding it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.format.container import parse_header
from kvwire.errors import ArgumentError, CorruptError, TruncatedError

if TYPE_CHECKING:
    from kvwire.types import BlobInfo


def inspect(blob: bytes) -> BlobInfo:
    """Read what a blob says about itself; segments are not read.

    Args:
        blob: The whole blob, or its header alone.

    Returns:
        Layout, levels, segments and token ids.

    Raises:
        TruncatedError: The header is not complete; ``needed`` says how many bytes it takes.
        CorruptError: The header is damaged.
        FormatVersionError: A later version wrote it.
    """
    return parse_header(blob).info


def verify(blob: bytes) -> BlobInfo:
    """Check a whole blob and every segment's checksum without decoding it.

    Args:
        blob: The whole blob.

    Returns:
        What the blob says about itself.

    Raises:
        TruncatedError: The blob ends too early.
        CorruptError: The header or a segment is damaged.
        FormatVersionError: A later version wrote it.
    """
    info = parse_header(blob).info
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    damaged = [s for row in info.segments for s in row if crc32(blob[s.offset : s.end]) != s.crc32]
    if damaged or len(blob) > info.file_bytes:
        what = f"chunk {damaged[0].chunk} level {damaged[0].level}" if damaged else "what follows the blob's end"
        raise CorruptError(f"{what} does not match its checksum or length; fetch the blob again or write it anew")
    return info


def level_index(info: BlobInfo, level: int | str | None) -> int:
    """Return a level's index.

    None means the finest lossy level where there is one: the lossless level is many times larger.

    Args:
        info: What the blob says about itself.
        level: Index (negative counts from the last), name, or None.

    Returns:
        The level's index from 0.

    Raises:
        ArgumentError: There is no such level; the message names those that exist.
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
