"""Reading through memory and disk: every byte once, whoever asks; nothing wrong, whatever happens."""

import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvwire.errors import ArgumentError, KvwireError, NotFoundError, StorageError
from kvwire.store import Addressed, MemoryStore, TierSettings, open_object, open_tiers
from kvwire.store.testing import StoreMachine, samples
from kvwire.store.testing.conformance import together

from ..store_wrappers import CountingStore, FaultyStore, StoreFault, StoreWrapper
from .conftest import until

MIB = 1 << 20


class Ranges(StoreWrapper):
    """Remembers which bytes were read, and may hold readers up until they are let go."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read = []
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def get(self, key, start=0, end=None):
        self.entered.release()
        assert self.gate.wait(30)
        data = self.inner.get(key, start, end)
        with self.lock:
            self.read.append((key, start, start + len(data)))
        return data

    def times(self, key, size):
        """How often each byte was read."""
        counts = [0] * size
        for one, start, end in self.read:
            if one == key:
                counts[start:end] = [count + 1 for count in counts[start:end]]
        return set(counts)


def filled(blobs=1, size=1000):
    remote = MemoryStore()
    pairs = [samples.blob(number, size) for number in range(blobs)]
    for key, data in pairs:
        remote.put(key, data)
    return remote, pairs


def test_what_is_cached_is_read_while_the_remote_is_down_and_after_others_deleted_it():
    remote, [(key, data)] = filled()
    down = FaultyStore(remote, lambda *_: StoreFault.ERROR if remote.down else None)
    remote.down = False
    with closing(open_tiers(down, memory_bytes=MIB)) as tiers:
        assert tiers.get(key) == data
        remote.down = True
        assert tiers.get(key, 10, 900) == data[10:900]
        with closing(open_object(tiers, key)) as reader:
            assert (reader.size, reader.etag, reader.read(5, 7)) == (1000, samples.digest(data), data[5:7])
        remote.down = False
        remote.delete(key)
        assert tiers.get(key) == data
        with pytest.raises(NotFoundError):
            tiers.stat(key)


def test_entries_are_never_cached_and_reads_cannot_go_past_the_tiers():
    remote = CountingStore(MemoryStore())
    with closing(open_tiers(remote, memory_bytes=MIB)) as tiers:
        for value in (b"one", b"two"):
            remote.inner.put("v1/a/catalog/profile.json", value)
            assert tiers.get("v1/a/catalog/profile.json") == value
        assert not isinstance(tiers, Addressed)


def test_deleting_forgets_the_copies(tmp_path):
    remote, [(key, _), (other, _)] = filled(2)
    with closing(open_tiers(remote, memory_bytes=2000, folder=tmp_path, folder_bytes=MIB)) as tiers:
        for gone, delete in ((key, lambda: tiers.delete(key)), (other, lambda: tiers.delete_many([other]))):
            tiers.get(gone)
            delete()
            with pytest.raises(NotFoundError):
                tiers.get(gone)
        assert tiers.settle(30)
        counters = tiers.counters()
        assert (counters.memory.held_bytes, counters.disk.held_bytes) == (0, 0)


def test_what_is_put_is_kept_unless_it_is_not_what_its_key_says_and_putting_again_heals():
    remote = CountingStore(MemoryStore())
    (key, data), (wrong, right) = samples.blob(1), samples.blob(2)
    with closing(open_tiers(remote, memory_bytes=MIB)) as tiers:
        tiers.put(key, bytearray(data))
        tiers.put(wrong, b"something else")
        assert tiers.get(key) == data
        assert remote.tally("get").requests == 0
        assert tiers.get(wrong) == b"something else"
        assert remote.tally("get", wrong).requests == 1
        assert tiers.create(key, data) is False
        tiers.put(wrong, right)
        assert tiers.get(wrong) == right


def test_distrusted_bytes_are_fetched_again_and_no_others(tmp_path):
    remote, [(key, data)] = filled()
    remote = Ranges(remote)
    tiny = TierSettings(flight_bytes=100)
    with closing(open_tiers(remote, memory_bytes=4000, folder=tmp_path, folder_bytes=MIB, settings=tiny)) as tiers:
        tiers.get(key)
        remote.read.clear()
        tiers.distrust(key, 250, 350)
        assert tiers.get(key) == data
        assert sorted((start, end) for _, start, end in remote.read if start < end) == [(200, 300), (300, 400)]


def test_evicted_bytes_go_to_the_disk_and_come_back_from_there(tmp_path):
    remote, pairs = filled(8)
    remote = CountingStore(remote)
    with closing(open_tiers(remote, memory_bytes=3200, folder=tmp_path, folder_bytes=MIB)) as tiers:
        for key, data in pairs:
            assert tiers.get(key) == data
        assert tiers.settle(30)
        assert tiers.counters().memory.objects == 2
        assert tiers.counters().disk.objects == 6
        for key, data in pairs:
            assert tiers.get(key) == data
        assert remote.tally("get").bytes == 8000
        assert tiers.counters().disk.hits >= 6


def test_closing_takes_what_the_memory_holds_to_the_disk(tmp_path):
    remote, pairs = filled(8, 10_000)
    few = TierSettings(dirty_bytes=15_000)
    with closing(open_tiers(remote, memory_bytes=MIB, folder=tmp_path, folder_bytes=MIB, settings=few)) as tiers:
        for key, _ in pairs:
            tiers.get(key)
        assert tiers.counters().disk.extents == 0
    with closing(open_tiers(MemoryStore(), memory_bytes=0, folder=tmp_path, folder_bytes=MIB)) as tiers:
        for key, data in pairs:
            assert tiers.get(key, 0, 10_000) == data


def was_used_again(tiers, key):
    return tiers.name(key) in tiers.cache._memory._order._again


def test_opening_an_object_is_one_use_however_many_reads_follow():
    remote, [(key, data)] = filled()
    with closing(open_tiers(remote, memory_bytes=MIB)) as tiers:
        for opened in (1, 2):
            with closing(open_object(tiers, key)) as reader:
                for start in range(0, 1000, 100):
                    assert reader.read(start, start + 100) == data[start : start + 100]
            assert was_used_again(tiers, key) == (opened == 2)


def test_long_reads_are_cut_into_flights_and_the_end_of_an_object_is_asked_for_once():
    remote, [(key, data)] = filled(size=600)
    remote = CountingStore(remote)
    with closing(open_tiers(remote, settings=TierSettings(flight_bytes=300))) as tiers:
        for _ in range(3):
            assert tiers.get(key) == data
            assert tiers.get(key, 590, 9000) == data[590:]
        assert tiers.counters().memory.extents == 2
        assert remote.tally("get").requests == 3  # the third finds nothing, which tells the size


def test_a_read_behind_the_end_finds_nothing_and_spoils_nothing():
    remote, [(key, data)] = filled()
    with closing(open_tiers(remote)) as tiers:
        assert tiers.get(key, 5000, 6000) == b""
        assert tiers.get(key, 1000) == b""
        assert tiers.get(key) == data
        with pytest.raises(ArgumentError):
            tiers.get(key, 9, 3)


def test_an_object_larger_than_the_memory_passes_through(tmp_path):
    remote, [(key, data)] = filled(size=50_000)
    with closing(open_tiers(remote, memory_bytes=2000, settings=TierSettings(flight_bytes=1000))) as tiers:
        assert tiers.get(key) == data
        assert tiers.counters().memory.held_bytes <= 2000


class Cutting(StoreWrapper):
    """Gives half of what is asked for where ``cuts`` says so."""

    cuts = 0

    def get(self, key, start=0, end=None):
        data = self.inner.get(key, start, end)
        if self.cuts:
            self.cuts -= 1
            return data[: len(data) // 2]
        return data


def test_a_short_answer_is_an_error_and_not_the_objects_end(tmp_path):
    memory, [(key, data)] = filled()
    memory.close = lambda: None
    remote = Cutting(memory)
    options = {"memory_bytes": MIB, "folder": tmp_path, "folder_bytes": MIB}
    with closing(open_tiers(remote, **options)) as tiers:
        remote.cuts = 1
        with pytest.raises(StorageError):
            tiers.get(key)
        assert tiers.get(key) == data
        tiers.distrust(key)
        remote.cuts = 1
        with closing(open_object(tiers, key)) as reader:
            with pytest.raises(StorageError):
                reader.read(100, 900)
            assert reader.read(100, 900) == data[100:900]
        assert tiers.counters().remote.bytes == 2000 - 200
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key) == data


def test_an_object_that_was_too_short_is_read_whole_once_it_is_healed_and_distrusted(tmp_path):
    memory, [(key, data)] = filled()
    memory.put(key, data[:300])
    with closing(open_tiers(memory, memory_bytes=MIB, folder=tmp_path, folder_bytes=MIB)) as tiers:
        assert tiers.get(key) == data[:300]
        memory.put(key, data)
        tiers.distrust(key, 100, 1000)
        assert tiers.get(key) == data


def test_a_read_behind_a_length_that_is_old_asks_the_remote(tmp_path):
    memory, [(key, data)] = filled()
    memory.put(key, data[:300])
    with closing(open_tiers(memory, memory_bytes=MIB, folder=tmp_path, folder_bytes=MIB)) as tiers:
        assert tiers.get(key) == data[:300]
        assert tiers.get(key, 300, 400) == b""
        memory.put(key, data)
        assert tiers.get(key, 300, 400) == data[300:400]
        assert tiers.get(key) == data


def test_the_next_process_takes_the_length_that_a_file_says_until_it_is_distrusted(tmp_path):
    memory, [(key, data)] = filled()
    memory.close = lambda: None
    memory.put(key, data[:300])
    options = {"memory_bytes": MIB, "folder": tmp_path, "folder_bytes": MIB}
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key) == data[:300]
    memory.put(key, data)
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key) == data[:300]
        assert tiers.counters().remote.requests == 0
        tiers.distrust(key)
        assert tiers.get(key) == data


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_distrusted_length_comes_back_from_no_file(tmp_path, is_new_process):
    memory, [(key, data)] = filled()
    memory.close = lambda: None
    memory.put(key, data[:300])
    options = {"memory_bytes": 0, "folder": tmp_path, "folder_bytes": MIB, "settings": TierSettings(flight_bytes=100)}
    with ExitStack() as stack:
        tiers = stack.enter_context(closing(open_tiers(memory, **options)))
        assert tiers.stat(key).size == 300  # which each file states from here on
        assert tiers.get(key, 0, 1000) == data[:300]
        assert tiers.get(key, 250, 400) == data[250:300]
        memory.put(key, data)
        if is_new_process:
            stack.close()
            tiers = stack.enter_context(closing(open_tiers(memory, **options)))
            assert tiers.get(key, 0, 1000) == data[:300]
        tiers.distrust(key, 800, 900)
        assert tiers.get(key, 800, 900) == data[800:900]
        assert tiers.get(key, 0, 100) == data[:100]
        assert tiers.get(key, 250, 400) == data[250:400]
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key, 0, 100) == data[:100]
        assert tiers.get(key) == data


def test_files_that_disagree_on_the_length_give_way_to_the_remote(tmp_path):
    memory, [(key, data)] = filled()
    memory.close = lambda: None
    memory.put(key, data[:300])
    options = {"memory_bytes": 0, "folder": tmp_path, "folder_bytes": MIB}
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key) == data[:300]
    memory.put(key, data)
    with closing(open_tiers(memory, **options)) as tiers:
        assert tiers.get(key, 500, 600) == data[500:600]
        assert tiers.get(key, 0, 100) == data[:100]
        assert tiers.get(key) == data


def test_a_thousand_threads_read_64_blobs_once():
    remote, pairs = filled(64, 20_000)
    remote = Ranges(remote)
    wanted = [pairs[number % 64] for number in range(1000)]
    start = threading.Barrier(1000)
    with closing(open_tiers(remote, memory_bytes=4 * MIB, settings=TierSettings(flight_bytes=6000))) as tiers:

        def load(pair):
            key, data = pair
            start.wait(60)
            rng = random.Random(threading.get_ident())
            for _ in range(2):
                first = rng.randrange(20_000)
                assert tiers.get(key, first, first + 7000) == data[first : first + 7000]
            return tiers.get(key) == data

        with ThreadPoolExecutor(1000) as pool:
            assert all(pool.map(load, wanted))
        assert all(remote.times(key, 20_000) == {1} for key, _ in pairs)
        counters = tiers.counters()
        assert counters.remote.bytes == 64 * 20_000
        assert counters.remote.failures == 0


def test_memory_stays_within_the_budget_while_many_read_more_than_fits(tmp_path):
    remote, pairs = filled(64, 20_000)
    options = {"memory_bytes": 200_000, "folder": tmp_path, "folder_bytes": 400_000}
    with closing(open_tiers(remote, **options)) as tiers:
        most = []

        def load(number):
            rng = random.Random(number)
            for _ in range(20):
                key, data = rng.choice(pairs)
                assert tiers.get(key) == data
                counted = tiers.counters()
                most.append((counted.memory.held_bytes, counted.disk.held_bytes))

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(load, range(32)))
        assert max(memory for memory, _ in most) <= 200_000
        assert max(disk for _, disk in most) <= 400_000
        assert tiers.settle(30)
        files = sum(path.stat().st_size for path in tmp_path.rglob("*.ext"))
        assert files == tiers.counters().disk.held_bytes > 0


def test_what_is_not_there_is_told_to_all_at_once():
    remote = Ranges(MemoryStore())
    remote.gate.clear()
    key, _ = samples.blob(1)
    with closing(open_tiers(remote)) as tiers, ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(tiers.get, key) for _ in range(10)]
        until(lambda: tiers.counters().remote.waits == 9)
        remote.gate.set()
        assert all(isinstance(one.exception(30), NotFoundError) for one in asked)
        assert tiers.counters().remote.requests == 1


def test_a_failure_reaches_only_those_whose_bytes_it_concerns():
    memory, [(key, data)] = filled()

    class HalfDead(StoreWrapper):
        def get(self, key, start=0, end=None):
            if start < 500:
                raise StorageError("the first half cannot be read")
            return self.inner.get(key, start, end)

    with closing(open_tiers(HalfDead(memory))) as tiers, ThreadPoolExecutor(10) as pool:
        asked = {start: pool.submit(tiers.get, key, start, start + 100) for start in range(0, 1000, 100)}
        for start, one in asked.items():
            failed = one.exception(30)
            assert isinstance(failed, StorageError) if start < 500 else one.result() == data[start : start + 100]


def test_a_reader_stops_waiting_for_a_leader_from_which_nothing_comes():
    memory, [(key, data)] = filled()
    remote = Ranges(memory)
    with closing(open_tiers(remote, settings=TierSettings(answer_s=0.05))) as tiers, ThreadPoolExecutor(2) as pool:
        remote.gate.clear()
        asked = []
        for _ in range(2):  # the second asks for itself
            asked.append(pool.submit(tiers.get, key))
            assert remote.entered.acquire(timeout=30)
        assert tiers.counters().remote.takeovers == 1
        remote.gate.set()
        assert asked[1].result(30) == data
        asked[0].result(30)
        assert tiers.get(key) == data


def test_what_is_prefetched_is_there_when_it_is_read_and_hints_for_what_is_not_there_harm_nobody():
    memory, [(key, data)] = filled(size=10_000)
    remote = CountingStore(memory)
    with closing(open_tiers(remote, settings=TierSettings(prefetch_bytes=1000))) as tiers:
        tiers.prefetch(key, 500)
        tiers.prefetch("v1/a/catalog/profile.json")
        assert tiers.settle(30)
        requests = remote.tally("get").requests
        assert requests in (10, 11)
        assert tiers.get(key, 500, 10_000) == data[500:]
        assert remote.tally("get").requests == requests
        tiers.prefetch(samples.blob(1)[0])
        assert tiers.settle(30)
        assert tiers.counters().remote.failures == 1


def test_a_hint_for_bytes_on_their_way_is_followed_once_they_are_there():
    memory, [(key, data)] = filled()
    remote = Ranges(memory)
    remote.gate.clear()
    with closing(open_tiers(remote, settings=TierSettings(prefetch_threads=2))) as tiers:
        first = tiers.prefetch(key)
        assert remote.entered.acquire(timeout=30)
        second = tiers.prefetch(key)
        until(lambda: tiers.counters().remote.waits == 1)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        remote.gate.set()
        assert first.result(30)
        assert second.result(30)
        assert remote.times(key, len(data)) == {1}


def test_every_hint_is_answered_whatever_happens():
    class Broken(StoreWrapper):
        def get(self, *_):
            raise RuntimeError

    memory, [(key, _)] = filled()
    tiers = open_tiers(Broken(memory))
    assert tiers.prefetch(key).result(30) is False
    tiers.close()
    assert tiers.prefetch(key).cancelled()


def test_hints_wait_while_someone_reads_and_too_many_are_dropped():
    memory, pairs = filled(4)
    remote = Ranges(memory)
    quick = TierSettings(prefetch_hints=1, prefetch_threads=1)
    with closing(open_tiers(remote, settings=quick)) as tiers:
        remote.gate.clear()
        foreground = threading.Thread(target=lambda: tiers.get(pairs[0][0]))
        foreground.start()
        assert remote.entered.acquire(timeout=30)
        for key, _ in pairs[1:]:
            tiers.prefetch(key)
        counted = tiers.counters()
        assert counted.prefetch.dropped >= 1
        assert counted.remote.requests == 1
        remote.gate.set()
        foreground.join(30)
        assert tiers.settle(30)
        assert tiers.counters().remote.requests >= 2


@pytest.mark.parametrize(
    "wrong", [{"memory_bytes": -1}, {"folder_bytes": 5}, {"write_back": True}, {"folder": "x", "write_back": True}]
)
def test_tiers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ArgumentError):
        open_tiers(MemoryStore(), **wrong)


BLOBS = dict(samples.blob(number, size) for number, size in enumerate([1, 40, 300, 1000, 2500]))


class TierMachine(StoreMachine):
    """Tiny tiers that evict all the time, in front of a memory store that outlives them."""

    has_snapshots = False  # of content: what is not cached goes with the remote's copy
    names = (*BLOBS, "v1/t/c/catalog/a.json", "plain")
    variant = 0

    def open_store(self):
        self.folder = tempfile.TemporaryDirectory()
        self.remote = MemoryStore()
        self.remote.close = lambda: None
        return self.tiers(self.variant)

    def tiers(self, variant):
        options = [
            {"memory_bytes": 2000, "folder_bytes": 1500},
            {"memory_bytes": 700, "folder_bytes": 100_000},
            {"memory_bytes": 0, "folder_bytes": 3000},
            {"memory_bytes": 5000, "folder_bytes": 100_000, "write_back": True},
        ][variant]
        quick = TierSettings(flight_bytes=97, prefetch_bytes=31)
        return open_tiers(self.remote, folder=Path(self.folder.name), settings=quick, **options)

    def close_store(self, store):
        store.close()
        self.folder.cleanup()

    def contents(self, key):
        return st.just(BLOBS[key]) if key in BLOBS else super().contents(key)

    def reopen_store(self, store):
        store.flush(30)
        store.close()
        self.variant += 1
        return self.tiers(self.variant % 4)

    @rule(key=st.sampled_from(list(BLOBS)), start=st.integers(0, 2600), length=st.integers(0, 1200))
    def get_content(self, key, start, length):
        if key in self.model:
            assert self.store.get(key, start, start + length) == BLOBS[key][start : start + length]

    @rule(key=st.sampled_from(list(BLOBS)), start=st.integers(0, 2600), length=st.integers(0, 1200))
    def prefetch(self, key, start, length):
        if key in self.model:
            self.store.prefetch(key, start, start + length)

    @rule(key=st.sampled_from(list(BLOBS)), start=st.integers(0, 2600), length=st.integers(1, 1200))
    def distrust(self, key, start, length):
        self.store.distrust(key, start, start + length)

    @rule()
    def settle(self):
        assert self.store.settle(30)
        held = self.store.counters().disk.held_bytes
        assert held == sum(path.stat().st_size for path in Path(self.folder.name).rglob("*.ext"))


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class WriteBackMachine(TierMachine):
    variant = 3


TestWriteBackMachine = WriteBackMachine.TestCase
TestWriteBackMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_random_reads_beside_deletions_and_distrust_give_right_bytes_or_none(tmp_path):
    memory, pairs = filled(6, 3000)
    faulty = FaultyStore(memory, rates={StoreFault.ERROR: 0.05}, seed=3)
    quick = TierSettings(flight_bytes=400)
    with closing(open_tiers(faulty, memory_bytes=6000, folder=tmp_path, folder_bytes=9000, settings=quick)) as tiers:

        def work(number):
            rng = random.Random(number)
            for _ in range(60):
                key, data = rng.choice(pairs)
                start = rng.randrange(3000)
                end = start + rng.randrange(1, 2000)
                with suppress(KvwireError):
                    match rng.randrange(12):
                        case 0:
                            tiers.delete(key)
                        case 1:
                            tiers.put(key, data)
                        case 2:
                            tiers.distrust(key, start, end)
                        case 3:
                            tiers.prefetch(key, start, end)
                        case _:
                            assert tiers.get(key, start, end) == data[start:end]

        together(*[lambda number=number: work(number) for number in range(12)])
