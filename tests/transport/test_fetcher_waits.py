"""Slow requests, deadlines, servers that ask to come back later, addresses that expire, long segments."""

import asyncio
import random
import threading
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, AuthError, DeadlineError, StorageError
from kvwire.store import FolderStore, HttpAddress, MemoryStore
from kvwire.transport import (
    BusyError,
    EmulatedLink,
    FetchedSegment,
    HttpSource,
    LinkMeter,
    ReadTimeouts,
    StalledError,
    StoreSource,
    WantedRange,
    read_object,
    split,
)
from kvwire.transport.fetch.metering import Pace

from .conftest import HEAD, behind_the_head, check_all, everything, fetched, outcome, until

# Second requests.


SETTLED = {"concurrency": 2, "max_bytes": 20_000, "gap_bytes": 0, "hedge_least_s": 0.1}
"""One segment a request, one request at a time, hedges after a tenth of a second."""
PATIENT = ReadTimeouts(60, 60)


async def test_a_request_that_hangs_gets_a_second_one(blob, unsteady):
    hung = []

    def plan(number, start, _end):
        if number >= 8 and not hung:
            hung.append(start)
            return {"silent": True}
        return None

    async with unsteady(plan, **SETTLED) as (server, fetcher):
        await fetched(fetcher, blob)
    assert (fetcher.counts.hedges, fetcher.counts.hedges_won) == (1, 1)
    assert sum(start == hung[0] for start, _ in server.requests) == 2


async def test_a_request_that_hangs_in_mid_body_is_hedged_for_the_rest(fake, unsteady):
    blob, hung = fake.build([[5_000, 10_000, 15_000]] * 40), []

    def plan(number, start, end):
        if number >= 6 and not hung and end - start > 40_000:
            hung.append((start, end))
            return {"after": 31_000, "stall": True}
        return None

    async with unsteady(plan, blob, **SETTLED | {"max_bytes": 60_000}) as (server, fetcher):
        await fetched(fetcher, blob)
    ((start, end),) = hung
    second = [r for r in server.requests if r[1] == end and r[0] > start]
    assert len(second) == 1
    assert second[0][0] <= start + 31_000
    assert fetcher.counts.hedges_won == 1


async def test_hedges_are_few(blob, unsteady):
    """Where half of the requests hang, second requests stay within their share and retries do the rest."""
    plan = lambda number, *_: {"silent": True} if number >= 8 and number % 2 else None  # noqa: E731
    async with unsteady(plan, **SETTLED, retries=6, hedge_share=0.05, patience=ReadTimeouts(0.4, 5)) as (_, fetcher):
        await fetched(fetcher, blob)
    assert fetcher.counts.stalled > 0
    assert 1 <= fetcher.counts.hedges <= 1 + 0.05 * fetcher.counts.requests


async def test_a_slow_link_is_no_reason_for_hedges(store, blob, fetcher_for, fake):
    link = EmulatedLink(400_000, 0.01)
    settings = replace(fake.FAST, concurrency=4, max_bytes=20_000, gap_bytes=0, hedge_least_s=0.01)
    async with fetcher_for(StoreSource(store, fake.KEY), link=link, settings=settings) as fetcher:
        await fetched(fetcher, blob)
    assert fetcher.counts.hedges == 0


async def test_hedging_can_be_switched_off(blob, unsteady):
    plan = lambda number, *_: {"silent": True} if number == 9 else None  # noqa: E731
    async with unsteady(plan, **SETTLED, hedge_factor=0, patience=ReadTimeouts(0.5, 5)) as (_, fetcher):
        await fetched(fetcher, blob)
    assert (fetcher.counts.hedges, fetcher.counts.stalled) == (0, 1)


async def test_breaking_off_leaves_no_task_behind(unsteady):
    before = asyncio.all_tasks()
    async with unsteady(lambda number, *_: {"silent": True} if number >= 8 else None, **SETTLED) as (_, fetcher):
        info = await fetcher.open()
        mine = asyncio.all_tasks()
        async with aclosing(fetcher.fetch(behind_the_head(info))) as arrivals:
            async for _ in arrivals:
                if fetcher.counts.requests >= 9:
                    break
            while not fetcher.counts.hedges:
                await asyncio.sleep(0.01)
        assert {
            task for task in asyncio.all_tasks() - mine if "_work" in repr(task) or "_attempt" in repr(task)
        } == set()
    assert before


def test_overdue_is_many_times_the_usual_and_a_least_time_and_hedges_have_a_budget():
    pace = Pace()
    assert [pace.may_hedge(0.1), pace.may_hedge(0.1)] == [True, False]
    for _ in range(3):
        pace.completed(0.01, 0.02, 1000)
    assert pace.expected_s(1000) is None
    assert not pace.is_overdue(100, 1000, factor=1, least_s=0)
    pace.completed(0.01, 0.02, 1000)
    assert pace.expected_s(1000) == pytest.approx(0.02)
    assert pace.expected_s(10_000) == pytest.approx(0.11)
    assert pace.is_overdue(0.081, 1000, factor=4, least_s=0.05)
    assert not pace.is_overdue(0.079, 1000, factor=4, least_s=0.05)
    assert not pace.is_overdue(0.081, 1000, factor=4, least_s=0.1)
    assert not pace.is_overdue(0.081, 5000, factor=4, least_s=0.05)
    for _ in range(26):
        pace.completed(0.01, 0.02, 1000)
    assert [pace.may_hedge(0.1) for _ in range(3)] == [True, True, False]


async def test_what_misses_the_deadline_is_given_as_late(blob, unsteady):
    plan = lambda number, *_: {"after": 12_000, "stall": True} if number else None  # noqa: E731
    async with unsteady(plan, patience=PATIENT) as (_, fetcher):
        info = await fetcher.open()
        started = time.monotonic()
        good, bad = await outcome(fetcher, behind_the_head(info), deadline=started + 0.5)
        assert 0.5 <= time.monotonic() - started < 20  # the server is silent for 30 s
    assert good  # what came in time stays good
    check_all(blob, good)
    assert bad
    assert all(isinstance(error.__cause__, DeadlineError) for error in bad.values())
    assert fetcher.counts.late == fetcher.counts.given_up == len(bad)


async def test_a_deadline_that_has_passed_still_gives_what_is_at_hand(store, fetcher_for, fake):
    async with fetcher_for(StoreSource(store, fake.KEY)) as fetcher:
        wanted = everything(await fetcher.open())
        good, bad = await outcome(fetcher, wanted, deadline=time.monotonic() - 1)
    assert {s for s in wanted if s.end <= HEAD} <= set(good)
    assert set(bad) <= {s for s in wanted if s.end > HEAD}
    assert bad


@pytest.mark.parametrize(
    ("status", "at"), [("503 Busy", 1), ("429 Too Many Requests", 1), ("429 Too Many Requests", 0)]
)
async def test_a_server_that_says_when_is_obeyed(status, at, blob, unsteady):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    fault = {"status": status, "headers": ["Retry-After: 7"]}
    async with unsteady(lambda number, *_: fault if number == at else None, sleep=sleep) as (_, fetcher):
        await fetched(fetcher, blob)
    assert max(pauses) == 7


@pytest.mark.parametrize("at", [0, 1])
async def test_a_server_that_comes_back_later_than_all_attempts_is_not_waited_for(at, unsteady):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    fault = {"status": "503 Busy", "headers": ["Retry-After: 91"]}  # three pauses of 30 s
    async with unsteady(lambda number, *_: fault if number >= at else None, sleep=sleep) as (_, fetcher):
        if at == 0:
            with pytest.raises(BusyError, match="try again in 91 s"):
                await fetcher.open()
            assert fetcher.counts.requests == 1
        else:
            _, bad = await outcome(fetcher, behind_the_head(await fetcher.open()))
            assert bad
            assert all(error.attempts == 1 for error in bad.values())
    assert not pauses


async def test_nobody_waits_beyond_the_deadline(unsteady):
    fault = {"status": "503 Busy", "headers": ["Retry-After: 20"]}
    plan = lambda number, *_: fault if number == 1 else None  # noqa: E731
    async with unsteady(plan, concurrency=1, max_bytes=20_000) as (_, fetcher):
        info = await fetcher.open()
        started = time.monotonic()
        _, bad = await outcome(fetcher, behind_the_head(info), deadline=started + 15)
        assert time.monotonic() - started < 10
    assert bad
    assert all(isinstance(error.__cause__, BusyError) for error in bad.values())


async def test_a_date_to_come_back_at(misbehaving, session, blob):
    fault = {"status": "503 Busy", "headers": ["Retry-After: Fri, 31 Dec 1999 23:59:59 GMT"]}
    async with misbehaving(blob, lambda *_: fault) as server:
        with pytest.raises(BusyError) as caught:
            await HttpSource(session, server.url).read(0, 10, lambda _: None)
    assert caught.value.retry_after_s == 0  # the date has passed


def refused_unless(good):
    return lambda _number, _start, _end: None if good() else {"status": "403 Forbidden"}


@pytest.mark.parametrize("is_renewed", [True, False])
async def test_a_refused_address_is_renewed_once(blob, misbehaving, session, is_renewed):
    asked = []
    async with misbehaving(blob, refused_unless(lambda: is_renewed and True in asked)) as server:

        def find(refused):
            asked.append(refused)
            return HttpAddress(f"{server.url}?X-Amz-Signature={len(asked)}")

        source, got = HttpSource(session, find), []
        if is_renewed:
            await source.read(0, 1000, got.append)
            await source.read(1000, 2000, got.append)
            assert b"".join(got) == blob[:2000]
        else:
            with pytest.raises(AuthError):
                await source.read(0, 10, got.append)
    assert asked == [False, True]


async def test_an_address_that_is_about_to_expire_is_not_used(blob, misbehaving, session):
    asked = []
    async with misbehaving(blob, lambda *_: None) as server:

        def find(refused):
            asked.append(refused)
            return HttpAddress(server.url, expires_at=time.time() + (10 if len(asked) < 3 else 1000))

        source = HttpSource(session, find)
        for _ in range(5):
            await source.read(0, 10, lambda _: None)
    assert asked == [False] * 3


async def test_an_address_without_renewal_stays_refused(blob, misbehaving, session):
    async with misbehaving(blob, refused_unless(lambda: False)) as server:
        with pytest.raises(AuthError):
            await HttpSource(session, server.url).read(0, 10, lambda _: None)
        assert len(server.requests) == 1


async def test_no_secret_in_the_errors_of_a_dead_server(session):
    url = "http://127.0.0.1:1/bucket/key?X-Amz-Signature=secretsecret"
    source = HttpSource(session, lambda _: HttpAddress(url, (("Authorization", "Bearer secretsecret"),)))
    with pytest.raises(StorageError) as caught:
        await source.read(0, 10, lambda _: None)
    assert "secretsecret" not in str(caught.value)
    assert "secretsecret" not in repr(HttpAddress(url, (("Authorization", "Bearer secretsecret"),)))


async def test_an_address_that_is_no_url(session):
    with pytest.raises(ArgumentError):
        await HttpSource(session, lambda _: HttpAddress("s3://bucket/key")).read(0, 10, lambda _: None)


def flips_until(last, spot):
    return lambda number, start, end: {"flip": spot} if number < last and start <= spot < end else None


@pytest.mark.parametrize(
    ("sizes", "plan", "requests", "corrupt"),
    [
        ([[300_000], [10_000]], lambda *_: None, 1 + 5, 0),  # the last part and the next segment share a request
        ([[300_000]], lambda number, *_: {"after": 100, "reset": True} if number == 3 else None, 1 + 5 + 1, 0),
        ([[300_000]], flips_until(6, 200_000), 1 + 5 + 5, 1),  # parts with a wrong sum are all asked for again
    ],
)
async def test_a_long_segment_comes_in_parts(fake, sizes, plan, requests, corrupt, unsteady):
    blob = fake.build(sizes)
    async with unsteady(plan, blob, max_bytes=70_000, header_bytes=2_000, hedge_factor=0) as (server, fetcher):
        await fetched(fetcher, blob, everything)
    assert len(server.requests) == requests
    assert all(end - start <= 70_000 for start, end in server.requests)
    assert fetcher.counts.corrupt == corrupt


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), max_size=8), st.integers(1, 100))
def test_parts_cover_their_pieces_and_are_no_longer_than_allowed(cells, limit):
    pieces = [WantedRange(offset, length, index) for index, (offset, length) in enumerate(cells)]
    parts = split(pieces, max_bytes=limit)
    for piece in pieces:
        mine = [part for part in parts if part.tag == piece.tag]
        assert [mine[0].offset, *[part.end for part in mine]] == [*[part.offset for part in mine], piece.end]
        assert len(mine) == max(1, -(-piece.length // limit))
        assert max(part.length for part in mine) <= limit
        assert max(part.length for part in mine) - min(part.length for part in mine) <= 1


class Remembering(StoreSource):
    """Gives a flipped byte until it is told not to trust that range."""

    def __init__(self, store, key, spot):
        super().__init__(store, key)
        self.spot = spot
        self.distrusted = []

    def distrust(self, start, end):
        self.distrusted.append((start, end))

    async def read(self, start, end, sink):
        def damaged(piece):
            data = bytearray(piece)
            if not self.distrusted and start <= self.spot < start + len(data):
                data[self.spot - start] ^= 1
            sink(bytes(data))

        await super().read(start, end, damaged)


async def test_a_source_is_told_which_bytes_were_wrong(store, blob, fetcher_for, fake):
    source = Remembering(store, fake.KEY, 200_000)
    async with fetcher_for(source) as fetcher:
        good = await fetched(fetcher, blob)
    ((start, end),) = source.distrusted
    assert start <= 200_000 < end
    assert any((s.offset, s.end) == (start, end) for s in good)


async def test_counts_tell_what_was_done(store, blob, fetcher_for, fake):
    meter = LinkMeter()
    async with fetcher_for(StoreSource(store, fake.KEY), meter=meter) as fetcher:
        good = await fetched(fetcher, blob, deadline=time.monotonic() + 60)
    counts = fetcher.counts
    assert counts.used_bytes == sum(s.stored for s in good)
    assert counts.wire_bytes == HEAD + counts.used_bytes
    assert counts.requests > 1
    assert (counts.retried, counts.hedges, counts.corrupt, counts.stalled, counts.late, counts.given_up) == (0,) * 6


async def test_chaos_with_hedges_gives_the_right_bytes(blob, unsteady):
    rng = random.Random(7)
    faults = [
        {"silent": True},
        {"after": 3_000, "stall": True},
        {"status": "503 Busy"},
        {"after": 9_000, "reset": True},
        {"status": "500 Oops"},
    ]
    plan = lambda number, *_: rng.choice(faults) if number and rng.random() < 0.25 else None  # noqa: E731
    async with unsteady(plan, **SETTLED, hedge_share=0.5, retries=20, patience=ReadTimeouts(0.3, 0.3)) as (_, fetcher):
        for _ in range(3):
            good = await fetched(fetcher, blob)
    assert isinstance(next(iter(good.values())), FetchedSegment)


async def test_a_head_that_misses_its_deadline(unsteady):
    async with unsteady(lambda *_: {"after": 10, "stall": True}, patience=PATIENT) as (_, fetcher):
        started = time.monotonic()
        with pytest.raises(DeadlineError, match="no header by the deadline"):
            await fetcher.open(deadline=started + 0.2)
        assert time.monotonic() - started < 20


async def test_a_wrong_head_is_not_trusted_again(store, fetcher_for, fake):
    source = Remembering(store, fake.KEY, 40)
    async with fetcher_for(source) as fetcher:
        info = await fetcher.open()
    assert info.chunks == 12
    ((start, end),) = source.distrusted
    assert start == 0
    assert end >= info.header_bytes


async def test_a_head_is_never_longer_than_allowed(store, fetcher_for, fake):
    class Asked(Remembering):
        async def read(self, start, end, sink):
            self.spans = [*getattr(self, "spans", []), (start, end)]
            await super().read(start, end, sink)

    source = Asked(store, fake.KEY, -1)
    settings = replace(fake.FAST, header_bytes=10**9, max_head_bytes=2_000)
    async with fetcher_for(source, settings=settings) as fetcher:
        await fetcher.open()
    assert source.spans == [(0, 2_000)]


@pytest.mark.parametrize("cancelled", ["whoever asked", "everything"])
async def test_an_object_opened_for_nobody_is_closed(tmp_path, cancelled):
    """Cancelled while the store opened the object; a session that ends cancels everything."""
    store, waits = FolderStore(tmp_path), threading.Event()
    store.put("k", b"x" * 1000)
    opened, asked = [], threading.Event()

    class Slow(MemoryStore):
        def snapshot(self, key):
            asked.set()
            waits.wait(5)
            opened.append(store.snapshot(key))
            return opened[-1]

    source = StoreSource(Slow(), "k")
    reading = asyncio.create_task(source.read(0, 10, lambda _: None))
    while not asked.is_set():
        await asyncio.sleep(0.001)
    everything = asyncio.all_tasks() - {asyncio.current_task()}
    for task in everything if cancelled == "everything" else {reading}:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    waits.set()
    await until(lambda: opened and opened[0]._descriptor < 0)


@pytest.mark.parametrize("hangs", ["opening", "reading"])
async def test_a_folder_that_hangs_is_given_up_as_a_server_is(fetcher_for, fake, hangs):
    waits = threading.Event()

    class Hung(MemoryStore):
        def snapshot(self, key):
            waits.wait(0 if hangs == "reading" else 60)
            reader = super().snapshot(key)
            return SimpleNamespace(size=reader.size, etag="", read=lambda *_: waits.wait(60), close=reader.close)

    store, brief = Hung(), ReadTimeouts(0.05, 0.05)
    store.put("k", b"x" * 1000)
    try:
        with pytest.raises(StalledError):
            await read_object(StoreSource(store, "k"), patience=brief)
        async with fetcher_for(
            StoreSource(store, "k"), settings=replace(fake.FAST, retries=1, patience=brief)
        ) as fetcher:
            with pytest.raises(StalledError):
                await fetcher.open()
    finally:
        waits.set()


async def test_every_part_has_its_own_attempts(fake, unsteady):
    """Each of six parts fails as often as it may: the segment arrives all the same."""
    blob, seen = fake.build([[400_000]]), {}

    def plan(number, start, _end):
        seen[start] = seen.get(start, 0) + 1
        return {"status": "500 Oops"} if number and seen[start] <= 2 else None

    async with unsteady(plan, blob, max_bytes=70_000, header_bytes=2_000, retries=2) as (_, fetcher):
        good = await fetched(fetcher, blob, everything)
    assert next(iter(good.values())).attempts == 3


async def test_parts_of_a_segment_that_was_given_up_are_not_asked_for(fake, unsteady):
    blob = fake.build([[700_000]])
    plan = lambda number, *_: {"status": "500 Oops"} if number else None  # noqa: E731
    async with unsteady(plan, blob, max_bytes=70_000, header_bytes=2_000, retries=0, concurrency=1) as (
        server,
        fetcher,
    ):
        _, bad = await outcome(fetcher, [(await fetcher.open()).segments[0][0]])
    assert len(bad) == 1
    assert len(server.requests) == 2


class HalfLocal(StoreSource):
    """Everything before ``border`` is a copy on this side of the link."""

    border = 200_000

    async def read(self, start, end, sink):
        at = start

        def take(piece):
            nonlocal at
            if at < self.border and self.on_local is not None:
                self.on_local(len(piece))
            at += len(piece)
            sink(piece)

        await super().read(start, end, take)


async def test_local_bytes_say_nothing_about_the_link(store, blob, fetcher_for, fake):
    samples = []
    settings = replace(fake.FAST, max_bytes=20_000, gap_bytes=0)
    async with fetcher_for(HalfLocal(store, fake.KEY), settings=settings, meter=LinkMeter(samples.append)) as fetcher:
        good = await fetched(fetcher, blob)
    counts = fetcher.counts
    assert sum(sample.wire_bytes for sample in samples) == counts.wire_bytes
    assert abs(counts.wire_bytes - (len(blob) - HalfLocal.border)) < 20_000
    assert counts.local_bytes + counts.wire_bytes == HEAD + sum(s.stored for s in good)
