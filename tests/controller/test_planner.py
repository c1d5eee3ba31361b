from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import (
    CostModel,
    DecodeCost,
    InFlight,
    OpenChunk,
    PlanRequest,
    PrefillCost,
    finish_naive,
    plan,
    plan_naive,
)
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

COSTS = CostModel(PrefillCost(0.005, 2e-4, 1e-9), DecodeCost(0.002, 1e-6, 1e-9), 1e-6, 16)
SIZES = (100_000, 200_000, 400_000)


def chunks(count, *, documents=1, sizes=SIZES, text=True):
    return tuple(
        OpenChunk(ChunkId(d, c), 256, 256 * c, sizes, len(sizes) - 1, text)
        for d in range(documents)
        for c in range(count)
    )


def request(items, **changes):
    return PlanRequest(**{"open_chunks": items, "costs": COSTS, "bandwidth": 1e7, "quality_floor": 0, **changes})


@st.composite
def requests(draw):
    items, flights = [], []
    for number in range(draw(st.integers(1, 3))):
        levels, text, context = draw(st.integers(0, 3)), draw(st.booleans()), 0
        for index in range(draw(st.integers(1, 5))):
            chunk, tokens = ChunkId(number, index), draw(st.integers(1, 300))
            steps = draw(st.lists(st.integers(0, 300_000), min_size=levels, max_size=levels))
            sizes = tuple(sum(steps[: level + 1]) for level in range(levels))
            kind = draw(st.sampled_from(["open", "open", "open", "flight", "done"]))
            if kind == "flight" and sizes:
                flights.append(InFlight(chunk, tokens, sizes[0], draw(st.integers(0, sizes[0]))))
            elif kind == "open":
                have = sizes[: draw(st.integers(0, levels))]
                items.append(OpenChunk(chunk, tokens, context, have, levels - 1, text or not have))
            context += tokens
    prefill = PrefillCost(draw(st.floats(0, 0.1)), draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-6)))
    decode = DecodeCost(draw(st.floats(0, 0.1)), 0.0, draw(st.floats(0, 1e-6)))
    return PlanRequest(
        open_chunks=tuple(items),
        costs=CostModel(prefill, decode, 1e-6, 20, draw(st.sampled_from([0.0, 0.5, 1.0]))),
        bandwidth=draw(st.sampled_from([0.0, 1e4, 1e5, 1e6, 1e7, 1e9])),
        quality_floor=draw(st.integers(0, 3)),
        in_flight=tuple(flights),
        busy_s=draw(st.sampled_from([0.0, 0.05, 0.5, 2.0])),
        prompt_tokens=1000,
        lead_s=draw(st.floats(0, 0.1)),
        ttfb_s=draw(st.floats(0, 0.1)),
        parallel=draw(st.integers(1, 4)),
        deadline_s=draw(st.none() | st.floats(0, 3)),
        merge_chunks=draw(st.integers(1, 3)),
    )


@settings(max_examples=400)
@given(requests())
def test_the_plan_is_the_best_of_its_family(asked):
    fast, naive = plan(asked), plan_naive(asked)
    in_time = asked.deadline_s is None or naive.finish_s <= asked.deadline_s
    assert fast.in_time == in_time
    if asked.open_chunks:
        assert fast.level == naive.target
    if asked.deadline_s is None or not in_time:
        assert fast.finish_s == pytest.approx(naive.finish_s, rel=1e-9)
    else:  # chunks may be lifted into the time that is left
        assert naive.finish_s <= fast.finish_s * (1 + 1e-9)
        assert fast.finish_s <= max(asked.deadline_s, naive.finish_s) * (1 + 1e-9)


@settings(max_examples=400)
@given(requests(), st.floats(1, 1.5))
def test_the_forecast_of_a_lifted_plan_is_what_playing_it_gives(asked, slack):
    asked = replace(asked, deadline_s=plan(replace(asked, deadline_s=None)).finish_s * slack)
    made = plan(asked)
    levels = {decision.chunk: decision.level for decision in made.decisions if decision.action == "fetch"}
    assert made.finish_s == pytest.approx(finish_naive(asked, made.front, levels), rel=1e-9)


@pytest.mark.parametrize("byte_s", [1e-9, 5e-7, 2e-6])  # from bound by the link to bound by decoding
@pytest.mark.parametrize("slack", [1.05, 1.2, 1.4, 1.8])
def test_lifted_chunks_delay_all_that_they_should(byte_s, slack):
    costs = CostModel(PrefillCost(0.01, 4e-3), DecodeCost(0.0, 0.0, byte_s))
    asked = request(chunks(10), costs=costs, bandwidth=1e6)
    asked = replace(asked, deadline_s=plan(asked).finish_s * slack)
    made = plan(asked)
    levels = {decision.chunk: decision.level for decision in made.decisions if decision.action == "fetch"}
    assert made.finish_s == pytest.approx(finish_naive(asked, made.front, levels))
    assert made.finish_s <= asked.deadline_s


def test_late_recomputations_count_in_full_where_compute_is_the_bottleneck():
    fine = OpenChunk(ChunkId(0, 0), 256, 0, SIZES, 2, can_recompute=True)
    coarse = OpenChunk(ChunkId(0, 1), 256, 256, SIZES[:1], 2, can_recompute=True)
    slow = CostModel(PrefillCost(0.0, 4e-3), COSTS.decode)
    asked = request((fine, coarse), costs=slow, bandwidth=1e9, quality_floor=2, busy_s=5.0)
    assert [decision.action for decision in plan(asked).decisions] == ["fetch", "recompute"]
    assert plan(asked).finish_s == pytest.approx(5.0 + slow.prefill.seconds(256) + slow.decode.seconds(256, SIZES[2]))


def test_late_recomputations_wait_for_what_they_build_on():
    fine = OpenChunk(ChunkId(0, 0), 256, 0, SIZES, 2, can_recompute=True)
    coarse = OpenChunk(ChunkId(0, 1), 256, 256, SIZES[:1], 2, can_recompute=True)
    slow = CostModel(PrefillCost(0.0, 8e-4), COSTS.decode)
    made = plan(request((fine, coarse), costs=slow, bandwidth=1.3e6, quality_floor=2))
    # 0.3 s for the fetch and 0.2 s for the recomputation behind it are later than recomputing both.
    assert [decision.action for decision in made.decisions] == ["recompute", "recompute"]


@given(requests())
def test_every_chunk_is_decided_once_and_by_what_it_has(asked):
    made = plan(asked)
    assert [decision.chunk for decision in made.decisions] == [item.chunk for item in asked.open_chunks]
    size = 0
    for decision, item in zip(made.decisions, asked.open_chunks, strict=True):
        if decision.action == "recompute":
            assert item.can_recompute
        else:
            size += item.fetch_bytes[decision.level]
            best = min(asked.quality_floor, item.finest)
            assert decision.level >= best or not item.can_recompute
    assert made.fetch_bytes == size
    fetched = {decision.chunk for decision in made.decisions if decision.action == "fetch"}
    assert set(made.fetch_order) == fetched
    assert len(made.fetch_order) == len(fetched)


@given(requests())
def test_more_bandwidth_is_never_later_nor_coarser(asked):
    wider = replace(asked, bandwidth=asked.bandwidth * 3 + 1e4)
    soonest, soonest_wider = plan(replace(asked, deadline_s=None)), plan(replace(wider, deadline_s=None))
    assert soonest_wider.finish_s <= soonest.finish_s * (1 + 1e-9)
    if asked.deadline_s is not None and plan(asked).in_time:
        assert plan(wider).in_time
        assert asked.open_chunks == () or plan(wider).level >= plan(asked).level


@given(requests(), st.floats(0, 1))
def test_a_tighter_deadline_never_raises_the_level(asked, share):
    asked = replace(asked, deadline_s=asked.deadline_s or 1.0)
    tighter = plan(replace(asked, deadline_s=asked.deadline_s * share))
    if asked.open_chunks and tighter.in_time:
        assert plan(asked).in_time
        assert tighter.level <= plan(asked).level


def test_a_dead_link_means_recomputing_all():
    made = plan(request(chunks(10), bandwidth=0.0))
    assert {decision.action for decision in made.decisions} == {"recompute"}
    assert made.fetch_order == ()


def test_costly_compute_means_fetching_all_from_the_back():
    slow = CostModel(PrefillCost(10.0, 1.0), COSTS.decode)
    made = plan(request(chunks(10), costs=slow))
    assert {decision.action for decision in made.decisions} == {"fetch"}
    assert [chunk.chunk for chunk in made.fetch_order] == list(range(9, -1, -1))


def test_both_work_at_once_and_beat_either_alone():
    made = plan(request(chunks(20)))
    assert {decision.action for decision in made.decisions} == {"fetch", "recompute"}
    actions = [decision.action for decision in made.decisions]
    assert actions == sorted(actions, reverse=True)  # recompute first, then fetch
    recompute = plan(request(chunks(20), bandwidth=0.0)).finish_s
    fetch = plan(request(chunks(20), costs=CostModel(PrefillCost(100.0, 1.0), COSTS.decode))).finish_s
    assert made.finish_s < min(recompute, fetch)


def test_the_time_that_is_left_lifts_the_first_chunks():
    slow = CostModel(PrefillCost(0.01, 2e-3), COSTS.decode)
    asked = request(chunks(10), costs=slow, bandwidth=1e6, deadline_s=1.2)
    made = plan(asked)
    fetched = [decision for decision in made.decisions if decision.action == "fetch"]
    levels = [decision.level for decision in fetched]
    assert made.in_time
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {0, 1}
    assert made.finish_s <= 1.2
    by_chunk = {decision.chunk: decision.level for decision in fetched}
    assert made.finish_s == pytest.approx(finish_naive(asked, made.front, by_chunk))


def test_the_floor_holds_where_there_is_a_choice():
    late = plan(request(chunks(10), bandwidth=1e5, quality_floor=2, deadline_s=0.01))
    assert not late.in_time
    assert all(decision.level in {None, 2} for decision in late.decisions)


def test_text_only_and_blob_only_documents_have_one_way_each():
    text = OpenChunk(ChunkId(0, 0), 256, 0, (), -1, can_recompute=True)
    blob = OpenChunk(ChunkId(1, 0), 256, 0, SIZES, 2, can_recompute=False)
    made = plan(request((text, blob)))
    assert [decision.action for decision in made.decisions] == ["recompute", "fetch"]


def test_a_level_that_is_missing_is_no_candidate():
    short = OpenChunk(ChunkId(0, 0), 256, 0, SIZES[:1], 2, can_recompute=False)
    assert plan(request((short,), quality_floor=2)).decisions[0].level == 0  # the best there is
    with_text = replace(short, can_recompute=True)
    assert plan(request((with_text,), quality_floor=2)).decisions[0].action == "recompute"


def test_nothing_open_is_an_empty_plan():
    made = plan(request((), busy_s=0.5, prompt_tokens=100))
    assert (made.decisions, made.level) == ((), None)
    assert made.finish_s == pytest.approx(0.5 + COSTS.closing_s(100))


def test_a_chunk_without_any_way_is_refused():
    with pytest.raises(ArgumentError):
        OpenChunk(ChunkId(0, 0), 256, 0, (), -1, can_recompute=False)
    for changes in ({"bandwidth": -1.0}, {"parallel": 0}, {"quality_floor": -1}):
        with pytest.raises(ArgumentError):
            request((), **changes)


@pytest.mark.parametrize("documents", [1, 50])
def test_a_long_prompt_is_linear_work(documents, monkeypatch):
    calls = 0
    seconds = DecodeCost.seconds

    def counted(self, tokens, size):
        nonlocal calls
        calls += 1
        return seconds(self, tokens, size)

    monkeypatch.setattr(DecodeCost, "seconds", counted)
    plan(request(chunks(500 // documents, documents=documents), deadline_s=4.0, parallel=4, merge_chunks=4))
    assert calls <= 500 * (len(SIZES) + 3)
