"""Log records as lines: JSON for machines, text for people."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from kvwire._printable import PrintableLines


class JsonLines(logging.Formatter):
    """One JSON object a record, with the request's fields where it tells of one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line break inside."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        request = getattr(record, "request", None)
        fields |= request if isinstance(request, dict) else {"message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TextLines(PrintableLines):
    """Time, level and message, with the request's most telling fields."""

    def __init__(self) -> None:
        """Set the layout."""
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The record's line."""
        request = getattr(record, "request", None)
        if isinstance(request, dict):
            record.message += f" {request['bytes']}B {request['seconds']:.3f}s {request['client']}"
            record.message += f" {request['request_id']}"
        return super().formatMessage(record)
