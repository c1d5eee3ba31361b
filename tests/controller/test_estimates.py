from __future__ import annotations

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller.costs import CostModel, DecodeCost, PrefillCost
from kvwire.controller.estimates import Estimates
from kvwire.controller.snapshot import SLOWEST
from kvwire.errors import ArgumentError, CorruptError

MB = 1_000_000
COSTS = CostModel(PrefillCost(0.01, 5e-5, 2e-9), DecodeCost(0.002, 1e-6, 3e-9), 1e-6)
HOUR = 3600.0


def cold():
    return Estimates(COSTS, 10 * MB, 0.02)


def taught():
    estimates = cold()
    for i in range(100):
        estimates.bandwidth.add(200_000, 0.005 * i, 0.005 * (i + 1))  # 40 MB/s
    for tokens, context in ((256, 0), (512, 1000), (64, 4000), (256, 8000)):
        estimates.prefill.add(tokens, context, 3 * COSTS.prefill.seconds(tokens, context))
        estimates.decode.add(tokens, 100 * tokens, 0.5 * COSTS.decode.seconds(tokens, 100 * tokens))
        estimates.ttfb.add(0.05)
        estimates.closing.add(0.004 / 1000)
    return estimates


def again(estimates, **options):
    state = json.loads(json.dumps(estimates.to_state(), allow_nan=False))
    return Estimates.of_state(state, COSTS, 10 * MB, 0.02, **options)


def test_cold_estimates_are_the_priors():
    estimates = cold()
    assert (estimates.bandwidth.value, estimates.ttfb.value) == (10 * MB, 0.02)
    assert estimates.costs(32) == CostModel(COSTS.prefill, COSTS.decode, 1e-6, 32)
    assert not estimates.knows_link
    assert not estimates.knows_engine


def test_costs_are_those_measured():
    costs = taught().costs(32)
    assert costs.prefill.seconds(256, 2000) == pytest.approx(3 * COSTS.prefill.seconds(256, 2000), rel=0.02)
    assert costs.decode.seconds(256, 25_600) == pytest.approx(0.5 * COSTS.decode.seconds(256, 25_600), rel=0.02)
    assert costs.link_s_per_token == pytest.approx(4e-6)
    assert taught().knows_link
    assert taught().knows_engine


def test_a_copy_learns_apart():
    first = taught()
    second = first.copy()
    second.bandwidth.add(0, 1.0, 2.0)
    second.prefill.add(256, 0, 10.0)
    second.ttfb.add(9.0)
    assert first.to_state() == taught().to_state()
    assert second.to_state() != first.to_state()


def test_what_was_written_down_comes_back():
    first = taught()
    second = again(first)
    assert second.costs(32) == first.costs(32)
    assert second.bandwidth.value == pytest.approx(first.bandwidth.usual)
    assert second.bandwidth.low == pytest.approx(first.bandwidth.low, rel=0.02)
    assert second.ttfb.value == pytest.approx(first.ttfb.value)
    assert second.prefill.spread == pytest.approx(first.prefill.spread)
    assert second.prefill.known == first.prefill.known
    assert not second.knows_link
    assert not second.knows_engine


@given(st.floats(1e3, 1e10), st.floats(0, 100), st.floats(0, 10), st.floats(0, 0.1), st.integers(0, 5))
def test_every_state_is_read_back_as_it_was(bandwidth, ttfb, base, token, known):
    estimates = Estimates(CostModel(PrefillCost(base, token), DecodeCost(token, base)), bandwidth, ttfb)
    for _ in range(known):
        estimates.prefill.add(100, 0, 0.5)
    assert again(estimates).to_state() == estimates.to_state()


def test_an_old_link_is_a_weak_prior_and_an_old_engine_a_strong_one():
    fresh, old, ancient = (again(taught(), age_s=age) for age in (0.0, HOUR, 1e9))
    assert fresh.bandwidth.low > 0.95 * fresh.bandwidth.value
    assert old.bandwidth.value == fresh.bandwidth.value
    assert old.bandwidth.low < 0.55 * old.bandwidth.value
    assert old.bandwidth.is_guess
    assert not fresh.bandwidth.is_guess
    assert ancient.bandwidth.low == pytest.approx(0.5 * ancient.bandwidth.value)
    assert old.ttfb.high > fresh.ttfb.high
    assert old.costs() == fresh.costs()
    assert old.prefill.high == fresh.prefill.high


def test_a_link_that_died_is_not_believed_to_be_dead():
    estimates = taught()
    estimates.bandwidth.add(0, 0.5, 500.0)
    assert estimates.bandwidth.value < 10
    known = again(estimates).bandwidth
    assert known.value >= SLOWEST
    known.add(200_000, 0.0, 0.005)
    assert known.value == pytest.approx(40 * MB)


def test_halves_of_a_state_are_enough():
    state = taught().to_state()
    link = Estimates.of_state({"version": 1, "link": state["link"]}, COSTS, MB, 1.0)
    assert link.costs() == CostModel(COSTS.prefill, COSTS.decode, 1e-6)
    assert link.bandwidth.value == pytest.approx(40 * MB)
    engine = Estimates.of_state({"version": 1, "engine": state["engine"]}, None, MB, 1.0)
    assert engine.costs() == taught().costs()
    assert engine.bandwidth.value == MB
    with pytest.raises(ArgumentError):
        Estimates.of_state({"version": 1, "link": state["link"]}, None, MB, 1.0)


def test_a_state_of_another_version_or_form_is_refused():
    state = taught().to_state()
    damaged = [None, [], "x", 1, {}, {"version": 1, "more": 1}, {**state, "version": 2}, {**state, "version": True}]
    damaged += [{**state, "link": None}, {**state, "engine": []}, {**state, "link": {}}]
    for wrong in damaged:
        with pytest.raises(CorruptError, match="measured again"):
            Estimates.of_state(wrong, COSTS, MB, 0.02)


def leaves(state, path=()):
    for name, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def changed(state, path, value):
    name, *rest = path
    return {**state, name: changed(state[name], rest, value) if rest else value}


@pytest.mark.parametrize("path", list(leaves(taught().to_state())), ids="/".join)
@pytest.mark.parametrize("value", [nan, inf, -1, 10**400, 1e15, None, "1", [1], True, {}], ids=str)
def test_absurd_values_are_refused(path, value):
    with pytest.raises(CorruptError):
        Estimates.of_state(changed(taught().to_state(), path, value), COSTS, MB, 0.02)


def test_wrong_priors_and_ages_are_the_callers_fault():
    for age in (-1.0, nan, inf):
        with pytest.raises(ArgumentError):
            again(taught(), age_s=age)
    with pytest.raises(ArgumentError):
        Estimates.of_state({"version": 1}, COSTS, nan, 0.02)


def test_errors_over_horizons_come_back_and_fade_with_age():
    first = taught()
    counts = first.bandwidth.horizons.counts
    assert sum(counts[0]) > 4
    assert again(first).bandwidth.horizons.counts == tuple(tuple(round(each, 4) for each in row) for row in counts)
    old = again(first, age_s=600.0).bandwidth.horizons.counts
    assert sum(old[0]) == pytest.approx(sum(counts[0]) / 2, rel=1e-3)


def test_what_older_versions_wrote_is_read():
    state = taught().to_state()
    del state["link"]["horizons"]
    link = Estimates.of_state(state, COSTS, MB, 0.02)
    assert link.bandwidth.value == pytest.approx(40 * MB)
    assert link.bandwidth.low_over(0.5) == link.bandwidth.low
    with pytest.raises(CorruptError, match="measured again"):
        Estimates.of_state({**state, "link": {**state["link"], "horizons": {"0.05": []}}}, COSTS, MB, 0.02)
