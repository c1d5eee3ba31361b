"""Tiers before a store: memory, local disk, remote."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.store.cache.cache import Cached, Fetch, RangeCache, Wait
    from kvwire.store.cache.reading import TierReading
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
    "Fetch",
    "PrefetchCounters",
    "RangeCache",
    "RemoteCounters",
    "TierCounters",
    "TierReading",
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
        "kvwire.store.cache.cache": ("Cached", "Fetch", "RangeCache", "Wait"),
        "kvwire.store.cache.reading": ("TierReading",),
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
