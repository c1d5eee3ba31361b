"""The proxy itself: which requests are made anew, how answers go through, and what a client is told of failures."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import aiohttp
from aiohttp import web

from kvwire.errors import ArgumentError, AuthError, KvwireError, StorageError
from kvwire.transport.server.access import is_loopback

from ..requests import PARAMS
from .counting import CONTENT_TYPE, ProxyMetrics
from .outcome_socket import OutcomeListener, check_path
from .placeholders import RequestError
from .streaming import EventStream, error_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from multidict import CIMultiDict

    from .bodies import BodyMaker, Prepared

_LOG = logging.getLogger("kvwire.proxy")
_COMPLETIONS = {"/v1/chat/completions": True, "/v1/completions": False}
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
_REQUEST_ID = re.compile(r"[\w-]{1,128}", re.ASCII)
_HOST = re.compile(r"(?:\[([^\]]+)\]|([^:]+))(?::\d+)?")
_KEEPALIVE_S = 3.0
"""Less than the 5 s after which vLLM closes a connection that rests, so that no request meets its end."""
_MOST_READ = 16 << 20
"""Of an answer that is no stream, whose truth of loading is counted; a longer one is handed on uncounted."""
_RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class ProxySettings:
    """Limits of a proxy.

    Attributes:
        upstream: vLLM's address.
        upstream_token: Sent to vLLM in place of what clients send.
        token: What clients must send; empty: the proxy asks for none.
        outcomes: Path of a socket at which vLLM's connector tells what became of requests; None: streams lack it.
        max_body_bytes: Of a request.
        max_requests: At a time.
        threads: Requests that are looked up and rendered at a time.
        connect_s: Longest wait for a connection to vLLM.
        prepare_s: Longest wait for the store and the template.
        answer_s: Longest silence of vLLM, from the request on.
        told_s: Longest wait, at a stream's end, for what became of its documents.
        shutdown_s: Given to running answers at the end.
    """

    upstream: str
    upstream_token: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    outcomes: Path | None = None
    max_body_bytes: int = 32 << 20
    max_requests: int = 512
    threads: int = 8
    connect_s: float = 5.0
    prepare_s: float = 30.0
    answer_s: float = 600.0
    told_s: float = 1.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what is no address."""
        if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", self.upstream):
            raise ArgumentError(f"--upstream is vLLM's address, such as http://127.0.0.1:8000, got {self.upstream!r}")
        if self.outcomes is not None:
            check_path(str(self.outcomes))


class VllmProxy:
    """Answers OpenAI's requests by a vLLM behind it."""

    def __init__(self, maker: BodyMaker, settings: ProxySettings) -> None:
        """Connect to nothing yet."""
        self._maker, self._settings = maker, settings
        self._metrics, self._listener = ProxyMetrics(), OutcomeListener()
        self._pool = ThreadPoolExecutor(settings.threads, "kvwire-prepare")
        self._client: aiohttp.ClientSession | None = None
        self._is_draining = False

    @asynccontextmanager
    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve until the context ends; running answers then get some time.

        Yields:
            The URL that was bound.

        Raises:
            AuthError: Other machines could ask, and no token is wanted of them.
            StorageError: The address cannot be bound.
        """
        if not is_loopback(host) and not self._settings.token:
            msg = f"{host or 'every address'} can be reached from outside: give a token (--token), or bind 127.0.0.1"
            raise AuthError(msg)
        application = web.Application(client_max_size=self._settings.max_body_bytes)
        application.router.add_get("/kvwire/metrics", self._own_metrics)
        application.router.add_get("/kvwire/health", self._own_health)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=self._settings.shutdown_s
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=self._settings.connect_s, sock_read=self._settings.answer_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as client:
            self._client = client
            try:
                if self._settings.outcomes is not None:
                    await self._listener.open(self._settings.outcomes)
                await runner.setup()
                try:
                    await web.TCPSite(runner, host, port).start()
                except OSError as error:
                    msg = f"cannot listen on {host}:{port} ({error.strerror or error}): choose another address or port"
                    raise StorageError(msg) from error
                bound, at, *_ = runner.addresses[0]
                yield f"http://[{bound}]:{at}" if ":" in bound else f"http://{bound}:{at}"
            finally:
                self._is_draining = True
                await runner.cleanup()
                self._listener.close()
                self._pool.shutdown(wait=False, cancel_futures=True)

    async def _own_metrics(self, request: web.Request) -> web.StreamResponse:
        if trouble := self._refusal(request):
            return trouble
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _own_health(self, _request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            return web.Response(text="stopping\n", status=503)
        return web.Response(text="ok\n")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, count and log it."""
        metrics, started = self._metrics, time.perf_counter()
        metrics.in_flight += 1
        run = _Run(request)
        status = 499
        try:
            try:
                response = self._refusal(request) or await self._served(request, run)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client gets OpenAI's error object
                response = await self._failed(run, error)
            status = response.status
            return response
        finally:
            metrics.in_flight -= 1
            metrics.ended(run.kind, status)
            self._listener.forget(run.upstream_id)
            _LOG.info(
                "%s %s %d", request.method, request.path, status,
                extra={"request": {
                    "request_id": run.request_id, "method": request.method, "path": request.path, "status": status,
                    "kind": run.kind, "documents": len(run.documents), "bytes": run.sent_bytes,
                    "seconds": round(time.perf_counter() - started, 4), "client": request.remote or "",
                    **({"told": run.told} if run.told else {}),
                }},
            )  # fmt: skip

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """What is over a limit or without rights."""
        settings = self._settings
        if settings.token:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(errors="replace"), settings.token.encode()):
                return _error("the token is wrong or missing", 401, "invalid_api_key")
        else:  # any web page can have its own name lead to 127.0.0.1
            host = _HOST.fullmatch(request.headers.get("Host", ""))
            if host is None or not is_loopback((host[1] or host[2]).lower()):
                return _error("a proxy without a token is asked for as 127.0.0.1, [::1] or localhost", 403, "host")
        if self._metrics.in_flight > settings.max_requests:
            self._metrics.failed("busy")
            return _error("too many requests at a time: try again later", 503, "overloaded", headers=_RETRY)
        return None

    async def _served(self, request: web.Request, run: _Run) -> web.StreamResponse:
        is_chat = _COMPLETIONS.get(request.path)
        if is_chat is None or request.method != "POST":
            return await self._pass(request, run, request.content if request.can_read_body else None)
        raw = await request.read()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return await self._pass(request, run, raw)  # vLLM says what is wrong with it
        if not isinstance(body, dict):
            return await self._pass(request, run, raw)
        prepared = await self._prepared(body, is_chat=is_chat)
        run.kind, run.documents = prepared.kind, prepared.documents
        data = raw if prepared.body is body else json.dumps(prepared.body).encode()
        if run.kind != "plain" and body.get("stream") and self._listener.is_open:
            self._listener.expect(run.upstream_id)
        return await self._pass(request, run, data, is_stream=bool(body.get("stream")))

    async def _prepared(self, body: dict[str, Any], *, is_chat: bool) -> Prepared:
        """Look documents up in a thread; a store that hangs costs the request, and no other."""
        started = time.perf_counter()
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: self._maker.prepare(body, is_chat=is_chat)
        )
        try:
            async with asyncio.timeout(self._settings.prepare_s):
                prepared = await asyncio.shield(work)
        except TimeoutError as error:
            work.cancel()
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            msg = f"the store of documents did not answer within {self._settings.prepare_s:g} s"
            raise RequestError(msg, 503, "store_unavailable") from error
        if prepared.kind != "plain":
            self._metrics.prepared(time.perf_counter() - started)
        return prepared

    async def _pass(
        self, request: web.Request, run: _Run, data: bytes | aiohttp.StreamReader | None, *, is_stream: bool = False
    ) -> web.StreamResponse:
        """Hand a request on and its answer back."""
        assert self._client is not None  # noqa: S101 - set before anything listens
        url = self._settings.upstream.rstrip("/") + request.rel_url.raw_path_qs
        headers = _handed_on(request.headers, "host", "content-length", "accept-encoding")
        headers["X-Request-Id"] = run.upstream_id
        headers["Accept-Encoding"] = "identity"  # answers are read on their way; aiohttp would ask for gzip
        if self._settings.upstream_token:
            headers["Authorization"] = f"Bearer {self._settings.upstream_token}"
        async with self._client.request(
            request.method, url, headers=headers, data=data, allow_redirects=False
        ) as upstream:
            is_completion = run.is_completion
            if is_completion and not is_stream and (upstream.content_length or 0) <= _MOST_READ:
                return await self._whole(run, upstream)
            run.response = response = web.StreamResponse(status=upstream.status, headers=run.answered(upstream))
            if is_stream:
                response.headers.popall("Content-Length", None)
            await response.prepare(request)
            is_events = upstream.content_type == "text/event-stream"
            events = run.events = EventStream() if is_events else None
            async for piece in upstream.content.iter_any():
                run.takes(self._metrics, len(piece))
                await response.write(piece) if events is None else await self._write(run, response, events, piece)
            if events is not None:
                await response.write(events.rest())
            await response.write_eof()
            return response

    async def _write(self, run: _Run, response: web.StreamResponse, events: EventStream, piece: bytes) -> None:
        """Hand events on; before the last one what became of the documents."""
        before, end = events.feed(piece)
        if before:
            await response.write(before)
        if not end:
            return
        if run.kind != "plain":
            run.told = await self._listener.told(run.upstream_id, self._settings.told_s)
            self._metrics.told(run.told)
            if run.told is not None:
                await response.write(events.event({"kv_transfer_params": {PARAMS: run.told}}))
        await response.write(end)

    async def _whole(self, run: _Run, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """An answer that is no stream: vLLM tells in it what became of the documents."""
        data = await upstream.read()
        run.takes(self._metrics, len(data))
        if run.kind != "plain" and upstream.status == 200:  # noqa: PLR2004 - OK
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                run.told = json.loads(data)["kv_transfer_params"][PARAMS]
            self._metrics.told(run.told if isinstance(run.told, dict) else None)
        headers = run.answered(upstream)
        headers.popall("Content-Length", None)
        return web.Response(body=data, status=upstream.status, headers=headers)

    async def _failed(self, run: _Run, error: Exception) -> web.StreamResponse:
        """An answer in OpenAI's shape; where one has begun, its stream ends with the error."""
        status, code, message, param = _shaped(error, self._settings)
        if status >= 500:  # noqa: PLR2004 - ours or vLLM's fault
            self._metrics.failed(code)
            _LOG.warning("request %s: %s", run.request_id, message if str(error) in message else f"{message} ({error})")
        if status == 500:  # noqa: PLR2004
            _LOG.exception("request %s failed", run.request_id, exc_info=error)
        if run.response is None or not run.response.prepared:
            return _error(message, status, code, param, _RETRY if status == 503 else None)  # noqa: PLR2004
        if run.events is None or isinstance(error, ConnectionResetError):
            raise error  # nothing can be said any more: the connection ends
        with suppress(ConnectionError):
            await run.response.write(error_event(_object(message, status, code, param)))
            await run.response.write_eof()
        return run.response


class _Run:
    """One request on its way. Clients may send an id twice, vLLM gets each with a suffix of its own."""

    def __init__(self, request: web.Request) -> None:
        given = request.headers.get("X-Request-Id", "")
        own = uuid4().hex
        self.request_id, self.upstream_id = (given, f"{given}-{own}") if _REQUEST_ID.fullmatch(given) else (own, own)
        self.is_completion = request.path in _COMPLETIONS and request.method == "POST"
        self.kind, self.documents = ("plain" if self.is_completion else "other"), tuple[str, ...]()
        self.told: dict[str, Any] | None = None
        self.response: web.StreamResponse | None = None
        self.events: EventStream | None = None
        self._started, self.sent_bytes = time.perf_counter(), 0

    def answered(self, upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """Headers of vLLM's answer, with the client's id."""
        headers = _handed_on(upstream.headers)
        if "X-Request-Id" in headers:
            headers["X-Request-Id"] = self.request_id
        return headers

    def takes(self, metrics: ProxyMetrics, count: int) -> None:
        """Note bytes of an answer, and when the first of a completion came."""
        if self.is_completion and not self.sent_bytes:
            metrics.first_byte(self.kind, time.perf_counter() - self._started)
        self.sent_bytes += count


def _shaped(error: Exception, settings: ProxySettings) -> tuple[int, str, str, str | None]:  # noqa: PLR0911 - a table
    """Status, code, words and field of an error."""
    if isinstance(error, RequestError):
        return error.status, error.code, str(error), error.param
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return 413, "request_too_large", f"a request has at most {settings.max_body_bytes} bytes", None
    if isinstance(error, web.HTTPException):
        return error.status, "invalid_request", error.reason, None
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return 502, "upstream_unreachable", f"vLLM took no connection within {settings.connect_s:g} s", None
    if isinstance(error, TimeoutError):
        return 504, "upstream_timeout", f"vLLM was silent for {settings.answer_s:g} s", None
    if isinstance(error, aiohttp.ClientError):
        return 502, "upstream_unreachable", "vLLM cannot be reached, or ended the connection", None
    if isinstance(error, StorageError):
        return 503, "store_unavailable", "the store of documents failed: try again later", None
    if isinstance(error, KvwireError):
        return 500, "store_error", str(error), None
    return 500, "internal_error", "the proxy failed; its log says why", None


def _object(message: str, status: int, code: str, param: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")  # noqa: PLR2004
    return {"message": message, "type": kind, "param": param, "code": code}


def _error(
    message: str, status: int, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.json_response({"error": _object(message, status, code, param)}, status=status, headers=headers)


def _handed_on(headers: Mapping[str, str], *without: str) -> CIMultiDict[str]:
    """Headers that are the other side's too."""
    from multidict import CIMultiDict

    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left_out = _HOP | named | set(without)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)
