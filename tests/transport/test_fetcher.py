"""Fetching a blob from the real server, from stores and over the emulated link."""

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvwire.errors import ArgumentError, CorruptError, NotFoundError, StorageError, TruncatedError
from kvwire.store import FolderStore, MemoryStore
from kvwire.transport import (
    EmulatedLink,
    FetchSettings,
    HttpSource,
    HttpStore,
    LinkMeter,
    ReplacedError,
    SegmentError,
    StoreSource,
    open_source,
    parse_link,
    read_object,
    serve,
)

from .conftest import HEAD, check_all, everything, fetched, outcome


async def arrivals_of(fetcher, segments):
    return [result async for result in fetcher.fetch(segments)]


@pytest.fixture
async def url(store, fake):
    async with serve(store) as url:
        yield f"{url}/{fake.KEY}"


async def test_http_end_to_end(url, blob, fetcher_for):
    async with fetcher_for(url) as fetcher:
        arrivals = (await fetched(fetcher, blob, everything)).values()
    at_hand = [a for a in arrivals if not a.attempts]
    asked = [a for a in arrivals if a.attempts]
    assert all(a.segment.end <= HEAD for a in at_hand)
    assert all(a.segment.end > HEAD for a in asked)
    assert all((a.elapsed_s, a.first_byte_s, a.wire_bytes) == (0, 0, 0) for a in at_hand)
    assert all(a.elapsed_s >= a.first_byte_s > 0 and a.attempts == 1 for a in asked)
    assert sum(a.wire_bytes for a in asked) == sum(a.segment.stored for a in asked)


@pytest.mark.parametrize("make", [MemoryStore, FolderStore], ids=["memory", "folder"])
async def test_stores_without_http(make, blob, fetcher_for, fake, tmp_path):
    store = make(tmp_path) if make is FolderStore else make()
    store.put(fake.KEY, blob)
    source = open_source(store, fake.KEY)
    async with fetcher_for(source) as fetcher:
        info = await fetcher.open()
        assert source.size == len(blob)
        store.put(fake.KEY, b"another object")  # the version that was opened stays readable
        store.delete(fake.KEY)
        good, bad = await outcome(fetcher, everything(info))
        check_all(blob, good)
        assert not bad


async def test_a_source_for_each_store(store, blob, url, session, fake):
    base = url.removesuffix("/" + fake.KEY)
    http = HttpStore(base, token="t")  # noqa: S106
    with pytest.raises(ArgumentError, match="session"):
        open_source(http, fake.KEY)
    source = open_source(http, fake.KEY, session)
    assert isinstance(source, HttpSource)
    assert await read_object(source) == blob
    assert source.size == len(blob)
    source = open_source(store, fake.KEY, session)
    assert isinstance(source, StoreSource)
    assert await read_object(source) == blob
    await source.close()


async def test_the_order_of_importance_is_kept(url, fetcher_for, fake):
    settings = replace(fake.FAST, concurrency=1)
    async with fetcher_for(url, settings=settings) as fetcher:
        info = await fetcher.open()
        wanted = [row[0] for row in reversed(info.segments)] + [row[1] for row in info.segments]
        wanted = [s for s in wanted if s.end > 65536]
        assert [a.segment for a in await arrivals_of(fetcher, wanted)] == wanted


class Counting(StoreSource):
    """Remembers what was asked for."""

    def __init__(self, store, key):
        super().__init__(store, key)
        self.asked = []

    async def read(self, start, end, sink):
        self.asked.append((start, end))
        await super().read(start, end, sink)


async def test_neighbours_share_requests(store, fetcher_for, fake):
    source = Counting(store, fake.KEY)
    async with fetcher_for(source) as fetcher:
        await arrivals_of(fetcher, everything(await fetcher.open()))
    (head, *ranges) = sorted(source.asked)
    assert head == (0, 65536)
    assert len(ranges) == 4  # 300 kB in ranges of at most 100 kB, cut between segments
    assert all(end - start <= fake.FAST.max_bytes for start, end in ranges)


async def test_a_subset_of_levels(url, blob, fetcher_for):
    async with fetcher_for(url) as fetcher:
        await fetched(fetcher, blob, lambda info: [segment for row in info.segments[5:] for segment in row[:2]])


async def test_a_gap_is_charged_to_the_segment_behind_it(url, fetcher_for, fake):
    settings = replace(fake.FAST, gap_bytes=20_000)
    async with fetcher_for(url, settings=settings) as fetcher:
        row = (await fetcher.open()).segments[8]
        first, last = await arrivals_of(fetcher, [row[0], row[2]])
    assert first.wire_bytes == 5_000
    assert last.wire_bytes == 25_000


async def test_the_same_segment_twice_and_nothing_at_all(url, blob, fetcher_for):
    async with fetcher_for(url) as fetcher:
        info = await fetcher.open()
        twice = [info.segments[0][0]] * 2 + [info.segments[9][1]] * 2
        arrivals = await arrivals_of(fetcher, twice)
        assert sorted(one.segment.offset for one in arrivals) == [one.offset for one in twice]
        assert all(one.data == blob[one.segment.offset : one.segment.end] for one in arrivals)
        assert await arrivals_of(fetcher, []) == []


async def test_empty_segments_need_no_request(fetcher_for, fake):
    store = MemoryStore()
    blob = fake.build([[0, 90_000, 0], [0, 0, 50_000]])
    store.put("k", blob)
    async with fetcher_for(StoreSource(store, "k")) as fetcher:
        await fetched(fetcher, blob, everything)


@pytest.mark.parametrize("padding", [60_000, 65_524, 70_000, 300_000])
async def test_heads_of_any_length(padding, fetcher_for, fake):
    store = MemoryStore()
    blob = fake.build([[100, 200]] * 3, padding=padding)
    store.put(fake.KEY, blob)
    async with serve(store) as base, fetcher_for(f"{base}/{fake.KEY}") as fetcher:
        assert await fetcher.open() == fake.read_header(blob)
        await fetched(fetcher, blob, everything)


@pytest.mark.parametrize("cut", [0, 5, 11, 12, 50, 5_000, 359_999])
async def test_a_blob_that_was_cut_short_is_truncated(cut, blob, fetcher_for, fake):
    store = MemoryStore()
    store.put(fake.KEY, blob[:cut])
    async with serve(store) as base:
        for source in (f"{base}/{fake.KEY}", StoreSource(store, fake.KEY)):
            async with fetcher_for(source) as fetcher:
                with pytest.raises(TruncatedError):
                    await fetcher.open()


async def test_a_head_over_the_limit_is_corrupt(fetcher_for, fake):
    store = MemoryStore()
    store.put("k", fake.build([[10]], padding=200_000))
    settings = replace(fake.FAST, max_head_bytes=100_000)
    async with fetcher_for(StoreSource(store, "k"), settings=settings) as fetcher:
        with pytest.raises(CorruptError, match="over the limit"):
            await fetcher.open()


async def test_a_head_that_leads_in_circles_is_corrupt(fetcher_for, store, fake):
    def greedy(data):
        raise TruncatedError("more", len(data) + 1)

    async with fetcher_for(StoreSource(store, fake.KEY), read_header=greedy) as fetcher:
        with pytest.raises(CorruptError, match="again and again"):
            await fetcher.open()


async def test_what_is_not_there(url, fetcher_for, store):
    for source in (url + "x", StoreSource(store, "absent")):
        async with fetcher_for(source) as fetcher:
            with pytest.raises(NotFoundError):
                await fetcher.open()


async def test_replaced_between_ranges(url, store, blob, fetcher_for, fake):
    async with fetcher_for(url) as fetcher:
        info = await fetcher.open()
        store.put(fake.KEY, fake.build([[5_000, 10_000, 15_000]] * 12, seed=2))
        with pytest.raises(ReplacedError, match="open it again"):
            await arrivals_of(fetcher, everything(info))
        store.delete(fake.KEY)
        with pytest.raises(ReplacedError):
            await arrivals_of(fetcher, everything(info)[-1:])
        store.put(fake.KEY, blob)
        good, bad = await outcome(fetcher, everything(info))
        check_all(blob, good)
        assert not bad


async def test_leaving_early_breaks_off_what_runs(store, fake, fetcher_for):
    before = asyncio.all_tasks()
    link = EmulatedLink(100_000)
    async with fetcher_for(
        StoreSource(store, fake.KEY), link=link, settings=FetchSettings(header_bytes=2000)
    ) as fetcher:
        async with aclosing(fetcher.fetch(everything(await fetcher.open()))) as arrivals:
            async for _ in arrivals:
                break
        assert asyncio.all_tasks() == before


async def test_being_cancelled_breaks_off_what_runs(store, fake, fetcher_for):
    before = asyncio.all_tasks()
    async with fetcher_for(StoreSource(store, fake.KEY), link=EmulatedLink(1_000_000)) as fetcher:
        info = await fetcher.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await arrivals_of(fetcher, everything(info))
        assert asyncio.all_tasks() == before


async def test_segments_are_given_while_the_answer_still_comes(store, fake, fetcher_for):
    settings = replace(fake.FAST, max_bytes=10_000_000, header_bytes=2000)
    async with fetcher_for(StoreSource(store, fake.KEY), link=EmulatedLink(1e6, 0.05), settings=settings) as fetcher:
        info = await fetcher.open()
        start = time.monotonic()
        seen = [(time.monotonic() - start, a) async for a in fetcher.fetch(everything(info))]
    for moment, arrival in seen:  # one answer of 0.36 s, and each segment at its place in it
        due = 0.05 + (arrival.segment.end - info.header_bytes) / 1e6
        assert moment > due - 0.03
        assert 0.03 < arrival.first_byte_s <= arrival.elapsed_s <= moment
    assert seen[-1][1].elapsed_s - seen[0][1].elapsed_s > 0.1


async def test_a_slow_taker_holds_back_new_requests(store, fake, fetcher_for):
    source = Counting(store, fake.KEY)
    settings = replace(fake.FAST, max_bytes=30_000, gap_bytes=0, concurrency=2, buffer_bytes=40_000)
    async with fetcher_for(source, settings=settings) as fetcher:
        info = await fetcher.open()
        async with aclosing(fetcher.fetch(everything(info)[9:])) as arrivals:
            await anext(arrivals)
            await asyncio.sleep(0.1)
            assert len(source.asked) <= 6  # the header, and what fits into the buffer with one more for each slot
            assert len([a async for a in arrivals]) == len(everything(info)) - 10


async def test_samples_tell_bandwidth_and_time_to_first_byte(store, fake, fetcher_for):
    samples = []
    link = EmulatedLink.of(parse_link("16mbit,30ms"))
    meter = LinkMeter(samples.append)
    async with serve(store) as base, fetcher_for(f"{base}/{fake.KEY}", link=link, meter=meter) as fetcher:
        arrivals = await arrivals_of(fetcher, everything(await fetcher.open()))
    assert sum(s.wire_bytes for s in samples) == 65536 + sum(a.wire_bytes for a in arrivals)
    bandwidth = sum(s.timed_bytes for s in samples) / sum(s.busy_s for s in samples)
    assert 2e5 < bandwidth < 2.6e6  # less than the link's where the machine is busy
    assert all(0.03 <= s.first_byte_s < 20 for s in samples if s.first_byte_s is not None)


async def test_fetchers_share_a_session_and_a_link(url, blob, fetcher_for):
    link = EmulatedLink(2e6)

    async def one():
        async with fetcher_for(url, link=link) as fetcher:
            await fetched(fetcher, blob, everything)

    start = time.monotonic()
    await asyncio.gather(one(), one(), one())
    assert 3 * len(blob) / 2e6 * 0.95 < time.monotonic() - start < 20


async def test_a_file_cut_short_while_being_read(tmp_path, blob, fetcher_for):
    store = FolderStore(tmp_path)
    store.put("k", blob)
    async with fetcher_for(StoreSource(store, "k")) as fetcher:
        info = await fetcher.open()
        os.truncate(tmp_path / "k", 100_000)
        good, bad = await outcome(fetcher, everything(info))
    assert set(good) == {s for s in everything(info) if s.end <= 100_000}
    assert all(isinstance(error, SegmentError) and isinstance(error, StorageError) for error in bad.values())


@pytest.mark.parametrize(
    "change",
    [
        *({"concurrency": 0}, {"retries": -1}, {"header_bytes": 0}, {"gap_bytes": -1}),
        *({"hedge_factor": -1}, {"hedge_share": -0.1}, {"max_retry_after_s": -1}),
    ],
)
def test_settings_that_cannot_work(change):
    with pytest.raises(ArgumentError):
        FetchSettings(**change)


@pytest.mark.parametrize("address", ["ftp://h/x", "h/x", "", "http:///x"])
async def test_addresses_that_are_no_object(session, address):
    with pytest.raises(ArgumentError):
        HttpSource(session, address)
    assert HttpSource(session, "http://user:pw@h:1/b/k?X-Amz-Signature=abc").url == "http://h:1/b/k"  # no secret
