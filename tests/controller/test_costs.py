from __future__ import annotations

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller import CostCorrection, CostModel, CostRatio, DecodeCost, PrefillCost, fit_decode, fit_prefill
from kvwire.errors import ArgumentError

TRUE = PrefillCost(0.01, 5e-5, 2e-9)
GRID = [(tokens, context) for tokens in (64, 256, 1024) for context in (0, 512, 4096, 16384)]


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 50_000))
def test_a_pass_cut_in_two_costs_one_base_more(first, second, context):
    whole = TRUE.seconds(first + second, context)
    parts = TRUE.seconds(first, context) + TRUE.seconds(second, context + first)
    assert parts - TRUE.base_s == pytest.approx(whole)


def test_fit_finds_the_prefill_cost_under_noise_and_outliers():
    rng = np.random.default_rng(0)
    samples = [(t, c, TRUE.seconds(t, c) * float(rng.normal(1, 0.02))) for t, c in GRID * 4]
    samples[5] = (*samples[5][:2], samples[5][2] * 10)  # a first pass that warms something up
    samples[11] = (*samples[11][:2], samples[11][2] / 10)  # a clock read too early
    fit = fit_prefill(samples)
    for tokens, context in [*GRID, (512, 8192)]:
        assert fit.seconds(tokens, context) == pytest.approx(TRUE.seconds(tokens, context), rel=0.08)


def test_fit_finds_the_decode_cost():
    true = DecodeCost(0.002, 1e-6, 3e-9)
    samples = [(t, b, true.seconds(t, b)) for t in (64, 256) for b in (10_000, 100_000, 1_000_000)]
    fit = fit_decode(samples)
    assert (fit.base_s, fit.token_s, fit.byte_s) == pytest.approx((0.002, 1e-6, 3e-9), rel=1e-6)


def test_fit_never_goes_below_zero():
    fit = fit_prefill([(100, 0, 0.5), (200, 0, 0.4), (400, 0, 0.3)])
    assert min(fit.base_s, fit.token_s, fit.pair_s) >= 0
    assert fit.seconds(200) == pytest.approx(0.4, rel=0.3)


def test_one_sample_is_enough_to_predict_itself():
    assert fit_prefill([(256, 0, 0.1)]).seconds(256) == pytest.approx(0.1)


def test_fit_refuses_what_it_cannot_use():
    for samples in ([], [(256, 0, nan)], [(256, -1, 0.1)]):
        with pytest.raises(ArgumentError):
            fit_prefill(samples)


def test_a_prior_twice_off_heals_in_a_few_samples():
    correction = CostCorrection()
    for _ in range(5):
        correction.prefill.add(0.2, 0.1)
        correction.decode.add(0.05, 0.1)
    model = CostModel(TRUE, DecodeCost(0.1, 0)).corrected(correction)
    assert model.prefill.seconds(256) == pytest.approx(2 * TRUE.seconds(256), rel=0.05)
    assert model.decode.seconds(256, 0) == pytest.approx(0.05, rel=0.05)


def test_a_ratio_is_clamped_and_free_work_is_skipped():
    ratio = CostRatio(weight=1.0)
    ratio.add(1e9, 1e-3)
    assert ratio.value == pytest.approx(16)
    ratio.add(1.0, 0.0)
    assert ratio.value == pytest.approx(16)
    with pytest.raises(ArgumentError):
        ratio.add(-1, 1)


def test_closing_counts_linking_and_the_question():
    model = CostModel(TRUE, DecodeCost(0, 0), link_s_per_token=1e-6, query_tokens=32)
    assert model.closing_s(1000) == pytest.approx(1e-3 + TRUE.seconds(32, 1000))
    assert CostModel(TRUE, DecodeCost(0, 0)).closing_s(1000) == 0


def test_costs_that_cannot_be_are_refused():
    for bad in (-1.0, nan):
        with pytest.raises(ArgumentError):
            PrefillCost(bad, 0)
        with pytest.raises(ArgumentError):
            DecodeCost(0, 0, bad)
    with pytest.raises(ArgumentError):
        CostModel(TRUE, DecodeCost(0, 0), decode_overlap=1.5)
