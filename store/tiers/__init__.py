"""Tiers before a store: memory, local disk, remote."""

from kvwire.store.tiers.cache import Held, Leading, OnDisk, RangeCache, Waiting
from kvwire.store.tiers.counters import Counters, PrefetchCounters, RemoteCounters, TierCounters, UploadCounters
from kvwire.store.tiers.disk_tier import StoredFile
from kvwire.store.tiers.extents import Extent
from kvwire.store.tiers.flights import Flight
from kvwire.store.tiers.opening import open_tiers, parse_size
from kvwire.store.tiers.policy import POLICIES, Policy, make_policy
from kvwire.store.tiers.settings import TierSettings
from kvwire.store.tiers.tiered import TieredStore
from kvwire.store.tiers.write_back import WriteBackStore

__all__ = [
    "POLICIES",
    "Counters",
    "Extent",
    "Flight",
    "Held",
    "Leading",
    "OnDisk",
    "Policy",
    "PrefetchCounters",
    "RangeCache",
    "RemoteCounters",
    "StoredFile",
    "TierCounters",
    "TierSettings",
    "TieredStore",
    "UploadCounters",
    "Waiting",
    "WriteBackStore",
    "make_policy",
    "open_tiers",
    "parse_size",
]
