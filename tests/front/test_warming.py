"""Work done before it is asked for."""

from __future__ import annotations

import threading
import time

import pytest

from kvwire.runtime import runner
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.threads import Warming

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
    assert "preparing for loads failed" in caplog.text
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


@pytest.mark.parametrize("is_known", [False, True], ids=["costs are measured", "costs are known"])
def test_nothing_is_prepared_while_an_engine_is_measured(small, tmp_path, monkeypatch, is_known):
    began, memory = threading.Event(), EstimatesFile(tmp_path / "estimates.json")
    corpus, kept = small.corpus(), []

    def steps(_):
        began.set()
        yield

    def measured(*_):
        kept.append(not began.wait(0.2))
        return small.costs

    if is_known:
        monkeypatch.setattr(runner, "measure_costs", lambda *_: small.costs)
        earlier = Loader(small.engine, corpus, memory=memory)
        earlier._runner.remember()
        earlier.close()
    monkeypatch.setattr(runner, "expect_all", steps)
    monkeypatch.setattr(runner, "warm_up" if is_known else "measure_costs", measured)
    with Loader(small.engine, corpus, memory=memory):
        assert kept == [True]
        assert began.wait(LONG_S)
