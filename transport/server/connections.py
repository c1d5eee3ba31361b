"""Connections under limits: how many, how long a header may take, how long an idle one is kept.

Beyond their number, a few spare ones are heard: who asks whether the server is alive gets an answer, all others 503.
"""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvwire.transport.server.http_errors import RefusedError, answer_of
from kvwire.transport.server.request_context import new_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvwire.transport.server.metrics import ServerMetrics
    from kvwire.transport.server.settings import ServerSettings

_CLOSING_S = 1.0
_FLUSH_S = 0.02
_LINGERING_S = 5.0  # an unread body is read for so long, so that its sender sees why it was refused
_TOO_LONG = "LineTooLong"
SPARE_CONNECTIONS = 8
_SPARE_S = 1.0  # for the header of a spare one
TOO_MANY = "too many connections: try again later"


class Connections(web.Server):
    """Makes a protocol for each connection, and knows all that are open."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: ServerSettings,
        metrics: ServerMetrics,
        refused: Callable[[int], None],
        most: int,
    ) -> None:
        """Keep the limits."""
        super().__init__(handler)
        self.settings = settings
        self.refused = refused
        self._metrics = metrics
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # have had an answer and sent nothing since, the longest idle first
        self._spare: dict[Connection, None] = {}  # over the limit, the oldest first
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def __call__(self) -> Connection:
        """Protocol of a new connection."""
        settings = self.settings
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.keepalive_s,
            max_line_size=settings.header_bytes,
            max_field_size=settings.header_bytes,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
            access_log=None,
        )

    def admitted(self) -> Connection | None:
        """Make the protocol of a connection that was accepted, and count it.

        Where all places are taken, a connection that has long been idle gives its own, else it is a spare one.
        """
        is_spare = not self._has_room()
        if is_spare and len(self._spare) >= SPARE_CONNECTIONS and not self._give_up_spare():
            self.count_refused()
            return None
        connection = self()
        connection.is_spare = is_spare
        if is_spare:
            self._spare[connection] = None
        self._open.add(connection)
        self._all_closed.clear()
        self._metrics.connections.set(len(self._open))
        return connection

    def promote(self, connection: Connection) -> None:
        """Give a spare connection that has sent its request a place of its own, where one is free by now."""
        if self._has_room():
            self._spare.pop(connection, None)
            connection.is_spare = False

    def count_refused(self) -> None:
        """A connection was one too many."""
        self._metrics.connections_refused.inc()

    def rest(self, connection: Connection) -> None:
        """A connection has had its answer."""
        self._idle[connection] = None

    def wake(self, connection: Connection) -> None:
        """A connection is not idle any more."""
        self._idle.pop(connection, None)

    def _has_room(self) -> bool:
        """Whether a place is free, or was made free: no answer is cut for it."""
        if len(self._open) - len(self._spare) < self._most:
            return True
        connection = next((one for one in self._idle if not one.unsent), None)
        if connection is None:
            return False
        connection.cut()
        self.leave(connection)
        return True

    def _give_up_spare(self) -> bool:
        connection = next((one for one in self._spare if not one.busy), None)
        if connection is None:
            return False
        connection.give_up()
        connection.cut()
        self.leave(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """A connection is over."""
        self._idle.pop(connection, None)
        self._spare.pop(connection, None)
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()
        self._metrics.connections.set(len(self._open))

    def sweep(self) -> None:
        """Close connections whose header took too long, or that were idle for too long."""
        now = asyncio.get_running_loop().time()
        for connection in [one for one in self._open if one.give_up_at < now]:
            connection.give_up()

    def close_idle(self) -> None:
        """Close connections without a running request; the others end with their answers."""
        self.pre_shutdown()
        for connection in [one for one in self._open if not one.busy]:
            connection.finish()

    async def flush(self, limit_s: float) -> None:
        """Close all connections, and wait until clients have taken what was written.

        For clients that owe no more than their side of closing, which TLS has, it waits a second.
        """
        for connection in list(self._open):
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSING_S):
                        await self._all_closed.wait()
                while any(connection.unsent for connection in self._open):  # noqa: ASYNC110 - no buffer tells
                    await asyncio.sleep(_FLUSH_S)

    def abort(self) -> None:
        """Cut what is still open."""
        for connection in list(self._open):
            connection.hang_up()


class Connection(web.RequestHandler):
    """aiohttp's protocol with a clock for headers.

    Attributes:
        give_up_at: Instant of the loop's clock.
        busy: A request is being answered.
        is_spare: It is over the limit of connections, and nothing is answered beyond whether the server is alive.
        opening: The handshake, where it is under way.
    """

    __slots__ = ("_connections", "_hung_up", "_in_header", "_link", "busy", "give_up_at", "is_spare", "opening")

    def __init__(self, connections: Connections, **options: Any) -> None:  # noqa: ANN401 - aiohttp's options
        """Wait for a connection."""
        super().__init__(connections, **options)
        self._connections = connections
        self._link: asyncio.Transport | None = None
        self._hung_up = False
        self._in_header = True
        self.busy = False
        self.is_spare = False
        self.opening: asyncio.Task[Any] | None = None
        self.give_up_at = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the clock for the first header starts."""
        if not isinstance(transport, asyncio.Transport):
            transport.close()
            return
        self._link = transport
        self.give_up_at = self._loop.time() + (_SPARE_S if self.is_spare else self._connections.settings.header_s)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Start the clock where a header begins."""
        if not self._in_header and not self.busy:
            self._connections.wake(self)
            self._in_header = True
            self.give_up_at = self._loop.time() + self._connections.settings.header_s
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back."""
        self._link = None
        self._connections.leave(self)
        super().connection_lost(exc)

    def begin(self) -> None:
        """A whole header has come: its request is being answered."""
        self.busy = True
        self._in_header = False
        self.give_up_at = math.inf
        self._connections.wake(self)
        if self.is_spare:
            self._connections.promote(self)

    def end(self) -> None:
        """The answer is out."""
        self.busy = False
        self.give_up_at = self._loop.time() + self._connections.settings.keepalive_s
        if self._link is not None and not self._link.is_closing() and not self.is_spare:
            self._connections.rest(self)

    def give_up(self) -> None:
        """Close an idle connection, and tell a client whose header is late."""
        if self._link is not None and self._in_header and not self._hung_up:
            if self.is_spare:
                self._connections.count_refused()
                self._link.write(too_many())
            else:
                self._connections.refused(408)
                self._link.write(_raw_answer(408, "Request Timeout", "the request's header took too long"))
        self.hang_up()

    def cut(self) -> None:
        """Close at once, and wait for nothing."""
        self._hung_up = True
        if self._link is not None:
            self._link.abort()
        elif self.opening is not None:
            self.opening.cancel()

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the client has not made room for."""
        return self._link.get_write_buffer_size() if self._link is not None else 0

    def finish(self) -> None:
        """Close once the client has taken all that was written, which may be never; ``hang_up`` cuts it then."""
        if self._link is not None:
            self._hung_up = True
            self.force_close()

    def hang_up(self) -> None:
        """Close; what is on its way is lost where the client does not take it at once.

        A close waits until all that was written is taken, which may be never: only what needs no waiting is closed so,
        and what is still open when it is asked again is cut.
        """
        link = self._link
        if link is None:
            return
        cut = self.busy or self._hung_up or link.get_write_buffer_size() > 0
        self._hung_up = True
        self.force_close()  # closes once: a TLS transport that is closed twice can no longer be cut
        if cut:
            link.abort()

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002 - nor is its header
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it may quote the header, hence a token
    ) -> web.StreamResponse:
        """Answer what is no request; nothing of it is logged or sent back."""
        if type(exc).__name__ == _TOO_LONG:
            status = 431
        words = {400: "not a valid request", 431: "a header line is too long"}.get(status, "internal error")
        self._connections.refused(status)
        response = answer_of(RefusedError(status, words), new_request_id())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ANN401 - aiohttp's signature
        """Say nothing: what aiohttp would log may quote a header."""


def too_many() -> bytes:
    """The whole answer to whoever is one too many."""
    return _raw_answer(503, "Service Unavailable", TOO_MANY)


def _raw_answer(status: int, reason: str, message: str) -> bytes:
    request_id = new_request_id()
    body = json.dumps({"error": message, "status": status, "request_id": request_id}).encode()
    lines = (
        f"HTTP/1.1 {status} {reason}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Retry-After: 1",
        "Connection: close",
        f"X-Request-Id: {request_id}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
