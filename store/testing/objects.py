"""Any key, any bytes: what a store of plain objects does."""

from __future__ import annotations

import mmap
import tempfile
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.errors import NotFoundError, StorageError
from kvwire.store import Store, open_object
from kvwire.store.testing.samples import ODD_KEYS, Hooks

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = st.from_regex(r"[a-c_+-][a-c_.+-]{0,2}(/[a-c]{1,2}){0,2}", fullmatch=True)


def without_folders_in_the_way(keys: set[str]) -> list[str]:
    """Those keys that can lie in a folder together: a file cannot lie where a folder is needed."""
    return sorted(key for key in keys if not any(other.startswith(key + "/") for other in keys))


class ObjectTests(Hooks):
    """Tests of single objects."""

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_are_keys(self, store: Store, key: str) -> None:
        store.put(key, b"1")
        store.put("b" + key[1:], b"22")
        assert store.get(key) == b"1"
        assert store.stat(key).size == 1
        assert sorted(store.keys("")) == sorted({key, "b" + key[1:]})
        assert self.raw_get(store, key) == b"1"
        store.delete(key)
        with pytest.raises(NotFoundError):
            store.get(key)

    def test_put_keeps_a_copy(self, store: Store) -> None:
        data = bytearray(b"before")
        store.put("k", data)
        data[:] = b"after!"
        assert store.get("k") == b"before"

    def test_mapped_files_and_pieces_of_buffers_are_written(self, store: Store) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(range(256)) * 64)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with closing(mapped), memoryview(mapped) as view:
                store.put("mapped", view)
                store.put("piece", view[3:70])
        assert store.get("mapped") == bytes(range(256)) * 64
        assert store.get("piece") == bytes(range(3, 70))

    @pytest.mark.parametrize(
        ("start", "end", "wanted"),
        [
            (0, None, b"0123456789"),
            (0, 0, b""),
            (3, 3, b""),
            (2, 5, b"234"),
            (7, None, b"789"),
            (7, 99, b"789"),
            (7, 1 << 62, b"789"),
            (10, 12, b""),
            (99, None, b""),
            (99, 100, b""),
        ],
    )
    def test_ranges_are_half_open_and_clamped(self, store: Store, start: int, end: int | None, wanted: bytes) -> None:
        store.put("k", b"0123456789")
        assert store.get("k", start, end) == wanted

    def test_ranges_of_nothing_are_nothing(self, store: Store) -> None:
        store.put("empty", b"")
        for start, end in ((0, None), (0, 0), (0, 5), (3, 5)):
            assert store.get("empty", start, end) == b""

    def test_what_lies_above_and_below_an_object_is_not_found(self, store: Store) -> None:
        store.put("folder/object", b"x")
        for key in ("absent", "folder", "folder/object/deeper", "folder/other"):
            for action in (store.get, store.stat, lambda missing: open_object(store, missing)):
                with pytest.raises(NotFoundError):
                    action(key)

    def test_put_replaces_and_the_tag_follows(self, store: Store) -> None:
        store.put("k", b"one")
        first = store.stat("k").etag
        store.put("k", b"two")
        assert store.get("k") == b"two"
        assert store.stat("k").etag != first
        store.put("k", b"one")
        assert store.stat("k").etag == first

    def test_a_shorter_object_leaves_nothing_of_a_longer_one(self, store: Store) -> None:
        store.put("k", bytes(100_000))
        store.put("k", b"short")
        assert store.get("k") == b"short"
        assert store.get("k", 3, 99) == b"rt"

    def test_create_writes_where_the_size_differs(self, store: Store) -> None:
        store.put("k", b"half")
        assert store.create("k", b"the whole") is True
        assert store.get("k") == b"the whole"
        assert store.create("k", b"same size") is False
        assert store.get("k") == b"the whole"
        assert store.create("empty", b"") is True
        assert store.create("empty", b"") is False

    def test_an_object_comes_with_the_tag_that_stat_tells(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            store.get_with_etag("k")
        for data in (b"0123456789", b""):
            store.put("k", data)
            for end in (None, 4, 99):
                assert store.get_with_etag("k", end) == (data[:end], store.stat("k").etag)

    def test_replace_writes_where_the_version_is_the_one_that_was_seen(self, store: Store) -> None:
        assert store.replace("k", b"first", "0" * 64) is False
        assert store.replace("k", b"first", "") is True
        seen = store.stat("k").etag
        assert store.replace("k", b"other", "") is False
        assert store.replace("k", b"second", seen) is True
        assert store.replace("k", b"third", seen) is False
        assert store.get("k") == b"second"

    def test_deleting_what_lies_above_or_below_deletes_nothing(self, store: Store) -> None:
        store.put("a/k", b"x")
        store.delete("a")
        store.delete("a/k/deeper")
        store.delete_many(["a", "a/k/deeper", "a/other"])
        assert store.get("a/k") == b"x"

    def test_a_deleted_key_leaves_room_for_a_shorter_one(self, store: Store) -> None:
        store.put("a/b/c", b"x")
        store.delete("a/b/c")
        store.put("a", b"y")
        assert list(store.keys("")) == ["a"]

    def test_an_open_reader_never_mixes_versions(self, store: Store) -> None:
        store.put("k", b"old old old")
        with closing(open_object(store, "k")) as reader:
            tag = reader.etag
            store.put("k", b"new")
            self._read_as_before(lambda: reader.read(0, 99), b"old old old")
            store.delete("k")
            self._read_as_before(lambda: reader.read(4, 7), b"old")
            assert (reader.size, reader.etag) == (11, tag)

    def _read_as_before(self, read: Callable[[], bytes], wanted: bytes) -> None:
        try:
            assert read() == wanted
        except (StorageError, NotFoundError):
            if self.has_snapshots:
                raise

    # Every example cleans up after itself, and the subclasses run it on purpose with stores of their own.
    @settings(
        max_examples=20,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        objects=st.dictionaries(KEYS, st.binary(max_size=40), max_size=5),
        start=st.integers(0, 50),
        length=st.integers(0, 50),
    )
    def test_it_behaves_like_a_dictionary(
        self, store: Store, objects: dict[str, bytes], start: int, length: int
    ) -> None:
        objects = {"h/" + key: objects[key] for key in without_folders_in_the_way(set(objects))}
        for key, data in objects.items():
            store.put(key, data)
        assert list(store.keys("h/")) == sorted(objects)
        for key, data in objects.items():
            assert store.get(key, start, start + length) == data[start : start + length]
        store.delete_many(objects)
        assert list(store.keys("")) == []
