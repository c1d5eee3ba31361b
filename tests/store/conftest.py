"""Emulators of S3, started once for each worker that needs them, and what tests of several files need."""

import os
import subprocess
import time

import pytest

from kvwire.store import Catalog, MemoryStore
from kvwire.store.backends.memory import MemorySnapshot

from ..s3_servers import ministack, moto

CONFIG = "c" * 64
DAY = 24 * 3600.0


class AgedStore(MemoryStore):
    """Objects can be made older than they are; the names of those that are read are kept."""

    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, key, start=0, end=None):
        self.read.append(key)
        return super().get(key, start, end)

    def age(self, seconds, but=()):
        for key, one in self._objects.items():
            if key not in but:
                one.modified -= seconds


class BehindMemory:
    """Raw access of a suite to the memory store that ``behind`` gives."""

    foreign_names = ()  # it has none

    def behind(self, store):
        return store

    def raw_get(self, store, key):
        found = self.behind(store)._objects.get(key)
        return found and found.data

    def raw_set(self, store, key, data):
        self.behind(store)._objects[key] = MemorySnapshot(key, data, time.time())

    def raw_delete(self, store, key):
        del self.behind(store)._objects[key]


def until(holds):
    give_up_at = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.fixture
def store():
    return AgedStore()


@pytest.fixture
def catalog(store):
    return Catalog(store)


@pytest.fixture(scope="session")
def ministack_server(tmp_path_factory):
    with ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def disk(tmp_path):
    """A real file system of two MiB that can be made read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
