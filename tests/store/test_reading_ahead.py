"""Reading many objects ahead: all that is asked for, in its order, and no thread is left behind."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import StorageError
from kvwire.store.listing import ahead


def fail_at(bad, item):
    if item == bad:
        raise StorageError(f"{item} is away")
    return 2 * item


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 40))
def test_items_come_in_their_order_with_what_work_on_them_gives(count, threads, bad):
    seen = []
    for item, read in ahead(range(count), lambda item: fail_at(bad, item), threads):
        try:
            seen.append((item, read()))
        except StorageError:
            seen.append((item, None))
    assert seen == [(item, None if item == bad else 2 * item) for item in range(count)]


def stores_threads():
    return [each for each in threading.enumerate() if each.name.startswith("kvwire-store")]


def look_up(bad):
    reads = ahead(range(12), lambda item: fail_at(bad, item), 4)
    return [read() for _, read in reads]


def test_who_fails_on_the_way_leaves_no_threads():
    """Its error holds the frame that reads, and with it what reads ahead, for as long as garbage is not collected."""
    before, is_collecting = len(stores_threads()), gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(look_up, 3) for _ in range(20)]
            for each in asked:
                with pytest.raises(StorageError):
                    each.result()
            until = time.monotonic() + 60
            while len(stores_threads()) > before:
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        if is_collecting:
            gc.enable()
