"""What lies behind the store: it writes what it says, and reads what is there."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, CorruptError, KvwireError, NotFoundError
from kvwire.store import Store, open_object
from kvwire.store.testing.samples import Hooks, blob


class RawTests(Hooks):
    """Tests that go round the store, with ``raw_get``, ``raw_set`` and ``raw_delete``."""

    def test_what_is_put_really_lies_there(self, store: Store) -> None:
        for size in (0, 1, 5000, self.large_bytes):
            key, data = blob(size, size)
            store.put(key, data)
            assert self.raw_get(store, key) == data
        store.put("plain/key", b"first")
        store.put("plain/key", b"second")
        assert self.raw_get(store, "plain/key") == b"second"

    def test_what_is_created_really_lies_there(self, store: Store) -> None:
        key, data = blob(1)
        store.create(key, data)
        assert self.raw_get(store, key) == data

    def test_what_is_deleted_is_really_gone(self, store: Store) -> None:
        for key in ("a/b", "a/c", "d"):
            store.put(key, b"x")
        store.delete("a/b")
        assert self.raw_get(store, "a/b") is None
        store.delete_many(["a/c"])
        assert self.raw_get(store, "a/c") is None
        assert self.raw_get(store, "d") == b"x"

    def test_what_others_wrote_is_there(self, store: Store) -> None:
        key, data = blob(2, 5000)
        for name in (key, "by/others"):
            self.raw_set(store, name, data)
            assert store.get(name) == data
            assert store.get(name, 100, 200) == data[100:200]
            assert store.stat(name).size == len(data)
            assert not store.create(name, data)
        assert [(one.key, one.size) for one in store.scan("")] == sorted([("by/others", 5000), (key, 5000)])

    def test_what_others_deleted_is_not_there(self, store: Store) -> None:
        if not self.notices_changes:
            pytest.skip("this store keeps copies")
        for key in ("a/k", blob(3)[0]):
            store.put(key, b"x" * 10)
            assert store.get(key)
            self.raw_delete(store, key)
            for action in (store.get, store.stat, lambda gone: open_object(store, gone)):
                with pytest.raises(NotFoundError):
                    action(key)
            assert list(store.keys("")) == []
            assert store.create(key, b"x" * 10) is True
            assert self.raw_get(store, key) == b"x" * 10
            store.delete(key)

    @pytest.mark.parametrize("other", [b"other size", b"SAME"], ids=["of another size", "of the same size"])
    def test_what_others_replaced_is_read_as_it_is_now(self, store: Store, other: bytes) -> None:
        if not self.notices_changes:
            pytest.skip("this store keeps copies")
        store.put("k", b"same")
        tag = store.stat("k").etag
        assert store.get("k") == b"same"
        self.raw_set(store, "k", other)
        assert store.get("k") == other
        assert store.get("k", 1, 3) == other[1:3]
        stat = store.stat("k")
        assert stat.size == len(other)
        assert stat.etag != tag

    def test_a_truncated_blob_is_told_and_healed(self, store: Store) -> None:
        """It is given as it is, refused as corrupt, or a good copy is given instead: never other bytes."""
        key, data = blob(4, 5000)
        store.put(key, data)
        self.raw_set(store, key, data[:1234])
        self._reads_one_of(store, key, data, data[:1234])
        if self.notices_changes:
            assert store.create(key, data) is True
        else:
            store.put(key, data)
        assert self.raw_get(store, key) == data
        assert store.get(key) == data

    def test_a_rotten_blob_is_never_mixed_with_a_good_one(self, store: Store) -> None:
        key, data = blob(5, 5000)
        rotten = data[:2500] + bytes([data[2500] ^ 1]) + data[2501:]
        store.put(key, data)
        assert store.get(key) == data
        self.raw_set(store, key, rotten)
        self._reads_one_of(store, key, data, rotten)
        store.put(key, data)
        assert self.raw_get(store, key) == data
        assert store.get(key) == data

    def _reads_one_of(self, store: Store, key: str, *versions: bytes) -> None:
        try:
            assert store.get(key) in versions
            assert store.get(key, 1000, 3000) in [version[1000:3000] for version in versions]
        except CorruptError:
            return

    def test_a_reader_meets_a_change_behind_its_back(self, store: Store) -> None:
        store.put("k", b"old old old")
        with closing(open_object(store, "k")) as reader:
            assert reader.read(0, 3) == b"old"
            self.raw_delete(store, "k")
            self.raw_set(store, "k", b"newer and longer")
            try:
                assert reader.read(0, 99) == b"old old old"
            except KvwireError:
                assert not self.has_snapshots
        if self.notices_changes:
            with closing(open_object(store, "k")) as reader:
                assert reader.read(0, 99) == b"newer and longer"

    def test_what_is_no_object_is_left_alone(self, store: Store) -> None:
        store.put("a/k", b"x")
        for name in self.foreign_names:
            self.raw_set(store, name, b"not ours")
        assert list(store.keys("")) == ["a/k"]
        assert [one.key for one in store.scan("a")] == ["a/k"]
        for name in self.foreign_names:
            with pytest.raises(ArgumentError):
                store.get(name)
        store.delete("a/k")
        for name in self.foreign_names:
            assert self.raw_get(store, name) == b"not ours"
