"""Servers that die in mid-answer, lie about ranges, flip bits, stall or send 500s."""

import gc
import random
import weakref
from contextlib import closing
from dataclasses import replace

import pytest

from kvwire.errors import AuthError, CorruptError, NotFoundError, StorageError
from kvwire.store import MemoryStore
from kvwire.transport import (
    HttpSource,
    ReadTimeouts,
    ReplacedError,
    SegmentCorruptError,
    SegmentStorageError,
    StalledError,
    StoreSource,
    read_object,
)

from .conftest import HEAD, KEY, behind_the_head, everything, fetched, outcome


def first_time(fault, at=1):
    """Request ``at`` goes wrong (0 is the header), all others are answered well."""
    return lambda number, _start, _end: fault if number == at else None


FAULTS = {
    "500": {"status": "500 Oops"},
    "503": {"status": "503 Busy"},
    "302": {"status": "302 Found", "headers": ["Location: http://127.0.0.1:1/"]},
    "other range": {"shift": 7},
    "compressed": {"headers": ["Content-Encoding: gzip"]},
    "no answer": {"silent": True},
    "closes before the body": {"after": 0},
    "closes in mid-body": {"after": 33_333},
    "resets in mid-body": {"after": 33_333, "reset": True},
    "stalls in mid-body": {"after": 33_333, "stall": True},
    "short body that looks whole": {"short": 5_000},
    "garbage": {"status": "what"},
}


def patience_for(fault):
    """Short waits where the fault is to make one wait, long ones elsewhere: a busy machine is no fault."""
    return {"patience": ReadTimeouts(0.5, 0.3)} if {"silent", "stall"} & set(fault) else {}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_one_fault_costs_time_and_nothing_else(fault, blob, unsteady):
    async with unsteady(first_time(fault), **patience_for(fault)) as (server, fetcher):
        good = await fetched(fetcher, blob)
        assert max(arrival.attempts for arrival in good.values()) == 2
        assert set(server.conditions) == {None, '"one"'}
        assert server.conditions.count(None) == 1


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_one_fault_while_opening(fault, blob, fake, unsteady):
    async with unsteady(first_time(fault, at=0), **patience_for(fault)) as (_, fetcher):
        assert await fetcher.open() == fake.read_header(blob)


async def test_a_flipped_bit_costs_that_segment_alone(blob, unsteady):
    flipped = []

    def plan(number, start, end):
        if start <= 200_000 < end and not flipped:
            flipped.append(number)
            return {"flip": 200_000}
        return None

    async with unsteady(plan) as (server, fetcher):
        good = await fetched(fetcher, blob)
        assert not fetcher.faults
    hit = [a for s, a in good.items() if s.offset <= 200_000 < s.end]
    assert [a.attempts for a in hit] == [2]
    assert hit[0].wire_bytes == 2 * hit[0].segment.stored
    assert all(a.attempts == 1 for a in good.values() if a is not hit[0])
    assert server.requests[-1] == (hit[0].segment.offset, hit[0].segment.end)


async def test_a_flipped_bit_in_the_head_is_read_again(blob, fake, unsteady):
    async with unsteady(first_time({"flip": 40}, at=0)) as (server, fetcher):
        assert await fetcher.open() == fake.read_header(blob)
    async with unsteady(lambda *_: {"flip": 40}) as (server, fetcher):
        with pytest.raises(CorruptError):
            await fetcher.open()
        assert len(server.requests) == 4


async def test_payload_that_came_along_damaged_is_fetched(unsteady):
    async with unsteady(first_time({"flip": 30_000}, at=0)) as (server, fetcher):
        info = await fetcher.open()
        hit = next(s for s in everything(info) if s.offset <= 30_000 < s.end)
        good, bad = await outcome(fetcher, [s for s in everything(info) if s.end <= HEAD])
    assert not bad
    assert good[hit].attempts == 1
    assert server.requests[1:] == [(hit.offset, hit.end)]


async def test_rot_on_the_servers_side_is_corrupt_and_bounded(blob, unsteady):
    rotten = bytearray(blob)
    rotten[200_000] ^= 1
    async with unsteady(data=bytes(rotten)) as (server, fetcher):
        info = await fetcher.open()
        good, bad = await outcome(fetcher, behind_the_head(info))
    ((segment, error),) = bad.items()
    assert fetcher.faults == {segment.offset: f"the CRC-32 of bytes {segment.offset} to {segment.end} is wrong"}
    assert segment.offset <= 200_000 < segment.end
    assert isinstance(error, SegmentCorruptError)
    assert isinstance(error, CorruptError)
    assert error.attempts == 4
    assert f"chunk {segment.chunk}, level {segment.level}" in str(error)
    assert sum(start <= 200_000 < end for start, end in server.requests) == 4
    assert len(good) == len(behind_the_head(info)) - 1


async def test_a_fetcher_that_met_damage_goes_at_once(blob, fetcher_for):
    """What it met keeps neither it nor a segment's bytes until Python collects garbage."""
    rotten = bytearray(blob)
    rotten[200_000] ^= 1
    with closing(MemoryStore()) as store:
        store.put(KEY, bytes(rotten))
        gc.disable()
        try:
            async with fetcher_for(StoreSource(store, KEY)) as fetcher:
                _, bad = await outcome(fetcher, behind_the_head(await fetcher.open()))
            assert len(bad) == 1
            known = weakref.ref(fetcher)
            del fetcher, bad
            assert known() is None
        finally:
            gc.enable()


async def test_a_spot_that_always_fails_takes_no_neighbour_along(unsteady):
    def plan(_number, start, end):
        return {"status": "500 Bad sector"} if start <= 200_000 < end else None

    async with unsteady(plan) as (_, fetcher):
        _, bad = await outcome(fetcher, behind_the_head(await fetcher.open()))
        assert len(bad) == 1
        assert isinstance(next(iter(bad.values())), SegmentStorageError)
        assert isinstance(next(iter(bad.values())), StorageError)


async def test_an_answer_that_breaks_off_is_held_against_one_segment(unsteady):
    plan = first_time({"after": 33_333, "reset": True})
    async with unsteady(plan, retries=0, concurrency=1) as (server, fetcher):
        good, bad = await outcome(fetcher, behind_the_head(await fetcher.open()))
    ((segment, _),) = bad.items()
    assert segment.offset <= server.requests[1][0] + 33_333 < segment.end
    assert all(arrival.attempts == 1 for arrival in good.values())


@pytest.mark.parametrize("after", [1, 4_000, 12_000])
async def test_a_server_that_never_ends_an_answer(after, fake, unsteady):
    """What is shorter than the server's breath arrives; the rest fails, after a bounded number of requests."""
    plan = lambda number, *_: {"after": after, "reset": bool(number % 2)} if number else None  # noqa: E731
    async with unsteady(plan) as (server, fetcher):
        wanted = behind_the_head(await fetcher.open())
        good, bad = await outcome(fetcher, wanted)
        assert {s.stored for s in bad} == {s for s in (5_000, 10_000, 15_000) if s > after}
        assert all(s.stored <= after for s in good)
        assert all(error.attempts == 4 for error in bad.values())
        assert len(server.requests) <= 2 + len(wanted) * (fake.FAST.retries + 1)


async def test_a_dead_server_is_given_up_with_pauses_between(blob, misbehaving, fetcher_for, fake):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    settings = replace(fake.FAST, backoff_s=0.1, max_backoff_s=0.3)
    async with misbehaving(blob, lambda *_: None) as server:
        fetcher = fetcher_for(server.url, settings=settings, sleep=sleep, rng=random.Random(5))
        info = await fetcher.open()
    async with fetcher:  # the server is gone
        good, bad = await outcome(fetcher, behind_the_head(info))
    assert not good
    assert all(isinstance(error, SegmentStorageError) and error.attempts == 4 for error in bad.values())
    assert min(pauses) >= 0.05
    assert max(pauses) <= 0.3
    assert len(set(pauses)) > 3  # jittered


async def test_a_server_that_always_stalls_is_given_up(unsteady):
    plan = lambda number, *_: {"after": 100, "stall": True} if number else None  # noqa: E731
    async with unsteady(plan, retries=1, patience=ReadTimeouts(0.1, 0.1)) as (server, fetcher):
        good, bad = await outcome(fetcher, behind_the_head(await fetcher.open()))
        assert not good
        assert all(isinstance(error.__cause__, StalledError) for error in bad.values())
        assert len(server.requests) <= 12


async def test_a_whole_object_is_not_waited_for_without_a_limit(misbehaving, session, blob):
    async with misbehaving(blob, lambda *_: {"silent": True}) as server:
        with pytest.raises(StalledError, match=r"nothing came for 0\.1 s"):
            await read_object(HttpSource(session, server.url), patience=ReadTimeouts(0.1, 0.1))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": "412 Precondition Failed"}, ReplacedError),
        ({"status": "404 Not Found"}, ReplacedError),
        ({"etag": '"two"'}, ReplacedError),
        ({"status": "401 Unauthorized"}, AuthError),
        ({"status": "403 Forbidden"}, AuthError),
    ],
)
async def test_faults_of_the_whole_object_end_the_fetch_at_once(fault, kind, unsteady):
    async with unsteady(lambda number, *_: fault if number else None) as (server, fetcher):
        info = await fetcher.open()
        with pytest.raises(kind):
            await outcome(fetcher, behind_the_head(info))
        assert len(server.requests) <= 5


@pytest.mark.parametrize(
    ("status", "kind"), [("404 Not Found", NotFoundError), ("410 Gone", NotFoundError), ("401 X", AuthError)]
)
async def test_faults_of_the_whole_object_end_the_opening_at_once(status, kind, unsteady):
    async with unsteady(lambda *_: {"status": status}) as (server, fetcher):
        with pytest.raises(kind):
            await fetcher.open()
        assert len(server.requests) == 1


async def test_a_weak_tag_is_no_condition(blob, unsteady):
    async with unsteady(lambda *_: {"etag": 'W/"x"'}) as (server, fetcher):
        assert await fetched(fetcher, blob)
        assert set(server.conditions) == {None}


async def test_a_server_without_ranges_serves_heads_but_no_segments(unsteady):
    whole = {"status": "200 OK"}
    async with unsteady(lambda *_: whole, retries=1) as (_, fetcher):
        good, bad = await outcome(fetcher, behind_the_head(await fetcher.open())[:2])
        assert not good
        assert all("ignores byte ranges" in str(error) for error in bad.values())


async def test_chaos(blob, unsteady):
    """Every third request goes wrong in some way; with enough retries everything arrives, and intact."""
    rng = random.Random(3)
    quick = [f for name, f in FAULTS.items() if name not in ("no answer", "stalls in mid-body")]

    def plan(_number, start, end):
        return rng.choice([*quick, {"flip": rng.randrange(start, end)}]) if rng.random() < 0.33 else None

    async with unsteady(plan, retries=30, max_bytes=16_000) as (server, fetcher):
        await fetched(fetcher, blob, everything)
        assert len(server.requests) > 12
