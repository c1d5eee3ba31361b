"""The suite that a store of plain objects passes."""

from __future__ import annotations

from kvwire.store.testing.blobs import BlobConformance
from kvwire.store.testing.listing import ListingTests
from kvwire.store.testing.objects import ObjectTests
from kvwire.store.testing.races import RaceTests
from kvwire.store.testing.raw import RawTests


class StoreConformance(BlobConformance, ObjectTests, ListingTests, RawTests, RaceTests):
    """Everything that ``kvwire.store.Store`` promises, as tests; a store's author inherits them.

    A subclass, in a test module, gives a fixture ``store`` (an empty one for each test), three ways round the store,
    and flags where the store legitimately cannot do something::

        from kvwire.store.testing import StoreConformance

        class TestMyStore(StoreConformance):
            has_snapshots = False          # see kvwire.store.testing.hooks.Hooks for all flags

            @pytest.fixture
            def store(self, tmp_path):
                with closing(MyStore(tmp_path)) as store:
                    yield store

            def raw_get(self, store, key):            # bytes, or None where nothing is
                path = store.root / key
                return path.read_bytes() if path.is_file() else None

            def raw_set(self, store, key, data): ...  # without the store: open(), a plain client, a dictionary
            def raw_delete(self, store, key): ...

    The raw methods are called with plain keys and content-addressed ones, never with keys of catalog entries, which a
    store may keep in a form of its own; ``raw_set`` and ``raw_get`` also with ``foreign_names``. Raw bytes may be the
    store's own form of the object only if the three methods translate. Do not name a test of your own like one here
    unless you mean to replace it. Needs pytest and hypothesis; takes a few seconds for a store on this machine.
    """
