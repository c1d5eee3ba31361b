"""The stores of this process and this machine pass the suite."""

from contextlib import closing
from importlib.util import find_spec

import pytest

from kvwire.errors import StorageError
from kvwire.store import FolderStore, MemoryStore, open_object, testing
from kvwire.store.testing import StoreConformance

from .conftest import BehindMemory


class TestMemoryStore(BehindMemory, StoreConformance):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    def test_close_forgets(self, store):
        store.put("k", b"x")
        store.close()
        assert list(store.keys("")) == []


class WithoutSnapshots(MemoryStore):
    snapshot = None


@pytest.mark.parametrize("later", [b"new new new", b"newer and longer", b"new"])
def test_a_reader_of_a_store_without_snapshots_refuses_what_has_changed(later):
    store = WithoutSnapshots()
    store.put("k", b"old old old")
    with closing(open_object(store, "k")) as reader:
        assert reader.read(0, 3) == b"old"
        store.put("k", later)
        with pytest.raises(StorageError, match="changed while being read"):
            reader.read(0, 3)


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return FolderStore(tmp_path / "made" / "on demand")

    def raw_get(self, store, key):
        path = store.root / key
        return path.read_bytes() if path.is_file() else None

    def raw_set(self, store, key, data):
        path = store.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_delete(self, store, key):
        (store.root / key).unlink()


class TestFolderStoreOfFiles(TestFolderStore):
    """Catalog entries are files as well."""

    @pytest.fixture
    def store(self, tmp_path):
        return FolderStore(tmp_path / "made" / "on demand", catalog="files")


def test_without_pytest_the_suite_says_what_to_install(monkeypatch):
    real = find_spec
    monkeypatch.delattr(testing, "StoreMachine")  # as if it were not imported yet
    monkeypatch.setattr(testing, "find_spec", lambda name: None if name == "hypothesis" else real(name))
    with pytest.raises(ImportError, match="pip install hypothesis"):
        testing.StoreMachine  # noqa: B018 - looking it up imports it
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        testing.Nothing  # noqa: B018
