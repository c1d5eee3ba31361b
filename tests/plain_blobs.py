"""Blobs without tensors, for tests and benchmarks of what carries them."""

import json
import random
import struct
import zlib

from kvwire.errors import CorruptError, TruncatedError
from kvwire.types import BlobInfo, CacheMeta, LevelInfo, SegmentInfo

_MAGIC = b"FAKE"
_PREFIX = struct.Struct("<4sII")  # magic, bytes of the JSON that follows, its CRC-32


def build_blob(sizes, *, padding=0, seed=1):
    """A blob with ``sizes[chunk][level]`` payload bytes, drawn from ``seed``; ``padding`` lengthens the header."""
    rng = random.Random(seed)
    payloads = [[rng.randbytes(size) for size in row] for row in sizes]
    table = [[[len(data), zlib.crc32(data)] for data in row] for row in payloads]
    body = json.dumps({"table": table, "padding": "x" * padding}).encode()
    return _PREFIX.pack(_MAGIC, len(body), zlib.crc32(body)) + body + b"".join(map(b"".join, payloads))


def read_blob_head(data):
    """What ``BlobFetcher`` needs to know of such a blob. Raises TruncatedError and CorruptError as the codec does."""
    if len(data) < _PREFIX.size:
        raise TruncatedError("the header is not there yet", _PREFIX.size)
    magic, length, crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptError("these bytes are no plain blob: build one")
    end = _PREFIX.size + length
    if len(data) < end:
        raise TruncatedError("half of the header is not there yet", end)
    body = data[_PREFIX.size : end]
    if zlib.crc32(body) != crc:
        raise CorruptError("the header's CRC-32 is wrong: write the blob again")
    return _info(json.loads(body)["table"], end)


def _info(table, header_bytes):
    position = header_bytes
    rows = []
    for chunk, row in enumerate(table):
        cells = []
        for level, (size, crc) in enumerate(row):
            cells.append(SegmentInfo(chunk, level, position, size, size, crc, 0, 0.0))
            position += size
        rows.append(tuple(cells))
    levels = tuple(LevelInfo(str(number), 1.0, 0, 0, 0.0, 0.0) for number in range(len(table[0])))
    return BlobInfo((1, 0), CacheMeta(), len(table), 1, header_bytes, position, "", levels, tuple(rows), None)
