"""Binds a server to an address, with TLS or without, and takes connections in.

No more are taken than there are files for; where the system has none left, they wait and the log stays small.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, AuthError, StorageError

from .access import is_loopback
from .application import ObjectServer
from .connections import SPARE_CONNECTIONS, too_many

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.store import Store

    from .access import AccessSettings
    from .connections import Connection, Connections
    from .settings import ServerSettings

    _Opening = asyncio.Task[tuple[asyncio.BaseTransport, asyncio.BaseProtocol]]

_log = logging.getLogger(__name__)
_BACKLOG = 1024
_HANDSHAKE_S = 10.0
_AT_ONCE = 8  # taken before the loop turns, which closes what was hung up for them
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_TOLD_EVERY_S = 60.0
_CONNECTION_FILES = 2  # its socket, and the object that it reads or the upload that it brings
_THREAD_FILES = 3  # what a call of the store opens for a moment: a database with its log, or a new file and its folder
_SPARE_FILES = 16 + SPARE_CONNECTIONS + _AT_ONCE  # of logs, credentials, modules that are imported late
_USUALLY_OPEN = 32  # where the system does not list what is open


@asynccontextmanager
async def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    access: AccessSettings | None = None,
    settings: ServerSettings | None = None,
    tls: ServerTls | None = None,
) -> AsyncIterator[str]:
    """Serve a store while the block runs.

    Args:
        store: Whose objects are served.
        host: Address to bind.
        port: Port to bind; 0: any free one.
        token: See ``ObjectServer``.
        access: See ``ObjectServer``.
        settings: See ``ObjectServer``.
        tls: Certificate and key; None for plain HTTP.

    Yields:
        The URL that was bound.

    Raises:
        AuthError: An address other than this machine's own would be bound without credentials or with a token of fewer
            than 16 characters.
        StorageError: The address cannot be bound, or this process may open too few files.
    """
    server = ObjectServer(store, token=token, access=access, settings=settings)
    async with listen(server, host, port, tls=tls) as url:
        yield url


@asynccontextmanager
async def listen(
    server: ObjectServer, host: str = "127.0.0.1", port: int = 0, *, tls: ServerTls | None = None
) -> AsyncIterator[str]:
    """As ``serve``, for a server made before; after the block no connection is open.

    Args:
        server: The server.
        host: Address to bind.
        port: Port to bind; 0: any free one.
        tls: Certificate and key; None for plain HTTP.

    Yields:
        The URL that was bound.

    Raises:
        AuthError: As for ``serve``.
        StorageError: The address cannot be bound, or this process may open too few files.
    """
    if not is_loopback(host):
        _check_public(server, host, tls)
    async with server.connections(connection_limit(server.settings)) as connections:
        sockets = await bind(host, port)
        listener = Listener(sockets, connections, tls.context if tls else None)
        try:
            yield _url("https" if tls else "http", sockets[0].getsockname())
        finally:
            await listener.close()


def _check_public(server: ObjectServer, host: str, tls: ServerTls | None) -> None:
    if not server.access.guarded:
        raise AuthError(
            f"{host or 'every address'} can be reached from outside: give a token, a tenants file or signing keys, "
            "or bind 127.0.0.1"
        )
    if server.access.guessable:
        raise AuthError(f"{host or 'every address'} can be reached from outside: give a token of 16 characters or more")
    if tls is None:
        _log.warning("%s is served without TLS: tokens can be read on the way; give a certificate", host or "*")


def _url(scheme: str, address: Any) -> str:  # noqa: ANN401 - a socket's address is typed so
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: With its chain.
        private_key: Without a password.
    """

    certificate: Path
    private_key: Path


class ServerTls:
    """The context that connections are made with; each handshake takes the certificate that was read last."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files.

        Args:
            files: Certificate and key.

        Raises:
            ArgumentError: They cannot be used.
        """
        self._files = files
        self.context = self._current = self._load()
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Load the files again, for connections from now on; where they cannot be used the old ones stay."""
        try:
            self._current = self._load()
        except ArgumentError as error:
            _log.error("%s; the certificate loaded before stays in use", error)
        else:
            _log.info("the certificate was read again")

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, also where the client names no host."""
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files.certificate, self._files.private_key, password=lambda: "")
        except (OSError, ValueError) as error:
            msg = f"the certificate {self._files.certificate} or its private key cannot be used: check both PEM files"
            raise ArgumentError(msg) from error
        return context


def connection_limit(settings: ServerSettings) -> int:
    """How many connections a server may have, by its settings and by the files that this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return settings.max_connections
    room = limit - _open_files() - _SPARE_FILES
    most = (room - _THREAD_FILES * settings.threads) // _CONNECTION_FILES
    if most < settings.threads:  # no more calls at a time than connections
        most = room // (_CONNECTION_FILES + _THREAD_FILES)
    if most < 1:
        msg = f"{limit} open files, which is this process's limit, leave no room for connections: raise it (ulimit -n)"
        raise StorageError(msg)
    if most < settings.max_connections:
        _log.warning("%d connections at most, not %d: this process may open %d files", most, settings.max_connections,
                     limit)  # fmt: skip
    return min(most, settings.max_connections)


def _open_files() -> int:
    try:
        return len(list(Path("/dev/fd").iterdir()))
    except OSError:
        return _USUALLY_OPEN


async def bind(host: str, port: int) -> list[socket.socket]:
    """Bind an address."""
    try:
        binding = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host or None, port, start_serving=False
        )
        sockets = [socket.socket(fileno=os.dup(one.fileno())) for one in binding.sockets]
        binding.close()
        for listening in sockets:
            listening.setblocking(False)
            listening.listen(_BACKLOG)
    except OSError as error:
        msg = f"cannot listen on {host}:{port} ({error.strerror or error}): choose another address or port"
        raise StorageError(msg) from error
    return sockets


class Listener:
    """Accepts on bound sockets while it is open."""

    def __init__(self, sockets: list[socket.socket], connections: Connections, tls: ssl.SSLContext | None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._connections = connections
        self._tls = tls
        self._opening: set[_Opening] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._tell_at = 0.0
        for listening in sockets:
            self._loop.add_reader(listening, self._accept, listening)

    async def close(self) -> None:
        """Stop listening; connections whose handshake is under way are closed."""
        for pause in self._pauses.values():
            pause.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(listening, error)
                return
            self._pause_s = _FIRST_PAUSE_S
            accepted.setblocking(False)
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        connection = self._connections.admitted()
        if connection is None:
            with suppress(OSError):
                accepted.send(b"" if self._tls else too_many())
            accepted.close()
            return
        handshake_s = _HANDSHAKE_S if self._tls else None
        opening = self._loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=handshake_s
        )
        connection.opening = task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, accepted, connection))

    def _opened(self, accepted: socket.socket, connection: Connection, task: _Opening) -> None:
        self._opening.discard(task)
        connection.opening = None
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._connections.leave(connection)
        accepted.close()
        if error is not None and not isinstance(error, OSError):  # an OSError: no handshake, or none in time
            _log.error("a connection could not be opened", exc_info=error)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Come back later: a connection that cannot be taken would be reported again at once, and for ever."""
        self._loop.remove_reader(listening)
        self._pauses[listening] = self._loop.call_later(self._pause_s, self._resume, listening)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self._loop.time() >= self._tell_at:
            self._tell_at = self._loop.time() + _TOLD_EVERY_S
            _log.error("connections cannot be taken (%s): they wait; this is told once a minute", error.strerror)

    def _resume(self, listening: socket.socket) -> None:
        del self._pauses[listening]
        self._loop.add_reader(listening, self._accept, listening)
