"""Listings: order, prefixes, going on after a key, sizes and times, and long ones."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from kvwire.store.testing.hooks import Hooks

if TYPE_CHECKING:
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
