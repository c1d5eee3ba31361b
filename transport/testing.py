"""For tests: a real server in a thread, and blobs without tensors."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import threading
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvwire.errors import CorruptError, StorageError, TruncatedError
from kvwire.transport.server import serve
from kvwire.types import BlobInfo, CacheMeta, LevelInfo, SegmentInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.store import Store


__all__ = ["build_blob", "read_blob_head", "serving"]

_START_S = 10.0
_MAGIC = b"FAKE"
_PREFIX = struct.Struct("<4sII")  # magic, bytes of the JSON that follows, its CRC-32


@contextmanager
def serving(store: Store, **options: Any) -> Iterator[str]:  # noqa: ANN401 - what ``serve`` takes
    """Serve a store while the block runs, as ``kvwire.transport.serve`` does; gives the URL."""
    ready, stop = threading.Event(), asyncio.Event()
    told: list[str | BaseException] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            async with serve(store, **options) as url:
                told.append(url)
                ready.set()
                await stop.wait()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            told.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="serving", daemon=True)
    thread.start()
    try:
        if not ready.wait(_START_S) or not told:
            raise StorageError("the server did not start: look for a free port on 127.0.0.1")
        if isinstance(told[0], BaseException):
            raise told[0]
        yield told[0]
    finally:
        if loops and thread.is_alive():
            loops[0].call_soon_threadsafe(stop.set)
        thread.join()


def build_blob(sizes: Sequence[Sequence[int]], *, padding: int = 0, seed: int = 1) -> bytes:
    """A blob with ``sizes[chunk][level]`` payload bytes, drawn from ``seed``; ``padding`` lengthens the header."""
    rng = random.Random(seed)  # noqa: S311 - test data
    payloads = [[rng.randbytes(size) for size in row] for row in sizes]
    table = [[[len(data), zlib.crc32(data)] for data in row] for row in payloads]
    body = json.dumps({"table": table, "padding": "x" * padding}).encode()
    return _PREFIX.pack(_MAGIC, len(body), zlib.crc32(body)) + body + b"".join(map(b"".join, payloads))


def read_blob_head(data: bytes) -> BlobInfo:
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


def _info(table: list[list[tuple[int, int]]], header_bytes: int) -> BlobInfo:
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
