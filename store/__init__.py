"""Where blobs live: stores, keys and the catalog."""

from kvwire.store.base import (
    Addressed,
    Data,
    HttpAddress,
    Listed,
    ObjectReader,
    ObjectStat,
    Snapshots,
    Store,
    check_after,
    clamp_range,
    open_object,
)
from kvwire.store.catalog import Catalog
from kvwire.store.entry import CatalogEntry
from kvwire.store.folder import FolderStore
from kvwire.store.keys import KeySpace, check_key, content_digest, tenant_hash
from kvwire.store.memory import MemoryStore
from kvwire.store.opening import open_store

__all__ = [
    "Addressed",
    "Catalog",
    "CatalogEntry",
    "Data",
    "FolderStore",
    "HttpAddress",
    "KeySpace",
    "Listed",
    "MemoryStore",
    "ObjectReader",
    "ObjectStat",
    "Snapshots",
    "Store",
    "check_after",
    "check_key",
    "clamp_range",
    "content_digest",
    "open_object",
    "open_store",
    "tenant_hash",
]
