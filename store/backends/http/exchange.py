"""Requests and whole answers over kept connections, in bounded time and memory. Errors of urllib3 end here."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import EmptyPoolError, HTTPError, NewConnectionError, ProxyError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from kvwire._forks import OwnProcess
from kvwire.errors import StorageError
from kvwire.store.backends.http.connection import BoundedPool, BoundedTlsPool, KeptClosedError
from kvwire.store.backends.http.semantics import retry_after_s
from kvwire.store.http_clients import (
    MAX_REDIRECTS,
    HttpAddress,
    client_tls,
    connection_failed,
    proxy_for,
    too_many_redirects,
    usual_tls,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from urllib.parse import SplitResult

    from kvwire.store.base import Data

_PIECE_BYTES = 256 * 1024
_TLS_PIECE_BYTES = 16 * 1024  # one record: a socket's limit of time over TLS is for one
_FIRST_REFUSAL = 400
_MAX_REFUSAL_BYTES = 4096  # of an error page
_MOST_ORIGINS = 8  # whose connections are kept
_PASSING = (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class HttpStoreSettings:
    """Limits of an HTTP store.

    Attributes:
        stall_s: Longest wait for the connection or the next bytes, in seconds.
        total_s: Longest wait for one request, in seconds, from its first byte to its answer's last; none is sent again
            once it is over.
        connections: Open at a time, of all threads together; more requests wait for one, up to stall_s.
        attempts: At a request whose connection breaks or whose server is busy or fails; silence is waited for once.
            That a server closed a connection which was kept is no failure: the request is sent again at once.
        backoff_s: Pause before the second attempt, doubled for each next one; a server that says when to come back is
            obeyed.
        max_wait_s: How far it is obeyed, in seconds; where all attempts would come too early, none is made.
    """

    stall_s: float = 15.0
    total_s: float = 600.0
    connections: int = 64
    attempts: int = 3
    backoff_s: float = 0.1
    max_wait_s: float = 5.0


@dataclass(frozen=True)
class Reply:
    """A whole answer. cut: there was more than the limit. is_repeated: sent before, and perhaps done then."""

    status: int
    fields: Mapping[str, str]
    body: bytes
    cut: bool
    is_repeated: bool = False


class _BrokenError(StorageError):
    """A connection that failed at once, or in the middle of an answer."""


class _KeptClosedError(_BrokenError):
    """A connection that the server had closed since its last answer."""


class HttpExchange:
    """Connections to one server, and to those that it leads to without the token. Shared by all threads."""

    def __init__(self, parts: SplitResult, token: str | None, settings: HttpStoreSettings) -> None:
        """Keep the address; nothing is connected yet."""
        self._name = parts.geturl()
        self._token, self._settings = token.encode() if token else b"", settings
        self._origin = f"{parts.scheme}://{parts.netloc}"
        headers = (("Authorization", f"Bearer {token}"),) if token else ()
        tls = client_tls() if parts.scheme == "https" else None
        self.address = HttpAddress(self._origin, headers, tls=tls, proxy=proxy_for(self._origin))
        self._connect()

    def _connect(self) -> None:
        self._process, self._lock = OwnProcess("connections"), threading.Lock()
        self._pools: dict[str, urllib3.HTTPConnectionPool] = {}  # by origin

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        data: Data | None = None,
        limit: int | None = None,
    ) -> Reply:
        """Send a request, follow redirects and read the answer.

        Each can be sent twice without harm; a conditional write is refused then by what it wrote (``is_repeated``).
        """
        give_up_at = time.monotonic() + self._settings.total_s
        address = replace(self.address, url=self._origin + target)
        for _ in range(MAX_REDIRECTS + 1):
            reply = self._ask(method, address, headers, data, limit, give_up_at)
            further = address.redirected(reply.status, reply.fields.get("Location"), method)
            if further is None:
                return reply
            address = further
        raise too_many_redirects(self._name)

    def _ask(
        self, method: str, address: HttpAddress, headers: Mapping[str, str], data: Data | None, limit: int | None,
        give_up_at: float,
    ) -> Reply:  # fmt: skip
        failed, kept_closed = 0, False
        while True:
            wait_s = 0.0
            try:
                reply = self._ask_once(method, address, headers, data, limit)
            except _BrokenError as error:
                if isinstance(error, _KeptClosedError) and not kept_closed:
                    kept_closed = True
                    continue
                if not self._may_repeat(failed, give_up_at):
                    raise StorageError(str(error)) from None
            else:
                told_s, most_s = retry_after_s(reply.fields.get("Retry-After", "")), self._settings.max_wait_s
                left, longest_s = self._settings.attempts - failed - 1, max(most_s, self._backoff_s(failed + 1))
                is_vain = told_s > left * longest_s
                if reply.status not in _PASSING or is_vain or not self._may_repeat(failed, give_up_at):
                    return replace(reply, is_repeated=failed > 0 or kept_closed)
                wait_s = min(told_s, most_s)
            failed += 1
            spread = 0.5 + 0.5 * random.random()  # noqa: S311 - spreads retries, guards nothing
            time.sleep(max(wait_s, self._backoff_s(failed) * spread))

    def _backoff_s(self, failed: int) -> float:
        return self._settings.backoff_s * 2.0 ** (failed - 1)

    def _may_repeat(self, failed: int, give_up_at: float) -> bool:
        return failed + 1 < self._settings.attempts and time.monotonic() < give_up_at

    def _ask_once(
        self, method: str, address: HttpAddress, headers: Mapping[str, str], data: Data | None, limit: int | None
    ) -> Reply:
        give_up_at = time.monotonic() + self._settings.total_s
        try:
            response = self._send(method, address, headers, data)
            try:
                body, cut = _body(response, limit if response.status < _FIRST_REFUSAL else _MAX_REFUSAL_BYTES)
            finally:
                response.close()  # without effect on a connection whose answer was read to its end
                response.release_conn()
        except (HTTPError, OSError) as error:
            # What urllib3 says may repeat what a server sent: it stays out of messages and tracebacks.
            raise self._failure(error, address, is_late=time.monotonic() >= give_up_at) from None
        if response.status >= _FIRST_REFUSAL and self._token:  # what it says goes into messages: it may quote the token
            body = body.replace(self._token, b"(the token)")
        return Reply(response.status, response.headers, body, cut)

    def _failure(self, error: HTTPError | OSError, address: HttpAddress, *, is_late: bool) -> StorageError:
        cause = _cause(error)
        # A connection that was refused is a timeout to urllib3, for the sake of its older callers.
        is_refused = isinstance(error, NewConnectionError)
        if isinstance(error, EmptyPoolError):
            return StorageError(connection_failed(self._name, "all connections are busy"))
        if isinstance(cause, TimeoutError) or (isinstance(error, UrllibTimeoutError) and not is_refused):
            words = f"the answer took longer than {self._settings.total_s:g} s" if is_late else "timed out"
            return StorageError(connection_failed(self._name, words))
        kind = _KeptClosedError if isinstance(cause, KeptClosedError) else _BrokenError
        at_proxy = isinstance(error, ProxyError) or (is_refused and address.proxy is not None)
        return kind(connection_failed(self._name, cause, at_proxy=at_proxy))

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()

    def _send(
        self, method: str, address: HttpAddress, headers: Mapping[str, str], data: Data | None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request; the answer's body is still to be read."""
        parts = urlsplit(address.url)  # a redirect may spell it in any way
        origin, body = f"{parts.scheme}://{parts.netloc}", None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        pool = self._pool(origin, address)
        headers = {"Accept-Encoding": "identity", **dict(address.headers), **headers}
        if data is not None:
            headers["Content-Length"] = str(memoryview(data).nbytes)
            body = _pieces(data, _TLS_PIECE_BYTES if parts.scheme == "https" else _PIECE_BYTES)
        return pool.urlopen(
            method,
            origin + target if pool.proxy and parts.scheme == "http" else target,
            redirect=False,
            body=body,  # type: ignore[arg-type]  # any buffer
            headers=headers,
            retries=False,
            assert_same_host=False,  # a proxy is asked for other hosts' addresses
            pool_timeout=self._settings.stall_s,  # type: ignore[arg-type]  # seconds, whole or not
            preload_content=False,
            decode_content=False,
        )

    def _pool(self, origin: str, address: HttpAddress) -> urllib3.HTTPConnectionPool:
        if not self._process.is_here:  # the parent process goes on with the connections that it had
            self._connect()
        with self._lock:
            if origin in self._pools:
                return self._pools[origin]
            while len(self._pools) > _MOST_ORIGINS:  # a server may lead to any number of others
                self._pools.pop(next(name for name in self._pools if name != self._origin)).close()
            settings, proxy = self._settings, address.proxy
            limits: dict[str, Any] = {"maxsize": settings.connections, "block": True}
            limits["timeout"] = urllib3.Timeout(connect=settings.stall_s, read=settings.stall_s)
            if origin.startswith("https:") or (proxy and proxy.url.startswith("https:")):
                limits["ssl_context"] = address.tls or usual_tls()
            if proxy:
                limits |= {"proxy_url": proxy.url, "proxy_headers": proxy.headers, "proxy_ssl_context": usual_tls()}
            manager = urllib3.ProxyManager(**limits) if proxy else urllib3.PoolManager(**limits)
            bounds: dict[str, Any] = {"stall_s": settings.stall_s, "total_s": settings.total_s}
            kinds = {"http": partial(BoundedPool, **bounds), "https": partial(BoundedTlsPool, **bounds)}
            manager.pool_classes_by_scheme = kinds  # type: ignore[assignment]  # made with the limits of time
            pool = self._pools[origin] = manager.connection_from_url(origin)
            return pool


def _pieces(data: Data, piece_bytes: int) -> Iterator[memoryview]:
    """A body in pieces: a socket's limit of time is for one call, which would be the whole body otherwise."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), piece_bytes):
        yield view[start : start + piece_bytes]


def _body(response: urllib3.BaseHTTPResponse, limit: int | None) -> tuple[bytes, bool]:
    """Read piece by piece: memory grows with what has come, not with what is announced."""
    pieces: list[bytes] = []
    left = limit
    while left is None or left > 0:
        piece = response.read1(_PIECE_BYTES if left is None else min(left, _PIECE_BYTES))
        if not piece:
            return b"".join(pieces), False
        pieces.append(piece)
        left = None if left is None else left - len(piece)
    return b"".join(pieces), bool(response.read1(1))


def _cause(error: Exception) -> BaseException:
    """What lies behind an error of urllib3, which names it among its arguments or as its cause."""
    return next((one for one in error.args if isinstance(one, Exception)), error.__cause__ or error)
