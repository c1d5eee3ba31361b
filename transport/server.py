"""Serves a store's objects over HTTP, in ranges."""

from __future__ import annotations

import asyncio
import hmac
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from kvwire.errors import KvwireError, NotFoundError, StorageError
from kvwire.store import content_digest, open_object
from kvwire.transport._failures import failure, failure_of
from kvwire.transport.http_semantics import answer
from kvwire.transport.metrics import ServerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvwire.store import ObjectReader, Store
    from kvwire.transport.http_semantics import Answer

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CONDITIONS = ("If-Match", "If-None-Match", "If-Range", "Range")
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # probes carry no credentials
_PROBE_KEY = "readyz"


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server.

    piece_bytes: read and sent at a time. threads: of reading. max_requests: answered at a time; more get a 503.
    send_s: longest wait for a client to take a piece. shutdown_s: given to running answers when the server stops.
    """

    piece_bytes: int = 256 * 1024
    threads: int = 8
    max_requests: int = 512
    send_s: float = 60.0
    shutdown_s: float = 5.0


class ObjectServer:
    """The aiohttp application over one store; ``serve`` runs it.

    token: if given, every request but the health probes must carry it as a bearer token.
    """

    def __init__(self, store: Store, *, token: str | None = None, settings: ServerSettings | None = None) -> None:
        """Keep the store; nothing is opened or bound."""
        self._store = store
        self._token = token or None
        self._settings = settings or ServerSettings()
        self._metrics = ServerMetrics()
        self._executor: ThreadPoolExecutor | None = None

    def application(self) -> web.Application:
        """A fresh application, for ``aiohttp.web`` or a test client."""
        app = web.Application(middlewares=[self._counted, self._plain_errors, self._authorised])
        app.cleanup_ctx.append(self._with_threads)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/{key:.*}", self._object)
        return app

    async def _with_threads(self, _: web.Application) -> AsyncIterator[None]:
        self._executor = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="kvwire-serve")
        yield
        self._executor.shutdown(wait=True)
        self._executor = None

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    # Middlewares, outermost first.

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 500
        self._metrics.begin()
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._metrics.end(status)

    @web.middleware
    async def _plain_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._metrics.in_flight > self._settings.max_requests:
            return failure(503, "too many requests at a time: try again later", {"Retry-After": "1"})
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client learns a status and nothing else
            return failure_of(error)

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None or request.path in _OPEN_PATHS:
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        wanted = self._token.encode()
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(errors="replace"), wanted):
            return await handler(request)
        return failure(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})

    # Handlers.

    async def _healthz(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n", headers={"Cache-Control": "no-store"})

    async def _readyz(self, _: web.Request) -> web.StreamResponse:
        """Ready is a store that can say what it does not have."""
        with suppress(NotFoundError):
            await self._in_thread(lambda: self._store.stat(_PROBE_KEY))
        return web.Response(text="ready\n", headers={"Cache-Control": "no-store"})

    async def _metrics_page(self, _: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Cache-Control": "no-store"}
        return web.Response(body=self._metrics.render().encode(), headers=headers)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        reader = await self._in_thread(lambda: open_object(self._store, key))
        try:
            return await self._answer(request, key, reader)
        finally:
            await self._in_thread(reader.close)

    async def _answer(self, request: web.Request, key: str, reader: ObjectReader) -> web.StreamResponse:
        etag = await self._in_thread(lambda: reader.etag)
        fields = {name: ", ".join(request.headers.getall(name)) for name in _CONDITIONS if name in request.headers}
        chosen = answer(request.method, fields, reader.size, etag)
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if chosen.status == 412:  # noqa: PLR2004 - the RFC's number is the name
            return failure(412, "the object is not the one that was asked for", headers)
        if chosen.status == 416:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes */{reader.size}"
            return failure(416, "the range lies beyond the object", headers)
        headers["Cache-Control"] = self._cache_control(key)
        if chosen.status == 304:  # noqa: PLR2004
            return web.Response(status=304, headers=headers)
        if chosen.status == 206:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes {chosen.start}-{chosen.end - 1}/{reader.size}"
        return await self._stream(request, reader, chosen, headers)

    def _cache_control(self, key: str) -> str:
        if content_digest(key) is None:
            return "no-cache"
        audience = "public" if self._token is None else "private"  # shared caches must not hand out guarded objects
        return f"{audience}, max-age=31536000, immutable"

    async def _stream(
        self, request: web.Request, reader: ObjectReader, chosen: Answer, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=chosen.status, headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = chosen.end - chosen.start
        if request.method == "HEAD":
            await response.prepare(request)
            return response
        position = chosen.start
        piece = await self._piece(reader, position, chosen.end)  # before the status line: a failure can be told yet
        await response.prepare(request)
        try:
            while piece:
                async with asyncio.timeout(self._settings.send_s):
                    await response.write(piece)
                self._metrics.sent(len(piece))
                position += len(piece)
                piece = await self._piece(reader, position, chosen.end)
        except (KvwireError, TimeoutError, ConnectionError) as error:
            _log.warning("an answer was broken off: %s", error)
            _break_off(request)
        return response

    async def _piece(self, reader: ObjectReader, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        piece = await self._in_thread(lambda: reader.read(start, min(end, start + self._settings.piece_bytes)))
        if not piece:
            msg = f"the object ended {end - start} bytes early"
            raise StorageError(msg)
        return piece


def _break_off(request: web.Request) -> None:
    """Close the connection hard: a client must see a broken answer, not a short one that looks whole."""
    if request.transport is not None:
        request.transport.abort()
