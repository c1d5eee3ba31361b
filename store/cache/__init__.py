"""Tiers before a store: memory, local disk, remote."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.store.cache.cache import Cached, DiskHit, Fetch, Hit, RangeCache, Wait
    from kvwire.store.cache.disk_tier import StoredFile
    from kvwire.store.cache.extents import Extent, InflightRead
    from kvwire.store.cache.settings import (
        Counters,
        PrefetchCounters,
        RemoteCounters,
        TierCounters,
        TierSettings,
        UploadCounters,
    )
    from kvwire.store.cache.tiered import TieredStore, open_tiers, parse_size
    from kvwire.store.cache.write_back import WriteBackStore

__all__ = [
    "Cached",
    "Counters",
    "DiskHit",
    "Extent",
    "Fetch",
    "Hit",
    "InflightRead",
    "PrefetchCounters",
    "RangeCache",
    "RemoteCounters",
    "StoredFile",
    "TierCounters",
    "TierSettings",
    "TieredStore",
    "UploadCounters",
    "Wait",
    "WriteBackStore",
    "open_tiers",
    "parse_size",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.store.cache.cache": ("Cached", "DiskHit", "Fetch", "Hit", "RangeCache", "Wait"),
        "kvwire.store.cache.disk_tier": ("StoredFile",),
        "kvwire.store.cache.extents": ("Extent", "InflightRead"),
        "kvwire.store.cache.settings": (
            "Counters",
            "PrefetchCounters",
            "RemoteCounters",
            "TierCounters",
            "TierSettings",
            "UploadCounters",
        ),
        "kvwire.store.cache.tiered": ("TieredStore", "open_tiers", "parse_size"),
        "kvwire.store.cache.write_back": ("WriteBackStore",),
    },
)
