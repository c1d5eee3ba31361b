"""Connections of urllib3 that hold one limit of time over a whole request: sending, headers and body.

A socket's own limit is for one call, so it never ends where a server sends a byte now and then.
"""

from __future__ import annotations

import http.client
import io
import math
import time
from typing import TYPE_CHECKING, Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from _typeshed import WriteableBuffer


class KeptClosedError(ConnectionError):
    """The server closed a connection that was kept after an earlier answer, before it answered again."""


class _BoundedConnection(HTTPConnection):
    """Each request must be answered within ``total_s`` seconds, and no wait for the next bytes exceeds ``stall_s``."""

    def __init__(self, *args: Any, stall_s: float, total_s: float, **settings: Any) -> None:  # noqa: ANN401 - urllib3's
        super().__init__(*args, **settings)
        self._stall_s = stall_s
        self._total_s = total_s
        self._give_up_at = math.inf
        self._is_kept = False

    def connect(self) -> None:
        self._is_kept = False
        super().connect()

    def request(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - urllib3's
        self._give_up_at = time.monotonic() + self._total_s
        super().request(*args, **settings)

    def send(self, data: Any) -> None:  # noqa: ANN401 - any buffer
        if self.sock is not None:
            self.sock.settimeout(self._left_s())
        super().send(data)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as urllib3 has it
        try:
            response = super().getresponse()
        except ConnectionError as error:
            if self._is_kept:
                raise KeptClosedError from error
            raise
        self._is_kept = True
        return response

    def response_class(self, sock: socket.socket, **settings: Any) -> http.client.HTTPResponse:  # type: ignore[override]  # noqa: ANN401
        """What http.client calls with the socket that it reads an answer from."""
        return http.client.HTTPResponse(_Incoming(sock, self._left_s), **settings)  # type: ignore[arg-type]  # only read

    def _left_s(self) -> float:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return min(left_s, self._stall_s)


class _BoundedTlsConnection(_BoundedConnection, HTTPSConnection):
    """The same over TLS, whose handshake has the limit of connecting."""


class BoundedPool(urllib3.HTTPConnectionPool):
    """Takes ``stall_s`` and ``total_s`` for its connections."""

    ConnectionCls = _BoundedConnection


class BoundedTlsPool(urllib3.HTTPSConnectionPool):
    """Takes ``stall_s`` and ``total_s`` for its connections."""

    ConnectionCls = _BoundedTlsConnection


class _Incoming(io.RawIOBase):
    """What a socket receives, each time with the limit that is left then."""

    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock = sock
        self._left_s = left_s
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        self._sock.settimeout(self._left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
