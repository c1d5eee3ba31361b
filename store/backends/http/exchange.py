"""Requests and whole answers over kept connections, in bounded time and memory. Errors of urllib3 end here."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import urllib3
from urllib3.exceptions import EmptyPoolError, HTTPError, NewConnectionError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from kvwire.errors import StorageError
from kvwire.store.backends.http.connection import BoundedPool, BoundedTlsPool, KeptClosedError
from kvwire.store.backends.http.semantics import retry_after_s
from kvwire.store.client_tls import client_tls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from urllib.parse import SplitResult

    from kvwire.store.base import Data

_PIECE_BYTES = 256 * 1024
_TLS_PIECE_BYTES = 16 * 1024  # one record: a socket's limit of time over TLS is for one
_MAX_WORDS = 200
_FIRST_REFUSAL = 400
_MAX_REFUSAL_BYTES = 4096  # of an error page
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
        max_wait_s: How far it is obeyed, in seconds.
    """

    stall_s: float = 15.0
    total_s: float = 600.0
    connections: int = 64
    attempts: int = 3
    backoff_s: float = 0.1
    max_wait_s: float = 5.0


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    Attributes:
        status: HTTP status.
        fields: Headers by any-case name.
        body: The bytes, whole or up to the limit.
        cut: There was more than the limit, which was not read.
    """

    status: int
    fields: Mapping[str, str]
    body: bytes
    cut: bool


class _BrokenError(StorageError):
    """A connection that failed at once, or in the middle of an answer."""


class _KeptClosedError(_BrokenError):
    """A connection that the server had closed since its last answer."""


class HttpExchange:
    """Connections to one server, shared by all threads, each with its own while it asks.

    Redirects, cookies and proxy settings are not followed, so that a token goes nowhere else.
    """

    def __init__(self, parts: SplitResult, token: str | None, settings: HttpStoreSettings) -> None:
        """Keep the address; nothing is connected yet.

        Args:
            parts: The server's address.
            token: Bearer token; None: none is sent.
            settings: Limits and waits.
        """
        self._name = parts.geturl()
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._token = token.encode() if token else b""
        self._settings = settings
        self._pool = _pool(parts, settings)
        self._piece_bytes = _TLS_PIECE_BYTES if parts.scheme == "https" else _PIECE_BYTES

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        data: Data | None = None,
        limit: int | None = None,
    ) -> Reply:
        """Send a request and read its answer.

        All requests of a store can be sent twice without harm.

        Args:
            method: HTTP method.
            target: Path and query.
            headers: Of this request; the token's is added.
            data: The body; None: there is none.
            limit: Bytes of the answer's body to read at most; None: the whole.

        Returns:
            The answer.

        Raises:
            StorageError: No answer came, or not in time.
        """
        give_up_at = time.monotonic() + self._settings.total_s
        failed, kept_closed = 0, False
        while True:
            wait_s = 0.0
            try:
                reply = self._ask_once(method, target, headers, data, limit)
            except _BrokenError as error:
                if isinstance(error, _KeptClosedError) and not kept_closed:
                    kept_closed = True
                    continue
                if not self._may_repeat(failed, give_up_at):
                    raise StorageError(str(error)) from None
            else:
                if reply.status not in _PASSING or not self._may_repeat(failed, give_up_at):
                    return reply
                wait_s = min(retry_after_s(reply.fields.get("Retry-After", "")), self._settings.max_wait_s)
            failed += 1
            spread = 0.5 + 0.5 * random.random()  # noqa: S311 - spreads retries, guards nothing
            time.sleep(max(wait_s, self._settings.backoff_s * 2 ** (failed - 1) * spread))

    def _may_repeat(self, failed: int, give_up_at: float) -> bool:
        return failed + 1 < self._settings.attempts and time.monotonic() < give_up_at

    def _ask_once(
        self, method: str, target: str, headers: Mapping[str, str], data: Data | None, limit: int | None
    ) -> Reply:
        give_up_at = time.monotonic() + self._settings.total_s
        try:
            response = self._sent(method, target, {**self._headers, **headers}, data)
            try:
                body, cut = _body(response, limit if response.status < _FIRST_REFUSAL else _MAX_REFUSAL_BYTES)
            finally:
                response.close()  # without effect on a connection whose answer was read to its end
                response.release_conn()
        except (HTTPError, OSError) as error:
            # What urllib3 says may repeat what a server sent: it stays out of messages and tracebacks.
            raise self._failure(error, is_late=time.monotonic() >= give_up_at) from None
        if response.status >= _FIRST_REFUSAL and self._token:  # what it says goes into messages: it may quote the token
            body = body.replace(self._token, b"(the token)")
        return Reply(response.status, response.headers, body, cut)

    def _failure(self, error: HTTPError | OSError, *, is_late: bool) -> StorageError:
        cause = _cause(error)
        # A connection that was refused is a timeout to urllib3, for the sake of its older callers.
        is_silent = isinstance(error, UrllibTimeoutError) and not isinstance(error, NewConnectionError)
        kind: type[StorageError] = StorageError
        if isinstance(error, EmptyPoolError):
            words = "all connections are busy"
        elif is_silent or isinstance(cause, TimeoutError):
            words = f"the answer took longer than {self._settings.total_s:g} s" if is_late else "timed out"
        else:
            kind = _KeptClosedError if isinstance(cause, KeptClosedError) else _BrokenError
            reason = cause.strerror if isinstance(cause, OSError) else None  # from the system, not from the server
            words = ": ".join(filter(None, (type(cause).__name__, reason)))[:_MAX_WORDS]
        return kind(f"{self._name}: the connection failed ({words}); try again or check the server")

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _sent(
        self, method: str, target: str, headers: Mapping[str, str], data: Data | None
    ) -> urllib3.BaseHTTPResponse:
        body = None if data is None else _pieces(data, self._piece_bytes)
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


def _pool(parts: SplitResult, settings: HttpStoreSettings) -> urllib3.HTTPConnectionPool:
    stall_s, total_s, size = settings.stall_s, settings.total_s, settings.connections
    limits: dict[str, Any] = {"maxsize": size, "block": True, "stall_s": stall_s, "total_s": total_s}
    limits["timeout"] = urllib3.Timeout(connect=stall_s, read=stall_s)
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "http":
        return BoundedPool(host, port, **limits)
    return BoundedTlsPool(host, port, ssl_context=client_tls(), **limits)


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
