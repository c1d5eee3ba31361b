"""A relay before any TCP server: what comes back from it passes at a rate that can be changed, and is counted."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self

_PART = 1 << 16
_STOCK_S = 0.002


class ShapedRelay:
    """A context manager; ``port`` is the relay's own. All connections share one rate, in one direction.

    The rate is of payload, without headers of TCP and below; there is no round trip but the loopback's.
    """

    def __init__(self, server_port: int) -> None:
        """Relay nothing yet.

        Args:
            server_port: Of the server, on the loopback.
        """
        self._server = ("127.0.0.1", server_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.bytes = 0
        self._rate: float | None = None
        self._free_at = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Accept connections."""
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Accept no more; connections end with their peers."""
        self._listener.close()

    def shape(self, rate: float | None) -> None:
        """Change the rate.

        Args:
            rate: Bytes a second from now on; None: as fast as it goes.
        """
        with self._lock:
            self._rate, self._free_at = rate, 0.0

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_shaped: bool) -> None:  # noqa: FBT001
        with suppress(OSError):
            while part := source.recv(_PART):
                if is_shaped:
                    self._wait(len(part))
                target.sendall(part)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait(self, count: int) -> None:
        with self._lock:
            self.bytes += count
            if self._rate is None:
                return
            start = max(time.monotonic() - _STOCK_S, self._free_at)
            self._free_at = start + count / self._rate
            left = self._free_at - time.monotonic()
        if left > 0:
            time.sleep(left)
