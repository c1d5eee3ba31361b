"""Prompt Cache schemas as JSON."""

from __future__ import annotations

from typing import Any

from kvwire._json import strict_json
from kvwire.errors import ArgumentError
from kvwire.reuse.schema import Module, Parameter, Schema, Union

_FORM = '{"modules": [{"name": ..., "document": ..., "tokens": ..., "parameters": [...]}, {"union": [...]}]}'


def read_schema(data: bytes | str) -> Schema:
    """Parse a schema: ``{"modules": [...]}``, each a module or ``{"union": [modules]}``.

    A module has a ``name`` and optionally ``document``, ``tokens``, ``start`` and ``parameters``; a parameter has a
    ``name`` and either ``at`` and ``tokens`` or ``text``.

    Args:
        data: JSON.

    Returns:
        The schema.

    Raises:
        ArgumentError: It is invalid.
    """
    fields = _checked(strict_json(data, "the schema"), {"modules": list}, "a schema")
    return Schema(tuple(_part(each) for each in fields.get("modules", [])))


def _part(value: Any) -> Module | Union:  # noqa: ANN401 - JSON
    if isinstance(value, dict) and "union" in value:
        fields = _checked(value, {"union": list, "start": int}, "a union")
        return Union(tuple(_module(each, has_start=False) for each in fields["union"]), fields.get("start"))
    return _module(value, has_start=True)


def _module(value: Any, *, has_start: bool) -> Module:  # noqa: ANN401 - JSON
    kinds = {"name": str, "document": str, "tokens": int, "parameters": list} | ({"start": int} if has_start else {})
    fields = _checked(value, kinds, "a module")
    slots = [
        _checked(each, {"name": str, "at": int, "tokens": int, "text": str}, "a parameter")
        for each in fields.pop("parameters", [])
    ]
    return Module(**{"name": ""} | fields, parameters=tuple(Parameter(**{"name": ""} | slot) for slot in slots))


def _checked(data: Any, kinds: dict[str, type], what: str) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """An object's fields, after checking their types."""
    wrong = not isinstance(data, dict) or any(type(value) is not kinds.get(name) for name, value in data.items())
    if wrong:
        raise ArgumentError(f"{what} holds {', '.join(kinds)} and nothing else; a schema is {_FORM}")
    return dict(data)
