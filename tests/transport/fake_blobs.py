"""A blob format of a few lines."""

import json
import random
import struct
import zlib

from kvwire.errors import CorruptError, TruncatedError
from kvwire.types import BlobInfo, CacheMeta, LevelInfo, SegmentInfo


def build(sizes, *, padding=0, seed=1):
    """A blob with ``sizes[chunk][level]`` payload bytes; ``padding`` lengthens the head."""
    rng = random.Random(seed)
    payloads = [[rng.randbytes(size) for size in row] for row in sizes]
    table = [[[len(data), zlib.crc32(data)] for data in row] for row in payloads]
    body = json.dumps({"table": table, "padding": "x" * padding}).encode()
    head = b"FAKE" + struct.pack("<II", len(body), zlib.crc32(body)) + body
    return head + b"".join(data for row in payloads for data in row)


def check(holds, error, *words):
    if not holds:
        raise error(*words)


def read_head(data):
    check(len(data) >= 12, TruncatedError, "no head", 12)
    check(data[:4] == b"FAKE", CorruptError, "no blob")
    length, crc = struct.unpack_from("<II", data, 4)
    check(len(data) >= 12 + length, TruncatedError, "half a head", 12 + length)
    body = data[12 : 12 + length]
    check(zlib.crc32(body) == crc, CorruptError, "the head's CRC is wrong")
    table = json.loads(body)["table"]
    position = 12 + length
    rows = []
    for chunk, row in enumerate(table):
        cells = []
        for level, (size, crc_) in enumerate(row):
            cells.append(SegmentInfo(chunk, level, position, size, size, crc_, 0, 0.0))
            position += size
        rows.append(tuple(cells))
    levels = tuple(LevelInfo(str(n), 1.0, 0, 0, 0.0, 0.0) for n in range(len(table[0])))
    return BlobInfo((1, 0), CacheMeta(), len(table), 1, 12 + length, position, "", levels, tuple(rows), None)
