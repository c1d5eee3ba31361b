"""Binds a server to an address, and lets it go."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvwire.errors import AuthError
from kvwire.transport.server.access import is_loopback
from kvwire.transport.server.application import ObjectServer
from kvwire.transport.server.listening import Listener, bind, connection_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.store import Store
    from kvwire.transport.server.access import AccessSettings
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.server.tls import ServerTls

_log = logging.getLogger(__name__)


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
    async with server.protocols(connection_limit(server.settings)) as connections:
        sockets = await bind(host, port)
        listener = Listener(sockets, connections, tls.context if tls else None)
        try:
            yield _url("https" if tls else "http", sockets[0].getsockname())
        finally:
            await listener.close()


def _check_public(server: ObjectServer, host: str, tls: ServerTls | None) -> None:
    if not server.guarded:
        msg = (
            f"{host or 'every address'} can be reached from outside: give a token, a tenants file or signing keys, "
            "or bind 127.0.0.1"
        )
        raise AuthError(msg)
    if server.guessable:
        msg = f"{host or 'every address'} can be reached from outside: give a token of 16 characters or more"
        raise AuthError(msg)
    if tls is None:
        _log.warning("%s is served without TLS: tokens can be read on the way; give a certificate", host or "*")


def _url(scheme: str, address: Any) -> str:  # noqa: ANN401 - a socket's address is typed so
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
