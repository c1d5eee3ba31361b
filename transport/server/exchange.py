"""One request: its id and counts, the refusal that may end it, its line in the log."""

from __future__ import annotations

import errno
import json
import logging
import random
import re
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiohttp import web

from kvwire._printable import PrintableLines
from kvwire.errors import ArgumentError, AuthError, ConflictError, KvwireError, NotFoundError

_log = logging.getLogger(__name__)
GONE = 499  # as nginx counts it: the client left, and the server did nothing wrong
RETRY = {"Retry-After": "1"}
CHALLENGE = {"WWW-Authenticate": "Bearer"}
PASSWORD = {"WWW-Authenticate": 'Basic realm="kvwire", charset="UTF-8"'}  # for pages that browsers show
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_LOGGED = 600
_random = random.Random(secrets.token_bytes(32))  # noqa: S311 - ids are no secrets, and asking the system takes long


class RefusedError(KvwireError):
    """A request ends with this status; the client gets the message as it is. reason: one word for the metrics."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, *, reason: str = "") -> None:
        """Keep what the answer needs."""
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rights:
    """What a request may touch."""

    client: str  # names the bucket that its requests are counted in; secret enough to stay out of logs
    prefix: str = ""  # keys must start with it
    key: str | None = None  # the one key; None for all that start with ``prefix``
    write: bool = False
    full: bool = False  # metrics, too

    def sees(self, key: str) -> bool:
        """Whether the key exists at all for these credentials."""
        return key.startswith(self.prefix) and (self.key is None or key == self.key)


@dataclass(slots=True)
class Exchange:
    """Counts of one request, for metrics and log; instants are of ``time.perf_counter``."""

    request_id: str
    rights: Rights | None = None
    started: float = field(default_factory=time.perf_counter)
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    store_failed: bool = False

    @classmethod
    def of(cls, request: web.BaseRequest) -> Exchange:
        """Begin; a well-formed id of the client's is kept."""
        given = request.headers.get("X-Request-Id", "")
        return cls(given if _REQUEST_ID.fullmatch(given) else new_request_id())

    def fields(self, request: web.BaseRequest, status: int, seconds: float) -> dict[str, object]:
        """What the log tells: the path as it was sent, never the query and no header but Range."""
        return {
            "request_id": self.request_id,
            "method": request.method,
            "path": request.rel_url.raw_path[:_MAX_LOGGED],
            "status": status,
            "bytes": self.sent_bytes,
            "received": self.received_bytes,
            "seconds": round(seconds, 6),
            "client": request.remote or "unknown",
            "range": request.headers.get("Range", "")[:100],
        }


EXCHANGE = web.RequestKey("EXCHANGE", Exchange)


def new_request_id() -> str:
    """A random id; it does not tell how many requests there were."""
    return f"{_random.getrandbits(64):016x}"


def not_found() -> RefusedError:
    """The one answer for what is absent and for what the client may not know of."""
    return RefusedError(404, "no such object")


def answer_of(refusal: RefusedError, request_id: str) -> web.Response:
    """The JSON answer to a refused request."""
    body = {"error": str(refusal), "status": refusal.status, "request_id": request_id}
    headers = refusal.headers | {"Cache-Control": "no-store"}
    response = web.json_response(body, status=refusal.status, headers=headers)
    mark(response, request_id)
    return response


def mark(response: web.StreamResponse, request_id: str) -> None:
    """Set what every answer carries; answers that say nothing of caches are not kept."""
    headers = response.headers
    headers["X-Request-Id"] = request_id
    headers["Server"] = "kvwire"
    headers["X-Content-Type-Options"] = "nosniff"
    if "Cache-Control" not in headers:
        headers["Cache-Control"] = "no-store"


def refusal_of(error: Exception, request_id: str) -> RefusedError:  # noqa: PLR0911 - one for each kind of error
    """Translate any exception; what a client cannot act on is logged and not told."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ArgumentError):
        return RefusedError(400, "not a key of this store")
    if isinstance(error, NotFoundError):
        return not_found()
    if isinstance(error, ConflictError):
        return RefusedError(409, "another object lies where this one has to go: use another key", reason="conflict")
    if _is_full(error):
        _log.error("request %s: no space is left: %s", request_id, error)
        return RefusedError(507, "no space is left: delete something or try again later", reason="disk_full")
    if isinstance(error, ConnectionError):
        return RefusedError(GONE, "the client went away", reason="gone")
    if isinstance(error, AuthError):
        _log.error("request %s: the store refused this server: %s", request_id, error)
        return RefusedError(502, "the store refuses this server: its operator must look into its log", reason="store")
    if isinstance(error, KvwireError | OSError):
        _log.warning("request %s: the store failed: %s", request_id, error)
        return RefusedError(503, "the store failed: try again later", RETRY, reason="store")
    _log.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, "internal error", reason="internal")


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk or a quota is at the bottom of an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class JsonLines(logging.Formatter):
    """One JSON object a record, with the request's fields where it tells of one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line break inside."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
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
            record.message += " {bytes}B {seconds:.3f}s {client} {request_id}".format(**request)
        return super().formatMessage(record)
