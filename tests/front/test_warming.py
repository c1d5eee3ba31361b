"""Work done before it is asked for."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from kvwire.codec.prediction.text import expect_all
from kvwire.runtime.warming import Warming

LONG_S = 10.0


def test_all_steps_are_done_and_the_thread_ends():
    done, over = [], threading.Event()

    def steps():
        for number in range(5):
            done.append(number)
            yield
        over.set()

    warming = Warming()
    warming.begin(steps())
    assert over.wait(LONG_S)
    assert done == [0, 1, 2, 3, 4]
    for thread in list(warming._threads._started):
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_step_that_fails_is_told_and_ends_the_thread(caplog):
    def steps():
        yield
        raise MemoryError

    warming = Warming()
    warming.begin(steps())
    for thread in wait_for_threads(warming):
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert "could not be prepared" in caplog.text
    assert "MemoryError" in caplog.text


def test_an_owner_may_be_collected_while_its_thread_holds_the_locks():
    warming = Warming()

    def collected():
        with warming._lock, warming._threads._guard:
            warming.close()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()


def wait_for_threads(warming):
    """The warming's threads, once it has any."""
    end = time.monotonic() + LONG_S
    while not (found := list(warming._threads._started)) and time.monotonic() < end:
        time.sleep(0.001)
    return found


def test_nothing_begins_while_a_load_is_under_way():
    began = threading.Event()

    def steps():
        began.set()
        yield

    warming = Warming()
    with warming.paused():
        with warming.paused():
            warming.begin(steps())
        assert not began.wait(0.05)
    assert began.wait(LONG_S)


def test_what_is_closed_goes_no_further():
    first, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def steps():
        first.set()
        go_on.wait(LONG_S)
        yield
        second.set()

    warming = Warming()
    warming.begin(steps())
    assert first.wait(LONG_S)
    warming.close()
    go_on.set()
    assert not second.wait(0.05)
    with warming.paused():
        pass
    assert not second.is_set()


def test_work_begins_again_once_the_first_is_done():
    done = threading.Event()

    def steps():
        yield
        done.set()

    warming = Warming()
    for _ in range(3):
        done.clear()
        warming.begin(steps())
        assert done.wait(LONG_S)
        for thread in wait_for_threads(warming):
            thread.join(LONG_S)
    warming.close()
    done.clear()
    warming.begin(steps())
    assert not done.wait(0.05)


class _Known:
    """Stands for a profile, and for its only group and for what that expects."""

    def __init__(self, vocabulary, width):
        self.table, self.width, self.groups = np.zeros((vocabulary, 2), np.int8), width, (self,)
        self.expectations, self.asked = (self,), []

    def rows(self, token_ids):
        self.asked += token_ids.tolist()
        return torch.zeros(len(token_ids), self.width)


def test_every_token_is_expected_once_where_there_is_room():
    known = _Known(300, 8)
    assert len(list(expect_all(known))) == 3
    assert known.asked == list(range(300))
    large = _Known(300, 1 << 20)
    assert not list(expect_all(large))
    large.table = None
    assert not list(expect_all(large))
