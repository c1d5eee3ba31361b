"""Log entries as lines of JSON, so that what happened to a real load can be kept and replayed.

A line is ``{"now": seconds, "event": {"kind": name, field: value, ...}, "instructions": [...]}``. Whoever keeps the log
reads and writes the file.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvwire._json import strict_json
from kvwire.controller import events as ev
from kvwire.controller.documents import DocumentPlanInput
from kvwire.controller.repair import Begins, RepairOption
from kvwire.controller.settings import Goal, Objective, OnLate
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import ChunkId, Decision

MOST_CHARACTERS = 16_000_000
"""Of a line, written or read: an index of forty thousand chunks of ten levels."""
_MOST_DEPTH = 8  # of nested values; a log has six
_LARGEST = 1 << 53  # of integers, as in other languages' JSON
_NAMES = {
    "Begins": Begins, "ChunkId": ChunkId, "Decision": Decision, "DocumentPlanInput": DocumentPlanInput, "Goal": Goal,
    "Literal": Literal, "Objective": Objective, "OnLate": OnLate, "RepairOption": RepairOption,
}  # fmt: skip
_EVENTS = {kind.__name__: kind for kind in get_args(ev.Event)}
_INSTRUCTIONS = {kind.__name__: kind for kind in get_args(ev.Instruction)}
_HINTS: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind, localns=_NAMES)
    for kind in (*_EVENTS.values(), *_INSTRUCTIONS.values(), ChunkId, Decision, DocumentPlanInput, Goal, RepairOption)
}
_ADVICE = "the log is damaged or of another version; record the load again"


def dump_entry(entry: ev.LogEntry) -> str:
    """Write one line, without its end."""
    line = {
        "now": entry.now,
        "event": _plain_kind(entry.event),
        "instructions": [_plain_kind(each) for each in entry.instructions],
    }
    try:
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        msg = f"an entry with a number that is not finite cannot be written: {error}"
        raise ArgumentError(msg) from error
    if len(text) > MOST_CHARACTERS:
        msg = f"an entry takes {MOST_CHARACTERS} characters at most, not {len(text)}; split the document"
        raise ArgumentError(msg)
    return text


def load_entry(line: str) -> ev.LogEntry:
    """Read what ``dump_entry`` wrote."""
    if len(line) > MOST_CHARACTERS:
        msg = f"a line of a log has {MOST_CHARACTERS} characters at most, not {len(line)}; {_ADVICE}"
        raise CorruptError(msg)
    try:
        value = strict_json(line)
    except ArgumentError as error:
        msg = f"a line of a log is no JSON: {error}; {_ADVICE}"
        raise CorruptError(msg) from error
    parts = _object(value, "an entry", {"now", "event", "instructions"})
    if not isinstance(parts["instructions"], list):
        what = "the list of instructions"
        raise _wrong(what, parts["instructions"])
    event = _of_kind(parts["event"], _EVENTS)
    instructions = tuple(_of_kind(each, _INSTRUCTIONS) for each in parts["instructions"])
    return ev.LogEntry(_typed(parts["now"], float, "now", 0), event, instructions)


def _plain_kind(value: ev.Event | ev.Instruction) -> dict[str, object]:
    return {"kind": type(value).__name__, **_plain_fields(value)}


def _plain_fields(value: Any) -> dict[str, object]:  # noqa: ANN401 - any dataclass of a log
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return _plain_fields(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _wrong(what: str, value: object) -> CorruptError:
    return CorruptError(f"{what} of a log cannot be {str(value)[:80]!r}; {_ADVICE}")


def _object(value: object, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise _wrong(what, value)
    return value


def _of_kind(value: object, kinds: dict[str, Any]) -> Any:  # noqa: ANN401 - one of the kinds
    kind = kinds.get(value["kind"]) if isinstance(value, dict) and isinstance(value.get("kind"), str) else None
    if kind is None or not isinstance(value, dict):
        what = "an event or instruction"
        raise _wrong(what, value)
    return _made(kind, {name: each for name, each in value.items() if name != "kind"}, 1)


def _made(kind: Any, value: object, depth: int) -> Any:  # noqa: ANN401 - a dataclass and one of it
    hints = _HINTS[kind]
    parts = _object(value, kind.__name__, set(hints))
    typed = {name: _typed(parts[name], hint, name, depth + 1) for name, hint in hints.items()}
    try:
        return kind(**typed)
    except ArgumentError as error:
        msg = f"{kind.__name__} of a log: {error}; {_ADVICE}"
        raise CorruptError(msg) from error


def _typed(value: Any, hint: Any, what: str, depth: int) -> Any:  # noqa: ANN401 - parsed JSON, and a type
    """A parsed value as a field's type wants it. Raises CorruptError where it is of another."""
    if depth > _MOST_DEPTH:
        raise _wrong(what, value)
    if hint in _HINTS:
        return _made(hint, value, depth)
    if get_origin(hint) is Literal and isinstance(value, str) and value in get_args(hint):
        return value
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(each, get_args(hint)[0], what, depth + 1) for each in value)
    if isinstance(hint, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        return None if value is None else _typed(value, others[0], what, depth)
    if isinstance(value, bool) or hint is bool:
        fits = isinstance(value, bool) and hint is bool
    elif hint is int:
        fits = isinstance(value, int) and abs(value) <= _LARGEST
    elif hint is float:
        # Compared before it is converted: an integer may be too large for a float.
        fits = isinstance(value, (int, float)) and abs(value) <= _LARGEST and isfinite(value)
    else:
        fits = hint is str and isinstance(value, str)
    if not fits:
        raise _wrong(what, value)
    return float(value) if hint is float else value
