"""The suite that a store of plain objects passes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError
from kvwire.store.testing.blobs import BlobConformance
from kvwire.store.testing.objects import ObjectTests
from kvwire.store.testing.raw import RawTests
from kvwire.store.testing.samples import Hooks, blob

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store import Store


_CLOCK_SLACK_S = 3.0  # servers tell whole seconds, file systems a coarser clock than time.time()
_NAMES = ("a-b", "a.b/c", "a/b", "a/b-c/d", "a/c", "ab/c", "b", "A/z", "a+b", "a~", "a/b.c", "a=/x")


class ListingTests(Hooks):
    """Tests of ``scan`` and ``keys``."""

    def test_keys_are_sorted_and_cut_by_prefix(self, store: Store) -> None:
        for name in _NAMES:
            store.put(name, b"x")
        assert list(store.keys("")) == sorted(_NAMES)
        for prefix in ("a", "a/", "a/b", "a/b-", "a/b-c/d", "b", "nothing", "a/b/c", "a+", "a="):
            assert list(store.keys(prefix)) == sorted(name for name in _NAMES if name.startswith(prefix))

    def test_a_listing_goes_on_after_any_key(self, store: Store) -> None:
        for name in _NAMES:
            store.put(name, b"x")
        for prefix in ("", "a", "a/", "a/b", "zzz"):
            for after in (*_NAMES, "a/b-c", "a/b-c/d/e", "0", "zz", "a", "aa"):
                wanted = sorted(name for name in _NAMES if name.startswith(prefix) and name > after)
                assert list(store.keys(prefix, after)) == wanted, (prefix, after)

    def test_sizes_and_times_are_told(self, store: Store) -> None:
        before = time.time()
        for size in (0, 1, 5000):
            store.put(f"k{size}", bytes(size))
        after = time.time()
        for one in store.scan("k"):
            assert one.size == int(one.key[1:])
            stat = store.stat(one.key)
            assert stat.size == one.size
            for modified in (one.modified, stat.modified):
                assert modified >= 0
                if self.clock_is_ours:
                    assert before - _CLOCK_SLACK_S <= modified <= after + _CLOCK_SLACK_S

    def test_a_long_listing_is_whole_and_can_be_cut_and_continued(self, store: Store) -> None:
        keys = [f"n{number % 7}/{number:05}" for number in range(self.many_keys)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        keys.sort()
        assert list(store.keys("")) == keys
        found: list[str] = []
        while page := list(islice(store.keys("", found[-1] if found else ""), 50)):
            found += page
        assert found == keys
        store.delete_many(keys)
        assert list(store.keys("")) == []

    def test_a_listing_while_others_write(self, store: Store) -> None:
        """What stays is listed once, in order; what comes and goes may or may not be."""
        steady = {f"s/{number:02}/k" for number in range(20)}
        for key in steady:
            store.put(key, b"steady")

        def come_and_go(worker: int) -> None:
            for turn in range(self.rounds):
                store.put(f"s/{turn % 20:02}/w{worker}", b"x")
                store.put(f"s/{turn % 20:02}w{worker}/deep/er", b"x")
                store.delete(f"s/{turn % 20:02}/w{worker}")
                store.delete_many([f"s/{turn % 20:02}w{worker}/deep/er"])

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(come_and_go, worker) for worker in range(3)]
            while True:
                last = all(future.done() for future in futures)
                listed = list(store.keys("s/"))
                assert all(one < other for one, other in pairwise(listed))
                assert steady <= set(listed)
                if last:
                    break
            for future in futures:
                future.result()
        assert set(store.keys("")) == steady


def together(*calls: Callable[[], None]) -> None:
    """Run all calls at the same time, each in a thread; the first error of any is raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(run, call) for call in calls]:
            future.result()


class RaceTests(Hooks):
    """Tests of concurrency."""

    def test_writers_and_deleters_do_not_trip_each_other(self, store: Store) -> None:
        def work(key: str) -> Callable[[], None]:
            def run() -> None:
                for _ in range(self.rounds):
                    store.put(key, b"x")
                    store.delete(key)

            return run

        together(*(work(f"d/e/{number}") for number in range(4)))
        assert list(store.keys("")) == []

    def test_racing_writers_leave_one_whole_object(self, store: Store) -> None:
        contents = [bytes([number]) * 50_000 for number in range(6)]
        seen: list[bytes] = []

        def write(data: bytes) -> Callable[[], None]:
            def run() -> None:
                for _ in range(4):
                    store.put("d/k", data)

            return run

        def read() -> None:
            seen.extend(store.get("d/k") for _ in range(2 * self.rounds))

        store.put("d/k", contents[0])
        together(read, *(write(data) for data in contents))
        assert store.get("d/k") in contents
        assert self.raw_get(store, "d/k") in contents
        assert all(data in contents for data in seen)
        assert list(store.keys("")) == ["d/k"]

    def test_racing_creators_leave_the_object_and_one_of_them_wrote(self, store: Store) -> None:
        for turn in range(3):
            key, data = blob(turn, 20_000)
            wrote: list[bool] = []

            def create(key: str = key, data: bytes = data, wrote: list[bool] = wrote) -> None:
                wrote.append(store.create(key, data))

            together(*[create] * 6)
            assert any(wrote)
            assert self.raw_get(store, key) == data
            assert store.get(key) == data

    def test_a_reader_beside_a_deleter_gets_all_or_nothing(self, store: Store) -> None:
        whole = b"whole" * 5000
        done = threading.Event()

        def come_and_go() -> None:
            for _ in range(self.rounds):
                store.put("a/b/k", whole)
                store.delete("a/b/k")
            done.set()

        def read() -> None:
            while not done.is_set():
                try:
                    assert store.get("a/b/k") == whole
                except NotFoundError:
                    continue

        together(come_and_go, read, read)


class StoreConformance(BlobConformance, ObjectTests, ListingTests, RawTests, RaceTests):
    """Everything that ``kvwire.store.Store`` promises, as tests; a store's author inherits them.

    A subclass, in a test module, gives a fixture ``store`` (an empty one for each test), three ways round the store,
    and flags where the store legitimately cannot do something::

        from kvwire.store.testing import StoreConformance

        class TestMyStore(StoreConformance):
            has_snapshots = False          # see kvwire.store.testing.samples.Hooks for all flags

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
