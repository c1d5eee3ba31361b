"""A tiered store is a store: with roomy tiers, with tiers that hold next to nothing, and with delayed writes."""

import time
from types import MappingProxyType

import pytest

from kvwire.store import MemoryStore, open_tiers
from kvwire.store.backends.memory import MemorySnapshot
from kvwire.store.testing import StoreConformance


class TierConformance(StoreConformance):
    notices_changes = False  # content is served from copies
    foreign_names = ()  # a memory store has none
    options = MappingProxyType({})

    @pytest.fixture
    def store(self, tmp_path):
        remote = MemoryStore()
        store = open_tiers(remote, folder=tmp_path / "cache", **self.options)
        store.behind = remote
        yield store
        store.close()

    def settled(self, store):
        store.flush(30)
        return store.behind

    def raw_get(self, store, key):
        found = self.settled(store)._objects.get(key)
        return found and found.data

    def raw_set(self, store, key, data):
        self.settled(store)._objects[key] = MemorySnapshot(key, data, time.time())

    def raw_delete(self, store, key):
        del self.settled(store)._objects[key]


class TestRoomyTiers(TierConformance):
    options = MappingProxyType({"memory_bytes": 1 << 26, "folder_bytes": 1 << 26})


class TestTinyTiers(TierConformance):
    options = MappingProxyType({"memory_bytes": 700, "folder_bytes": 300})


class TestWriteBack(TierConformance):
    has_snapshots = True
    options = MappingProxyType({"memory_bytes": 1 << 20, "folder_bytes": 1 << 26, "write_back": True})
