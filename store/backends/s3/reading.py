"""Answers to S3's GET: whether they are the bytes that were asked for, and those bytes, in bounded time and memory."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvwire.errors import StorageError
from kvwire.store.http_ranges import range_told

if TYPE_CHECKING:
    from collections.abc import Mapping

_PIECE_BYTES = 256 * 1024
_PARTIAL = 206
_TOO_LARGE = 10**18


def strong_tag(answer: Mapping[str, Any]) -> str:
    """The answer's entity tag."""
    tag = answer.get("ETag") or ""
    return "" if tag.startswith("W/") else tag.strip('"')


def size_told(answer: Mapping[str, Any]) -> int:
    """The body's length that the answer announces."""
    size = answer.get("ContentLength")
    if not isinstance(size, int) or not 0 <= size < _TOO_LARGE:
        msg = "an answer tells no proper size: check that the server speaks S3"
        raise StorageError(msg)
    return size


def modified_at(answer: Mapping[str, Any]) -> float:
    """When the object was written."""
    modified = answer.get("LastModified")
    return modified.timestamp() if isinstance(modified, datetime) else 0.0


def read_answer(answer: Mapping[str, Any], start: int, end: int | None, *, total_s: float, what: str) -> bytes:
    """Read a range from S3's answer."""
    length = size_told(answer)
    if answer["ResponseMetadata"]["HTTPStatusCode"] == _PARTIAL:
        _check_range(answer.get("ContentRange"), length, start, end, what)
        return _read(answer["Body"], length, total_s, what)
    wanted = length if end is None else min(end, length)  # the whole object, asked for or not
    return _read(answer["Body"], wanted, total_s, what)[start:]


def _check_range(field: str | None, length: int, start: int, end: int | None, what: str) -> None:
    """The range told is the one asked for, as long as the body, and of an object whose size is told: S3 knows it."""
    told = range_told(field, start, end)
    if told is not None and told[2] is not None and length == told[1] - told[0]:
        return
    msg = f"{what}: asked for bytes from {start} to {end}, got others; the server's ranges are broken"
    raise StorageError(msg)


def _read(body: Any, length: int, total_s: float, what: str) -> bytes:  # noqa: ANN401 - botocore's StreamingBody
    """Read piece by piece: memory grows with what has come, not with what is announced."""
    give_up_at = time.monotonic() + total_s
    # read1 returns with what is there; read waits for the full piece, which a dripping server can make last.
    read = getattr(getattr(body, "_raw_stream", None), "read1", None) or body.read
    pieces: list[bytes] = []
    left = length
    try:
        while left and (piece := read(min(left, _PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
            if time.monotonic() > give_up_at:
                msg = f"{what}: the answer took longer than {total_s:g} s: check the server and the network"
                raise StorageError(msg)
        if left:
            msg = f"{what}: the answer ended {left} bytes early; try again"
            raise StorageError(msg)
        read(1)  # an answer whose end was met gives its connection back
    finally:
        body.close()
    return b"".join(pieces)
