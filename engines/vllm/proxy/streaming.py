"""A stream of server-sent events on its way through: each event as it came, and one more before the end."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_END = re.compile(rb"\r?\n\r?\n")
_DONE = b"[DONE]"
_MOST_BYTES = 8 << 20
"""Of an event that has not ended; a longer one is handed on in pieces."""


class EventStream:
    """Cuts bytes into events."""

    def __init__(self) -> None:
        """Nothing came yet."""
        self._rest = b""
        self._first: dict[str, Any] | None = None

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take bytes in; returns what may go on, and from the end's event on what may go on behind it."""
        data = self._rest + data
        ends = [found.end() for found in _END.finditer(data)]
        whole = ends[-1] if ends else 0
        if not whole and len(data) > _MOST_BYTES:
            whole = len(data)
        events, self._rest = data[:whole], data[whole:]
        if self._first is None and events:
            self._first = _fields(events[: ends[0]] if ends else events)
        start = 0
        for end in ends:
            if _data(events[start:end]) == _DONE:
                return events[:start], events[start:]
            start = end
        return events, b""

    def rest(self) -> bytes:
        """What came behind the last whole event."""
        rest, self._rest = self._rest, b""
        return rest

    def event(self, more: Mapping[str, Any]) -> bytes:
        """An event like the stream's own, without choices."""
        named = {name: (self._first or {}).get(name) for name in ("id", "object", "created", "model")}
        return b"data: " + json.dumps(named | {"choices": []} | dict(more)).encode() + b"\n\n"


def error_event(error: Mapping[str, Any]) -> bytes:
    """An event that tells why a stream ends here."""
    return b"data: " + json.dumps({"error": dict(error)}).encode() + b"\n\n"


def _data(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _fields(event: bytes) -> dict[str, Any]:
    try:
        found = json.loads(_data(event))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
