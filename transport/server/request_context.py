"""One request and what is known of its answer."""

from __future__ import annotations

import random
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_LOGGED = 600
_random = random.Random(secrets.token_bytes(32))  # noqa: S311 - ids are no secrets, and asking the system takes long


def new_request_id() -> str:
    """An id that hardly any other request has; it tells nothing of how many there were."""
    return f"{_random.getrandbits(64):016x}"


@dataclass(slots=True)
class Exchange:
    """One request, its id, and counts for logs and metrics.

    Attributes:
        path: Decoded, without the query.
        started: Of ``time.perf_counter``.
        first_byte_at: Of the same clock, 0 before.
        store_failed: The store did not give what the answer needed.
    """

    request: web.BaseRequest
    request_id: str
    path: str
    query: str
    started: float = field(default_factory=time.perf_counter)
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    store_failed: bool = False

    @classmethod
    def of(cls, request: web.BaseRequest) -> Exchange:
        """Begin; the request's own id is kept where it is well-formed."""
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        return cls(request, request_id, request.path, request.query_string)

    def begin_body(self) -> None:
        """The first byte goes out now."""
        self.first_byte_at = time.perf_counter()

    def fields(self, status: int, seconds: float) -> dict[str, object]:
        """What the log tells: the path as it was sent, never the query and no header but Range."""
        request = self.request
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
