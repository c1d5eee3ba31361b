"""What the connector tells of requests, while their answers stream: vLLM's own streams have no field for it.

A datagram for each request goes from vLLM's scheduler to the proxy's socket, a file on the machine that both run on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LOG = logging.getLogger("kvwire.vllm")
_MOST_BYTES = 32 << 10
_MOST_TEXT = 4000


class OutcomeSender:
    """vLLM's side. A proxy that is not there costs nothing."""

    def __init__(self, path: str) -> None:
        """Open a socket."""
        self._path, self._socket = path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._has_warned = False

    def send(self, request_id: str, told: Mapping[str, Any]) -> None:
        """Tell what became of a request's documents."""
        short = {name: value[:_MOST_TEXT] if isinstance(value, str) else value for name, value in told.items()}
        try:
            self._socket.sendto(json.dumps({"request": request_id, "told": short}).encode(), self._path)
        except OSError as error:
            if not self._has_warned:
                _LOG.warning("outcomes cannot be told to a proxy at %s: %s (told once)", self._path, error)
            self._has_warned = True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class OutcomeListener(asyncio.DatagramProtocol):
    """The proxy's side."""

    def __init__(self) -> None:
        """Wait for nothing yet."""
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._path: Path | None = None

    async def open(self, path: Path) -> None:
        """Bind the socket; one that an earlier proxy left is replaced."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=_bound(path))
        self._path = path

    def close(self) -> None:
        """Close and remove the socket."""
        if self._transport is not None:
            self._transport.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    @property
    def is_open(self) -> bool:
        """Whether anything can be told."""
        return self._transport is not None

    def expect(self, request_id: str) -> None:
        """Keep what will be told of a request."""
        self._waiting[request_id] = asyncio.get_running_loop().create_future()

    async def told(self, request_id: str, limit_s: float) -> dict[str, Any] | None:
        """What was told of a request; None where that takes too long."""
        waited = self._waiting.get(request_id)
        if waited is None:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(waited)
        return None

    def forget(self, request_id: str) -> None:
        """Keep nothing more of a request."""
        if (waited := self._waiting.pop(request_id, None)) is not None:
            waited.cancel()

    def datagram_received(self, data: bytes, addr: object) -> None:
        """Take in a datagram; vLLM's name of a request has the one that it was sent with inside."""
        del addr
        try:
            message = json.loads(data[:_MOST_BYTES])
            name, told = message["request"], message["told"]
        except (KeyError, TypeError, ValueError, RecursionError):
            return
        if not isinstance(name, str) or not isinstance(told, dict):
            return
        for request_id, waited in self._waiting.items():
            if request_id in name and not waited.done():
                waited.set_result(told)
                return


def _bound(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if path.exists():
            if not path.is_socket():
                raise ArgumentError(f"{path} is there and is no socket: name another file")
            path.unlink()
        bound.bind(str(path))
        path.chmod(0o660)
    except OSError as error:
        bound.close()
        msg = f"no socket can be made at {path} ({error.strerror or error}): name a path in a folder of yours"
        raise ArgumentError(msg) from error
    bound.setblocking(False)
    return bound


def check_path(path: str) -> str:
    """Refuse what is no path of a socket."""
    if not os.path.isabs(path) or len(path.encode()) > 100:  # noqa: PLR2004, PTH117 - sockets' names end at 107 bytes
        raise ArgumentError(
            f"outcomes is an absolute path of at most 100 bytes, the same as kvwire vllm-proxy --outcomes; got {path!r}"
        )
    return path
