from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvwire.controller.simulator import RateTrace, ar1, constant, steps, token_bucket, with_outages
from kvwire.errors import ArgumentError

GRID = 64  # pieces begin at multiples of 1 / GRID, where the naive twin steps


@st.composite
def traces(draw):
    """Any trace whose pieces begin on the grid, rates of 0 among them."""
    lengths = draw(st.lists(st.integers(1, GRID), min_size=1, max_size=6))
    rates = draw(st.lists(st.sampled_from([0.0, 1.0, 10.0, 1e6]), min_size=len(lengths), max_size=len(lengths)))
    times = tuple(sum(lengths[:index]) / GRID for index in range(len(lengths)))
    period = sum(lengths) / GRID if draw(st.booleans()) else None
    return RateTrace(times, tuple(rates), period)


def instants():
    return st.integers(0, 5 * GRID).map(lambda step: step / GRID)


def naive_bytes(trace, a, b):
    """Bytes between two instants of the grid, summed step by step."""
    return sum(trace.at(step / GRID) / GRID for step in range(round(a * GRID), round(b * GRID)))


@given(traces(), instants(), instants())
def test_bytes_between_is_the_sum_over_fine_steps(trace, a, b):
    a, b = min(a, b), max(a, b)
    assert trace.bytes_between(a, b) == pytest.approx(naive_bytes(trace, a, b), rel=1e-9, abs=1e-9)


@given(traces(), st.floats(0, 5), st.floats(1e-3, 1e7))
def test_time_to_inverts_bytes_between(trace, start, size):
    end = trace.time_to(size, start)
    if end == inf:
        assert trace.mean_bytes_s == 0
        assert trace.bytes_between(start, start + 100) < size
        return
    slack = 1e-9 * max(trace.rates) * (1 + end)  # what one rounding of an instant is worth
    assert end >= start
    assert trace.bytes_between(start, end) == pytest.approx(size, rel=1e-9, abs=slack)


@given(traces(), instants(), instants())
def test_time_to_is_the_earliest_instant(trace, start, end):
    assume(start < end)
    size = trace.bytes_between(start, end)
    assume(size > 0)
    found = trace.time_to(size, start)
    assert found <= end + 1e-9
    if found < end - 1e-6:  # then the link was silent since
        assert trace.bytes_between(found, end) == pytest.approx(0, abs=1e-9 * size + 1e-6 * max(trace.rates))


@st.composite
def walks(draw):
    """A trace with an outage, an instant before it, where the outage begins and how a walk there is cut up."""
    rates = st.floats(1.0, 1e10)
    before, silent, after = draw(st.floats(1e-3, 10)), draw(st.floats(1e-3, 10)), draw(st.floats(1e-3, 10))
    middle = draw(st.floats(0, 0.99)) * before
    times = [0.0, *([middle] if middle else []), before, before + silent]
    chosen = [draw(rates), *([draw(rates)] if middle else []), 0.0, draw(rates)]
    period = before + silent + after if draw(st.booleans()) else None
    turns = draw(st.integers(0, 10_000)) if period else 0
    start = draw(st.floats(0, 1, exclude_max=True)) * before
    cuts = sorted(draw(st.lists(st.floats(0, 1), max_size=5)))
    trace = RateTrace(tuple(times), tuple(chosen), period)
    return trace, turns * (period or 0.0) + start, turns * (period or 0.0) + before, cuts


@settings(max_examples=1000)
@given(walks())
def test_a_walk_to_an_edge_never_jumps_the_outage_behind_it(walk):
    trace, start, edge, cuts = walk
    assume(start < edge)
    total = trace.bytes_between(start, edge)
    sizes = [(b - a) * total for a, b in pairwise([0.0, *cuts, 1.0])]
    reached = start
    for size in sizes:
        reached = trace.time_to(size, reached)
    assert reached <= edge * (1 + 1e-12) + 1e-9
    assert trace.moment_of(trace.bytes_by(edge)) <= edge * (1 + 1e-9)


def test_walks_to_the_edge_of_an_outage_end_there():
    rng = np.random.default_rng(0)
    late = 0
    for _ in range(2000):
        edge, silent, after = rng.uniform(0.01, 3, 3)
        trace = RateTrace((0.0, edge, edge + silent), (rng.uniform(1, 1e9), 0.0, 1e6), edge + silent + after)
        start = rng.uniform(0, edge)
        late += trace.time_to(trace.bytes_between(start, edge), start) > edge
    assert late == 0


@given(traces(), instants(), instants())
def test_a_shifted_trace_is_the_rest_of_the_trace(trace, start, later):
    moved = trace.shifted(start)
    assert moved.at(later) == trace.at(start + later)
    assert moved.bytes_between(0, later) == pytest.approx(trace.bytes_between(start, start + later), rel=1e-9, abs=1e-9)


@given(traces(), instants(), st.sampled_from([0.25, 0.5, 4.0]))
def test_a_stretched_trace_has_the_same_rates_for_longer(trace, instant, factor):
    slow = trace.stretched(factor)
    assert slow.at(instant * factor) == trace.at(instant)
    assert slow.bytes_between(0, instant * factor) == pytest.approx(factor * trace.bytes_between(0, instant))


@given(traces(), st.floats(0, 1e9))
def test_a_scaled_trace_has_the_mean_that_was_asked_for(trace, mean):
    assume(trace.mean_bytes_s > 0)
    assert trace.scaled(mean).mean_bytes_s == pytest.approx(mean)


def test_nothing_is_through_at_once_and_nothing_ever_over_a_dead_link():
    assert constant(0.0).time_to(0, 3.0) == 3.0
    assert constant(0.0).time_to(1, 3.0) == inf
    assert RateTrace((0.0, 1.0), (0.0, 0.0), 2.0).time_to(1, 3.0) == inf
    assert steps([(0.0, 10.0), (1.0, 0.0)]).time_to(11, 0.0) == inf


def test_whole_periods_end_with_their_last_byte():
    pulse = RateTrace((0.0, 1.0), (8.0, 0.0), 10.0)
    assert pulse.time_to(8, 0.0) == 1.0
    assert pulse.time_to(16, 0.0) == 11.0
    assert pulse.time_to(24, 0.0) == 21.0
    assert pulse.time_to(8, 1.0) == 11.0


def test_ar1_has_its_mean_its_spread_and_its_correlation():
    trace = ar1(np.random.default_rng(1), 1e6, sigma=0.5, correlation=0.9, step_s=0.1, length_s=2000.0)
    logs = np.log(trace.rates)
    centred = logs - logs.mean()
    assert trace.mean_bytes_s == pytest.approx(1e6)
    assert logs.std() == pytest.approx(0.5, rel=0.1)
    assert (centred[1:] * centred[:-1]).mean() / centred.var() == pytest.approx(0.9, abs=0.02)
    assert trace == ar1(np.random.default_rng(1), 1e6, sigma=0.5, correlation=0.9, step_s=0.1, length_s=2000.0)


def test_a_token_bucket_gives_its_tokens_and_what_flows_in_meanwhile():
    shaped = token_bucket(100.0, 20.0, 400.0)
    assert shaped.times == (0.0, 5.0)
    assert shaped.bytes_between(0, 5) == 400 + 5 * 20
    assert shaped.bytes_between(5, 10) == 5 * 20


@given(traces(), instants(), st.integers(1, GRID), instants())
def test_outages_silence_their_intervals_alone(trace, start, steps_long, instant):
    end = start + steps_long / GRID
    assume(trace.period_s is None or end <= trace.period_s)
    broken = with_outages(trace, [(start, steps_long / GRID)])
    within = instant if trace.period_s is None else instant % trace.period_s
    assert broken.at(instant) == (0.0 if start <= within < end else trace.at(instant))


@pytest.mark.parametrize(
    ("times", "rates", "period"),
    [
        ((), (), None),
        ((0.0,), (1.0, 2.0), None),
        ((1.0,), (1.0,), None),
        ((0.0, 0.0), (1.0, 1.0), None),
        ((0.0, 2.0), (1.0, 1.0), 2.0),
        ((0.0,), (-1.0,), None),
        ((0.0,), (inf,), None),
        ((0.0, inf), (1.0, 1.0), None),
        ((0.0,), (1.0,), float("nan")),
    ],
)
def test_impossible_traces_are_refused(times, rates, period):
    with pytest.raises(ArgumentError):
        RateTrace(times, rates, period)


@pytest.mark.parametrize(
    "ask",
    [
        lambda trace: trace.at(-1.0),
        lambda trace: trace.bytes_between(2.0, 1.0),
        lambda trace: trace.time_to(-1.0, 0.0),
        lambda trace: trace.time_to(inf, 0.0),
        lambda trace: trace.time_to(1.0, inf),
        lambda trace: trace.stretched(0.0),
        lambda trace: trace.scaled(-1.0),
        lambda trace: trace.shifted(-1.0),
        lambda trace: with_outages(trace, [(-1.0, 2.0)]),
    ],
)
def test_impossible_questions_are_refused(ask):
    with pytest.raises(ArgumentError):
        ask(constant(1.0))


def test_impossible_links_are_refused():
    with pytest.raises(ArgumentError, match="peak"):
        token_bucket(1.0, 2.0, 3.0)
    with pytest.raises(ArgumentError, match="correlation"):
        ar1(np.random.default_rng(0), 1.0, sigma=1.0, correlation=1.0)
    with pytest.raises(ArgumentError, match="mean"):
        constant(0.0).scaled(1.0)
