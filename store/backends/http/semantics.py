"""What RFC 9110 says about ranges and preconditions, without any I/O.

Choices that the RFC leaves open: a range that is malformed, of an unknown unit or one of several is ignored, so the
answer is 200 with the whole object (section 14.2 allows a server to ignore Range). HEAD ignores Range, as it must.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANGE = re.compile(r"bytes=[ \t]*(?:([0-9]+)-([0-9]*)|-([0-9]+))[ \t]*", re.IGNORECASE)
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\uffff]*)"')
_UNSATISFIED = re.compile(r"bytes \*/([0-9]{1,18})")
_SECONDS = re.compile(r"[0-9]{1,9}")
_MANY_DIGITS = 18  # any larger number is beyond the end of every object
_BEYOND = 10**_MANY_DIGITS


@dataclass(frozen=True)
class HttpAnswer:
    """What to answer with: status, first byte to send, and the byte after the last."""

    status: Literal[200, 206, 304, 412, 416]
    start: int = 0
    end: int = 0


def answer(method: str, headers: Mapping[str, str], size: int, etag: str, modified: float = 0.0) -> HttpAnswer:
    """Evaluate preconditions, then the range, in the order of RFC 9110 section 13.2.2."""
    if "If-Match" in headers:
        if not _matches(headers["If-Match"], etag, weak=False):
            return HttpAnswer(412)
    elif _is_after(modified, headers.get("If-Unmodified-Since")) is True:
        return HttpAnswer(412)
    if "If-None-Match" in headers:
        if _matches(headers["If-None-Match"], etag, weak=True):
            return HttpAnswer(304)
    elif _is_after(modified, headers.get("If-Modified-Since")) is False:
        return HttpAnswer(304)
    wanted = headers.get("Range")
    condition = headers.get("If-Range")
    # A date in If-Range never matches: within one second an object can change twice.
    if method != "GET" or wanted is None or (condition is not None and condition.strip() != f'"{etag}"'):
        return HttpAnswer(200, 0, size)
    return _ranged(wanted, size)


def may_write(headers: Mapping[str, str], etag: str | None) -> bool:
    """Whether the preconditions of a PUT or DELETE hold."""
    if "If-Match" in headers and (etag is None or not _matches(headers["If-Match"], etag, weak=False)):
        return False
    return etag is None or "If-None-Match" not in headers or not _matches(headers["If-None-Match"], etag, weak=True)


def _is_after(modified: float, field: str | None) -> bool | None:
    """Whether an object was written after the date in a field; None where either is unknown."""
    if not modified or field is None:
        return None
    try:
        date = parsedate_to_datetime(field)
        return math.floor(modified) > date.replace(tzinfo=date.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def _ranged(wanted: str, size: int) -> HttpAnswer:
    match = _RANGE.fullmatch(wanted.strip())
    if match is None:
        return HttpAnswer(200, 0, size)
    first, last, suffix = (None if not digits else _number(digits) for digits in match.groups())
    if suffix is not None:
        if suffix == 0:
            return HttpAnswer(416)
        # The last bytes of nothing cannot be written as a Content-Range: send the whole nothing.
        return HttpAnswer(206, max(0, size - suffix), size) if size else HttpAnswer(200, 0, 0)
    start = first or 0
    if last is not None and last < start:
        return HttpAnswer(200, 0, size)
    if start >= size:
        return HttpAnswer(416)
    return HttpAnswer(206, start, size if last is None else min(last + 1, size))


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _MANY_DIGITS else _BEYOND


def _matches(field: str, etag: str, *, weak: bool) -> bool:
    if field.strip() == "*":
        return True
    return any(tag == etag and (weak or not is_weak) for is_weak, tag in _TAG.findall(field))


def strong_etag(field: str | None) -> str | None:
    """Read an ETag header."""
    match = _TAG.fullmatch(field or "")
    return field if match and not match[1] else None


def unsatisfied_size(field: str | None) -> int | None:
    """Read the Content-Range of a 416 answer."""
    match = _UNSATISFIED.fullmatch(field or "")
    return int(match[1]) if match else None


def retry_after_s(field: str) -> float:
    """Read a Retry-After (RFC 9110 section 10.2.3)."""
    field = field.strip()
    if _SECONDS.fullmatch(field):
        return float(field)
    try:
        return max(0.0, parsedate_to_datetime(field).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
