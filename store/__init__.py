"""Where blobs live: stores, keys and the catalog."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire._json import strict_json
    from kvwire.store.backends.folder.store import FolderStore
    from kvwire.store.backends.memory import MemoryStore
    from kvwire.store.backends.s3.address import S3Settings
    from kvwire.store.backends.s3.store import S3Store
    from kvwire.store.base import (
        Data,
        Listed,
        ObjectReader,
        ObjectStat,
        Snapshots,
        Store,
        clamp_range,
        open_object,
    )
    from kvwire.store.cache.settings import TierSettings
    from kvwire.store.cache.tiered import TieredStore, open_tiers, parse_size
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.catalog.last_uses import LastUses
    from kvwire.store.catalog.uses import UseCounts, UseFile
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.donors import DONORS, Donor, DonorIndex
    from kvwire.store.http_clients import Addressed, HttpAddress, range_header, range_told
    from kvwire.store.index_records import PrefixEntry
    from kvwire.store.kept_repair import TEXT_LEVEL, KeptRepair, KeptRows, base_of
    from kvwire.store.key_kinds import KeyKind, ObjectRef, content_digest, kind_of
    from kvwire.store.keys import KeySpace, check_after, check_key, check_new_name, is_catalog_key, tenant_hash
    from kvwire.store.listing import Part, read_ahead, tenants
    from kvwire.store.prefix.index import PrefixHit, PrefixIndex
    from kvwire.store.prefix.schemes import HashScheme, hash_scheme
    from kvwire.store.records import CatalogEntry, ModelRecord
    from kvwire.store.schemes import open_store
    from kvwire.store.upkeep.collect import collect
    from kvwire.store.upkeep.copy import Copied, copy_store
    from kvwire.store.upkeep.forget import Forgotten, forget
    from kvwire.store.upkeep.indexing import Indexed, index_documents
    from kvwire.store.upkeep.rebuild import Rebuilt, rebuild
    from kvwire.store.upkeep.verify import Damage, Verified, verify_store
    from kvwire.store.upkeep.walk import Collected

__all__ = [
    "DONORS",
    "TEXT_LEVEL",
    "Addressed",
    "Catalog",
    "CatalogEntry",
    "Collected",
    "Copied",
    "Damage",
    "Data",
    "Donor",
    "DonorIndex",
    "FolderStore",
    "Forgotten",
    "HashScheme",
    "HttpAddress",
    "Indexed",
    "KeptRepair",
    "KeptRows",
    "KeyKind",
    "KeySpace",
    "Keyring",
    "LastUses",
    "Listed",
    "MemoryStore",
    "ModelRecord",
    "ObjectReader",
    "ObjectRef",
    "ObjectStat",
    "Part",
    "PrefixEntry",
    "PrefixHit",
    "PrefixIndex",
    "Rebuilt",
    "S3Settings",
    "S3Store",
    "Snapshots",
    "Store",
    "TierSettings",
    "TieredStore",
    "UseCounts",
    "UseFile",
    "Verified",
    "base_of",
    "check_after",
    "check_key",
    "check_new_name",
    "clamp_range",
    "collect",
    "content_digest",
    "copy_store",
    "forget",
    "hash_scheme",
    "index_documents",
    "is_catalog_key",
    "kind_of",
    "open_object",
    "open_store",
    "open_tiers",
    "parse_size",
    "range_header",
    "range_told",
    "read_ahead",
    "rebuild",
    "strict_json",
    "tenant_hash",
    "tenants",
    "verify_store",
]

__getattr__ = lazy(__name__)
