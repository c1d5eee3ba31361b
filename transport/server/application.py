"""The server over one store: which request goes where, under which limits, and what is counted and logged.

It stands on aiohttp's ``web.Server``: a router would cost each request more than the few paths here are worth, and
aiohttp's application answers ``Expect`` before any limit is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from aiohttp import web

from kvwire._html import POLICY
from kvwire.store import check_key

from .access import Access, AccessSettings, RateLimiter
from .connections import TOO_MANY, Connections
from .exchange import (
    CHALLENGE,
    EXCHANGE,
    GONE,
    PASSWORD,
    RETRY,
    Exchange,
    RefusedError,
    answer_of,
    mark,
    not_found,
    refusal_of,
)
from .metrics import CONTENT_TYPE, ServerMetrics, StatusPage
from .objects import Objects
from .settings import ServerSettings
from .storage import Storage
from .uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvwire.store import Store

    from .connections import Connection
    from .exchange import Rights

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

access_log = logging.getLogger("kvwire.access")
_log = logging.getLogger(__name__)
_REFRESH_S = 1.0
_READS = ("GET", "HEAD")
_METHODS = (*_READS, "PUT", "DELETE")


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
        self.settings = settings
        self.access = Access(replace(access, token=token) if token else access)
        self._metrics = ServerMetrics()
        self._storage = Storage(store, settings.threads)
        self._rates = RateLimiter(settings.requests_per_s, settings.burst)
        self._objects = Objects(self._storage, settings, guarded=self.access.guarded)
        self._uploads = Uploads(self._storage, settings, self._metrics)
        self._status = StatusPage(store, self._metrics) if settings.status else None
        self._probes: dict[str, Handler] = {"/healthz": self._health, "/readyz": self._ready}
        self._pages: dict[str, Handler] = {"/metrics": self._metrics_page}
        if self._status is not None:
            self._pages["/status"] = self._status_page
        self._connections: Connections | None = None

    def reload(self) -> None:
        """Read the credentials' files again; what is broken is logged, and the old content stays."""
        self.access.refresh(force=True)

    @asynccontextmanager
    async def connections(self, most: int) -> AsyncIterator[Connections]:
        """Admit connections, ``most`` at a time, and drain them at the end. Stop listening before."""
        server = web.Server(self._answer)
        connections = self._connections = Connections(server, self.settings, self._metrics, most)
        housekeeping = asyncio.create_task(self._housekeeping(connections))
        try:
            yield connections
        finally:
            await connections.drain()
            housekeeping.cancel()
            with suppress(asyncio.CancelledError):
                await housekeeping
            await server.shutdown(1.0)
            await asyncio.to_thread(self._storage.close)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Give a request its id, count and log it, and answer where it is refused or fails."""
        exchange = request[EXCHANGE] = Exchange.of(request)
        connection = cast("Connection", request.protocol)
        self._metrics.begin()
        connection.begin()
        status = GONE
        try:
            try:
                self._admit(request, exchange, connection)
                response = await self._handler(request.path)(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client learns a status and nothing else
                response = self._refused(request, exchange, error)
            if not response.prepared:
                mark(response, exchange.request_id)
                if connection.is_spare or _draining(self._connections):
                    response.force_close()
            status = response.status
            return response
        finally:
            self._end(request, exchange, status)
            connection.end()

    def _handler(self, path: str) -> Handler:
        if found := self._probes.get(path) or self._pages.get(path):
            return found
        if path == "/":
            return self._listing
        if path.startswith("/"):
            return self._object
        raise not_found()  # a target that is no path, as in OPTIONS *

    def _refused(self, request: web.BaseRequest, exchange: Exchange, error: Exception) -> web.Response:
        refusal = refusal_of(error, exchange.request_id)
        exchange.store_failed = refusal.reason == "store"
        response = answer_of(refusal, exchange.request_id)
        if not request.content.is_eof():  # the rest of a refused upload is not waited for
            response.force_close()
        return response

    def _admit(self, request: web.BaseRequest, exchange: Exchange, connection: Connection) -> None:
        """Refuse what is over a limit or without rights. Whether the server is alive is always answered."""
        path, method = request.path, request.method
        if path != "/healthz" and connection.is_spare:
            self._metrics.connections_refused.inc()
            raise RefusedError(503, TOO_MANY, RETRY)
        if path in self._probes:
            _check_method(method, _READS)
            return
        if self._metrics.in_flight > self.settings.max_requests:
            raise RefusedError(503, "too many requests at a time: try again later", RETRY)
        if path in self._pages:
            self.access.check_host(request.headers)
            _check_method(method, _READS)
            self._check_page(request)
        else:
            rights = exchange.rights = self._rights(request)
            self._take(rights.client)
            _check_method(method, _METHODS)

    def _rights(self, request: web.BaseRequest) -> Rights:
        address = request.remote or "unknown"
        self._slow_down(self._rates.look(f"address {address}"))  # before anything is compared: guessing shall take long
        try:
            return self.access.rights(request.method, request.path, request.query_string, request.headers, address)
        except RefusedError:
            self._take(f"address {address}")
            raise

    def _check_page(self, request: web.BaseRequest) -> None:
        address = request.remote or "unknown"
        self._slow_down(self._rates.look(f"address {address}"))
        if not self.access.may_see_metrics(request.headers):
            self._take(f"address {address}")
            challenge = CHALLENGE if request.path == "/metrics" else PASSWORD
            raise RefusedError(401, "a token for metrics is needed", challenge)

    def _take(self, client: str) -> None:
        self._slow_down(self._rates.take(client))

    def _slow_down(self, wait_s: float) -> None:
        if wait_s:
            self._metrics.rate_limited.inc()
            raise RefusedError(
                429, "too many requests: slow down", {"Retry-After": str(math.ceil(wait_s))}, reason="rate"
            )

    async def _object(self, request: web.BaseRequest) -> web.StreamResponse:
        method, key, rights = request.method, check_key(request.path[1:]), _rights_of(request)
        if not rights.sees(key):
            raise not_found()
        if method in _READS:
            return await self._objects.get(request, key)
        if self.settings.read_only or not rights.write:
            raise RefusedError(403, "these credentials may not write", reason="rights")
        if method == "PUT":
            return await self._uploads.put(request, key, rights.client)
        return await self._objects.delete(request, key)

    async def _listing(self, request: web.BaseRequest) -> web.StreamResponse:
        rights, query = _rights_of(request), request.query_string.split("&")
        if rights.key is not None or not any(part.partition("=")[0] == "list" for part in query):
            raise not_found()
        if request.method != "GET":
            raise RefusedError(405, "a listing can only be read", {"Allow": "GET"})
        return await self._objects.listing(request, rights)

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        if _draining(self._connections):
            raise RefusedError(503, "the server is stopping", RETRY)
        await self._storage.check_ready(request[EXCHANGE].request_id)
        return web.Response(text="ready\n")

    async def _metrics_page(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _status_page(self, _request: web.BaseRequest) -> web.StreamResponse:
        headers = {"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        text = self._status.render() if self._status else ""
        return web.Response(text=text, content_type="text/html", headers=headers)

    def _end(self, request: web.BaseRequest, exchange: Exchange, status: int) -> None:
        now = time.perf_counter()
        seconds = now - exchange.started
        metrics = self._metrics
        metrics.end(request.method, status, seconds, (exchange.first_byte_at or now) - exchange.started)
        if exchange.sent_bytes:
            metrics.sent_bytes.inc(exchange.sent_bytes)
        if exchange.received_bytes:
            metrics.received_bytes.inc(exchange.received_bytes)
        if exchange.store_failed:
            metrics.store_errors.inc()
        if access_log.isEnabledFor(logging.INFO):
            fields = exchange.fields(request, status, seconds)
            access_log.info("%s %s %d", fields["method"], fields["path"], status, extra={"request": fields})

    async def _housekeeping(self, connections: Connections) -> None:
        interval_s = min(_REFRESH_S, self.settings.header_s / 4, self.settings.keepalive_s / 4)
        refresh_at = 0.0
        while True:
            await asyncio.sleep(interval_s)
            connections.sweep()
            if time.monotonic() < refresh_at:
                continue
            refresh_at = time.monotonic() + _REFRESH_S
            try:
                await self._storage.start(self.access.refresh)
            except Exception:  # noqa: BLE001 - whatever it is, connections are looked after as before
                _log.exception("the credentials' files could not be looked at")
            try:
                if self._status is not None:
                    self._status.look()
            except Exception:  # noqa: BLE001 - likewise, and credentials are
                _log.exception("the status page could not be kept up")


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        raise RefusedError(405, "no such method", {"Allow": ", ".join(allowed)})


def _rights_of(request: web.BaseRequest) -> Rights:
    rights = request[EXCHANGE].rights
    assert rights is not None  # noqa: S101 - the middleware looked
    return rights


def _draining(connections: Connections | None) -> bool:
    return connections is not None and connections.draining
