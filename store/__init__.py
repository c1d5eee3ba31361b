"""Where blobs live: stores, keys and the catalog."""

from typing import TYPE_CHECKING

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
from kvwire.store.catalog import Catalog, Page
from kvwire.store.collecting import Collected, collect
from kvwire.store.copying import Copied, copy_store
from kvwire.store.entry import CatalogEntry, strict_json
from kvwire.store.folder import FolderStore
from kvwire.store.http_ranges import range_header, range_told
from kvwire.store.keyring import Keyring
from kvwire.store.keys import KeySpace, check_key, content_digest, is_catalog_key, tenant_hash, text_digest
from kvwire.store.listing import tenants
from kvwire.store.memory import MemoryStore
from kvwire.store.opening import open_store
from kvwire.store.s3 import S3Settings
from kvwire.store.tiers import TieredStore, TierSettings, open_tiers, parse_size
from kvwire.store.uses import UseCounts, UseFile
from kvwire.store.verifying import Damage, Verified, verify_store

if TYPE_CHECKING:
    from kvwire.store.s3 import S3Store

__all__ = [
    "Addressed",
    "Catalog",
    "CatalogEntry",
    "Collected",
    "Copied",
    "Damage",
    "Data",
    "FolderStore",
    "HttpAddress",
    "KeySpace",
    "Keyring",
    "Listed",
    "MemoryStore",
    "ObjectReader",
    "ObjectStat",
    "Page",
    "S3Settings",
    "S3Store",
    "Snapshots",
    "Store",
    "TierSettings",
    "TieredStore",
    "UseCounts",
    "UseFile",
    "Verified",
    "check_after",
    "check_key",
    "clamp_range",
    "collect",
    "content_digest",
    "copy_store",
    "is_catalog_key",
    "open_object",
    "open_store",
    "open_tiers",
    "parse_size",
    "range_header",
    "range_told",
    "strict_json",
    "tenant_hash",
    "tenants",
    "text_digest",
    "verify_store",
]


def __getattr__(name: str) -> object:
    """Import the S3 store, and boto3 with it, when it is asked for."""
    if name != "S3Store":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from kvwire.store.s3 import S3Store

    return S3Store
