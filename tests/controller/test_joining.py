"""Passes of several loads that run as one: only where all end sooner in sum, and where no load's cut is crossed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller import Controller, ControllerSettings, CostModel, DecodeCost, Estimates, Goal, PrefillCost
from kvwire.controller import events as ev
from kvwire.controller.core import replay
from kvwire.controller.joining import join, sum_of_ends
from kvwire.controller.simulator.loads import LoadArrival, Trouble
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

from .playing import RTT_S, document, play

SLOW = 10.0
"""Bytes a second of a link that nobody waits for."""
PREFILL = PrefillCost(0.02, 1e-5, 1e-9)
ALONE = CostModel(PREFILL, DecodeCost(0.001, 1e-6, 1e-9), 1e-6)
JOINS = replace(ALONE, joined=PREFILL)
"""A pass is mostly its fixed part, as on a GPU where a short one is bound by reading the weights."""
SHORT = document(1, tokens=64)


def loads(count, *, deadline_s=None, every_s=0.0, doc=SHORT):
    return [LoadArrival(at * every_s, ((doc,),), Goal.within(deadline_s), 8) for at in range(count)]


def together(played):
    return [each for entry in played.log for each in entry.instructions if isinstance(each, ev.RecomputeTogether)]


ROWS = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 4000)), min_size=1, max_size=7)


@given(ROWS, st.floats(0, 0.05), st.floats(1e-7, 1e-4), st.integers(1, 8), st.floats(0, 0.3))
def test_joining_makes_the_sum_of_ends_less_and_is_not_too_long(rows, base_s, token_s, most, longest_s):
    costs = replace(ALONE, joined=PrefillCost(base_s, token_s, 1e-9))
    chosen = join(rows, costs, ControllerSettings(max_joined=most), longest_s)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most
    if len(chosen) == 1:
        return
    seconds = costs.joined_s([rows[each] for each in chosen])
    assert seconds <= longest_s
    alone_s = [PREFILL.seconds(*row) for row in rows]
    # One by one, by hand.
    ends, now = [seconds] * len(chosen), seconds
    for number, each in enumerate(alone_s):
        if number not in chosen:
            now += each
            ends.append(now)
    assert sum(ends) == pytest.approx(sum_of_ends(alone_s, chosen, seconds))
    assert sum(ends) < sum_of_ends(alone_s, [0], alone_s[0])


@given(st.integers(1, 500), st.integers(0, 500), st.integers(2, 6), st.floats(0, 0.05), st.floats(1e-7, 1e-3))
def test_equal_passes_are_joined_as_well_as_any_choice_of_them(tokens, context, count, base_s, token_s):
    """Where rows are alike, none of all choices ends sooner by more than what is not worth it."""
    prefill = PrefillCost(base_s, token_s, 1e-9)
    costs, rows = replace(ALONE, prefill=prefill, joined=prefill), [(tokens, context)] * count

    def ends(chosen):
        alone_s = [prefill.seconds(*row) for row in rows]
        end_s = alone_s[0] if len(chosen) == 1 else costs.joined_s([rows[0]] * len(chosen))
        return sum_of_ends(alone_s, chosen, end_s)

    best = min(ends((0, *others)) for size in range(count) for others in combinations(range(1, count), size))
    assert ends(join(rows, costs, ControllerSettings(max_joined=count))) <= best * 1.06 + 1e-12


def test_rows_that_lie_in_memory_twice_are_bounded():
    cost = PrefillCost(10.0, 1e-9)  # mostly its fixed part, which joining saves
    costs, rows = replace(ALONE, prefill=cost, joined=cost), [(16_000, 0)] * 8
    assert [len(join(rows, costs, ControllerSettings(max_joined_tokens=most))) for most in (10, 32_000, 64_000)] == [
        1, 2, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_eight_loads_at_once_end_sooner_joined_than_one_by_one(workers):
    alone = play(loads(8), SLOW, costs=ALONE, workers=workers)
    joining = play(loads(8), SLOW, costs=JOINS, workers=workers)
    assert not together(alone)
    assert together(joining)
    before, after = ([each.ttft_s for each in played.outcomes] for played in (alone, joining))
    assert max(after) < 0.75 * max(before)  # the questions' passes still run one by one
    assert sum(after) < 0.9 * sum(before)
    assert all(each.decisions for each in joining.outcomes)


@pytest.mark.parametrize("count", [1, 4])
def test_where_joining_is_slower_nothing_changes(count):
    slow = replace(ALONE, joined=PrefillCost(1.0, 1e-3))
    plain, unused = (play(loads(count, every_s=0.01), SLOW, costs=costs) for costs in (ALONE, slow))
    assert unused.log == plain.log


def test_one_load_is_played_as_without_joining():
    plain, able = (play(loads(1, doc=document(8)), 1e6, costs=costs) for costs in (ALONE, JOINS))
    assert able.log == plain.log


def drawn(seed, over_s):
    """Loads of all kinds that come within some time, and the rate of their link."""
    draw = random.Random(seed)
    arrivals = [
        LoadArrival(
            draw.uniform(0, over_s),
            tuple((document(draw.randint(1, 3), tokens=draw.choice([16, 64, 256])),) for _ in range(2)),
            Goal.within(draw.choice([None, draw.uniform(0.1, 1.0)])),
            8,
        )
        for _ in range(draw.randint(2, 8))
    ]
    return sorted(arrivals, key=lambda each: each.at), draw.choice([SLOW, 1e6, 2e7])


@pytest.mark.parametrize("seed", range(30))
def test_as_many_loads_that_come_at_once_are_in_time_joined(seed):
    """Of later ones nobody knows when a pass begins, and none can be called back."""
    arrivals, rate = drawn(seed, 0.0)
    plain, able = (play(arrivals, rate, costs=costs, workers=2) for costs in (ALONE, JOINS))
    late = [sum(not each.in_time for each in played.outcomes) for played in (plain, able)]
    assert late[1] <= late[0]


def test_loads_that_come_at_any_time_are_sooner_in_sum():
    """One that comes while a joined pass runs waits for longer: of some 100 with a deadline one more is late."""
    sums, late = [0.0, 0.0], [0, 0]
    for seed in range(30):
        arrivals, rate = drawn(seed, 0.2)
        for at, costs in enumerate((ALONE, JOINS)):
            outcomes = play(arrivals, rate, costs=costs, workers=2).outcomes
            sums[at] += sum(each.ttft_s for each in outcomes)
            late[at] += sum(not each.in_time for each in outcomes)
    assert sums[1] < 0.9 * sums[0]
    assert late[1] <= late[0] + 1


def test_a_log_with_joined_passes_is_written_read_and_replayed():
    played = play(loads(6), SLOW, costs=JOINS)
    log = played.log
    assert log == played.log
    assert together(played)
    replay(log, Controller(Estimates(JOINS, SLOW, RTT_S), ControllerSettings()))


def test_what_a_joined_pass_takes_is_learnt_and_remembered():
    true = replace(JOINS, joined=PREFILL.scaled(3.0))
    played = play(loads(8, every_s=0.001), SLOW, costs=JOINS, true=true)
    assert together(played)
    learnt = played.estimates.joined.cost
    assert learnt.seconds(64) > 1.5 * PREFILL.seconds(64)
    state = played.estimates.to_state()
    again = Estimates.of_state(state, None, 1e6, 0.01)
    assert again.costs().joined.seconds(256, 128) == pytest.approx(learnt.seconds(256, 128))
    assert Estimates.of_state(Estimates(ALONE, 1e6, 0.01).to_state(), None, 1e6, 0.01).joined is None


class Two:
    """A controller with some loads of one chunk each, told by hand until a joined pass runs."""

    def __init__(self, count=3, chunks=1):
        self.controller = Controller(Estimates(JOINS, SLOW, 0.001), ControllerSettings(workers=2))
        self.now, self.out = 0.0, []
        self.tell(ev.LoadRequested(0, 1, 8, Goal()))
        self.tell(ev.IndexKnown(0, 0, (document(1, tokens=64),)))  # its pass keeps the lane busy
        for number in range(1, count + 1):
            self.tell(ev.LoadRequested(number, 1, 8, Goal()))
            self.tell(ev.IndexKnown(number, 0, (document(chunks, tokens=64),)))
        self.tell(ev.RecomputeDone((ChunkId(0, 0, 0),), 0.02))
        if self.joined is None:
            self.tell(ev.PromptAssembled(0, 64, 0.0))
        for _ in range(100):
            if self.joined is None:
                self.tell(ev.Tick())
        assert self.joined is not None

    def tell(self, event):
        self.now += 0.002
        new = self.controller.handle(event, self.now)
        self.out += new
        return new

    @property
    def joined(self):
        return next((each for each in self.out if isinstance(each, ev.RecomputeTogether)), None)

    def finished(self):
        return {each.load for each in self.out if isinstance(each, ev.Finish)}


def test_a_pass_that_fails_in_the_middle_leaves_the_others_whole_and_is_fetched():
    hand = Two()
    bad, *others = hand.joined.passes
    failed = (ev.RecomputeFailed(bad.first, "memory"),)
    out = hand.tell(ev.RecomputedTogether(hand.joined.passes, 0.03, joined=False, failed=failed))
    assert hand.finished() >= {each.first.load for each in others}
    assert bad.first.load not in hand.finished()
    assert [each.chunk for each in out if isinstance(each, ev.Fetch)] == [bad.first]
    assert not hand.controller.estimates.joined.is_measured


def test_each_load_is_told_its_own_trouble():
    """Nobody reads what went wrong with somebody else's text."""
    hand = Two()
    passes = hand.joined.passes
    failed = tuple(ev.RecomputeFailed(each.first, f"trouble of {each.first.load}") for each in passes)
    hand.tell(ev.RecomputedTogether(passes, 0.03, joined=False, failed=failed))
    for each in passes:
        load = hand.controller.loads[each.first.load]
        assert list(load.doc(0).troubles.values()) == [f"recomputation failed: trouble of {load.number}"]


def test_wrong_reports_change_nothing():
    hand = Two()
    passes = hand.joined.passes
    wrong = [
        ev.RecomputedTogether(passes[:-1], 0.03),
        ev.RecomputedTogether(passes, float("nan")),
        ev.RecomputedTogether(passes, -1.0),
        ev.RecomputedTogether(passes, 0.03, failed=(ev.RecomputeFailed(ChunkId(0, 9, passes[0].first.load), ""),)),
        ev.RecomputedTogether(passes, 0.03, failed=(ev.RecomputeFailed(passes[0].first, ""),) * 2),
        ev.RecomputedTogether(passes, 0.03, unfit=(99,)),
        ev.RecomputedTogether(passes, 0.03, blind=(ChunkId(0, 9, passes[0].first.load),)),
        ev.RecomputeDone((passes[0].first,), 0.03),
        ev.RecomputeFailed(passes[0].first, "memory"),
    ]
    for event in wrong:
        with pytest.raises(ArgumentError):
            hand.tell(event)
    hand.tell(ev.RecomputedTogether(passes, 0.03))
    assert hand.finished() >= {each.first.load for each in passes}
    with pytest.raises(ArgumentError, match="no such joined pass"):
        hand.tell(ev.RecomputedTogether(passes, 0.03))


@pytest.mark.parametrize("seed", range(6))
def test_troubles_and_leavers_end_every_load(seed):
    draw = random.Random(seed)
    arrivals = [
        LoadArrival(
            draw.uniform(0, 0.1), ((document(draw.randint(1, 3), tokens=64),),),
            Goal.within(draw.choice([None, 0.3])), 8, leaves_s=draw.choice([0.05, 1e3]),
        )
        for _ in range(8)
    ]  # fmt: skip
    arrivals.sort(key=lambda each: each.at)
    trouble = Trouble(fail=0.3, corrupt=0.3, noise=0.5)
    played = play(arrivals, draw.choice([SLOW, 1e6]), costs=JOINS, trouble=trouble, seed=seed, workers=2)
    for arrival, each in zip(arrivals, played.outcomes, strict=True):
        assert each.decisions or arrival.leaves_s < 1 or "cannot be made ready" in each.reason


class Unable:
    """What tells a controller that no joined pass ran as one."""

    def __init__(self, controller):
        self._controller = controller

    @property
    def wake_at(self):
        return self._controller.wake_at

    def handle(self, event, now):
        told = replace(event, joined=False) if isinstance(event, ev.RecomputedTogether) else event
        return self._controller.handle(told, now)


def test_an_engine_that_cannot_after_all_is_asked_for_no_more_joined_passes():
    arrivals = loads(24, every_s=0.02)
    assert len(together(play(arrivals, SLOW, costs=JOINS))) > 3
    played = play(arrivals, SLOW, costs=JOINS, wrap=Unable)
    assert len(together(played)) == 1
    assert played.log[-1].now < 30  # after which it is asked once more
