"""Requests and whole answers over kept connections, in bounded time and memory. Errors of urllib3 end here."""

from __future__ import annotations

import random
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import urllib3
from urllib3.exceptions import EmptyPoolError, HTTPError, ProtocolError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from kvwire.errors import StorageError
from kvwire.transport.http_semantics import retry_after_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from urllib.parse import SplitResult

    from kvwire.store import Data

_PIECE_BYTES = 256 * 1024
_MAX_WORDS = 200
_FIRST_REFUSAL = 400
_MAX_REFUSAL_BYTES = 4096  # of an error page
_PASSING = (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class HttpStoreSettings:
    """Limits of an HTTP store.

    stall_s, total_s: longest waits, in seconds: for the connection or the next bytes, and for one whole body.
    connections: open at a time, of all threads together; more requests wait for one, up to stall_s.
    attempts: at a request whose connection breaks or whose server is busy or fails; silence is waited for once.
    backoff_s: pause before the second attempt, doubled for each next one; a server that says when to come back is
    obeyed, up to max_wait_s.
    """

    stall_s: float = 15.0
    total_s: float = 600.0
    connections: int = 64
    attempts: int = 3
    backoff_s: float = 0.1
    max_wait_s: float = 5.0


@dataclass(frozen=True)
class Reply:
    """A whole answer. fields: headers by any-case name; cut: there was more than the limit, which was not read."""

    status: int
    fields: Mapping[str, str]
    body: bytes
    cut: bool


class _BrokenError(StorageError):
    """A connection that failed at once, or in the middle of an answer."""


class HttpExchange:
    """Connections to one server, shared by all threads, each with its own while it asks.

    Redirects, cookies and proxy settings are not followed, so that a token goes nowhere else.
    """

    def __init__(self, parts: SplitResult, token: str | None, settings: HttpStoreSettings) -> None:
        """Keep the address; nothing is connected yet."""
        self._name = parts.geturl()
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._settings = settings
        self._pool = _pool(parts, settings)

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        data: Data | None = None,
        limit: int | None = None,
    ) -> Reply:
        """Send a request; its answer's body is read whole, or up to ``limit`` bytes. Raises StorageError.

        All requests of a store can be sent twice without harm.
        """
        for failed in range(1, self._settings.attempts):
            wait_s = 0.0
            try:
                reply = self._ask_once(method, target, headers, data, limit)
            except _BrokenError:
                pass
            else:
                if reply.status not in _PASSING:
                    return reply
                wait_s = min(retry_after_s(reply.fields.get("Retry-After", "")), self._settings.max_wait_s)
            spread = 0.5 + 0.5 * random.random()  # noqa: S311 - spreads retries, guards nothing
            time.sleep(max(wait_s, self._settings.backoff_s * 2 ** (failed - 1) * spread))
        return self._ask_once(method, target, headers, data, limit)

    def _ask_once(
        self, method: str, target: str, headers: Mapping[str, str], data: Data | None, limit: int | None
    ) -> Reply:
        try:
            response = self._opened(method, target, {**self._headers, **headers}, data)
            try:
                body, cut = self._body(response, limit if response.status < _FIRST_REFUSAL else _MAX_REFUSAL_BYTES)
            finally:
                response.close()  # without effect on a connection whose answer was read to its end
                response.release_conn()
        except (HTTPError, OSError) as error:
            msg = f"{self._name}: the connection failed ({_words(error)}); try again or check the server"
            silent = isinstance(error, UrllibTimeoutError | TimeoutError | EmptyPoolError)
            raise (StorageError if silent else _BrokenError)(msg) from error
        return Reply(response.status, response.headers, body, cut)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _opened(
        self, method: str, target: str, headers: Mapping[str, str], data: Data | None
    ) -> urllib3.BaseHTTPResponse:
        """An answer whose body is not read. A server may have closed a connection that was kept: that is no failure."""
        try:
            return self._sent(method, target, headers, data)
        except ProtocolError as error:
            if not isinstance(error.args[-1], ConnectionError):
                raise
        return self._sent(method, target, headers, data)

    def _sent(
        self, method: str, target: str, headers: Mapping[str, str], data: Data | None
    ) -> urllib3.BaseHTTPResponse:
        body = None if data is None else _pieces(data, self._settings.total_s)
        return self._pool.urlopen(
            method,
            target,
            body=body,  # type: ignore[arg-type]  # any buffer is sent as it is
            headers=headers if data is None else {**headers, "Content-Length": str(memoryview(data).nbytes)},
            retries=False,
            redirect=False,
            pool_timeout=self._settings.stall_s,  # type: ignore[arg-type]  # seconds, whole or not
            preload_content=False,
            decode_content=False,
        )

    def _body(self, response: urllib3.BaseHTTPResponse, limit: int | None) -> tuple[bytes, bool]:
        """Read piece by piece: memory grows with what has come, not with what is announced."""
        give_up_at = time.monotonic() + self._settings.total_s
        pieces: list[bytes] = []
        left = limit
        while left is None or left > 0:
            piece = response.read1(_PIECE_BYTES if left is None else min(left, _PIECE_BYTES))
            if not piece:
                return b"".join(pieces), False
            pieces.append(piece)
            left = None if left is None else left - len(piece)
            _check_time(give_up_at, self._settings.total_s)
        return b"".join(pieces), bool(response.read1(1))


def _pool(parts: SplitResult, settings: HttpStoreSettings) -> urllib3.HTTPConnectionPool:
    timeout = urllib3.Timeout(connect=settings.stall_s, read=settings.stall_s)
    host, port, size = parts.hostname or "", parts.port, settings.connections
    if parts.scheme == "http":
        return urllib3.HTTPConnectionPool(host, port, timeout=timeout, maxsize=size, block=True)
    context = ssl.create_default_context()
    return urllib3.HTTPSConnectionPool(host, port, timeout=timeout, maxsize=size, block=True, ssl_context=context)


def _pieces(data: Data, total_s: float) -> Iterator[memoryview]:
    """A body in pieces: a socket's limit of time is for one call, which would be the whole body otherwise."""
    give_up_at = time.monotonic() + total_s
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE_BYTES):
        _check_time(give_up_at, total_s)
        yield view[start : start + _PIECE_BYTES]


def _check_time(give_up_at: float, total_s: float) -> None:
    if time.monotonic() > give_up_at:
        msg = f"timed out: the body took longer than {total_s:g} s"
        raise TimeoutError(msg)


def _words(error: Exception) -> str:
    if isinstance(error, EmptyPoolError):
        return "all connections are busy"
    if isinstance(error, UrllibTimeoutError):
        return "timed out"
    return (str(error) or type(error).__name__)[:_MAX_WORDS]
