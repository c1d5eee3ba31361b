"""Byte ranges as HTTP writes them (RFC 9110 section 14), for every client that reads objects in ranges."""

from __future__ import annotations

import re

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")

ContentRange = tuple[int, int, int | None]
"""Start, end (exclusive) and the object's size, None where that is unknown."""


def range_header(start: int, end: int | None) -> str:
    """The Range header of a request.

    Args:
        start: First byte.
        end: The byte after the last; None: to the end.

    Returns:
        The header's value.
    """
    return f"bytes={start}-{'' if end is None else end - 1}"


def content_range(field: str | None) -> ContentRange | None:
    """Read a Content-Range header."""
    match = _CONTENT_RANGE.fullmatch(field or "")
    if match is None:
        return None
    start, end = int(match[1]), int(match[2]) + 1
    size = None if match[3] == "*" else int(match[3])
    if start >= end or (size is not None and end > size):
        return None
    return start, end, size


def range_told(field: str | None, start: int, end: int | None) -> ContentRange | None:
    """Read the Content-Range of an answer, and compare it with what was asked for.

    An answer to an open range that does not tell the object's size is taken as it is: nothing shows where it was cut.

    Args:
        field: The header's value; None where it is missing.
        start: First byte asked for.
        end: The byte after the last asked for; None: to the end.

    Returns:
        What it tells; None where that is not the range asked for, cut at the object's end and no sooner.
    """
    told = content_range(field)
    if told is None:
        return None
    first, stop, size = told
    wanted = min((limit for limit in (end, size) if limit is not None), default=stop)
    return told if (first, stop) == (start, wanted) else None
