"""The emulated link keeps its rate, whatever the timer's grain."""

import asyncio
import time

import pytest

from kvwire.errors import ArgumentError
from kvwire.store import MemoryStore
from kvwire.transport import EmulatedLink, LinkedSource, LinkSettings, StoreSource, parse_link, read_object

from .conftest import FakeTime


@pytest.mark.parametrize(
    ("text", "bandwidth", "rtt"),
    [
        *(("50mbit", 6.25e6, 0), ("1gbit", 125e6, 0), ("800kbit", 1e5, 0), ("8bit", 1, 0), ("6.25MB/s", 6.25e6, 0)),
        *(("100kB/s", 1e5, 0), ("50mbit,20ms", 6.25e6, 0.02), (" 50 Mbit/s , 0.5 s ", 6.25e6, 0.5)),
        *((".5gbit,100us", 62.5e6, 1e-4), ("2MBIT", 25e4, 0)),
    ],
)
def test_parse(text, bandwidth, rtt):
    settings = parse_link(text)
    assert settings.bandwidth_bytes_s == pytest.approx(bandwidth)
    assert settings.rtt_s == pytest.approx(rtt)


@pytest.mark.parametrize(
    "text",
    [
        *("", "50", "fast", "0mbit", "-5mbit", "1e3mbit", "50mbps", "50Mb/s", "50mbit,", "50mbit,5", ",5ms", "5ms"),
        *("50mbit,5ms,6ms", "nanbit", "infbit", "9" * 400 + "mbit", "1tbit", "5 m bit"),
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(ArgumentError):
        parse_link(text)


@pytest.mark.parametrize(("bandwidth", "rtt"), [(0, 0), (-1, 0), (float("inf"), 0), (float("nan"), 0), (1, -1)])
def test_links_that_could_not_deliver_are_refused(bandwidth, rtt):
    with pytest.raises(ArgumentError):
        LinkSettings(bandwidth, rtt)


RATES = [125e3, 1.25e6, 6.25e6, 125e6, 250e6]  # 1 Mbit/s to 2 Gbit/s


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("late", [0.0, 0.0005, 0.005])
@pytest.mark.parametrize("piece", [1500, 65536])
async def test_the_rate_holds_when_sleeps_overrun(rate, late, piece):
    fake = FakeTime(late)
    link = EmulatedLink(rate, clock=fake.clock, sleep=fake.sleep)
    count = max(4, int(rate * 0.5) // piece)
    start = fake.now
    async with link.sending():
        for _ in range(count):
            await link.transmit(piece)
    assert count * piece / (fake.now - start) == pytest.approx(rate, rel=0.03)
    assert fake.sleeps <= (fake.now - start) / 0.001  # debts are slept off together, not packet by packet


async def test_an_idle_link_saves_nothing_up():
    fake = FakeTime()
    link = EmulatedLink(1e6, clock=fake.clock, sleep=fake.sleep)
    for _ in range(3):
        fake.now += 100
        start = fake.now
        async with link.sending():
            await link.transmit(100_000)
        assert fake.now - start == pytest.approx(0.1)


LOADED_S = 20  # on a machine that does much else


@pytest.fixture
def big_store():
    store = MemoryStore()
    store.put("k", bytes(3_000_000))
    return store


async def test_real_time_of_a_transfer_and_of_two_that_share_the_link(big_store):
    link = EmulatedLink.of(parse_link("40mbit,50ms"))
    start = time.monotonic()
    assert len(await read_object(StoreSource(big_store, "k"), link)) == 3_000_000
    assert 0.64 < time.monotonic() - start < LOADED_S  # 0.6 s on the link and 0.05 s of round trip
    link = EmulatedLink(6e6)
    start = time.monotonic()
    await asyncio.gather(*(read_object(StoreSource(big_store, "k"), link) for _ in range(2)))
    assert 0.97 < time.monotonic() - start < LOADED_S


async def test_the_first_byte_is_a_round_trip_late_and_pieces_are_small(big_store):
    link = EmulatedLink(1e6, 0.1)
    start, sizes = time.monotonic(), []

    def take(piece):
        if not sizes:
            assert 0.1 <= time.monotonic() - start < LOADED_S
        sizes.append(len(piece))

    await LinkedSource(StoreSource(big_store, "k"), link).read(0, 50_000, take)
    assert sum(sizes) == 50_000
    assert max(sizes) <= 10_000
