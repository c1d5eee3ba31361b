"""Facts for the estimator: wall time is counted once, however many answers come in at a time."""

from itertools import pairwise

import pytest

from kvwire.transport import LinkMeter


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def samples():
    return []


@pytest.fixture
def meter(clock, samples):
    return LinkMeter(samples.append, clock)


def total(samples):
    return (
        sum(s.wire_bytes for s in samples),
        sum(s.timed_bytes for s in samples),
        pytest.approx(sum(s.busy_s for s in samples)),
    )


def test_one_transfer(meter, clock, samples):
    transfer = meter.begin()
    clock.now = 0.05
    transfer.received(100)  # opens the period: nobody knows how long it took
    for _ in range(10):
        clock.now += 0.01
        transfer.received(100)
    clock.now += 5
    transfer.end()
    assert total(samples) == (1100, 1000, 0.1)
    assert [s.first_byte_s for s in samples if s.first_byte_s is not None] == [0.05]


def test_two_transfers_at_a_time_count_the_time_once(meter, clock, samples):
    one, two = meter.begin(), meter.begin()
    for _ in range(11):
        clock.now += 0.01
        one.received(100)
        two.received(100)
    one.end()
    two.end()
    assert total(samples) == (2200, 2100, 0.1)
    assert len([s for s in samples if s.first_byte_s is not None]) == 2


def test_a_pause_between_transfers_is_not_busy(meter, clock, samples):
    for _ in range(2):
        transfer = meter.begin()
        clock.now += 1
        transfer.received(10)
        clock.now += 0.5
        transfer.received(10)
        transfer.end()
        clock.now += 10
    assert total(samples) == (40, 20, 1.0)


def test_intervals_do_not_overlap_and_silence_shows(meter, clock, samples):
    one, two = meter.begin(), meter.begin()
    for _ in range(20):
        clock.now += 0.003
        one.received(10)
        two.received(10)
    clock.now += 2
    one.end(silent=True)
    two.end()
    assert all(a.ended <= b.started for a, b in pairwise(samples))
    assert any(s.busy_s > 1.9 and s.timed_bytes <= 40 for s in samples)
    assert len(samples) <= 20  # not one for each piece


def test_a_transfer_without_bytes_gives_no_sample(meter, samples):
    meter.begin().end()
    meter.flush()
    assert samples == []
