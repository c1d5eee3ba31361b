"""What every writable store must do; a new store inherits ``StoreConformance`` and names itself."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.store import FolderStore, MemoryStore, Store, open_object

DIGEST = "ab" * 32
BAD_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../secret",
    "a/../b",
    "a//b",
    "a/",
    ".hidden",
    "a/.tmp-1-2",
    "a\\b",
    "a b",
    "a\0b",
    "a\n",
    "a%2fb",
    "ä",
    "a?b",
    "x" * 201,
    "/".join(["x" * 100] * 6),
    "C:/x",
]


class StoreConformance:
    @pytest.fixture
    def store(self):
        raise NotImplementedError

    def test_what_is_put_is_got(self, store: Store):
        for data in (b"", b"x", bytes(range(256)) * 700):
            store.put("v1/a/b.bin", data)
            assert store.get("v1/a/b.bin") == data
            assert store.stat("v1/a/b.bin").size == len(data)

    def test_put_keeps_a_copy(self, store: Store):
        data = bytearray(b"before")
        store.put("k", data)
        data[:] = b"after!"
        assert store.get("k") == b"before"

    @pytest.mark.parametrize(
        ("start", "end", "wanted"),
        [
            (0, None, b"0123456789"),
            (0, 0, b""),
            (3, 3, b""),
            (2, 5, b"234"),
            (7, None, b"789"),
            (7, 99, b"789"),
            (10, 12, b""),
            (99, None, b""),
            (99, 100, b""),
        ],
    )
    def test_ranges_are_half_open_and_clamped(self, store: Store, start, end, wanted):
        store.put("k", b"0123456789")
        assert store.get("k", start, end) == wanted

    @pytest.mark.parametrize(("start", "end"), [(-1, None), (-5, 3), (4, 3)])
    def test_backward_ranges_are_refused(self, store: Store, start, end):
        store.put("k", b"0123456789")
        with pytest.raises(ArgumentError):
            store.get("k", start, end)

    def test_what_is_not_there_is_not_found(self, store: Store):
        store.put("folder/object", b"x")
        for key in ("absent", "folder", "folder/object/deeper", "folder/other"):
            with pytest.raises(NotFoundError):
                store.get(key)
            with pytest.raises(NotFoundError):
                store.stat(key)
            with pytest.raises(NotFoundError):
                open_object(store, key)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_everywhere(self, store: Store, key):
        for call in (store.get, store.stat, store.delete, lambda k: store.put(k, b"x")):
            with pytest.raises(ArgumentError):
                call(key)

    @pytest.mark.parametrize("prefix", ["/", "..", "a/../b", ".", "a//", "a/.t", "a*"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix):
        with pytest.raises(ArgumentError):
            list(store.keys(prefix))

    def test_put_replaces_and_the_tag_follows(self, store: Store):
        store.put("k", b"one")
        first = store.stat("k").etag
        store.put("k", b"two")
        assert store.get("k") == b"two"
        assert store.stat("k").etag != first
        store.put("k", b"one")
        assert store.stat("k").etag == first

    def test_a_content_addressed_key_carries_its_tag(self, store: Store):
        store.put(f"v1/{DIGEST}.kvw", b"x")
        assert store.stat(f"v1/{DIGEST}.kvw").etag == DIGEST

    def test_delete_is_idempotent(self, store: Store):
        store.put("a/k", b"x")
        store.delete("a/k")
        store.delete("a/k")
        store.delete("a")
        store.delete("a/k/deeper")
        with pytest.raises(NotFoundError):
            store.get("a/k")

    def test_deleting_a_folder_of_keys_deletes_nothing(self, store: Store):
        store.put("a/k", b"x")
        store.delete("a")
        assert store.get("a/k") == b"x"

    def test_a_deleted_key_leaves_room_for_a_shorter_one(self, store: Store):
        store.put("a/b/c", b"x")
        store.delete("a/b/c")
        store.put("a", b"y")
        assert list(store.keys("")) == ["a"]

    def test_writers_and_deleters_do_not_trip_each_other(self, store: Store):
        def work(n):
            for _ in range(40):
                store.put(f"d/e/{n}", b"x")
                store.delete(f"d/e/{n}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert list(store.keys("")) == []

    def test_keys_are_sorted_and_cut_by_prefix(self, store: Store):
        names = ["a-b", "a.b/c", "a/b", "a/b-c/d", "a/c", "ab/c", "b", "A/z"]
        for name in names:
            store.put(name, b"x")
        assert list(store.keys("")) == sorted(names)
        for prefix in ("a", "a/", "a/b", "a/b-", "a/b-c/d", "b", "nothing", "a/b/c"):
            assert list(store.keys(prefix)) == sorted(n for n in names if n.startswith(prefix))

    def test_an_empty_store_lists_nothing(self, store: Store):
        assert list(store.keys("")) == []

    def test_a_snapshot_outlives_replacement_and_deletion(self, store: Store):
        store.put("k", b"old old old")
        with closing(open_object(store, "k")) as reader:
            tag = reader.etag
            store.put("k", b"new")
            assert reader.read(0, 99) == b"old old old"
            store.delete("k")
            assert reader.read(4, 7) == b"old"
            assert (reader.size, reader.etag) == (11, tag)

    def test_racing_writers_leave_one_whole_object(self, store: Store):
        contents = [bytes([n]) * 50_000 for n in range(8)]
        barrier = threading.Barrier(9)
        seen = []

        def write(data):
            barrier.wait()
            for _ in range(5):
                store.put("d/k", data)

        def read():
            barrier.wait()
            seen.extend(store.get("d/k") for _ in range(60))

        store.put("d/k", contents[0])
        with ThreadPoolExecutor(9) as pool:
            futures = [pool.submit(write, data) for data in contents] + [pool.submit(read)]
            for future in futures:
                future.result()
        assert store.get("d/k") in contents
        assert all(data in contents for data in seen)
        assert list(store.keys("")) == ["d/k"]

    # Every example cleans up after itself, and the subclasses run it on purpose with stores of their own.
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        objects=st.dictionaries(
            st.from_regex(r"[a-c_.-]{1,3}(/[a-c]{1,2}){0,2}", fullmatch=True).filter(lambda k: not k.startswith(".")),
            st.binary(max_size=40),
            max_size=5,
        ),
        start=st.integers(0, 50),
        length=st.integers(0, 50),
    )
    def test_it_behaves_like_a_dictionary(self, store: Store, objects, start, length):
        # A file cannot lie where a folder is needed: only key sets without such pairs can be in a folder.
        objects = {k: v for k, v in objects.items() if not any(o.startswith(k + "/") for o in objects)}
        for key, data in objects.items():
            store.put("h/" + key, data)
        assert list(store.keys("h/")) == sorted("h/" + key for key in objects)
        for key, data in objects.items():
            assert store.get("h/" + key, start, start + length) == data[start : start + length]
            store.delete("h/" + key)
        assert list(store.keys("")) == []


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    def test_close_forgets(self, store):
        store.put("k", b"x")
        store.close()
        assert list(store.keys("")) == []


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return FolderStore(tmp_path / "made" / "on demand")
