"""From a store and a key to the best source for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.transport.http_source import HttpSource
from kvwire.transport.http_store import HttpStore
from kvwire.transport.sources import ByteSource, StoreSource

if TYPE_CHECKING:
    import aiohttp

    from kvwire.store import Store


def open_source(store: Store, key: str, session: aiohttp.ClientSession | None = None) -> ByteSource:
    """A source for an object: ranges over HTTP for an ``HttpStore``, worker threads for any other store.

    session: from ``open_session``; only an ``HttpStore`` needs one.
    """
    if not isinstance(store, HttpStore):
        return StoreSource(store, key)
    if session is None:
        msg = "an object behind http needs a session: pass one from open_session()"
        raise ArgumentError(msg)
    return HttpSource(session, store.object_url(key), token=store.token)
