"""Stores around stores: they are stores themselves, and do what they were told to, no more and no less."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, KvwireError, NotFoundError, StorageError
from kvwire.store import Addressed, FolderStore, HttpAddress, MemoryStore, Snapshots, open_object
from kvwire.store.testing import StoreConformance

from ..store_wrappers import CountingStore, FaultyStore, SlowStore, StoreFault, StoreWrapper, Tally
from .conftest import BehindMemory


class TestWrappedMemory(BehindMemory, StoreConformance):
    """The suite holds for each wrapper that has nothing to do."""

    rounds = 5
    large_bytes = 1 << 20

    @pytest.fixture(
        params=[
            CountingStore,
            lambda inner: FaultyStore(inner, lambda *_: None, rates={StoreFault.ERROR: 0.0}),
            lambda inner: SlowStore(inner, bandwidth=1e12),
        ],
        ids=["counting", "faulty without faults", "slow that is fast"],
    )
    def store(self, request):
        return request.param(MemoryStore())

    def behind(self, store):
        return store.inner


class Plain(MemoryStore):
    """A store without snapshots, with addresses."""

    snapshot = None

    def http_address(self, key, *, renew=False):
        return HttpAddress(f"http://127.0.0.1:1/{key}?{renew}")


def test_only_what_the_inner_store_offers_is_offered(tmp_path):
    for inner in (MemoryStore(), FolderStore(tmp_path)):
        wrapper = StoreWrapper(inner)
        assert isinstance(wrapper, Snapshots)
        assert not isinstance(wrapper, Addressed)
        assert wrapper.url == inner.url
    wrapper = CountingStore(Plain())
    assert isinstance(wrapper, Addressed)
    assert not isinstance(wrapper, Snapshots)
    assert wrapper.http_address("k", renew=True).url.endswith("/k?True")
    assert wrapper.tally("http_address", "k") == Tally(1, 0)


def test_counts_by_method_and_key():
    store = CountingStore(MemoryStore())
    store.put("a", b"12345")
    store.create("b", bytearray(7))
    store.create("b", bytes(7))
    store.get("a", 1, 3)
    store.get("a")
    with closing(open_object(store, "a")) as reader:
        reader.read(0, 4)
    with pytest.raises(NotFoundError):
        store.get("c")
    list(store.keys("a"))
    store.delete_many(["a", "b"])
    assert store.tallies() == {
        ("put", "a"): Tally(1, 5),
        ("create", "b"): Tally(2, 14),
        ("get", "a"): Tally(2, 7),
        ("snapshot", "a"): Tally(1, 0),
        ("read", "a"): Tally(1, 4),
        ("get", "c"): Tally(1, 0),
        ("scan", "a"): Tally(1, 0),
        ("delete_many", ""): Tally(1, 0),
    }
    assert store.tally("get") == Tally(3, 7)
    assert store.tally(key="a") == Tally(6, 16)
    store.reset()
    assert store.tally() == Tally()
    store.put("k", b"x")
    store.close()
    assert list(store.inner.keys("")) == []  # closing closes the inner store


def test_counts_are_right_with_many_threads():
    store = CountingStore(MemoryStore())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put("k", bytes(n % 3)), range(900)))
    assert store.tally("put", "k") == Tally(900, 900)


class Clock:
    """Time that passes only where someone sleeps."""

    def __init__(self):
        self.now_s = 100.0
        self.pauses = []
        self.lock = threading.Lock()

    def sleep(self, seconds):
        with self.lock:
            self.pauses.append(seconds)
            self.now_s += seconds

    def __call__(self):
        return self.now_s


def test_a_slow_store_waits_for_round_trip_and_bytes():
    clock = Clock()
    store = SlowStore(MemoryStore(), latency_s=0.5, bandwidth=1000, sleep=clock.sleep, clock=clock)
    store.put("k", bytes(2000))
    assert clock.pauses == pytest.approx([2.5])
    store.get("k", 0, 500)
    assert clock.pauses == pytest.approx([2.5, 0.5, 0.5])
    store.stat("k")
    assert clock.pauses[3:] == pytest.approx([0.5])


def test_bytes_of_several_threads_share_the_link():
    stopped = lambda: 0.0  # noqa: E731
    pauses = []
    store = SlowStore(MemoryStore(), bandwidth=1000, sleep=pauses.append, clock=stopped)
    for _ in range(3):
        store.put("k", bytes(1000))
    assert pauses == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize("settings", [{"latency_s": -1}, {"bandwidth": 0}, {"latency_s": float("nan")}])
def test_links_that_carry_nothing_are_refused(settings):
    with pytest.raises(ArgumentError):
        SlowStore(MemoryStore(), **settings)


@pytest.fixture
def inner():
    store = MemoryStore()
    store.put("k", b"0123456789")
    return store


def always(fault):
    return lambda *_: fault


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(StoreFault.ERROR, StorageError), (StoreFault.VANISH, NotFoundError), (StoreFault.LOST_ANSWER, StorageError)],
)
def test_reads_fail(inner, fault, kind):
    store = FaultyStore(inner, always(fault))
    for call in (store.get, store.stat, lambda key: open_object(store, key)):
        with pytest.raises(kind):
            call("k")
    assert store.faults == {fault: 3}


def test_writes_fail_before_or_after_they_are_done(inner):
    for fault, left in ((StoreFault.ERROR, b"0123456789"), (StoreFault.FULL, b"0123456789")):
        with pytest.raises(StorageError):
            FaultyStore(inner, always(fault)).put("k", b"new")
        assert inner.get("k") == left
    with pytest.raises(StorageError):
        FaultyStore(inner, always(StoreFault.LOST_ANSWER)).put("k", b"new")
    assert inner.get("k") == b"new"
    with pytest.raises(StorageError):
        FaultyStore(inner, always(StoreFault.LOST_ANSWER)).delete("k")
    assert list(inner.keys("")) == []


def test_bytes_are_cut_or_flipped_on_the_way(inner):
    store = FaultyStore(inner, always(StoreFault.TRUNCATE))
    assert store.get("k") == b"01234"
    store = FaultyStore(inner, always(StoreFault.FLIP))
    got = store.get("k")
    assert len(got) == 10
    assert sum(one != other for one, other in zip(got, b"0123456789", strict=True)) == 1
    with closing(open_object(store, "k")) as reader:
        assert reader.read(0, 10) != b"0123456789"
    assert inner.get("k") == b"0123456789"
    store.put("k", b"abc")
    assert inner.get("k") != b"abc"
    FaultyStore(inner, always(StoreFault.TRUNCATE)).create("other", b"abcd")
    assert inner.get("other") == b"ab"


def test_a_plan_sees_numbers_methods_and_keys(inner):
    seen = []

    def plan(number, method, key):
        seen.append((number, method, key))
        return StoreFault.ERROR if number == 1 else None

    store = FaultyStore(inner, plan)
    store.get("k")
    with pytest.raises(StorageError):
        list(store.keys("p"))
    store.put("n", b"")
    assert seen == [(0, "get", "k"), (1, "scan", "p"), (2, "put", "n")]


def test_random_faults_come_as_often_as_asked_and_again_with_the_same_seed(inner):
    def run(seed):
        rates = {StoreFault.ERROR: 0.1, StoreFault.FLIP: 0.2, StoreFault.FULL: 0.3}
        store = FaultyStore(inner, rates=rates, seed=seed)
        results = []
        for _ in range(1000):
            try:
                results.append(store.get("k"))
            except KvwireError as error:
                results.append(str(error))
        return results, store.faults

    results, faults = run(1)
    assert (results, faults) == run(1)
    assert results != run(2)[0]
    assert 60 < faults[StoreFault.ERROR] < 140
    assert 140 < faults[StoreFault.FLIP] < 260
    assert faults[StoreFault.FULL] == 0  # reading needs no space


@pytest.mark.parametrize("rates", [{StoreFault.ERROR: -0.1}, {StoreFault.ERROR: 0.6, StoreFault.FLIP: 0.6}])
def test_rates_are_probabilities(rates):
    with pytest.raises(ArgumentError):
        FaultyStore(MemoryStore(), rates=rates)
