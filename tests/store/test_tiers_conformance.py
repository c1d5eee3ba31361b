"""A tiered store is a store: with roomy tiers, with tiers that hold next to nothing, and with delayed writes."""

from types import MappingProxyType

import pytest

from kvwire.store import MemoryStore, open_tiers
from kvwire.store.testing import StoreConformance

from .conftest import BehindMemory


class TierConformance(BehindMemory, StoreConformance):
    notices_changes = False  # content is served from copies
    options = MappingProxyType({})

    @pytest.fixture
    def store(self, tmp_path):
        remote = MemoryStore()
        store = open_tiers(remote, folder=tmp_path / "cache", **self.options)
        store.inner = remote
        yield store
        store.close()

    def behind(self, store):
        store.flush(30)
        return store.inner


class TestRoomyTiers(TierConformance):
    options = MappingProxyType({"memory_bytes": 1 << 26, "folder_bytes": 1 << 26})


class TestTinyTiers(TierConformance):
    options = MappingProxyType({"memory_bytes": 700, "folder_bytes": 300})


class TestWriteBack(TierConformance):
    has_snapshots = True
    options = MappingProxyType({"memory_bytes": 1 << 20, "folder_bytes": 1 << 26, "write_back": True})
