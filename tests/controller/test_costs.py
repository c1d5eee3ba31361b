from __future__ import annotations

import random
from math import inf, log, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller.costs import CostModel, DecodeCost, PrefillCost, busiest, fit_decode, fit_prefill
from kvwire.controller.learning import DecodeEstimator, PrefillEstimator
from kvwire.errors import ArgumentError

TRUE = PrefillCost(0.01, 5e-5, 2e-9)
TRUE_DECODE = DecodeCost(0.002, 1e-6, 3e-9)
GRID = [(tokens, context) for tokens in (64, 256, 1024) for context in (0, 512, 4096, 16384)]


def worst(estimator, true=TRUE, grid=GRID):
    """Largest error of predictions, in logarithms."""
    cost = estimator.cost
    return max(abs(log(cost.seconds(*at) / true.seconds(*at))) for at in grid)


def passes(count, seed=0, noise=0.05, speed=1.0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens, context = int(rng.choice([64, 256, 512, 1024])), int(rng.integers(0, 16384))
        yield tokens, context, TRUE.seconds(tokens, context) * speed * float(rng.lognormal(0, noise))


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


def test_fit_refuses_what_it_cannot_use():
    for samples in ([], [(256, 0, nan)], [(256, -1, 0.1)]):
        with pytest.raises(ArgumentError):
            fit_prefill(samples)


@given(st.floats(1 / 16, 16), st.sampled_from(GRID), st.sampled_from(GRID))
def test_a_prior_of_the_wrong_scale_heals_with_one_pass(wrong, first, second):
    estimator = PrefillEstimator(TRUE.scaled(wrong))
    estimator.add(*first, TRUE.seconds(*first))
    assert worst(estimator) < 0.02
    estimator.add(*second, TRUE.seconds(*second))
    assert worst(estimator) < 0.02


@pytest.mark.parametrize("prior", [PrefillCost(0.001, 2e-4, 1e-8), PrefillCost(0.01, 5e-5), PrefillCost(0, 0)])
def test_the_shape_is_learnt_from_diverse_passes(prior):
    for seed in range(4):
        estimator = PrefillEstimator(prior)
        for sample in passes(32, seed):
            estimator.add(*sample)
        assert worst(estimator) < 0.2
        assert 0.02 < estimator.spread < 0.25


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_change_of_speed_is_followed_after_a_few_passes_and_stays_so(noise):
    estimator = PrefillEstimator(TRUE)
    for sample in passes(30, noise=noise):
        estimator.add(*sample)
    slower = TRUE.scaled(2.5)
    for count, sample in enumerate(passes(40, 1, noise, 2.5), 1):
        estimator.add(*sample)
        if count >= 4:
            assert worst(estimator, slower) < 0.35
    assert worst(estimator, slower) < 0.2


def test_spread_tells_what_predictions_are_off_by():
    assert PrefillEstimator(TRUE).spread == pytest.approx(0.5)
    assert PrefillEstimator(TRUE).high == pytest.approx(2)
    for noise in (0.0, 0.05, 0.2):
        estimator = PrefillEstimator(TRUE.scaled(3))
        for sample in passes(60, noise=noise):
            estimator.add(*sample)
        assert estimator.spread == pytest.approx(noise, rel=0.6, abs=0.02)
        assert estimator.high == 1 + 2 * estimator.spread


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e9)), max_size=80),
    st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)),
)
def test_any_measurements_give_a_cost(samples, prior):
    estimator = PrefillEstimator(PrefillCost(*prior))
    for sample in samples:
        estimator.add(*sample)
    cost = estimator.cost
    assert 0 <= cost.seconds(1000, 1000) < inf
    assert 0 <= estimator.spread < inf
    assert estimator.known == min(8, len(samples))


def test_rounding_of_wild_measurements_leaves_a_cost():
    wild = random.Random(8)
    for _ in range(20):
        estimator = PrefillEstimator(PrefillCost(1e-9, 1e-3, 1.0))
        for _ in range(40):
            tokens, context = wild.choice([1, 16, 4096, 10**6]), wild.choice([0, 1000, 10**9])
            estimator.add(tokens, context, wild.choice([0.0, 1e-6, 1e-3, 1, 100, 1e6]))
            assert 0 <= estimator.cost.seconds(256) < inf


def test_decoding_is_learnt_alone_and_in_batches():
    rng = np.random.default_rng(0)
    grid = [(256, size) for size in (10_000, 100_000, 1_000_000)]
    estimator = DecodeEstimator(DecodeCost(0.01, 1e-5, 1e-10))
    for _ in range(40):
        size, count = int(rng.integers(5_000, 2_000_000)), int(rng.integers(1, 5))
        estimator.add(256 * count, size, TRUE_DECODE.seconds(256 * count, size))
    assert worst(estimator, TRUE_DECODE, grid) < 0.15
    assert estimator.spread < 0.1
    assert estimator.high == 1 + 2 * estimator.spread
    assert estimator.known == 8


def test_measurements_that_leave_nothing_of_a_cost_still_give_one():
    estimator = DecodeEstimator(DecodeCost(9e-12, 0.0026, 74.0), known=5)
    for tokens, size, seconds in ((512, 12_000, 620_418.0), (512, 0, 0.0)):
        estimator.add(tokens, size, seconds)
        cost = estimator.cost
        assert min(cost.base_s, cost.token_s, cost.byte_s) >= 0


def test_what_batches_and_threads_share():
    cost = DecodeCost(0.004, 1e-5, 1e-8)
    assert cost.shared(4, 2) == DecodeCost(0.001, 5e-6, 5e-9)
    shares = [cost.shared(batch, 8).token_s / 1e-5 for batch in (1, 2, 8, 9, 16)]
    assert shares == pytest.approx([1, 1 / 2, 1 / 8, 2 / 9, 1 / 8])
    chunks = [(256, 10), (256, 10), (256, 20), (16, 1), (256, 10)]
    assert busiest(chunks, 1) == (1040, 51)
    assert busiest(chunks, 2) == (528, 21)
    assert busiest(chunks[:4], 2) == (512, 30)
    assert busiest(chunks[2:4], 8) == (256, 20)


def test_closing_counts_linking_and_the_question():
    model = CostModel(TRUE, DecodeCost(0, 0), link_s_per_token=1e-6, query_tokens=32)
    assert model.closing_s(1000) == pytest.approx(1e-3 + TRUE.seconds(32, 1000))
    assert CostModel(TRUE, DecodeCost(0, 0)).closing_s(1000) == 0


def test_costs_and_measurements_that_cannot_be_are_refused():
    for bad in (-1.0, nan, inf):
        with pytest.raises(ArgumentError):
            PrefillCost(bad, 0)
        with pytest.raises(ArgumentError):
            DecodeCost(0, 0, bad)
        with pytest.raises(ArgumentError):
            PrefillEstimator(TRUE).add(256, 0, bad)
        with pytest.raises(ArgumentError):
            PrefillEstimator(TRUE, spread=bad)
    with pytest.raises(ArgumentError):
        DecodeEstimator(TRUE_DECODE).add(-256, 0, 0.1)
