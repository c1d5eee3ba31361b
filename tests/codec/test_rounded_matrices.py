"""Matrices stored as whole numbers and steps: exact, and no more precise than they need be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import Profile, encode, fit_profile, inspect
from kvwire.codec.fitting.rounding import factor_of, round_with_feedback
from kvwire.codec.profile.group import LARGEST, QuantisedMatrix

from . import surgery as cut
from .naive import round_with_feedback_naive, values_naive
from .synthetic import make_cache, make_statistics, stored_plainly


def covariance(width, seed=0):
    """Positive definite, with variances that differ a thousandfold."""
    draw = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))[0]
    return turned @ torch.diag(10.0 ** torch.linspace(0, -3, width, dtype=torch.float64)) @ turned.T


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_values_are_those_of_the_readable_twin(rows, columns, seed):
    rng = np.random.default_rng(seed)
    entries = rng.integers(-LARGEST, LARGEST + 1, (rows, columns)).astype(np.int16)
    steps = [(2.0 ** rng.uniform(-30, 30, count)).astype(np.float32) for count in (rows, columns)]
    matrix = QuantisedMatrix(entries, *steps)
    assert torch.equal(matrix.values(), values_naive(matrix))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 5, 63, 64, 65, 130]), st.integers(0, 2**31))
def test_rounding_with_feedback_is_that_of_the_readable_twin(count, width, seed):
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(count, width, generator=draw, dtype=torch.float64)
    lower = torch.tril(torch.randn(width, width, generator=draw, dtype=torch.float64), -1) / width
    steps = [torch.rand(n, generator=draw, dtype=torch.float64) + 0.1 for n in (count, width)]
    found, twin = (
        each(matrix, *steps, lower + torch.eye(width, dtype=torch.float64))
        for each in (round_with_feedback, round_with_feedback_naive)
    )
    assert torch.equal(found, twin)


def test_a_metric_comes_back_from_its_factors():
    metric = torch.stack([covariance(16, seed) for seed in (1, 2)])
    found = torch.from_numpy(factor_of(metric).metric).double()
    assert torch.equal(found, found.mT)
    assert float((found - metric).abs().max()) < 0.02 * float(metric.abs().max())
    assert bool((torch.linalg.eigvalsh(found) > 0).all())


def test_a_fitted_profile_takes_less_and_says_the_same(packed_profile):
    again, plain = Profile.from_bytes(packed_profile.data), stored_plainly(packed_profile)
    assert len(packed_profile.data) < 0.7 * len(plain.data)
    assert cut.get(packed_profile.data, cut.PROFILE_FIELDS, "incompatible") == 3
    assert cut.get(plain.data, cut.PROFILE_FIELDS, "incompatible") == 0
    for one in (again, Profile.from_bytes(plain.data), replace(again)):
        for ours, theirs in zip(packed_profile.groups, one.groups, strict=True):
            assert torch.equal(ours.rows, theirs.rows)
            assert torch.equal(ours.predictor, theirs.predictor)
            assert all(map(np.array_equal, ours.metric, theirs.metric))
        assert np.array_equal(packed_profile.table, one.table)
    assert replace(again).digest == packed_profile.digest


def test_a_matrix_that_was_replaced_is_stored_as_it_is(packed_profile):
    group = packed_profile.groups[0]
    other = replace(packed_profile, groups=(replace(group, rows=2 * group.rows), *packed_profile.groups[1:]))
    again = Profile.from_bytes(other.data)
    assert torch.equal(again.groups[0].rows, 2 * group.rows)
    assert again.groups[0].rounded is None
    assert again.groups[1].rounded is not None
    assert np.array_equal(again.table, packed_profile.table)


@pytest.mark.parametrize("seed", [5, 6])
def test_what_rounding_costs_is_little(seed):
    caches, statistics = [make_cache(512, seed) for seed in (1, 2)], make_statistics(words=True)
    usual = fit_profile(caches, statistics)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROW_SHARE", "TABLE_SHARE", "PREDICTOR_SHARE"):
            patch.setattr(f"kvwire.codec.fitting.rounding.{name}", 1e-5)
        exact = fit_profile(caches, statistics)
    cache = make_cache(600, seed)
    infos = [inspect(encode(cache, each)) for each in (usual, exact)]
    for rounded, reference in zip(infos[0].levels[:3], infos[1].levels[:3], strict=True):
        assert rounded.bits_per_element < 1.03 * reference.bits_per_element
        assert rounded.measured_error < 1.15 * reference.measured_error
