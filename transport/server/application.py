"""The server over one store: which request goes where, under which limits, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from kvwire._html import POLICY
from kvwire.store import check_key
from kvwire.transport.server.access import Access, AccessSettings
from kvwire.transport.server.connections import TOO_MANY, Connection, Connections
from kvwire.transport.server.http_errors import (
    CHALLENGE,
    GONE,
    PASSWORD,
    RefusedError,
    answer_of,
    common_headers,
    not_found,
    refusal_of,
)
from kvwire.transport.server.limits import RateLimiter
from kvwire.transport.server.locks import KeyLocks
from kvwire.transport.server.metrics import CONTENT_TYPE, ServerMetrics
from kvwire.transport.server.objects import Objects
from kvwire.transport.server.readiness import Readiness
from kvwire.transport.server.request_context import Exchange
from kvwire.transport.server.settings import ServerSettings
from kvwire.transport.server.status import StatusPage
from kvwire.transport.server.threads import Threads
from kvwire.transport.server.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.store import Store
    from kvwire.transport.server.credentials import Rights

access_log = logging.getLogger("kvwire.access")
_log = logging.getLogger(__name__)
_REFRESH_S = 1.0
_METHODS = "GET, HEAD, PUT, DELETE"
_ERROR = 400


class ObjectServer:
    """Answers requests for the objects of one store; ``listen`` or ``serve`` runs it."""

    def __init__(
        self,
        store: Store,
        *,
        token: str | None = None,
        access: AccessSettings | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        """Keep the store, read the credentials' files; nothing is bound.

        Args:
            store: Whose objects are served.
            token: With full rights; the same as in ``access``. Without any credentials, everybody who can connect may
                read and write.
            access: Tells all credentials.
            settings: Limits; None for the defaults.

        Raises:
            StorageError: A file cannot be read.
            ArgumentError: A file or a token cannot be used.
        """
        settings = settings or ServerSettings()
        access = access or AccessSettings()
        self._settings = settings
        self._access = Access(replace(access, token=token) if token else access)
        self._metrics = ServerMetrics()
        self._threads = Threads(settings.threads)
        self._rates = RateLimiter(settings.requests_per_s, settings.burst)
        locks = KeyLocks()
        self._objects = Objects(store, settings, self._threads, locks, guarded=self._access.guarded)
        self._uploads = Uploads(store, settings, self._threads, locks, self._metrics)
        self._readiness = Readiness(store, self._threads)
        self._status = StatusPage(store, self._metrics) if settings.status else None
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def settings(self) -> ServerSettings:
        """Its limits."""
        return self._settings

    @property
    def guarded(self) -> bool:
        """Whether objects are kept from those without credentials."""
        return self._access.guarded

    @property
    def guessable(self) -> bool:
        """Whether the token with full rights is so short that it could be guessed."""
        return self._access.guessable

    def reload(self) -> None:
        """Read the credentials' files again; what is broken is logged, and the old content stays."""
        self._access.refresh(force=True)

    @asynccontextmanager
    async def protocols(self, most: int) -> AsyncIterator[Connections]:
        """What makes a protocol for each connection; at the end, connections are drained.

        Stop listening before the end of the block.

        Args:
            most: Connections at a time, see ``connection_limit``.

        Yields:
            Where connections are admitted.
        """
        connections = Connections(self.handle, self._settings, self._metrics, self._malformed, most)
        housekeeping = asyncio.create_task(self._housekeeping(connections))
        try:
            yield connections
        finally:
            await self._drain(connections)
            housekeeping.cancel()
            with suppress(asyncio.CancelledError):
                await housekeeping
            await asyncio.to_thread(self._threads.close)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request.

        Args:
            request: As aiohttp read it.

        Returns:
            The answer, sent or to be sent.
        """
        exchange = Exchange.of(request)
        connection = request.protocol
        task = asyncio.current_task()
        self._metrics.begin()
        if isinstance(connection, Connection):
            connection.begin()
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        status = GONE
        try:
            response = await self._answered(exchange)
            status = response.status
            return response
        finally:
            self._end(exchange, status)
            if isinstance(connection, Connection):
                connection.end()

    async def _answered(self, exchange: Exchange) -> web.StreamResponse:
        try:
            response = await self._route(exchange)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client learns a status and nothing else
            refusal = refusal_of(error, exchange.request_id)
            exchange.store_failed = refusal.reason == "store"
            response = answer_of(refusal, exchange.request_id)
            if not exchange.request.content.is_eof():  # the rest of a refused upload is not waited for
                response.force_close()
        if (self._draining or _is_spare(exchange)) and not response.prepared:
            response.force_close()
        return response

    async def _route(self, exchange: Exchange) -> web.StreamResponse:
        method, path = exchange.request.method, exchange.path
        if _is_spare(exchange) and path != "/healthz":
            self._metrics.connections_refused.inc()
            raise RefusedError(503, TOO_MANY, {"Retry-After": "1"})
        if path in ("/healthz", "/readyz"):
            return await self._probe(exchange)
        if self._metrics.in_flight > self._settings.max_requests:
            raise RefusedError(503, "too many requests at a time: try again later", {"Retry-After": "1"})
        if path == "/metrics" or (path == "/status" and self._status):
            self._access.check_host(exchange.request.headers)
            return self._page(exchange)
        rights = self._rights(exchange)
        self._take(rights.client)
        if method not in ("GET", "HEAD", "PUT", "DELETE"):
            raise RefusedError(405, "no such method", {"Allow": _METHODS})
        return await (self._listing(exchange, rights) if path == "/" else self._object(exchange, rights))

    async def _object(self, exchange: Exchange, rights: Rights) -> web.StreamResponse:
        method, key = exchange.request.method, check_key(exchange.path[1:])
        if not rights.sees(key):
            raise not_found()
        if method in ("GET", "HEAD"):
            return await self._objects.get(exchange, key)
        if self._settings.read_only or not rights.write:
            raise RefusedError(403, "these credentials may not write", reason="rights")
        if method == "PUT":
            return await self._uploads.put(exchange, key, rights.client)
        return await self._objects.delete(exchange, key)

    def _rights(self, exchange: Exchange) -> Rights:
        request = exchange.request
        address = request.remote or "unknown"
        self._slow_down(self._rates.look(f"address {address}"))  # before anything is compared: guessing shall take long
        try:
            return self._access.rights(request.method, exchange.path, exchange.query, request.headers, address)
        except RefusedError:
            self._take(f"address {address}")
            raise

    def _take(self, client: str) -> None:
        self._slow_down(self._rates.take(client))

    def _slow_down(self, wait_s: float) -> None:
        if wait_s:
            self._metrics.rate_limited.inc()
            raise RefusedError(
                429, "too many requests: slow down", {"Retry-After": str(math.ceil(wait_s))}, reason="rate"
            )

    async def _listing(self, exchange: Exchange, rights: Rights) -> web.StreamResponse:
        query = exchange.query.split("&")
        if rights.key is not None or not any(part.partition("=")[0] == "list" for part in query):
            raise not_found()
        if exchange.request.method != "GET":
            raise RefusedError(405, "a listing can only be read", {"Allow": "GET"})
        return await self._objects.listing(exchange, rights)

    async def _probe(self, exchange: Exchange) -> web.StreamResponse:
        """Alive is whoever answers; ready is a store that can say what it does not have, while nobody drains."""
        if exchange.request.method not in ("GET", "HEAD"):
            raise RefusedError(405, "no such method", {"Allow": "GET, HEAD"})
        if exchange.path == "/healthz":
            return _text(exchange, "ok\n")
        if self._draining:
            raise RefusedError(503, "the server is stopping", {"Retry-After": "1"})
        await self._readiness.check(exchange.request_id)
        return _text(exchange, "ready\n")

    def _page(self, exchange: Exchange) -> web.StreamResponse:
        """Metrics, or the status for people."""
        request = exchange.request
        if request.method not in ("GET", "HEAD"):
            raise RefusedError(405, "no such method", {"Allow": "GET, HEAD"})
        address = request.remote or "unknown"
        self._slow_down(self._rates.look(f"address {address}"))
        if not self._access.may_see_metrics(request.headers):
            self._take(f"address {address}")
            challenge = CHALLENGE if exchange.path == "/metrics" else PASSWORD
            raise RefusedError(401, "a token for metrics is needed", challenge)
        headers = {**common_headers(exchange.request_id), "Cache-Control": "no-store"}
        if self._status is None or exchange.path == "/metrics":
            return web.Response(body=self._metrics.render(), headers=headers | {"Content-Type": CONTENT_TYPE})
        headers |= {"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        return web.Response(text=self._status.render(), content_type="text/html", headers=headers)

    def _end(self, exchange: Exchange, status: int) -> None:
        now = time.perf_counter()
        seconds = now - exchange.started
        first_s = (exchange.first_byte_at or now) - exchange.started
        metrics = self._metrics
        metrics.end(exchange.request.method, status, seconds, first_s)
        if exchange.sent_bytes:
            metrics.sent_bytes.inc(exchange.sent_bytes)
        if exchange.store_failed:
            metrics.store_errors.inc()
        if exchange.received_bytes:
            metrics.received_bytes.inc(exchange.received_bytes)
        if access_log.isEnabledFor(logging.INFO):
            fields = exchange.fields(status, seconds)
            access_log.info("%s %s %d", fields["method"], fields["path"], status, extra={"request": fields})

    def _malformed(self, status: int) -> None:
        """Count what was no request."""
        self._metrics.begin()
        self._metrics.end("other", status, 0.0, 0.0)

    async def _housekeeping(self, connections: Connections) -> None:
        interval_s = min(_REFRESH_S, self._settings.header_s / 4, self._settings.keepalive_s / 4)
        refresh_at = 0.0
        while True:
            await asyncio.sleep(interval_s)
            connections.sweep()
            if time.monotonic() >= refresh_at:
                refresh_at = time.monotonic() + _REFRESH_S
                try:
                    await self._threads.run(self._access.refresh)
                except Exception:  # noqa: BLE001 - whatever it is, connections are looked after as before
                    _log.exception("the credentials' files could not be looked at")
                try:
                    if self._status is not None:
                        self._status.look()
                except Exception:  # noqa: BLE001 - likewise, and credentials are
                    _log.exception("the status page could not be kept up")

    async def _drain(self, connections: Connections) -> None:
        """Let running answers end and be taken, for as long as the settings say; then cut them."""
        self._draining = True
        clock = asyncio.get_running_loop().time
        until = clock() + self._settings.shutdown_s
        await asyncio.sleep(0)  # requests that have come in before are running now
        connections.close_idle()
        running = set(self._running)
        if running:
            _, late = await asyncio.wait(running, timeout=self._settings.shutdown_s)
            for task in late:
                task.cancel()
            if late:
                _log.warning("%d answers were cut off, since the server stops", len(late))
                await asyncio.wait(late, timeout=self._settings.shutdown_s)
        # An answer that is written has its end in a buffer still, where the client is slow to take it.
        await connections.flush(max(0.0, until - clock()))
        connections.abort()
        await connections.shutdown(1.0)


def _is_spare(exchange: Exchange) -> bool:
    connection = exchange.request.protocol
    return isinstance(connection, Connection) and connection.is_spare


def _text(exchange: Exchange, text: str) -> web.Response:
    return web.Response(text=text, headers={**common_headers(exchange.request_id), "Cache-Control": "no-store"})
