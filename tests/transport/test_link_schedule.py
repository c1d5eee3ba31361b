"""A link whose rate changes carries, in any interval, what its schedule allows."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError
from kvwire.store import MemoryStore
from kvwire.transport import EmulatedLink, LinkedSource, RateSchedule, StoreSource

from .conftest import FakeTime

STEPS = RateSchedule((0.0, 1.0, 1.5, 3.0), (1000.0, 4000.0, 0.0, 500.0), 4.0)  # 3500 bytes in 4 s


def naive_bytes(schedule, moment):
    """Bytes by ``moment``, summed over every stretch of constant rate."""
    total, start = 0.0, 0.0
    while start < moment:
        for index, rate in enumerate(schedule.rates):
            last = index + 1 == len(schedule.rates)
            end = (schedule.period_s or math.inf) if last else schedule.times[index + 1]
            stretch = min(moment, start + end) - (start + schedule.times[index])
            total += rate * max(0.0, stretch)
        start += schedule.period_s or math.inf
    return total


@st.composite
def schedules(draw):
    """Schedules of up to five rates between 10 kB/s and 10 MB/s, outages among them."""
    rates = draw(st.lists(st.sampled_from([0.0, 1e4, 3e5, 1e6, 1e7]), min_size=1, max_size=5))
    lengths = draw(st.lists(st.sampled_from([0.01, 0.07, 0.5, 2.0]), min_size=len(rates), max_size=len(rates)))
    times = tuple(sum(lengths[:index]) for index in range(len(rates)))
    period = draw(st.sampled_from([None, sum(lengths)]))
    if (period is None and not rates[-1]) or not any(rates):
        rates[-1] = 1e5
    return RateSchedule(times, tuple(rates), period)


MOMENTS = [(-1, 0), (0, 0), (0.5, 500), (1, 1000), (1.25, 2000), (2.9, 3000), (3.5, 3250), (4, 3500), (9.25, 9000)]
ARRIVALS = [(-5, 0), (500, 0.5), (3000, 1.5), (3001, 3.002), (3500, 4), (3501, 4.001), (35_000, 40), (36_000, 41)]


def test_bytes_by_a_moment_and_moments_by_bytes_which_are_there_when_an_outage_begins():
    assert [STEPS.bytes_by(moment) for moment, _ in MOMENTS] == pytest.approx([carried for _, carried in MOMENTS])
    assert [STEPS.moment_of(carried) for carried, _ in ARRIVALS] == pytest.approx([moment for _, moment in ARRIVALS])


@given(schedules(), st.floats(0, 20))
@example(RateSchedule((0, 0.01, 0.02, 0.03, 0.1), (0.0, 0.0, 1e4, 0.0, 1e4), 0.11), 3.0)  # rounds up in an outage
def test_the_sum_is_the_integral_and_moments_invert_it(schedule, moment):
    carried = schedule.bytes_by(moment)
    assert carried == pytest.approx(naive_bytes(schedule, moment), rel=1e-9, abs=1e-3)
    reached = schedule.moment_of(carried)
    assert reached <= moment + 1e-6
    assert schedule.bytes_by(reached) == pytest.approx(carried, rel=1e-9, abs=1e-2)


@given(st.floats(1e-3, 1e8), st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(1, 10**9))
def test_whole_periods_that_begin_with_an_outage_end_with_their_last_byte(rate, outage, flow, periods):
    schedule = RateSchedule((0.0, outage), (0.0, rate), outage + flow)
    carried = periods * schedule.bytes_by(outage + flow)
    for wanted in (math.nextafter(carried, 0), carried, math.nextafter(carried, math.inf)):
        reached = schedule.moment_of(wanted) - periods * (outage + flow)
        slack = 1e-6 * periods * (outage + flow)
        assert min(abs(reached), abs(reached - outage)) < slack  # a byte more comes after the next outage


def test_a_sum_that_rounds_to_whole_periods_is_there_at_their_end():
    schedule = RateSchedule((0.0, 1.0), (0.0, 1 / 49), 2.0)  # of which 25 periods, divided by one, round up
    for whole in range(1, 100):
        assert schedule.moment_of(whole * schedule.bytes_by(2.0)) == pytest.approx(2 * whole)


@pytest.mark.parametrize(
    ("times", "rates", "period"),
    [
        *(((), (), None), ((1.0,), (5.0,), None), ((0.0, 0.0), (5.0, 5.0), None)),
        *(((0.0, 2.0, 1.0), (5.0, 5.0, 5.0), None), ((0.0, math.nan), (5.0, 5.0), None)),
        *(((0.0, math.inf), (5.0, 5.0), None), ((0.0, 1.0), (5.0,), None), ((0.0, 1.0), (5.0, 5.0), 1.0)),
        *(((0.0,), (5.0,), math.inf), ((0.0,), (5.0,), math.nan), ((0.0,), (-5.0,), None)),
        *(((0.0, 1.0), (5.0, math.nan), 2.0), ((0.0,), (math.inf,), None)),
    ],
)
def test_schedules_that_make_no_sense_are_refused(times, rates, period):
    with pytest.raises(ArgumentError):
        RateSchedule(times, rates, period)


NEVER = [((0.0,), (0.0,), 1.0), ((0.0, 1.0), (5.0, 0.0), None), ((0.0,), (0.0,), None)]


@pytest.mark.parametrize(("times", "rates", "period"), NEVER)
def test_a_link_refuses_schedules_that_never_deliver_and_a_round_trip_below_zero(times, rates, period):
    with pytest.raises(ArgumentError, match="stay at 0"):
        EmulatedLink(RateSchedule(times, rates, period))
    with pytest.raises(ArgumentError):
        EmulatedLink(STEPS, -1)


@given(schedules(), st.sampled_from([0.0, 0.0005, 0.005]), st.sampled_from([700, 1500, 65536]))
def test_what_has_come_is_the_integral_of_the_rate(schedule, late, piece):
    """Early by a millisecond's bytes at most, late by one overrun of the timer at most; never adding up."""

    async def check():
        fake = FakeTime(late)
        link = EmulatedLink(schedule, clock=fake.clock, sleep=fake.sleep)
        start, sent = fake.now, 0
        async with link.sending():
            while fake.now - start < 6 and sent < 300 * piece:
                await link.transmit(piece)
                sent += piece
                elapsed = fake.now - start
                assert schedule.bytes_by(elapsed + 0.001) >= sent - 1e-3
                assert elapsed <= schedule.moment_of(sent) + late + 1e-6

    asyncio.run(check())


async def test_an_outage_holds_everything_up_and_no_stock_is_kept_over_it():
    fake = FakeTime()
    link = EmulatedLink(RateSchedule((0.0, 1.0, 5.0), (1e6, 0.0, 1e6)), clock=fake.clock, sleep=fake.sleep)
    start = fake.now
    async with link.sending():
        await link.transmit(1_000_000)
        assert fake.now - start == pytest.approx(1)
        await link.transmit(500_000)
        assert fake.now - start == pytest.approx(5.5)
    fake.now += 10
    async with link.sending():
        await link.transmit(500_000)
    assert fake.now - start == pytest.approx(16)


async def test_a_transfer_over_a_drop_takes_the_time_of_both_rates():
    schedule = RateSchedule((0.0, 2.0), (1e6, 1e5))
    assert (schedule.bytes_by(103), schedule.moment_of(12.1e6)) == pytest.approx((12.1e6, 103))  # the last rate lasts
    fake = FakeTime()
    link = EmulatedLink(schedule, clock=fake.clock, sleep=fake.sleep)
    start = fake.now
    async with link.sending():
        await link.transmit(2_100_000)
    assert fake.now - start == pytest.approx(3)


@pytest.mark.parametrize(("burst", "elapsed"), [(10_000, 10.1), (None, 10.09)])
async def test_catching_up_is_limited_at_the_rate_of_the_moment(burst, elapsed):
    """By default to what 20 ms carry: 20 kB here, though the link was ten times as fast before."""
    fake = FakeTime()
    schedule = RateSchedule((0.0, 1.0), (1e7, 1e6))
    link = EmulatedLink(schedule, burst_bytes=burst, clock=fake.clock, sleep=fake.sleep)
    start = fake.now
    async with link.sending():
        await link.transmit(1000)
        fake.now = start + 10  # the sender was busy elsewhere
        await link.transmit(110_000)
    assert fake.now - start == pytest.approx(elapsed)


async def test_the_schedule_starts_with_the_first_request_or_with_begin_but_not_under_a_response():
    fake = FakeTime()
    link = EmulatedLink(RateSchedule((0.0, 1.0), (1e6, 1e5)), 0.5, clock=fake.clock, sleep=fake.sleep)
    fake.now += 50
    start = link.now()
    await link.round_trip(start)
    async with link.sending():
        await link.transmit(600_000)
        with pytest.raises(ArgumentError, match="before the first request"):
            link.begin()
    assert fake.now - start == pytest.approx(2)  # 0.5 s of round trip, 0.5 s fast, 1 s slow
    for _ in range(2):
        link.begin()
        fake.now += 0.9
        start = fake.now
        async with link.sending():
            await link.transmit(200_000)
        assert fake.now - start == pytest.approx(1.1)


async def test_pieces_are_small_enough_for_the_slowest_rate():
    assert EmulatedLink(RateSchedule((0.0, 1.0, 2.0), (1e8, 1e6, 0.0), 3.0)).piece_bytes == 10_000


async def test_real_time_over_an_outage():
    store = MemoryStore()
    store.put("k", bytes(200_000))
    link = EmulatedLink(RateSchedule((0.0, 0.1, 0.4), (1e6, 0.0, 1e6)))
    start, sizes = time.monotonic(), []
    sources = [LinkedSource(StoreSource(store, "k"), link) for _ in range(2)]
    await asyncio.gather(*(source.read(0, 100_000, lambda piece: sizes.append(len(piece))) for source in sources))
    assert sum(sizes) == 200_000
    assert 0.49 < time.monotonic() - start < 20
