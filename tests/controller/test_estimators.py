from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller.estimators import BandwidthEstimator, BandwidthSettings, Memory, RecentMedian
from kvwire.errors import ArgumentError

MB = 1_000_000
RATES = st.floats(np.log(1e4), np.log(5e9)).map(np.exp).map(float)


def fed(prior, samples, settings=None):
    estimator = BandwidthEstimator(prior, settings)
    for size, started, ended in samples:
        estimator.add(size, started, ended)
    return estimator


def steady(rate, start, stop, step=0.005, noise=0.0):
    rng = np.random.default_rng(0)
    return [
        (int(rate * step * rng.lognormal(-(noise**2) / 2, noise)), start + i * step, start + (i + 1) * step)
        for i in range(round((stop - start) / step))
    ]


def until(estimator, samples, reached):
    """Seconds of samples after which something holds."""
    begun = samples[0][1]
    for size, started, ended in samples:
        estimator.add(size, started, ended)
        if reached(estimator):
            return ended - begun
    return inf


def test_cold_start_is_the_prior_and_far_from_certain():
    cold = fed(5 * MB, [])
    assert (cold.value, cold.usual, cold.is_measured) == (5 * MB, 5 * MB, False)
    assert cold.low < 0.7 * cold.value
    assert BandwidthEstimator(5 * MB, prior_error=0.1).low > 0.9 * 5 * MB
    assert fed(0, []).value == fed(0, []).low == 0


@given(RATES, st.floats(0.01, 100), st.floats(0.002, 0.05))
def test_a_wrong_prior_is_forgotten_on_any_steady_link(rate, wrong, step):
    samples = steady(rate, 0, 0.6, step)
    estimator, taken = BandwidthEstimator(rate * wrong), 0
    # 0.5 s or 400 kB, whichever is sooner, and 3 samples at least.
    for count, sample in enumerate(samples, 1):
        estimator.add(*sample)
        taken += sample[0]
        if count >= 3 and (taken >= 400_000 or sample[2] >= 0.5):
            break
    assert estimator.value == pytest.approx(rate, rel=0.2)


@given(RATES, st.floats(0.01, 100))
def test_the_lower_bound_comes_close_on_a_steady_link(rate, wrong):
    step = max(0.005, 20_000 / rate)
    estimator = fed(rate * wrong, steady(rate, 0, 10.5 * step, step))
    assert 0.9 * rate < estimator.low < estimator.value < 1.1 * rate
    assert estimator.low > 0.95 * estimator.value


@pytest.mark.parametrize(
    ("rate", "low_s", "value_s"),
    [  # 10 Mbit/s to 40 Gbit/s
        (1.25 * MB, 0.055, 0.25), (12.5 * MB, 0.02, 0.08), (125 * MB, 0.02, 0.06), (1250 * MB, 0.02, 0.04),
        (5000 * MB, 0.02, 0.04),
    ],
)  # fmt: skip
def test_a_fall_to_a_third_is_noticed_within_a_short_load(rate, low_s, value_s):
    before = steady(rate, 0, 1)
    after = steady(rate / 3, 1, 2)
    assert until(fed(rate, before), after, lambda e: e.low < 0.4 * rate) <= low_s
    assert until(fed(rate, before), after, lambda e: e.value < 0.4 * rate) <= value_s


@given(RATES, st.floats(0.05, 1.0), st.floats(0.0, 2.0))
def test_time_that_brings_nothing_counts_as_if_it_were_measured(rate, busy_s, silent_s):
    """But for samples: that several were far off makes an estimate forget sooner."""
    estimator = fed(rate, steady(rate, 0, busy_s))
    share, before = estimator.share_after(silent_s), estimator.value
    for average in (estimator._fast, estimator._slow):
        average.add(0, silent_s)
    left = min(estimator._fast.value(), estimator._slow.value())
    assert left == pytest.approx(share * before)
    assert BandwidthEstimator(rate).share_after(silent_s) == 1


def test_a_silent_link_falls_to_nothing():
    for rate in (MB, 10 * MB, 5000 * MB):
        estimator = fed(rate, steady(rate, 0, 2))
        estimator.add(0, 2, 2.06)
        assert estimator.low < 0.4 * rate
        for i in range(1, 40):
            estimator.add(0, 2 + 0.05 * i, 2.05 + 0.05 * i)
        assert estimator.value < 0.002 * rate
        assert estimator.low < 0.001 * rate


def test_parallel_requests_count_each_second_once():
    one = fed(0, steady(8 * MB, 0, 2))
    four = fed(0, [sample for sample in steady(2 * MB, 0, 2) for _ in range(4)])
    assert four.value == pytest.approx(one.value, rel=0.05)
    one = steady(2 * MB, 0, 2)
    shifted = [(size, start + delay, end + delay) for delay in (0, 2e-3, 4e-3) for size, start, end in one]
    staggered = sorted(shifted, key=lambda sample: sample[2])
    assert fed(0, staggered).value == pytest.approx(6 * MB, rel=0.05)


def test_tiny_samples_are_kept_back_not_lost():
    estimator = fed(MB, [(1_000, 0.0, 1e-6)])  # a buffered crumb, 1 GB/s by its own account
    assert estimator.value == MB
    estimator.add(99_000, 1e-6, 0.1)
    assert estimator.value == pytest.approx(MB, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 100), st.floats(0, 5)), max_size=30))
def test_stays_between_the_bounds_and_never_breaks(samples):
    estimator = fed(3 * MB, [(size, start, start + length) for size, start, length in samples])
    assert 0 <= estimator.low <= estimator.value < inf


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
    ttfb = RecentMedian(0.1)
    assert ttfb.value == 0.1
    assert ttfb.high == pytest.approx(0.2)
    ttfb.add(0.02)
    assert ttfb.value == pytest.approx(0.06)
    for _ in range(9):
        ttfb.add(0.02)
    assert ttfb.value == 0.02
    assert 0.02 < ttfb.high < 0.025
    for _ in range(5):
        ttfb.add(0.2)
    assert ttfb.value == 0.2


@given(st.lists(st.floats(0.01, 0.012), min_size=2, max_size=20), st.floats(0, 1e3), st.integers(0, 20))
def test_one_outlier_does_not_move_the_time_to_first_byte(times, outlier, at):
    ttfb = RecentMedian(0.011)
    for seconds in [*times[:at], outlier, *times[at:]]:
        ttfb.add(seconds)
    assert 0.01 <= ttfb.value <= 0.012
    assert ttfb.value <= ttfb.high <= 0.02


def test_arguments_that_cannot_be_are_refused():
    for prior in (-1, nan, inf):
        with pytest.raises(ArgumentError):
            BandwidthEstimator(prior)
        with pytest.raises(ArgumentError):
            BandwidthEstimator(1, prior_error=prior)
        with pytest.raises(ArgumentError):
            RecentMedian(prior)
        with pytest.raises(ArgumentError):
            RecentMedian(0, prior)
    for sample in ((-1, 0, 1), (1, 2, 1), (1, nan, 1), (1, 0, inf)):
        with pytest.raises(ArgumentError):
            BandwidthEstimator(1).add(*sample)
    with pytest.raises(ArgumentError):
        RecentMedian(0).add(nan)
    for bad in ({"max_hold_s": 0}, {"prior_error": -1}, {"min_bytes": -1}):
        with pytest.raises(ArgumentError):
            BandwidthSettings(**bad)
    for bad in ((0,), (inf,), (1, 0), (1, 1, nan)):
        with pytest.raises(ArgumentError):
            Memory(*bad)
