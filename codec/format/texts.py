"""A text on its own: the token ids of one document, without a cache. Exactly specified in docs/format.md."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import zstandard
from isal.isal_zlib import crc32

from kvwire.codec.format.ids import MAX_BITS, MIN_BITS, id_bytes, pack_ids, unpack_ids
from kvwire.codec.format.metadata_json import decompress
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, TruncatedError
from kvwire.types import TEXT_MAGIC

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = (1, 0)
MAX_TEXT_TOKENS = 1 << 22
"""Several times the longest window of any model; read, they take 200 MB in Python."""
_MOST_PACKED = 256
"""Bytes that a byte of the frame may stand for, as for kept entries: a short file never claims much memory."""
_PROLOGUE = struct.Struct("<8sHHIIIIB3x")
"""magic, major, minor, incompatible flags, CRC-32, tokens, stored bytes of the ids, bits of an id, reserved"""
_CRC_AT = 16


def pack_text(ids: Sequence[int]) -> bytes:
    """Write a text's file; equal ids give equal bytes.

    Args:
        ids: Token ids.

    Returns:
        The file.

    Raises:
        ArgumentError: There are not 1 to 2^22 ids of 32 bits.
    """
    if not 0 < len(ids) <= MAX_TEXT_TOKENS:
        msg = f"a text has 1 to {MAX_TEXT_TOKENS} tokens, got {len(ids)}; split it"
        raise ArgumentError(msg)
    bits, raw = pack_ids(ids, len(ids))
    frame = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)
    stored = frame if len(frame) < len(raw) <= _MOST_PACKED * len(frame) else raw
    header = _PROLOGUE.pack(TEXT_MAGIC, *VERSION, 0, 0, len(ids), len(stored), bits)
    data = bytearray(header + stored)
    data[_CRC_AT : _CRC_AT + 4] = crc32(data).to_bytes(4, "little")
    return bytes(data)


def read_text(data: bytes) -> tuple[int, ...]:
    """Read a text's file.

    Args:
        data: All its bytes.

    Returns:
        The token ids.

    Raises:
        TruncatedError: It ends too early.
        CorruptError: It is damaged.
        FormatVersionError: A later version wrote it.
    """
    if data[: len(TEXT_MAGIC)] != TEXT_MAGIC[: len(data)]:
        msg = "this is no text of kvwire's; encode the document again"
        raise CorruptError(msg)
    if len(data) < _PROLOGUE.size:
        msg = f"the text ends after {len(data)} bytes, within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    _, major, minor, flags, checksum, tokens, stored, bits = _PROLOGUE.unpack_from(data)
    if major != VERSION[0] or flags:
        msg = f"the text has version {major}.{minor}, flags {flags:#x}; this reader knows {VERSION[0]}.x without any"
        raise FormatVersionError(msg)
    if len(data) < _PROLOGUE.size + stored:
        msg = f"the text ends after {len(data)} of {_PROLOGUE.size + stored} bytes; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size + stored)
    zeroed = data[:_CRC_AT] + bytes(4) + data[_CRC_AT + 4 :]
    if len(data) > _PROLOGUE.size + stored or crc32(zeroed) != checksum:
        msg = "the text does not match its checksum or length; fetch it again or encode the document again"
        raise CorruptError(msg)
    size = id_bytes(tokens, bits)
    fits = 0 < tokens <= MAX_TEXT_TOKENS and MIN_BITS <= bits <= MAX_BITS and stored <= size <= _MOST_PACKED * stored
    if not fits:
        msg = f"the text claims {tokens} tokens of {bits} bits in {stored} bytes; encode the document again"
        raise CorruptError(msg)
    body = data[_PROLOGUE.size :]
    raw = body if stored == size else decompress(body, size, "text")
    return unpack_ids(raw, tokens, bits) or ()
