"""Threads that use one store at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError
from kvwire.store.testing.hooks import Hooks
from kvwire.store.testing.samples import blob

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store import Store


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
