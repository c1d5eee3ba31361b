"""Binds a server to an address, and lets it go."""

from __future__ import annotations

import ipaddress
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvwire.errors import AuthError, StorageError
from kvwire.transport.server import ObjectServer, ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.store import Store


@asynccontextmanager
async def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    settings: ServerSettings | None = None,
) -> AsyncIterator[str]:
    """Serve a store while the block runs; gives the URL that was bound (port 0: any free port).

    Raises AuthError where an address other than this machine's own would be bound without a token, StorageError where
    the address cannot be bound.
    """
    if not token and not is_loopback(host):
        msg = f"{host or 'every address'} can be reached from outside: give a token, or bind 127.0.0.1"
        raise AuthError(msg)
    settings = settings or ServerSettings()
    server = ObjectServer(store, token=token, settings=settings)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=settings.shutdown_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            msg = f"cannot listen on {host}:{port} ({error.strerror or error}): choose another address or port"
            raise StorageError(msg) from error
        yield _url(runner.addresses[0])
    finally:
        await runner.cleanup()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a name other than ``localhost`` counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(address: Any) -> str:  # noqa: ANN401 - a socket's address is typed so
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
