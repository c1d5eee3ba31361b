from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller import BandwidthEstimator, BandwidthSettings, TtfbEstimator
from kvwire.errors import ArgumentError

MB = 1_000_000


def fed(prior, samples, settings=None):
    estimator = BandwidthEstimator(prior, settings)
    for size, started, ended in samples:
        estimator.add(size, started, ended)
    return estimator


def steady(rate, start, stop, step=0.05):
    count = round((stop - start) / step)
    return [(int(rate * step), start + i * step, start + (i + 1) * step) for i in range(count)]


def test_cold_start_is_the_prior_and_it_fades():
    assert fed(5 * MB, []).value == 5 * MB
    assert fed(5 * MB, []).confidence == 0
    early, late = fed(5 * MB, steady(MB, 0, 0.1)), fed(5 * MB, steady(MB, 0, 2))
    assert MB < late.value < early.value < 5 * MB
    assert late.value == pytest.approx(MB, rel=0.01)
    assert late.confidence > 0.99
    assert late.low == pytest.approx(0.9 * late.value)


def test_parallel_requests_count_each_second_once():
    one = fed(0, steady(8 * MB, 0, 2))
    four = fed(0, [sample for sample in steady(2 * MB, 0, 2) for _ in range(4)])
    assert four.value == pytest.approx(one.value, rel=0.05)


def test_a_long_request_around_short_ones_adds_only_its_own_seconds():
    short = [(MB, 1.0, 1.5), (MB, 1.5, 2.0)]
    around = [*short, (2 * MB, 0.0, 2.0), (2 * MB, 2.0, 3.0)]
    estimator = fed(0, around, BandwidthSettings(fast_half_life_s=1e6, slow_half_life_s=1e6))
    assert estimator.value == pytest.approx(2 * MB, rel=0.01)  # 6 MB in the 3 busy seconds


def test_idle_time_does_not_count():
    apart = [(100_000, 10.0 * i, 10.0 * i + 0.1) for i in range(20)]
    assert fed(0, apart).value == pytest.approx(MB, rel=0.01)


def test_falls_fast_and_rises_slowly():
    down = fed(0, [*steady(10 * MB, 0, 3), *steady(MB, 3, 4)])
    up = fed(0, [*steady(MB, 0, 3), *steady(10 * MB, 3, 4)])
    assert down.value < 4 * MB
    assert up.value < 5 * MB


def test_a_silent_link_falls_to_nothing():
    dead = fed(0, [*steady(10 * MB, 0, 2), *[(0, 2 + 0.05 * i, 2.05 + 0.05 * i) for i in range(100)]])
    assert dead.value < 0.02 * MB


def test_tiny_samples_are_kept_back_not_lost():
    estimator = fed(MB, [(1_000, 0.0, 1e-6)])  # a buffered crumb, 1 GB/s by its own account
    assert estimator.value == MB
    estimator.add(99_000, 1e-6, 0.1)
    assert estimator.value == pytest.approx(MB, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 100), st.floats(0, 5)), max_size=30))
def test_stays_between_the_extremes_and_never_breaks(samples):
    estimator = fed(3 * MB, [(size, start, start + length) for size, start, length in samples])
    assert estimator.value >= 0
    assert 0 <= estimator.confidence <= 1
    assert estimator.low <= estimator.value


@given(st.lists(st.tuples(st.integers(0, 10**7), st.floats(0.01, 0.5)), min_size=1, max_size=20), st.integers(0, 20))
def test_causal_a_prefix_gives_what_it_gave(samples, cut):
    at, timed = 0.0, []
    for size, seconds in samples:
        timed.append((size, at, at + seconds))
        at += seconds
    estimator, values = BandwidthEstimator(MB), []
    for sample in timed:
        estimator.add(*sample)
        values.append(estimator.value)
    cut = min(cut, len(timed) - 1)
    assert fed(MB, timed[: cut + 1]).value == values[cut]


def test_ttfb_leaves_its_prior_and_follows():
    ttfb = TtfbEstimator(0.1)
    assert ttfb.value == 0.1
    ttfb.add(0.02)
    assert ttfb.value == pytest.approx(0.06)
    for _ in range(30):
        ttfb.add(0.02)
    assert ttfb.value == pytest.approx(0.02, rel=0.01)


def test_arguments_that_cannot_be_are_refused():
    for prior in (-1, nan, inf):
        with pytest.raises(ArgumentError):
            BandwidthEstimator(prior)
    for sample in ((-1, 0, 1), (1, 2, 1), (1, nan, 1), (1, 0, inf)):
        with pytest.raises(ArgumentError):
            BandwidthEstimator(1).add(*sample)
    with pytest.raises(ArgumentError):
        TtfbEstimator(-1)
    with pytest.raises(ArgumentError):
        TtfbEstimator(0).add(nan)
    with pytest.raises(ArgumentError):
        BandwidthSettings(safety=0)
