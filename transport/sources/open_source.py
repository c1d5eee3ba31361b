"""From a store and a key to the best source for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.store import Addressed, HttpAddress
from kvwire.store.cache import Cached
from kvwire.transport.sources.base import ByteSource, StoreSource
from kvwire.transport.sources.http import HttpSource
from kvwire.transport.sources.tiered import TieredSource

if TYPE_CHECKING:
    import aiohttp

    from kvwire.store import Catalog, CatalogEntry, Store


def open_source(store: Store, key: str, session: aiohttp.ClientSession | None = None) -> ByteSource:
    """Make a source: ranges over HTTP where the store gives addresses, worker threads for any other store.

    Content of a ``TieredStore`` comes through its tiers, and the gaps from what lies below them in the same way.

    Args:
        store: Where the object lies.
        key: Its key.
        session: From ``open_session``; only a store that is ``Addressed`` needs one.

    Returns:
        The source; close it after use.

    Raises:
        ArgumentError: The store needs a session and none is given.
    """
    if isinstance(store, Cached):
        below = open_source(store.origin(key), key, session)
        return below if store.name(key) is None else TieredSource(store, key, below)
    if not isinstance(store, Addressed):
        return StoreSource(store, key)
    if session is None:
        msg = "an object behind http needs a session: pass one from open_session()"
        raise ArgumentError(msg)
    return HttpSource(session, partial(_address, store, key))


def open_document(catalog: Catalog, entry: CatalogEntry, session: aiohttp.ClientSession | None = None) -> ByteSource:
    """Make a source of a document's blob, or of its parts as one object.

    Args:
        catalog: Of the document's tenant.
        entry: The document's, with a blob.
        session: As for ``open_source``.

    Returns:
        The source; close it after use.

    Raises:
        ArgumentError: The store needs a session and none is given.
    """
    sources = [open_source(catalog.store, key, session) for key in catalog.blobs.of(entry)]
    if not entry.parts:
        return sources[0]
    from kvwire.store.crypto.joined import Extents
    from kvwire.transport.sources.parts import PartsSource

    return PartsSource(sources, Extents(entry.parts))


def _address(store: Addressed, key: str, refused: bool) -> HttpAddress:  # noqa: FBT001 - called through a type alias
    return store.http_address(key, renew=refused)
