"""What a client is told when a request fails: a status and a few words, nothing of what lies behind the server."""

from __future__ import annotations

import json
import logging

from aiohttp import web

from kvwire.errors import ArgumentError, KvwireError, NotFoundError

_log = logging.getLogger(__name__)
_GONE = 499  # as nginx counts it: nobody reads this answer, and the server did nothing wrong


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error as JSON, never cached."""
    return web.Response(
        status=status,
        text=json.dumps({"error": message, "status": status}),
        content_type="application/json",
        headers={**(headers or {}), "Cache-Control": "no-store"},
    )


def failure_of(error: Exception) -> web.Response:
    """The answer for an exception; the log gets the rest."""
    match error:
        case web.HTTPException():
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return failure(error.status, error.reason, allow)
        case ArgumentError():
            return failure(400, "not a key of this store")
        case NotFoundError():
            return failure(404, "no such object")
        case KvwireError():
            _log.warning("the store failed: %s", error)
            return failure(503, "the store failed: try again later", {"Retry-After": "1"})
        case ConnectionError():
            _log.debug("the client went away: %s", error)
            return failure(_GONE, "the client went away")
    _log.error("a request failed", exc_info=error)
    return failure(500, "internal error")
