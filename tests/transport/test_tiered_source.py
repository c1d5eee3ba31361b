"""Fetching through tiers: one request for all who want the same bytes, and nobody hangs on anybody."""

import asyncio
import hashlib
import random
import threading
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.store import MemoryStore, TierSettings, open_tiers
from kvwire.store.cache import disk_tier
from kvwire.store.testing import samples
from kvwire.transport import (
    BlobFetcher,
    HttpStore,
    ReadTimeouts,
    SegmentError,
    StoreSource,
    open_source,
    read_object,
    serve,
)
from kvwire.transport.sources.base import ByteSource
from kvwire.transport.sources.open_source import TieredSource

from ..store_wrappers import CountingStore
from .conftest import everything, outcome, until

MIB = 1 << 20


class Stepwise(ByteSource):
    """Gives pieces of 100 bytes, where ``held`` as it is allowed to; remembers them. fails_at: where it breaks off."""

    def __init__(self, data, *, held=False, fails_at=None):
        self.data = data
        self.steps = asyncio.Semaphore(0) if held else None
        self.fails_at = fails_at
        self.given = []
        self.requests = 0
        self.distrusted = []
        self.asked = asyncio.Event()
        self.closed = False
        self._size = None

    url = "stepwise:"

    @property
    def size(self):
        return self._size

    async def read(self, start, end, sink):
        self.requests += 1
        self.asked.set()
        await asyncio.sleep(0)  # no request is answered at once
        self._size = len(self.data)
        end = min(len(self.data), len(self.data) if end is None else end)
        for first in range(start, end, 100):
            last = min(end, first + 100)
            if self.steps is not None:
                await self.steps.acquire()
            if self.fails_at is not None and last > self.fails_at:
                raise StorageError("the connection broke")
            self.given.append((first, last))
            sink(self.data[first:last])

    def allow(self, pieces):
        for _ in range(pieces):
            self.steps.release()

    def distrust(self, start, end):
        self.distrusted.append((start, end))

    async def close(self):
        self.closed = True

    @property
    def times(self):
        """How often each byte was given."""
        counts = [0] * len(self.data)
        for first, last in self.given:
            for position in range(first, last):
                counts[position] += 1
        return set(counts)


KEY, DATA = samples.blob(1, 1000)


@pytest.fixture
def tiers(tmp_path):
    with closing(open_tiers(MemoryStore(), memory_bytes=MIB, folder=tmp_path, folder_bytes=MIB)) as tiers:
        yield tiers


async def read(source, start=0, end=None):
    pieces = []
    await source.read(start, end, lambda data: pieces.append(bytes(data)))
    return b"".join(pieces)


async def cancelled(*tasks):
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_bytes_are_passed_on_as_they_come_and_kept(tiers):
    remote = Stepwise(DATA, held=True)
    source = TieredSource(tiers, KEY, remote)
    came = []
    reading = asyncio.create_task(source.read(0, None, lambda data: came.append(len(data))))
    for number in range(1, 11):
        remote.allow(1)
        await until(lambda number=number: sum(came) == 100 * number)
    await reading
    assert source.size == 1000
    again = Stepwise(b"")
    assert await read(TieredSource(tiers, KEY, again)) == DATA
    assert again.requests == 0
    assert tiers.counters().memory.hit_bytes == 1000


async def test_cached_bytes_are_views_of_what_the_memory_holds_and_gaps_are_all_that_is_asked_for(tiers):
    remote = Stepwise(DATA)
    source = TieredSource(tiers, KEY, remote)
    for start, end in ((100, 200), (400, 500), (50, 450), (0, None), (0, 5000)):
        assert await read(source, start, end) == DATA[start:end]
    assert remote.times == {1}
    whole, views = TieredSource(tiers, samples.blob(2, 1000)[0], Stepwise(samples.blob(2, 1000)[1])), []
    await read(whole)
    await whole.read(200, 700, views.append)
    (view,) = views
    assert isinstance(view, memoryview)
    assert len(view.obj) == 1000
    assert view == samples.blob(2, 1000)[1][200:700]


async def test_bytes_on_the_disk_are_read_from_there(tmp_path):
    with closing(open_tiers(MemoryStore(), memory_bytes=0, folder=tmp_path, folder_bytes=MIB)) as tiers:
        await read(TieredSource(tiers, KEY, Stepwise(DATA)), 100, 900)
        assert tiers.settle(30)
        remote = Stepwise(DATA)
        assert await read(TieredSource(tiers, KEY, remote), 150, 850) == DATA[150:850]
        assert remote.requests == 0
        assert tiers.counters().disk.hits == 1
        for path in tmp_path.rglob("*.ext"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert await read(TieredSource(tiers, KEY, remote), 150, 850) == DATA[150:850]
        assert remote.given[0][0] == 150
        assert tiers.counters().disk.corrupt == 1


async def test_readers_that_want_the_same_bytes_share_a_request_and_hear_what_has_come_before_all_of_it_has(tiers):
    remote = Stepwise(DATA, held=True)
    tasks = [asyncio.create_task(read(TieredSource(tiers, KEY, remote), start)) for start in (0, 0, 300, 999)]
    await until(lambda: tiers.counters().remote.waits == 3)
    came = []
    tasks.append(asyncio.create_task(TieredSource(tiers, KEY, remote).read(50, None, came.append)))
    remote.allow(3)
    await until(lambda: sum(map(len, came)) >= 250)
    assert not tasks[0].done()
    remote.allow(7)
    assert (await asyncio.gather(*tasks))[:4] == [DATA, DATA, DATA[300:], DATA[999:]]
    assert b"".join(came) == DATA[50:]
    assert remote.times == {1}
    assert remote.requests == 1


async def started(tiers, remote, count):
    """A reader who leads, and that many who wait for it."""
    leading = asyncio.create_task(read(TieredSource(tiers, KEY, remote)))
    await remote.asked.wait()
    waiting = [asyncio.create_task(read(TieredSource(tiers, KEY, remote))) for _ in range(count)]
    await until(lambda: tiers.counters().remote.waits == count)
    return leading, waiting


async def test_a_cancelled_leader_leaves_what_came_and_another_goes_on(tiers):
    remote = Stepwise(DATA, held=True)
    leading, waiting = await started(tiers, remote, 5)
    remote.allow(4)
    await until(lambda: len(remote.given) == 4)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    remote.allow(6)
    assert await asyncio.gather(*waiting) == [DATA] * 5
    assert remote.times == {1}
    assert remote.requests == 2


async def test_a_cancelled_waiter_disturbs_nobody(tiers):
    remote = Stepwise(DATA, held=True)
    leading, waiting = await started(tiers, remote, 3)
    waiting[0].cancel()
    waiting[2].cancel()
    remote.allow(10)
    results = await asyncio.gather(leading, *waiting, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) or one == DATA for one in results] == [True] * 4
    assert results[0] == results[2] == DATA
    assert remote.requests == 1


async def test_a_failed_leader_is_followed_by_one_who_waits(tiers):
    broken, sound = Stepwise(DATA, held=True, fails_at=500), Stepwise(DATA)
    leading = asyncio.create_task(read(TieredSource(tiers, KEY, broken)))
    await broken.asked.wait()
    waiting = [asyncio.create_task(read(TieredSource(tiers, KEY, sound))) for _ in range(5)]
    await until(lambda: tiers.counters().remote.waits == 5)
    broken.allow(10)
    with pytest.raises(StorageError):
        await leading
    assert await asyncio.gather(*waiting) == [DATA] * 5
    assert sorted(broken.given) == [(start, start + 100) for start in range(0, 500, 100)]
    assert sum(last - first for first, last in sound.given) == 500


async def test_a_dead_remote_is_not_asked_once_for_each_of_a_thousand_readers(tiers):
    remote = Stepwise(DATA, held=True, fails_at=0)
    tasks = [asyncio.create_task(read(TieredSource(tiers, KEY, remote))) for _ in range(1000)]
    await remote.asked.wait()
    await until(lambda: tiers.counters().remote.waits >= 999)
    remote.allow(1)
    await until(lambda: tiers.counters().remote.waits >= 999 + 998)  # all but the one who asks a second time
    remote.allow(1)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, StorageError) for one in results)
    assert remote.requests == 2


async def test_a_silent_leader_is_left_after_a_while(tmp_path):
    quick = TierSettings(stall_s=0.05)
    with closing(open_tiers(MemoryStore(), memory_bytes=MIB, settings=quick)) as tiers:
        silent = Stepwise(DATA, held=True)
        leading = asyncio.create_task(read(TieredSource(tiers, KEY, silent)))
        await silent.asked.wait()
        results = await asyncio.gather(*(read(TieredSource(tiers, KEY, Stepwise(DATA))) for _ in range(3)))
        assert results == [DATA] * 3
        assert tiers.counters().remote.takeovers == 1
        await cancelled(leading)


async def test_a_source_that_asks_twice_for_the_same_bytes_hedges(tiers):
    slow = asyncio.Semaphore(0)

    class SecondIsFast(Stepwise):
        async def read(self, start, end, sink):
            self.steps = slow if self.requests == 0 else None
            await super().read(start, end, sink)

    remote = SecondIsFast(DATA)
    source = TieredSource(tiers, KEY, remote)
    first = asyncio.create_task(read(source))
    await remote.asked.wait()
    waiting = asyncio.create_task(read(TieredSource(tiers, KEY, Stepwise(DATA, fails_at=0))))
    assert await read(source) == DATA
    await cancelled(first)  # as a fetcher does once the second request has won
    assert await waiting == DATA
    assert remote.requests == 2


async def test_requests_that_are_cancelled_are_counted_and_their_bytes_kept(tiers):
    steps = [asyncio.Semaphore(0), asyncio.Semaphore(0)]

    class Two(Stepwise):
        async def read(self, start, end, sink):
            self.steps = steps[self.requests]
            await super().read(start, end, sink)

    remote = Two(DATA)
    source = TieredSource(tiers, KEY, remote)
    first = asyncio.create_task(read(source))
    await remote.asked.wait()
    remote.asked.clear()
    second = asyncio.create_task(read(source))
    await remote.asked.wait()
    for _ in range(3):
        steps[1].release()
    await until(lambda: len(remote.given) == 3)
    await cancelled(second, first)
    counted = tiers.counters().remote
    assert (counted.requests, counted.bytes, counted.failures) == (2, 300, 0)
    assert await read(TieredSource(tiers, KEY, Stepwise(b"")), 0, 300) == DATA[:300]


async def test_bytes_that_a_tier_had_are_told_apart_from_those_that_crossed_the_link(tmp_path):
    options = {"memory_bytes": 900, "folder": tmp_path, "folder_bytes": MIB}
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        await read(TieredSource(tiers, KEY, Stepwise(DATA)), 0, 600)  # too large for the memory
        assert tiers.settle(30)
        await read(TieredSource(tiers, KEY, Stepwise(DATA)), 700, 800)
        source = TieredSource(tiers, KEY, Stepwise(DATA))
        told = []
        source.on_local = lambda size: told.append(("local", size))
        await source.read(50, 1000, lambda data: told.append(("given", len(data))))
        assert told == [
            ("local", 550),
            ("given", 550),
            ("given", 100),
            ("local", 100),
            ("given", 100),
            ("given", 100),
            ("given", 100),
        ]


async def test_a_disk_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    free = threading.Event()

    def hang(*arguments):
        assert free.wait(30)
        return real(*arguments)

    real = disk_tier.read_extent
    quick = TierSettings(stall_s=0.05, retry_s=60.0)
    options = {"memory_bytes": MIB, "folder": tmp_path, "folder_bytes": MIB, "settings": quick}
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        await read(TieredSource(tiers, KEY, Stepwise(DATA)))
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        monkeypatch.setattr(disk_tier, "read_extent", hang)
        remote = Stepwise(DATA)
        assert await asyncio.gather(*(read(TieredSource(tiers, KEY, remote)) for _ in range(8))) == [DATA] * 8
        assert remote.requests == 1
        free.set()


@pytest.mark.parametrize("more", [-500, 500])
async def test_fewer_or_more_bytes_than_asked_for_are_an_error_and_spoil_nothing(tiers, more):
    class Wrong(Stepwise):
        async def read(self, start, end, sink):
            await super().read(start, end + more, sink)

    source = TieredSource(tiers, KEY, Wrong(DATA * 2))
    with pytest.raises(StorageError):
        await read(source, 0, 1000)
    assert await read(TieredSource(tiers, KEY, Stepwise(DATA))) == DATA
    source.distrust(0, 100)
    assert tiers.cache.sizes.get(tiers.name(KEY)) is None


async def test_the_end_that_the_disk_remembers_counts_while_the_remote_is_gone(tmp_path):
    options = {"memory_bytes": 0, "folder": tmp_path, "folder_bytes": MIB}
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        tiers.put(KEY, DATA)
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        gone = Stepwise(DATA, fails_at=0)
        assert await read(TieredSource(tiers, KEY, gone), 0, 1000) == DATA
        assert gone.requests == 0
    with closing(open_tiers(MemoryStore(), **options)) as tiers:
        assert await read(TieredSource(tiers, KEY, StoreSource(MemoryStore(), KEY)), 0, 5000) == DATA


async def test_distrusted_bytes_come_from_the_remote_next_time(tiers):
    remote = Stepwise(DATA)
    source = TieredSource(tiers, KEY, remote)
    await read(source)
    source.distrust(300, 400)
    assert remote.distrusted == [(300, 400)]
    assert await read(source) == DATA
    assert remote.requests == 2
    await source.close()
    assert remote.closed


async def test_bytes_that_were_distrusted_on_their_way_are_not_kept(tiers):
    remote = Stepwise(DATA, held=True)
    source = TieredSource(tiers, KEY, remote)
    first = asyncio.create_task(read(source))
    await remote.asked.wait()
    source.distrust(0, 1000)
    remote.allow(30)
    await first
    assert tiers.counters().memory.extents == 0
    assert await read(source) == DATA
    assert remote.requests == 2


async def test_a_source_is_one_use_however_often_it_is_read():
    with closing(open_tiers(MemoryStore(), memory_bytes=MIB)) as tiers:
        for uses in (1, 2, 3):
            source = TieredSource(tiers, KEY, Stepwise(DATA))
            for start in range(0, 1000, 250):
                await read(source, start, start + 250)
            assert (tiers.name(KEY) in tiers.cache._memory._order._again) == (uses > 1)


async def test_only_content_goes_through_the_tiers(tiers):
    with pytest.raises(ArgumentError):
        TieredSource(tiers, "v1/t/c/catalog/profile.json", Stepwise(DATA))
    tiers.put(KEY, DATA)
    assert isinstance(open_source(tiers, "v1/t/c/catalog/profile.json"), StoreSource)
    assert isinstance(open_source(tiers, KEY), TieredSource)
    with pytest.raises(NotFoundError):
        await read_object(open_source(tiers, samples.blob(9)[0]))


async def test_what_is_not_uploaded_yet_is_read_from_the_pending_folder(tmp_path, session):
    store = HttpStore("http://127.0.0.1:1")  # nobody listens there
    quick = TierSettings(close_s=0.01, backoff_s=30.0)
    options = {"memory_bytes": 0, "folder": tmp_path, "folder_bytes": MIB, "write_back": True, "settings": quick}
    with closing(open_tiers(store, **options)) as tiers:
        tiers.put(KEY, DATA)
        tiers.distrust(KEY)
        assert await read_object(open_source(tiers, KEY, session)) == DATA


def content(fake, number, sizes):
    blob = fake.build(sizes, seed=number)
    return samples.SPACE.blob(hashlib.sha256(blob).hexdigest()), blob


async def load(tiers, key, session, fake, settings):
    """One load, as the executor does it: the header, then all segments; returns the number of segments."""
    async with BlobFetcher(
        open_source(tiers, key, session), read_header=fake.read_header, settings=settings
    ) as fetcher:
        info = await fetcher.open()
        segments = [segment for row in info.segments for segment in row]
        arrived = 0
        async for one in fetcher.fetch(segments):
            assert not isinstance(one, SegmentError)
            arrived += 1
        return arrived


async def test_a_thousand_loads_of_64_blobs_cross_the_link_once(fake, session, tmp_path):
    behind = CountingStore(MemoryStore())
    blobs = [content(fake, number, [[2_000, 5_000, 9_000]] * 3) for number in range(64)]
    for key, blob in blobs:
        behind.put(key, blob)
    patient = replace(fake.FAST, header_bytes=1000, concurrency=2, hedge_factor=0, patience=ReadTimeouts(60, 60))
    async with serve(behind) as url:
        options = {"memory_bytes": 16 * MIB, "folder": tmp_path, "folder_bytes": 16 * MIB}
        options["settings"] = TierSettings(stall_s=60)
        with closing(open_tiers(HttpStore(url), **options)) as tiers:
            order = [blobs[number % 64][0] for number in range(1000)]
            random.Random(1).shuffle(order)
            loads = [asyncio.create_task(load(tiers, key, session, fake, patient)) for key in order]
            assert set(await asyncio.gather(*loads)) == {9}
            counted = tiers.counters()
            assert counted.remote.bytes == sum(len(blob) for _, blob in blobs)
            assert counted.remote.failures == 0
            assert counted.memory.held_bytes <= 16 * MIB
    assert {behind.tally("read", key).bytes for key, _ in blobs} == {len(blob) for _, blob in blobs}


async def test_loads_that_are_cancelled_at_random_leave_the_others_whole(fake, session):
    behind = MemoryStore()
    key, blob = content(fake, 1, [[4_000, 9_000]] * 20)
    behind.put(key, blob)
    rng = random.Random(4)
    calm = replace(fake.FAST, max_bytes=10_000, hedge_factor=0)
    async with serve(behind) as url:
        for _ in range(5):
            with closing(open_tiers(HttpStore(url), memory_bytes=MIB)) as tiers:
                loads = [asyncio.create_task(load(tiers, key, session, fake, calm)) for _ in range(40)]
                for _ in range(20):
                    await asyncio.sleep(0.001)
                    rng.choice(loads).cancel()
                results = await asyncio.gather(*loads, return_exceptions=True)
                assert all(one == 40 or isinstance(one, asyncio.CancelledError) for one in results)
                assert 40 in results
                assert tiers.counters().remote.bytes <= len(blob) + 40 * 10_000


async def test_a_damaged_copy_is_found_by_the_fetcher_and_fetched_again(fake, session):
    behind = CountingStore(MemoryStore())
    key, blob = content(fake, 1, [[5_000]] * 4)
    behind.put(key, blob)
    async with serve(behind) as url:
        with closing(open_tiers(HttpStore(url), memory_bytes=MIB)) as tiers:
            tiers.cache.use(tiers.name(key))
            tiers.cache.keep(tiers.name(key), 0, blob[:9_000] + bytes(1_000), len(blob))
            assert await load(tiers, key, session, fake, fake.FAST) == 4
            assert await read_object(open_source(tiers, key, session)) == blob
            assert await load(tiers, key, session, fake, fake.FAST) == 4
            assert tiers.counters().remote.bytes <= 2 * len(blob)


@pytest.mark.parametrize("header_bytes", [1000, 32_000])
@pytest.mark.parametrize("is_new_process", [False, True])
@pytest.mark.parametrize("over_http", [False, True])
async def test_a_blob_that_was_cut_short_is_loaded_whole_once_it_is_healed(
    fake, session, tmp_path, header_bytes, is_new_process, over_http
):
    behind = MemoryStore()
    behind.close = lambda: None
    key, blob = content(fake, 1, [[30_000]] * 10)
    behind.put(key, blob[:200_000])
    settings = replace(fake.FAST, header_bytes=header_bytes, max_bytes=30_000, retries=1)
    options = {"memory_bytes": 0, "folder": tmp_path, "folder_bytes": MIB}

    async def loaded(tiers):
        async with BlobFetcher(
            open_source(tiers, key, session), read_header=fake.read_header, settings=settings
        ) as fetcher:
            good, _ = await outcome(fetcher, everything(fake.read_header(blob)))
            return len(good)

    async with serve(behind) as url:
        with ExitStack() as stack:

            def opened():
                return stack.enter_context(closing(open_tiers(HttpStore(url) if over_http else behind, **options)))

            tiers = opened()
            await asyncio.to_thread(
                tiers.get, key
            )  # copies that state its length, as of a reader that found nothing wrong
            if is_new_process:
                stack.close()
                tiers = opened()
                await asyncio.to_thread(tiers.get, key, 0, 100)
            behind.put(key, blob)
            assert await loaded(tiers) == 10
            assert await load(tiers, key, session, fake, settings) == 10
            assert await asyncio.to_thread(tiers.get, key, 250_000, 300_000) == blob[250_000:300_000]
            behind.put(key, blob[:200_000])
            tiers.distrust(key)
            assert await loaded(tiers) == 6
            behind.put(key, blob)
            if is_new_process:
                stack.close()
                tiers = opened()
            assert await load(tiers, key, session, fake, settings) == 10
            assert await loaded(tiers) == 10


async def test_a_blob_is_loaded_from_the_tiers_while_its_server_is_gone(fake, session, tmp_path):
    behind = MemoryStore()
    key, blob = content(fake, 1, [[5_000]] * 4)
    behind.put(key, blob)
    options = {"memory_bytes": 8_000, "folder": tmp_path, "folder_bytes": MIB}
    small = replace(fake.FAST, max_bytes=6_000, header_bytes=600)
    async with serve(behind) as url:
        with closing(open_tiers(HttpStore(url), **options)) as tiers:
            assert await load(tiers, key, session, fake, small) == 4
    with closing(open_tiers(HttpStore(url), **options)) as tiers:
        assert await load(tiers, key, session, fake, small) == 4
        assert tiers.counters().remote.requests == 0
