"""What a client is told when a request fails: a status and a few words, nothing of what lies behind the server."""

from __future__ import annotations

import errno
import json
import logging

from aiohttp import web

from kvwire.errors import ArgumentError, AuthError, ConflictError, KvwireError, NotFoundError

_log = logging.getLogger(__name__)
GONE = 499  # as nginx counts it: nobody reads this answer, and the server did nothing wrong
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RefusedError(KvwireError):
    """A request ends here with this status; the message goes to the client as it is.

    Attributes:
        status: Of the answer.
        headers: Of the answer.
        reason: One word for the metrics.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, *, reason: str = "") -> None:
        """Keep what the answer needs."""
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.reason = reason


CHALLENGE = {"WWW-Authenticate": "Bearer"}  # goes with every 401
PASSWORD = {"WWW-Authenticate": 'Basic realm="kvwire", charset="UTF-8"'}  # but for pages that browsers show


def not_found() -> RefusedError:
    """The one answer for what is absent and for what the client may not know of."""
    return RefusedError(404, "no such object")


def answer_of(refusal: RefusedError, request_id: str) -> web.Response:
    """Make the answer to a refused request: JSON that is never cached."""
    body = {"error": str(refusal), "status": refusal.status, "request_id": request_id}
    headers = {**refusal.headers, **common_headers(request_id), "Cache-Control": "no-store"}
    return web.Response(status=refusal.status, text=json.dumps(body), content_type="application/json", headers=headers)


def common_headers(request_id: str) -> dict[str, str]:
    """What every answer carries."""
    return {"X-Request-Id": request_id, "Server": "kvwire", "X-Content-Type-Options": "nosniff"}


def refusal_of(error: Exception, request_id: str) -> RefusedError:
    """Translate any exception; what a client cannot act on is logged here and not told."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ArgumentError):
        return RefusedError(400, "not a key of this store")
    if isinstance(error, NotFoundError):
        return not_found()
    if isinstance(error, ConflictError):
        return RefusedError(409, "another object lies where this one has to go: use another key", reason="conflict")
    return _failure_of(error, request_id)


def _failure_of(error: Exception, request_id: str) -> RefusedError:
    if is_full(error):
        _log.error("request %s: no space is left: %s", request_id, error)
        return RefusedError(507, "no space is left: delete something or try again later", reason="disk_full")
    if isinstance(error, ConnectionError):
        return RefusedError(GONE, "the client went away", reason="gone")
    if isinstance(error, AuthError):
        _log.error("request %s: the store refused this server: %s", request_id, error)
        return RefusedError(502, "the store refuses this server: its operator must look into its log", reason="store")
    if isinstance(error, KvwireError | OSError):
        _log.warning("request %s: the store failed: %s", request_id, error)
        return RefusedError(503, "the store failed: try again later", {"Retry-After": "1"}, reason="store")
    _log.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, "internal error", reason="internal")


def is_full(error: BaseException) -> bool:
    """Whether a full disk or a quota is at the bottom of an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        cause = cause.__cause__
    return False
