"""Connections under limits: how many, how long a header may take, how long an idle one is kept.

aiohttp has none of these, and quotes what is no request in its answer. Beyond the limit a few spare connections are
read: health checks get their answer, all else 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .exchange import RefusedError, answer_of, new_request_id

if TYPE_CHECKING:
    from .metrics import ServerMetrics
    from .settings import ServerSettings

_log = logging.getLogger(__name__)
_CLOSING_S = 1.0  # for a client that owes no more than its side of closing, which TLS has
_FLUSH_S = 0.02
_LINGERING_S = 5.0  # an unread body is read for so long, so that its sender sees why it was refused
SPARE_CONNECTIONS = 8
_SPARE_S = 1.0  # for the header of a spare one
TOO_MANY = "too many connections: try again later"


class Connections:
    """All that are open."""

    def __init__(self, server: web.Server, settings: ServerSettings, metrics: ServerMetrics, most: int) -> None:
        """Keep the limits."""
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self._server = server
        self._most = most
        self._open: dict[Connection, None] = {}  # the oldest first

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        """Answers under way."""
        return [one.task for one in self._open if one.task is not None]

    def admitted(self) -> Connection | None:
        """Make the protocol of a connection that was accepted; None where even spare ones are too many."""
        is_spare = not self.make_room()
        if is_spare and len(self._spare()) >= SPARE_CONNECTIONS and not self._give_up_spare():
            self.metrics.connections_refused.inc()
            return None
        connection = Connection(self, self._server, is_spare=is_spare)
        self._open[connection] = None
        self.metrics.connections.set(len(self._open))
        return connection

    def make_room(self) -> bool:
        """Whether a place is free, or the longest idle connection gave its own: no answer is cut for it."""
        if len(self._open) - len(self._spare()) < self._most:
            return True
        idle = [one for one in self._open if one.is_idle]
        if not idle:
            return False
        self._cut(min(idle, key=lambda one: one.give_up_at))
        return True

    def _spare(self) -> list[Connection]:
        return [one for one in self._open if one.is_spare] if len(self._open) >= self._most else []

    def _give_up_spare(self) -> bool:
        connection = next((one for one in self._spare() if one.task is None), None)
        if connection is None:
            return False
        connection.give_up()
        self._cut(connection)
        return True

    def _cut(self, connection: Connection) -> None:
        connection.cut()
        self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """A connection is over."""
        self._open.pop(connection, None)
        self.metrics.connections.set(len(self._open))

    def sweep(self) -> None:
        """Close connections whose header took too long, or that were idle for too long."""
        now = asyncio.get_running_loop().time()
        for connection in [one for one in self._open if one.give_up_at < now]:
            connection.give_up()

    async def drain(self) -> None:
        """Let running answers end and be taken, for as long as the settings say; then cut them."""
        self.draining = True
        limit_s = self.settings.shutdown_s
        until = asyncio.get_running_loop().time() + limit_s
        await asyncio.sleep(0)  # requests that have come in before are running now
        for connection in [one for one in self._open if one.task is None]:
            connection.finish()
        if running := self.running:
            _, late = await asyncio.wait(running, timeout=limit_s)
            for task in late:
                task.cancel()
            if late:
                _log.warning("%d answers were cut off, since the server stops", len(late))
                await asyncio.wait(late, timeout=limit_s)
        await self._flush(until)
        for connection in list(self._open):
            connection.hang_up()

    async def _flush(self, until: float) -> None:
        """Close all; an answer that is written has its end in a buffer still, where its client is slow to take it."""
        clock = asyncio.get_running_loop().time
        for connection in list(self._open):
            connection.finish()
        closing_until = min(until, clock() + _CLOSING_S)
        while self._open and clock() < (until if any(one.unsent for one in self._open) else closing_until):  # noqa: ASYNC110 - no buffer tells
            await asyncio.sleep(_FLUSH_S)


class Connection(web.RequestHandler):
    """aiohttp's protocol with a clock for headers."""

    __slots__ = ("_connections", "_hung_up", "_in_header", "_link", "give_up_at", "is_spare", "opening", "task")

    def __init__(self, connections: Connections, server: web.Server, *, is_spare: bool) -> None:
        """Wait for a connection."""
        settings = connections.settings
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.keepalive_s,
            max_line_size=settings.header_bytes,
            max_field_size=settings.header_bytes,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type] # its own default is a logger
        )
        self._connections = connections
        self._link: asyncio.Transport | None = None  # aiohttp forgets its own at force_close, before all is sent
        self._hung_up = False
        self._in_header = True
        self.is_spare = is_spare  # over the limit: only whether the server is alive is answered
        self.task: asyncio.Task[Any] | None = None  # that answers a request
        self.opening: asyncio.Task[Any] | None = None  # the handshake, where it is under way
        self.give_up_at = math.inf  # on the loop's clock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the clock for the first header starts."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream
        self._link = transport
        self._start_clock(_SPARE_S if self.is_spare else self._connections.settings.header_s)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Start the clock where a header begins."""
        if not self._in_header and self.task is None:
            self._in_header = True
            self._start_clock(self._connections.settings.header_s)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back."""
        self._link = None
        self._connections.leave(self)
        super().connection_lost(exc)

    def _start_clock(self, seconds: float) -> None:
        self.give_up_at = self._loop.time() + seconds

    def begin(self) -> None:
        """A whole header has come: its request is being answered. A spare one takes a place that is free by now."""
        self.task = asyncio.current_task()
        self._in_header = False
        self.give_up_at = math.inf
        if self.is_spare and self._connections.make_room():
            self.is_spare = False

    def end(self) -> None:
        """The answer is out."""
        self.task = None
        self._start_clock(self._connections.settings.keepalive_s)
        if self._connections.draining:
            self.close()

    @property
    def is_idle(self) -> bool:
        """Whether it has had an answer whole and sent nothing since."""
        return self.task is None and not (self._in_header or self.is_spare or self.unsent)

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the client has not made room for."""
        return self._link.get_write_buffer_size() if self._link is not None else 0

    def give_up(self) -> None:
        """Close an idle connection, and tell a client whose header is late."""
        if self._link is not None and self._in_header and not self._hung_up:
            if self.is_spare:
                self._connections.metrics.connections_refused.inc()
                self._link.write(too_many())
            else:
                self._connections.metrics.malformed(408)
                self._link.write(_raw_answer(408, "Request Timeout", "the request's header took too long"))
        self.hang_up()

    def cut(self) -> None:
        """Close at once, and wait for nothing."""
        self._hung_up = True
        if self._link is not None:
            self._link.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def finish(self) -> None:
        """Close once the client has taken all that was written, which may be never; ``hang_up`` cuts it then."""
        if self._link is not None:
            self._hung_up = True
            if not self._link.is_closing():  # a TLS transport that is closed twice can no longer be cut
                self.force_close()

    def hang_up(self) -> None:
        """Close what needs no waiting; cut the rest, and what is still open when it is asked again."""
        link = self._link
        if link is not None:
            cut = self.task is not None or self._hung_up or self.unsent > 0
            self.finish()
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
        if type(exc).__name__ == "LineTooLong":
            status = 431
        words = {400: "not a valid request", 431: "a header line is too long"}.get(status, "internal error")
        self._connections.metrics.malformed(status)
        response = answer_of(RefusedError(status, words), new_request_id())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ANN401 - aiohttp's signature
        """Say nothing: what aiohttp would log may quote a header."""


def too_many() -> bytes:
    """The whole answer to a connection that is one too many."""
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
