"""Stores driven at random beside a dictionary; tiers in ``test_tiers.py``."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvwire.errors import NotFoundError
from kvwire.store import FolderStore, MemoryStore
from kvwire.store.testing import StoreMachine
from kvwire.store.testing.samples import blob, catalog_entry
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving

from ..store_wrappers import CountingStore, FaultyStore, StoreFault


def blobs_and_entries():
    """Bytes that may lie under each key: a blob's are always the same."""
    known = {}
    for key, data in [blob(seed, size) for seed, size in enumerate((0, 1, 40, 64, 64))]:
        known[key] = [data]
    for name in ("one", "two"):
        entries = [catalog_entry(name, seed, levels) for seed, levels in ((0, 1), (1, 1), (0, 3))]
        known[entries[0][0]] = [data for _, data in entries]
    return known


FEW = settings(max_examples=20, stateful_step_count=30, deadline=None)


class MemoryMachine(StoreMachine):
    def open_store(self):
        return MemoryStore()


class FolderMachine(StoreMachine):
    """With catalog keys among the others, which lie elsewhere in a folder."""

    names = (*StoreMachine.names, "v1/t/c/catalog/doc/aa/x.json", "v1/t/c/catalog/doc/ab/y.json", "v1/t/c/z.kvw")

    def open_store(self):
        self.folder = Path(tempfile.mkdtemp())
        return FolderStore(self.folder / "s")

    def reopen_store(self, store):
        store.close()
        return FolderStore(self.folder / "s")

    def close_store(self, store):
        store.close()
        shutil.rmtree(self.folder)


class PlainMachine(StoreMachine):
    """A store without snapshots."""

    has_snapshots = False

    def open_store(self):
        store = CountingStore(MemoryStore())
        del store.snapshot
        return store


class BlobMachine(StoreMachine):
    """Content-addressed objects and catalog entries alone: what a server takes."""

    known = blobs_and_entries()
    names = tuple(known)

    def contents(self, key):
        return st.sampled_from(self.known[key])


@pytest.mark.parametrize("machine", [MemoryMachine, FolderMachine, PlainMachine], ids=lambda one: one.__name__)
def test_stores_behave_like_a_dictionary(machine):
    run_state_machine_as_test(machine, settings=FEW)


def test_a_store_behind_http_behaves_like_a_dictionary():
    origin = MemoryStore()

    class HttpMachine(BlobMachine):
        has_snapshots = False

        def open_store(self):
            return HttpStore(url)

        def reopen_store(self, store):
            store.close()
            return HttpStore(url)

        def close_store(self, store):
            store.close()
            origin.delete_many(list(origin.keys("")))

    with serving(origin) as url:
        run_state_machine_as_test(HttpMachine, settings=FEW)


def forgetful(number, method, _key):
    return StoreFault.VANISH if method == "get" and number > 10 else None


class Undead(MemoryStore):
    """Deletes nothing that begins with a b."""

    def delete(self, key):
        if not key.startswith("b"):
            super().delete(key)


class Short(MemoryStore):
    """Loses the last byte of long objects."""

    def put(self, key, data):
        super().put(key, data[:30])


class Unordered(MemoryStore):
    def scan(self, prefix, after=""):
        return reversed(list(super().scan(prefix, after)))


class Late(MemoryStore):
    """Creates although something is there."""

    def create(self, key, data):
        self.put(key, data)
        return True


@pytest.mark.parametrize(
    "broken",
    [Undead, Short, Unordered, Late, lambda: FaultyStore(MemoryStore(), forgetful)],
    ids=["undead", "short", "unordered", "late", "forgetful"],
)
def test_the_machine_finds_stores_that_are_wrong(broken):
    class Machine(StoreMachine):
        def open_store(self):
            return broken()

    many = settings(
        max_examples=300,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # what it finds need not be the shortest here
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, NotFoundError)):
        run_state_machine_as_test(Machine, settings=many)
