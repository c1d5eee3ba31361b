"""The third action: rows of a prompt computed anew, weighed against bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller import Goal, RepairOption, replay
from kvwire.controller import events as ev
from kvwire.controller.policies import CacheBlend
from kvwire.controller.repair import rows_of
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.errors import ArgumentError
from kvwire.reuse import rows_for

from .playing import COSTS, MB, RTT_S, document, play

OPTION = RepairOption(most=0.3, error=0.2, shares=(0.0, 0.05, 0.15, 0.3), left=(1.0, 0.2, 0.1, 0.05))
DOCUMENTS = ((document(),), (document(),), (document(),))


def arrival(option, *, at=0.0, objective="quality", deadline_s=1.0, documents=DOCUMENTS):
    goal = Goal(objective=objective, deadline_s=deadline_s)
    return LoadArrival(at, documents, goal, index_s=0.0, repair=option)


def only(played):
    (outcome,) = played.outcomes
    return outcome


def finish(played, load=0):
    ((_, instruction),) = played.instructions(ev.Finish, load)
    return instruction


@given(st.floats(0, 1), st.lists(st.integers(1, 400), min_size=1, max_size=9))
def test_the_controller_counts_rows_as_repair_does(share, documents):
    assert rows_of(share, sum(documents), documents[0]) == rows_for(share, tuple(documents))


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_error_that_is_left_never_grows(one, other):
    low, high = sorted((one, other))
    assert OPTION.error_left(low) >= OPTION.error_left(high) >= 0
    assert OPTION.error_left(0.0) == 0.2
    assert OPTION.error_left(0.05) == pytest.approx(0.04)
    assert OPTION.error_left(0.1) == pytest.approx(0.03)
    assert OPTION.error_left(0.9) == pytest.approx(0.01)


@given(
    st.floats(0.01, 2),
    st.floats(0.001, 0.5),
    st.floats(0.1, 3),
    st.lists(st.tuples(st.floats(0.001, 1), st.floats(1e-6, 0.5)), min_size=1, max_size=5),
)
def test_the_best_share_is_the_best_of_all_candidates(left_s, look_s, all_s, steps):
    """Against trying every candidate and every level by hand."""
    times = sorted(seconds for seconds, _ in steps)
    errors = sorted((error for _, error in steps), reverse=True)
    coding = list(zip(times, errors, strict=True))

    def closing_s(share):
        return look_s * (share > 0) + all_s * share

    chosen = OPTION.best(left_s, closing_s, coding)
    assert chosen in OPTION.candidates()

    def naive(share):
        spare = left_s - closing_s(share)
        done = [error for seconds, error in coding if seconds <= spare]
        return (done[-1] + OPTION.error_left(share)) if done else None

    feasible = {share: naive(share) for share in OPTION.candidates() if naive(share) is not None}
    if not feasible:
        assert chosen == OPTION.least
    else:
        # Between levels the choice counts on a mixture of them: it may be better than whole levels say.
        spare = left_s - closing_s(chosen)
        assert spare >= coding[0][0]
        assert errors[-1] + OPTION.error_left(chosen) <= 1.01 * min(feasible.values()) + 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 0.5, "most": 0.1},
        {"most": 1.5},
        {"error": -1.0},
        {"error": float("nan")},
        {"shares": (0.0, 0.5, 0.2), "left": (1.0, 0.5, 0.2)},
        {"shares": (0.1, 0.5), "left": (1.0, 0.5)},
        {"shares": (0.0, 0.5), "left": (0.5, 0.9)},
        {"shares": (0.0,), "left": (1.0, 0.5)},
    ],
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ArgumentError):
        RepairOption(**wrong)


def test_idle_time_before_a_deadline_is_spent_on_repair():
    played = play([arrival(OPTION)], 100 * MB)
    assert finish(played).repair == OPTION.most
    assert only(played).in_time
    assert only(played).link_error == pytest.approx(0.01)


def test_text_takes_the_place_of_bytes_where_links_are_known_to_cost_more():
    option = replace(OPTION, weighs_text=True)
    played = play([arrival(option)], 100 * MB)
    first, tokens = (sum(sum(each[0].tokens) for each in part) for part in (DOCUMENTS[:1], DOCUMENTS))
    assert only(played).recomputed > only(play([arrival(OPTION)], 100 * MB)).recomputed
    assert finish(played).front > first
    assert only(played).link_error == pytest.approx(0.01 * (1 - (finish(played).front - first) / tokens))


def test_without_a_deadline_only_the_floor_is_repaired():
    sooner = play([arrival(OPTION, objective="earliest", deadline_s=None)], 100 * MB)
    assert finish(sooner).repair == 0.0
    floor = replace(OPTION, least=0.05)
    played = play([arrival(floor, objective="earliest", deadline_s=None)], 100 * MB)
    assert finish(played).repair == 0.05
    assert only(played).ttft_s > only(sooner).ttft_s


def test_where_time_is_short_rows_give_way_to_the_deadline():
    for deadline_s in (0.12, 0.2, 0.3, 0.5):
        plain = play([arrival(None, deadline_s=deadline_s)], 40 * MB)
        played = play([arrival(OPTION, deadline_s=deadline_s)], 40 * MB)
        assert only(played).in_time or not only(plain).in_time
        assert 0 <= finish(played).repair <= OPTION.most


def test_a_repair_that_gives_much_goes_before_finer_bytes():
    """Three tenths of a second on a link that carries two levels in it: where links matter, fewer bytes, more rows."""
    much = replace(OPTION, error=5.0)
    little = replace(OPTION, error=1e-6)
    rows, levels = [], []
    for option in (little, OPTION, much):
        played = play([arrival(option, deadline_s=0.3)], 8 * MB)
        assert only(played).in_time
        rows.append(finish(played).repair)
        levels.append(only(played).error)
    assert all(fewer <= more for fewer, more in pairwise(rows))
    assert rows[0] < rows[-1]
    assert levels[0] <= levels[-1]


def test_what_is_asked_for_is_done_even_where_it_is_late():
    fixed = replace(OPTION, least=1.0, most=1.0)
    played = play([arrival(fixed, deadline_s=0.2)], 100 * MB)
    assert finish(played).repair == 1.0
    assert not only(played).in_time


def test_a_slow_repair_is_learnt():
    slow = replace(COSTS, repair_scale=1.0)
    played = play([arrival(replace(OPTION, least=0.3), at=float(at), deadline_s=1.0) for at in range(3)], 100 * MB)
    assert played.estimates.repair.value == pytest.approx(1.0, rel=0.01)
    played.estimates.repair.add(3.0)
    for _ in range(8):
        played.estimates.repair.add(3.0)
    assert played.estimates.costs(8).repair_scale == pytest.approx(3.0, rel=0.01)
    assert slow.repair_scale == 1.0
    state = played.estimates.to_state()
    again = type(played.estimates).of_state(state, None, 1e6, RTT_S)
    assert again.repair.value == played.estimates.repair.value


def test_a_load_that_is_late_waits_for_no_repair():
    """Whoever cannot be in time is served as soon as can be, before others repair what they need not."""
    late = arrival(None, at=0.02, deadline_s=0.05)
    plain, repaired = (play([arrival(option), late], 30 * MB).outcomes[1].ttft_s for option in (None, OPTION))
    assert repaired < plain + 0.05


def test_loads_with_repair_are_replayed_and_written_down():
    played = play([arrival(OPTION), arrival(replace(OPTION, least=0.1), at=0.05)], 20 * MB)
    entries = played.log
    assert entries == played.log
    asked = [entry.event for entry in entries if isinstance(entry.event, ev.LoadRequested)]
    assert [event.repair for event in asked] == [OPTION, replace(OPTION, least=0.1)]
    assert callable(replay)


def test_levels_that_the_goal_leaves_out_are_not_counted_on():
    """With a floor, what is below it is never fetched; with a ceiling, what is above it neither."""
    low = play([arrival(OPTION, deadline_s=0.35)], 8 * MB)
    goal = Goal(objective="quality", deadline_s=0.6, floor=3)
    floor = play([replace(arrival(OPTION), goal=goal)], 8 * MB)
    plain = play([replace(arrival(None), goal=goal)], 8 * MB)
    assert only(low).in_time
    assert only(floor).in_time or not only(plain).in_time
    ceiling = Goal(objective="quality", deadline_s=0.35, ceiling=0)
    played = play([replace(arrival(OPTION), goal=ceiling)], 8 * MB)
    assert only(played).in_time
    assert finish(played).repair == OPTION.most


PAPER = {  # seconds a layer at 4,000 tokens from an NVMe disk of 4.8 GB/s: computing 15 % of the rows, loading
    "7B": (0.003, 0.016),
    "70B": (0.007, 0.004),
}


def test_cacheblends_rule_gives_its_papers_examples():
    """Section 5.1 of arXiv 2405.16444: a small model can compute more rows while it loads, a large one 15 %."""
    rule, shares = CacheBlend(), {}
    for model, (rows_s, load_s) in PAPER.items():
        prefill_s = rows_s / 0.15
        shares[model] = rule.repair_share(load_s, prefill_s)
        assert shares[model] * prefill_s == pytest.approx(max(rows_s, load_s))
    assert shares == {"7B": pytest.approx(0.8), "70B": 0.15}
    assert rule.repair_share(1.0, 0.5) == 1.0  # loading takes longer than a prefill: all of it is free
    assert rule.repair_share(0.0, 1.0) == 0.15
    assert rule.repair_share(0.0, 0.0) == 1.0


@pytest.mark.parametrize("rate", [1 * MB, 8 * MB, 400 * MB])
def test_cacheblends_rule_takes_as_many_rows_as_loading_takes_time(rate):
    played = play([arrival(OPTION, objective="earliest", deadline_s=None)], rate, policy=CacheBlend())
    size = sum(row[-1] for variants in DOCUMENTS for row in variants[0].fetch_bytes)
    tokens = sum(sum(variants[0].tokens) for variants in DOCUMENTS)
    wanted = min(1.0, max(0.15, size / rate / COSTS.prefill.seconds(tokens)))
    assert finish(played).repair == pytest.approx(wanted, rel=0.05)
    assert {decision.level for decision in finish(played).decisions} == {3}


def test_a_share_that_was_asked_for_goes_before_cacheblends_rule():
    fixed = replace(OPTION, least=0.05, most=0.05)
    played = play([arrival(fixed, deadline_s=0.2)], 8 * MB, policy=CacheBlend())
    assert finish(played).repair == 0.05
