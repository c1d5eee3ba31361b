"""Prompt Cache schemas as JSON."""

from __future__ import annotations

from typing import Any

from kvwire._json import strict_json
from kvwire.errors import ArgumentError
from kvwire.reuse.schema import Module, Parameter, Schema, Union

_FORM = '{"modules": [{"name": ..., "document": ..., "tokens": ..., "parameters": [...]}, {"union": [...]}]}'


def read_schema(data: bytes | str) -> Schema:
    """Read a schema: ``{"modules": [...]}``, each a module or ``{"union": [modules]}``.

    A module has a ``name`` and, where wanted, a ``document``, ``tokens``, ``start`` and ``parameters``; a parameter has
    a ``name`` and either ``at`` and ``tokens`` or ``text``.

    Args:
        data: JSON.

    Returns:
        The schema.

    Raises:
        ArgumentError: It is none.
    """
    fields = _checked(strict_json(data), {"modules": list}, "a schema")
    return Schema(tuple(_part(each) for each in fields.get("modules", [])))


def _part(given: Any) -> Module | Union:  # noqa: ANN401 - JSON
    if isinstance(given, dict) and "union" in given:
        fields = _checked(given, {"union": list, "start": int}, "a union")
        return Union(tuple(_module(each, has_start=False) for each in fields["union"]), fields.get("start"))
    return _module(given, has_start=True)


def _module(given: Any, *, has_start: bool) -> Module:  # noqa: ANN401 - JSON
    kinds = {"name": str, "document": str, "tokens": int, "parameters": list} | ({"start": int} if has_start else {})
    fields = _checked(given, kinds, "a module")
    slots = [
        _checked(each, {"name": str, "at": int, "tokens": int, "text": str}, "a parameter")
        for each in fields.pop("parameters", [])
    ]
    return Module(**{"name": ""} | fields, parameters=tuple(Parameter(**{"name": ""} | slot) for slot in slots))


def _checked(given: Any, kinds: dict[str, type], what: str) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """An object's fields, of the types that they have to be of."""
    wrong = not isinstance(given, dict) or any(type(value) is not kinds.get(name) for name, value in given.items())
    if wrong:
        msg = f"{what} holds {', '.join(kinds)} and nothing else; a schema is {_FORM}"
        raise ArgumentError(msg)
    return dict(given)
