"""Errors of predictions over horizons, against a twin that keeps every sample and every ratio."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller.horizons import EDGES, HORIZONS_S, MOST_COUNTED, HorizonErrors, faded
from kvwire.errors import ArgumentError

SAMPLES = st.lists(
    st.tuples(st.integers(0, 10**7), st.floats(1e-3, 0.6), st.floats(1.0, 1e9)), min_size=1, max_size=120
)


def fed(samples):
    errors = HorizonErrors()
    for sample in samples:
        errors.add(*sample)
    return errors


def naive(samples):
    """Counts by horizon: every prediction is checked against all samples, in the order in which its time is over."""
    starts = np.cumsum([0.0, *(seconds for _, seconds, _ in samples)])
    brought = np.cumsum([0.0, *(size for size, _, _ in samples)])
    out = []
    for horizon_s in HORIZONS_S:
        row, latest = np.zeros(len(EDGES)), -inf
        for at, (_, _, rate) in enumerate(samples):
            if starts[at] < latest + horizon_s:
                continue
            latest = starts[at]
            if latest + horizon_s <= starts[-1]:
                came = np.interp(latest + horizon_s, starts, brought) - brought[at]
                ratio = max(came, 0.0) / (horizon_s * rate)
                row *= 1 - 1 / MOST_COUNTED
                row[sum(ratio >= edge for edge in EDGES) - 1] += 1
        out.append(row)
    return np.array(out)


@given(SAMPLES)
@settings(max_examples=100, deadline=None)
def test_counts_are_those_of_whoever_keeps_everything(samples):
    counts, expected = np.array(fed(samples).counts), naive(samples)
    # A ratio within rounding of an edge may fall to either side of it.
    assert counts.sum(axis=1) == pytest.approx(expected.sum(axis=1))
    assert np.abs(counts - expected).sum() <= 2.001 * near_edges(samples)


def near_edges(samples):
    """Ratios that rounding could put into the next bin."""
    moved = [(size * (1 + sign * 1e-9), seconds, rate) for sign in (-1, 1) for size, seconds, rate in samples]
    half = len(samples)
    low, high = naive(moved[:half]), naive(moved[half:])
    return int(np.ceil(np.abs(low - high).sum()))


@given(SAMPLES)
def test_counts_and_what_follows_from_them_stay_in_bounds(samples):
    errors = fed(samples)
    assert all(sum(row) <= MOST_COUNTED for row in errors.counts)
    for horizon_s in (0.0, 0.01, *HORIZONS_S, 5.0):
        lows = [errors.low(horizon_s, share, 0.5) for share in (0.05, 0.25, 0.5, 0.9)]
        assert all(0 < low <= 1 for low in lows)
        assert all(one <= other + 1e-12 for one, other in pairwise(lows))
        assert 0 < errors.risk(horizon_s) < 1


def test_what_nobody_measured_is_what_is_assumed():
    errors = HorizonErrors()
    assert errors.low(0.5, 0.1, 0.7) == 0.7
    assert errors.low(0.5, 0.1, 1.3) == 1.0
    assert errors.risk(0.5) == pytest.approx(0.05)


def test_fading_halves_what_is_known():
    counts = fed([(1000, 0.1, 2e4)] * 40).counts
    assert np.array(faded(counts, 1.0)) == pytest.approx(np.array(counts) / 2)
    old = HorizonErrors(faded(counts, 50.0))
    assert old.low(0.2, 0.1, 0.9) == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("wrong", [-1.0, nan, inf])
def test_counts_that_cannot_be_are_refused(wrong):
    counts = HorizonErrors().counts
    with pytest.raises(ArgumentError):
        HorizonErrors(((wrong, *counts[0][1:]), *counts[1:]))
    with pytest.raises(ArgumentError):
        HorizonErrors(counts[1:])
    with pytest.raises(ArgumentError):
        HorizonErrors(tuple(row[1:] for row in counts))
