"""The one reader of JSON from strangers: files, objects of a store, answers of a server, lines of a log."""

from __future__ import annotations

import json
import math
from typing import Any

from kvwire.errors import ArgumentError, CorruptError


def strict_json(data: bytes | str) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON strictly. The error's message quotes nothing of the data, which may hold secrets.

    Args:
        data: UTF-8 bytes, or text.

    Returns:
        The value. Numbers are finite.

    Raises:
        ArgumentError: The data is no JSON, is nested too deeply, names a key of one object twice, or holds NaN,
            Infinity or a number too large for a float.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        msg = f"not valid JSON at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        msg = "not valid JSON: it must be UTF-8, hardly nested, of finite numbers, and name nothing twice in one object"
    raise ArgumentError(msg)


def json_object(data: bytes | str, what: str, most: int) -> dict[str, Any]:
    """Parse one JSON object as ``strict_json`` does."""
    if len(data) > most:
        msg = f"{what} is longer than {most} bytes"
        raise CorruptError(msg)
    try:
        value = strict_json(data)
    except ArgumentError as error:
        msg = f"{what} is {error}"
        raise CorruptError(msg) from error
    if not isinstance(value, dict):
        msg = f"{what} must be a JSON object, got {type(value).__name__}"
        raise CorruptError(msg)
    return value


def json_field(fields: dict[str, Any], name: str, kind: type, what: str) -> Any:  # noqa: ANN401 - of the caller's type
    """One field of a parsed object."""
    value = fields.get(name)
    if type(value) is not kind:
        msg = f"{what}'s {name} must be of type {kind.__name__}, got {type(value).__name__}"
        raise CorruptError(msg)
    return value


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
