"""Text files: token ids and the names of the documents that have them. Specified in docs/format.md."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import zstandard
from isal.isal_zlib import crc32

from kvwire._json import strict_json
from kvwire.codec.format.header import MAX_BITS, MIN_BITS, id_bytes, pack_ids, unpack_ids
from kvwire.codec.format.metadata_json import decompress
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, TruncatedError
from kvwire.types import TEXT_MAGIC

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = (1, 0)
MAX_TEXT_TOKENS = 1 << 22
"""Several times the longest window of any model; as Python ints they take 200 MB."""
_MOST_PACKED = 256
"""Most bytes that one byte of the frame may unpack to, so that a short file cannot claim much memory."""
_PROLOGUE = struct.Struct("<8sHHIIIIB3x")
"""Magic, major, minor, incompatible flags, CRC-32, tokens, stored bytes of the ids, bits of an id, reserved."""
_CRC_AT = 16
_NAMED = 1
"""Flag: names of documents follow the ids."""
_MAX_NAMES_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


def pack_text(ids: Sequence[int], documents: Sequence[str] = ()) -> bytes:
    """Write a text's file; equal ids and names give equal bytes.

    Args:
        ids: Token ids.
        documents: Names of documents that have this text, from which a lost catalog can be rebuilt. The first names
            are left out where all of them exceed 1 MiB.

    Returns:
        The file.

    Raises:
        ArgumentError: There are not 1 to 2^22 ids of 32 bits.
    """
    if not 0 < len(ids) <= MAX_TEXT_TOKENS:
        raise ArgumentError(f"a text has 1 to {MAX_TEXT_TOKENS} tokens, got {len(ids)}; split it")
    bits, raw = pack_ids(ids, len(ids))
    frame = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)
    stored = frame if len(frame) < len(raw) <= _MOST_PACKED * len(frame) else raw
    names = _pack_names(documents)
    header = _PROLOGUE.pack(TEXT_MAGIC, *VERSION, _NAMED if names else 0, 0, len(ids), len(stored), bits)
    data = bytearray(header + stored + names)
    data[_CRC_AT : _CRC_AT + 4] = crc32(data).to_bytes(4, "little")
    return bytes(data)


def read_text(data: bytes) -> tuple[int, ...]:
    """Read a text's file.

    Args:
        data: The whole file.

    Returns:
        The token ids.

    Raises:
        TruncatedError: The file ends too early.
        CorruptError: The file is damaged.
        FormatVersionError: A later version wrote it.
    """
    tokens, bits, body, _ = _parts(data)
    size = id_bytes(tokens, bits)
    raw = body if len(body) == size else decompress(body, size, "text")
    return unpack_ids(raw, tokens, bits) or ()


def read_text_documents(data: bytes) -> tuple[str, ...]:
    """Read the names of the documents that have a text.

    Args:
        data: The whole file.

    Returns:
        The names in the order in which they were added; empty where the file has none.

    Raises:
        TruncatedError: The file ends too early.
        CorruptError: The file is damaged.
        FormatVersionError: A later version wrote it.
    """
    return _parts(data)[3]


def _parts(data: bytes) -> tuple[int, int, bytes, tuple[str, ...]]:
    """Check a file and return the number of tokens, bits of an id, the stored ids and the names."""
    if data[: len(TEXT_MAGIC)] != TEXT_MAGIC[: len(data)]:
        raise CorruptError("this is no text of kvwire's; encode the document again")
    if len(data) < _PROLOGUE.size:
        msg = f"the text ends after {len(data)} bytes, within its header; fetch it again"
        raise TruncatedError(msg, _PROLOGUE.size)
    _, major, minor, flags, checksum, tokens, stored, bits = _PROLOGUE.unpack_from(data)
    if major != VERSION[0] or flags & ~_NAMED:
        msg = f"the text has version {major}.{minor}, flags {flags:#x}; this reader knows {VERSION[0]}.x, flags 0 and 1"
        raise FormatVersionError(msg)
    end = _end(data, _PROLOGUE.size + stored, has_names=bool(flags & _NAMED))
    zeroed = data[:_CRC_AT] + bytes(4) + data[_CRC_AT + 4 :]
    if len(data) > end or crc32(zeroed) != checksum:
        msg = "the text does not match its checksum or length; fetch it again or encode the document again"
        raise CorruptError(msg)
    size = id_bytes(tokens, bits)
    fits = 0 < tokens <= MAX_TEXT_TOKENS and MIN_BITS <= bits <= MAX_BITS and stored <= size <= _MOST_PACKED * stored
    if not fits:
        msg = f"the text claims {tokens} tokens of {bits} bits in {stored} bytes; encode the document again"
        raise CorruptError(msg)
    at = _PROLOGUE.size + stored
    names = _read_names(data[at + _LENGTH.size : end]) if flags & _NAMED else ()
    return tokens, bits, data[_PROLOGUE.size : at], names


def _end(data: bytes, end: int, *, has_names: bool) -> int:
    """Return the file's required length in bytes; raises TruncatedError where it is shorter."""
    if has_names and len(data) >= end + _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data, end)
        if length > _MAX_NAMES_BYTES:
            msg = f"the text claims {length} bytes of names, more than the {_MAX_NAMES_BYTES} allowed; encode it again"
            raise CorruptError(msg)
        end += length
    end += _LENGTH.size if has_names else 0
    if len(data) < end:
        raise TruncatedError(f"the text ends after {len(data)} of {end} bytes; fetch it again", end)
    return end


def _pack_names(documents: Sequence[str]) -> bytes:
    names = list(dict.fromkeys(documents))
    while names:
        packed = json.dumps(names, separators=(",", ":")).encode()
        if len(packed) <= _MAX_NAMES_BYTES:
            return _LENGTH.pack(len(packed)) + packed
        names = names[-(len(names) // 2) :] if len(names) > 1 else []
    return b""


def _read_names(data: bytes) -> tuple[str, ...]:
    try:
        names = strict_json(data)
    except ArgumentError as error:
        msg = f"the text's names are not JSON as kvwire writes it ({error}); encode the document again"
        raise CorruptError(msg) from error
    if not (isinstance(names, list) and names) or not all(isinstance(name, str) and name for name in names):
        raise CorruptError("the text's names are no list of texts; encode the document again")
    return tuple(names)
