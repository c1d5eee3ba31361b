"""Documents with floors of their own: no coarser level is fetched, whatever the goal, the policy and the link are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import DecodeCost, DocumentPlanInput, Goal
from kvwire.controller import events as ev
from kvwire.controller.chunk_table import ChunkTable
from kvwire.controller.forecast import Timeline
from kvwire.controller.policies import Adaptive, CacheGen, Fixed
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.simulator.offline_optimum import optimum
from kvwire.controller.snapshot import RECOMPUTE
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .naive_timeline import finish_naive, splits
from .playing import COSTS, MB, document, one, play, quality
from .requests import LEVELS, plan_requests

GOALS = [
    Goal(), Goal(objective="quality", deadline_s=0.25), Goal(objective="cheapest", deadline_s=0.25),
    Goal(objective="quality", deadline_s=0.02), Goal(objective="cheapest", deadline_s=5.0, floor=1),
]  # fmt: skip


class AlwaysCoarse(Fixed):
    """A policy that never asks for what documents want."""

    def plan(self, request):
        plan = super().plan(request)
        return replace(plan, levels=np.where(plan.levels == RECOMPUTE, plan.levels, 0))


def used(outcome):
    return {(d.chunk.document, d.level) for d in outcome.decisions if d.level is not None}


@pytest.mark.parametrize("policy", [Adaptive(), CacheGen(), Fixed(0), AlwaysCoarse(0)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.objective}-{goal.deadline_s}")
@pytest.mark.parametrize("rate", [0.3, 3.0, 100.0])
@pytest.mark.parametrize("layered", [True, False])
def test_no_coarser_level_is_fetched(policy, goal, rate, layered):
    documents = [replace(document(4, layered=layered), floor=floor) for floor in (0, 2, 3)]
    arrival = LoadArrival(0.0, tuple((each,) for each in documents), goal, 32)
    played = play([arrival], RateTrace((0.0,), (rate * MB,)), policy=policy)
    (outcome,) = played.outcomes
    assert all(level >= documents[number].floor for number, level in used(outcome))


def test_a_floor_that_no_level_reaches_is_the_finest_and_text_stays_allowed():
    slow, fast = (RateTrace((0.0,), (rate,)) for rate in (1e4, 1e9))
    high = replace(document(4), floor=9)
    arrival = LoadArrival(0.0, ((high,),), Goal(), 32)
    (crawling,) = play([arrival], slow).outcomes
    (flying,) = play([arrival], fast).outcomes
    assert used(crawling) == set()
    assert {level for _, level in used(flying)} == {3}


def test_what_comes_below_the_floor_is_recomputed_where_there_is_text():
    rows = ((100, 200), *[(100, 200, 400, 800)] * 3)
    errors = tuple(tuple(0.1 ** (1 + level) for level in range(len(row))) for row in rows)
    for text in (True, False):
        short = DocumentPlanInput((256,) * 4, rows, text, errors, floor=2)
        (outcome,) = play([LoadArrival(0.0, ((short,),), Goal(), 32)], RateTrace((0.0,), (1e9,))).outcomes
        levels = {d.chunk.chunk: d.level for d in outcome.decisions}
        assert levels[0] == (None if text else 1)
        assert text or {levels[1], levels[2], levels[3]} == {2}


@given(plan_requests(), st.data())
@settings(max_examples=200, deadline=None)
def test_plans_with_floors_take_the_time_that_playing_them_takes(request, data):
    count = request.chunks.count
    floor = np.array(data.draw(st.lists(st.integers(0, LEVELS), min_size=count, max_size=count)), np.int64)
    chunks = replace(request.chunks, floor=np.minimum(floor, np.maximum(request.chunks.finest, 0)))
    request = replace(request, chunks=chunks, refinable=None)
    targets = np.arange(request.goal.floor, LEVELS)
    short_cut, whole = (Timeline(request, targets, request.bandwidth, plain=plain) for plain in (True, False))
    for row, target in enumerate(targets):
        levels = chunks.level_for(int(target))
        assert ((levels == RECOMPUTE) | (levels >= np.minimum(chunks.floor, chunks.top))).all()
        assert (whole.levels[row] == levels).all()
        for split in splits(request, levels):
            expected = finish_naive(request, int(target), levels, split, request.bandwidth)
            assert whole.finish_s[row, split] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (short_cut.levels == whole.levels).all()


def test_a_table_counts_levels_below_the_floor_as_it():
    made = [document(chunks, floor_levels) for chunks, floor_levels in ((1, 4), (3, 4), (3, 1))]
    for given_floor, each in ((2, made[0]), (2, made[1]), (2, made[2])):
        table = ChunkTable()
        table.place(table.add(0, each.tokens), replace(each, floor=given_floor), has_text=True)
        row, errors = each.fetch_bytes[0], each.errors[0]
        at = min(given_floor, len(row) - 1)
        assert [column[0] for column in table.sizes] == [*[row[at]] * at, *row[at:]]
        assert [column[0] for column in table.errors] == [*[errors[at]] * at, *errors[at:]]
        assert table.lowest(0, 0) == at


def test_the_bound_of_any_controller_has_the_floor_too():
    rate = RateTrace((0.0,), (3 * MB,))
    documents = [document(4, text=False), document(4, text=False)]
    own = [replace(each, floor=2) for each in documents]
    by_goal = optimum(documents, COSTS, rate, objective="earliest", floor=2)
    assert optimum(own, COSTS, rate, objective="earliest") == by_goal
    assert optimum(documents, COSTS, rate, objective="earliest").ttft_s < by_goal.ttft_s


def test_a_floor_below_0_is_refused():
    with pytest.raises(ArgumentError, match="a level from 0 on"):
        replace(document(), floor=-1)


def test_nothing_is_decoded_below_the_floor_for_want_of_time():
    """Decoding takes long, so that what came is decoded more coarsely at first, but not below the floor."""
    slow = replace(COSTS, decode=DecodeCost(0.001, 1e-5, 1e-7))
    given_document = replace(document(16, text=False), floor=2)
    _, played = one(quality(0.3), 500 * MB, given_document, costs=slow, true=slow, decode_batch=4)
    fetched = {fetch.chunk: fetch.level for _, fetch in played.instructions(ev.Fetch) if not fetch.first}
    decoded = [
        (chunk, level)
        for _, decode in played.instructions(ev.Decode)
        for chunk, level in zip(decode.chunks, decode.levels, strict=True)
    ]
    assert any(level < fetched[chunk] for chunk, level in decoded)
    assert min(level for _, level in decoded) == 2
