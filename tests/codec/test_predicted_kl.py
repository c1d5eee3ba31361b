"""The KL divergence that blobs predict of their errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import Ladder, encode, error_of_kl, fit_profile, inspect, predicted_kl

from .synthetic import make_cache

positive = st.floats(1e-6, 1e3)


def naive(error, curve, factors):
    """Look the factor up between its two neighbours."""
    law = curve[0] * error ** curve[1]
    before = [pair for pair in factors if pair[0] <= error]
    after = [pair for pair in factors if pair[0] > error]
    if not before or not after:
        return law * (before[-1:] or after[:1] or [(0, 1.0)])[0][1]
    (low, first), (high, second) = before[-1], after[0]
    share = math.log(error / low) / math.log(high / low)
    return law * first ** (1 - share) * second**share


@given(positive, positive, st.floats(0.1, 8), st.dictionaries(positive, st.floats(1 / 1024, 1024), max_size=8))
def test_factors_are_interpolated_in_logarithms(error, scale, exponent, factors):
    pairs = tuple(sorted(factors.items()))
    expected = naive(error, (scale, exponent), pairs)
    assert predicted_kl(error, (scale, exponent), pairs) == pytest.approx(expected, rel=1e-6)


@given(positive, positive, st.floats(0.5, 2), st.dictionaries(st.floats(1e-3, 1e3), st.floats(0.1, 10), max_size=5))
def test_an_error_is_found_by_its_divergence(error, scale, exponent, factors):
    """Of curves that never fall with errors, as calibration makes them."""
    pairs, top = [], 0.0
    for at, factor in sorted(factors.items()):
        top = max(1.01 * top, factor * at**exponent)
        pairs.append((at, top / at**exponent))
    kl = predicted_kl(error, (scale, exponent), pairs)
    found = error_of_kl(kl, (scale, exponent), pairs)
    assert predicted_kl(found, (scale, exponent), pairs) == pytest.approx(kl, rel=1e-6)
    assert error_of_kl(0.0, (scale, exponent), pairs) == 0.0


def test_no_error_loses_nothing_and_too_large_ones_are_infinite():
    assert predicted_kl(0.0, (2.0, 1.5), ((0.1, 3.0),)) == 0.0
    assert predicted_kl(1e300, (2.0, 8.0), ((0.1, 3.0),)) == math.inf


def test_blobs_predict_with_their_profiles_factors():
    cache = make_cache(200)
    profile = replace(fit_profile([cache]), error_to_kl=(0.25, 1.5))
    blob = encode(cache, profile, Ladder())
    plain = inspect(blob).levels
    errors = sorted(level.measured_error for level in plain)
    factors = ((errors[0], 3.0), (errors[-1], 0.5))
    bent = inspect(encode(cache, replace(profile, kl_factors=factors), Ladder())).levels
    assert bent[0].predicted_kl == pytest.approx(0.5 * plain[0].predicted_kl)
    assert bent[-1].predicted_kl == pytest.approx(3.0 * plain[-1].predicted_kl)
    middle = bent[2].predicted_kl / plain[2].predicted_kl
    assert 0.5 < middle < 3.0
