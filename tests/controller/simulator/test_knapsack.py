from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvwire.controller.simulator._knapsack import Savings, _prices, least_value


def exact_least_value(value, uses, budgets):
    """The least sum of values over all choices that fit."""
    items, options = value.shape
    rows = np.arange(items)
    choices = [np.array(choice) for choice in product(range(options), repeat=items)]
    fitting = [
        float(value[rows, choice].sum()) for choice in choices if (uses[:, rows, choice].sum(axis=1) <= budgets).all()
    ]
    return min(fitting, default=inf)


def problem(seed, items, options, resources):
    """Options that cost more of each resource the less their value is, and one that costs only the last."""
    draw = np.random.default_rng(seed)
    grown = np.cumsum(draw.uniform(0.2, 1.0, (items, options)), axis=1)
    value = 4.0**-grown
    uses = grown * draw.uniform(0.5, 1.5, (resources, items, options))
    uses[:-1, :, 0] = 0
    uses[-1, :, 0] *= draw.uniform(1, 5)
    low, high = uses.min(axis=2).sum(axis=1), uses.max(axis=2).sum(axis=1)
    return value, uses, low + (high - low) * draw.uniform(0.2, 0.8, resources)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), items=st.integers(1, 5), resources=st.integers(1, 3))
def test_no_choice_that_fits_has_less_value_than_the_bound(seed, items, resources):
    value, uses, budgets = problem(seed, items, 4, resources)
    bound = least_value(value, uses, budgets)
    assert bound <= exact_least_value(value, uses, budgets) * (1 + 1e-9)


def lagrangian(value, parts, prices):
    """What these prices bound."""
    return float((value + np.tensordot(prices, parts, axes=1)).min(axis=1).sum() - prices.sum())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), items=st.integers(1, 40), resources=st.integers(1, 3), skew=st.floats(-4, 0))
@example(seed=1, items=3, resources=3, skew=-3.0)
@example(seed=97090, items=23, resources=3, skew=-3.17)
def test_no_prices_bound_higher_than_those_found(seed, items, resources, skew):
    value, uses, budgets = problem(seed, items, 5, resources)
    least = uses[0].min(axis=1).sum()
    budgets[0] = least + (budgets[0] - least) * 10.0**skew  # resources that differ much in how short they are
    parts = uses / budgets[:, None, None]
    prices, bound = _prices(value, parts)
    assert bound == pytest.approx(lagrangian(value, parts, prices), rel=1e-12)
    draw = np.random.default_rng(seed)
    tried = [draw.uniform(-1, 1, resources) * 10.0 ** draw.uniform(-9, 0) + prices for _ in range(200)]
    tried += [10.0 ** draw.uniform(-8, 2, resources) for _ in range(200)]
    best = max(lagrangian(value, parts, np.clip(each, 0, 1e4 * value.max(axis=1).sum())) for each in tried)
    assert best <= bound + 2e-5 * abs(bound)


def test_a_link_that_brings_little_and_lanes_that_recompute_much_are_bounded_together():
    # 128 chunks of a latent cache, half of which can be computed; the link brings a coarse level of the rest.
    sizes = np.array((0, 104592, 379079, 990340, 2027369, 3525495), np.float64)
    errors = np.array((5.9e-5, 0.0258, 0.0064, 0.00135, 0.00027, 5.9e-5)) / 128
    value, use = np.tile(errors, (128, 1)), np.stack([sizes, np.eye(6)[0] * 0.0064])
    budgets = np.array([13.6e6, 0.46])
    bound = least_value(value, np.repeat(use[:, None], 128, axis=1), budgets)
    # 71 computed, 27 at the second level and 30 at the first.
    feasible = 71 * errors[0] + 27 * errors[2] + 30 * errors[1]
    assert 0.95 * feasible < bound <= feasible


def test_options_that_are_not_there_are_not_chosen():
    value = np.array([[inf, 3.0, 1.0], [5.0, inf, 2.0]])
    uses = np.array([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]])
    assert least_value(value, uses, np.array([3.0])) == pytest.approx(4.5, rel=1e-4)  # half of each of two


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), items=st.integers(1, 8), share=st.floats(0, 1))
def test_no_purchase_saves_more_than_the_bound(seed, items, share):
    draw = np.random.default_rng(seed)
    cost, saved = draw.uniform(0.01, 1, items), draw.uniform(0, 1, (items, 2))
    most = float(cost.sum())
    bought = np.array(list(product((0.0, 1.0), repeat=items)))
    fits = bought[bought @ cost <= share * most]
    bound = Savings(cost, saved, most).most(share * most)
    assert (bound * (1 + 1e-9) + 1e-12 >= (fits @ saved).max(axis=0)).all()
