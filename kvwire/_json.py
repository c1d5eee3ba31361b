"""Untrusted JSON: strict parsing, and validation against a record type."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
_MOST_BYTES = 1 << 24
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Sha256OrEmpty = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


def strict_json(data: bytes | str, what: str = "") -> Any:  # noqa: ANN401 - JSON
    """Parse JSON strictly. Error messages quote none of the data, which may hold secrets.

    Args:
        data: UTF-8 bytes, or text.
        what: Its name in messages.

    Returns:
        The value. Numbers are finite.

    Raises:
        ArgumentError: It is invalid JSON, nested too deeply, repeats a key, or holds NaN, Infinity or a number too
            large for a float.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        msg = f"not valid JSON at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        msg = "not valid JSON: it must be UTF-8, not deeply nested, with finite numbers and no repeated names"
    raise ArgumentError(f"{what} is {msg}" if what else msg)


def json_object(data: bytes | str, what: str, most: int, advice: str) -> dict[str, Any]:
    """Parse one JSON object as ``strict_json`` does; CorruptError gives the problem and the advice."""
    if len(data) > most:
        msg = f"{what} is longer than {most} bytes: {advice}"
        raise CorruptError(msg)
    try:
        value = strict_json(data, what)
    except ArgumentError as error:
        msg = f"{error}; {advice}"
        raise CorruptError(msg) from error
    if not isinstance(value, dict):
        msg = f"{what} must be a JSON object, got {type(value).__name__}: {advice}"
        raise CorruptError(msg)
    return value


def record(fields: object, kind: type[T], what: str, advice: str) -> T:
    """Validate parsed JSON as a record; unknown fields are ignored. CorruptError gives the problem and the advice."""
    if isinstance(fields, dict):  # msgspec fails on names that are not UTF-8; ours are ASCII
        fields = {name: value for name, value in fields.items() if name.isascii()}
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        msg = f"{what} is damaged ({error}): {advice}"
        raise CorruptError(msg) from error


def stored_record(data: bytes | str, kind: type[T], what: str, advice: str, versions: Sequence[int] = ()) -> T:
    """Read a stored record, of one of these versions if it has any; CorruptError gives the problem and the advice."""
    fields = json_object(data, what, _MOST_BYTES, advice)
    if versions and fields.pop("version", None) not in versions:
        raise CorruptError(f"{what} is of another version: {advice}")
    return record(fields, kind, what, advice)


def check_version(fields: dict[str, Any], known: int, what: str) -> dict[str, Any]:
    """Refuse a record of a later version."""
    if type(version := fields.get("version")) is not int:
        msg = f"{what}'s version must be of type int, got {type(version).__name__}"
        raise CorruptError(msg)
    if version != known:
        msg = f"{what} is of version {version}, this kvwire reads {known}: use a later kvwire"
        raise FormatVersionError(msg)
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError
    return fields


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
