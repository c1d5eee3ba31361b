"""What the controller does with one load, one behaviour at a time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kvwire.controller import DecodeCost, DocumentPlanInput, Goal
from kvwire.controller import events as ev
from kvwire.controller.policies import Fixed
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, ByHand, cheapest, document, one, play, quality

# Goals.


def test_the_soonest_load_meets_in_the_middle():
    outcome, played = one(Goal(), 1 * MB)
    assert outcome.recomputed > 0
    assert sum(outcome.levels) > 0
    passes = [each.last.chunk for _, each in played.instructions(ev.Recompute)]
    fetched = [each.chunk.chunk for _, each in played.instructions(ev.Fetch)]
    assert max(passes) < min(fetched)
    alone = min(one(Goal(), rate)[0].ttft_s for rate in (1.0, 1 * MB))
    assert outcome.ttft_s < 0.5 * one(Goal(), 1.0)[0].ttft_s
    assert alone == outcome.ttft_s
    assert not one(Goal(), 100 * MB)[0].recomputed  # a fast link waits for no passes


@pytest.mark.parametrize("floor", [0, 1, 2])
def test_nothing_below_the_floor_is_fetched_where_text_is_known(floor):
    outcome, _ = one(Goal(floor=floor), 30 * MB)
    assert sum(outcome.levels[:floor]) == 0
    assert outcome.levels[floor] > 0


def test_nothing_above_the_ceiling_is_fetched():
    outcome, played = one(quality(5.0, ceiling=1), 30 * MB, document(text=False))
    assert outcome.levels == (0, 2048, 0, 0)
    assert not played.refinements()


@pytest.mark.parametrize("deadline_s", [0.1, 0.15, 0.2])
def test_the_tighter_the_deadline_the_coarser_and_always_in_time(deadline_s):
    outcome, _ = one(quality(deadline_s), 5 * MB, document(text=False))
    assert outcome.in_time
    later, _ = one(quality(deadline_s + 0.1), 5 * MB, document(text=False))
    assert later.error < outcome.error


def test_the_cheapest_load_fetches_the_fewest_bytes_that_are_in_time():
    wide, _ = one(cheapest(1.0), 3 * MB)
    tight, _ = one(cheapest(0.2), 3 * MB)
    soonest, _ = one(Goal(), 3 * MB)
    assert wide.received == 0
    assert wide.recomputed == 2048
    assert 0 < tight.received < soonest.received
    assert tight.in_time


def test_a_deadline_in_the_past_gets_the_soonest_first_token():
    late, _ = one(quality(-1.0), 3 * MB)
    soonest, _ = one(Goal(), 3 * MB)
    assert not late.in_time
    assert late.ttft_s == pytest.approx(soonest.ttft_s, rel=0.05)
    assert "late by" in late.reason


# Slack, refinements.


def test_slack_is_carried_forward():
    """On a link ten times as good as it seemed, what is saved at the start makes the rest finer."""
    outcome, _ = one(quality(0.4), 10 * MB, document(16, text=False), prior=1 * MB)
    steady, _ = one(quality(0.4), 1 * MB, document(16, text=False))
    assert outcome.in_time
    assert outcome.error < 0.1 * steady.error


def test_refinements_begin_once_everything_is_on_its_way():
    _, played = one(quality(0.3), 10 * MB, document(text=False), prior=0.5 * MB)
    assert played.refinements()
    fetches = [fetch for _, fetch in played.instructions(ev.Fetch)]
    first = next(at for at, fetch in enumerate(fetches) if fetch.first)
    assert {fetch.chunk.chunk for fetch in fetches[:first]} == set(range(8))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_chunks_of_a_batch_are_decoded_side_by_side(threads):
    """As many as there are threads at a time; that nothing new is learnt of the costs shows that they are told so."""
    fine = document(16, scale=40)
    _, played = one(Goal(floor=2), 1000 * MB, fine, decode_batch=8, decode_threads=threads, workers=2)
    decodes = [each for _, each in played.instructions(ev.Decode)]
    assert max(4, threads) <= max(len(each.chunks) for each in decodes) <= 8
    seconds = [entry.event.seconds for entry in played.log if isinstance(entry.event, ev.DecodeDone)]
    work_s = COSTS.decode.seconds(256, fine.fetch_bytes[0][2]) - COSTS.decode.base_s
    for each, took_s in zip(decodes, seconds, strict=True):
        rounds = -(-len(each.chunks) // threads)
        assert took_s == pytest.approx(COSTS.decode.base_s + work_s * rounds, rel=1e-3)
    learnt = played.estimates.decode.cost
    assert learnt.seconds(256, 50_000) == pytest.approx(COSTS.decode.seconds(256, 50_000), rel=0.01)


def test_a_first_byte_that_came_behind_others_tells_nothing_of_the_round_trip():
    steps = ByHand(quality(0.5), document(), prior=1 * MB)
    ttfb = steps.controller.estimates.ttfb
    steps.begin()
    for _ in range(4):
        steps.tell(ev.FirstByte(0.02))  # nothing has come yet: nothing can be in the way
    assert ttfb.value == pytest.approx(0.02)
    steps.tell(ev.TransferProgress(1000, steps.now, steps.now + 0.001))
    for _ in range(4):
        steps.tell(ev.FirstByte(0.2))
    assert ttfb.value == pytest.approx(0.02)
    with pytest.raises(ArgumentError, match="first byte"):
        steps.tell(ev.FirstByte(-0.2))


def test_refining_stops_at_the_cut_with_a_valid_prompt():
    big = document(16, text=False, scale=20)
    outcome, played = one(quality(0.6), 10 * MB, big, prior=5 * MB)
    assert outcome.in_time
    assert len(outcome.decisions) == 16
    assert not outcome.failed
    assert played.log[-1].now < 0.6


@pytest.mark.parametrize("share_s", [0.02, 0.025])
@pytest.mark.parametrize("slower", [1.0, 1.1, 1.3, 1.5])
@pytest.mark.parametrize("chunks", [16, 18, 40])
def test_where_bytes_take_longer_to_decode_than_believed_no_chunk_stays_at_its_base(slower, chunks, share_s):
    """Rather all a little better than some as fine as they came, and the rest not at all."""
    costs, true = (replace(COSTS, decode=DecodeCost(0.001, 1e-5, 1e-7 * ratio)) for ratio in (1.0, slower))
    goal, text = quality(share_s * chunks), document(chunks, text=False)
    outcome, _ = one(goal, 500 * MB, text, costs=costs, true=true, decode_batch=4)
    assert outcome.in_time
    assert outcome.levels[0] == 0


@pytest.mark.parametrize("share_s", [0.01, 0.014])
@pytest.mark.parametrize("slower", [1.5, 2.0])
@pytest.mark.parametrize("rate", [20, 500])
@pytest.mark.parametrize("chunks", [16, 40])
def test_where_decoding_is_slower_than_believed_all_is_decoded_more_coarsely_than_it_came(
    chunks, rate, slower, share_s
):
    costs, true = (replace(COSTS, decode=DecodeCost(0.001 * by, 1e-5 * by, 1e-7 * by)) for by in (1.0, slower))
    goal, text = quality(share_s * chunks), document(chunks, text=False)
    coarsest, _ = one(goal, rate * MB, text, costs=costs, true=true, decode_batch=4, policy=Fixed(0))
    outcome, _ = one(goal, rate * MB, text, costs=costs, true=true, decode_batch=4)
    assert outcome.in_time == coarsest.in_time


def test_a_refinement_that_is_late_is_cancelled_and_the_load_is_in_time():
    uneven = DocumentPlanInput((256,), ((12_800, 1_280_000),), has_text=False)
    steps = ByHand(quality(0.5), uneven, prior=0.4 * MB, stall_s=10.0)
    chunks = steps.valid_at_level_0()
    (fetch,) = (each for each in steps.quick_link(chunks) if isinstance(each, ev.Fetch))
    out = []
    while not out:
        out = steps.tell(ev.Tick(), steps.controller.wake_at)
    assert [type(each) for each in out] == [ev.Cancel, ev.Release, ev.Finish]
    assert steps.now == pytest.approx(fetch.until)
    finish = out[-1]
    assert finish.decisions[0].level == 0
    assert "in time" in finish.reason


def test_a_corrupt_refinement_leaves_the_level_that_was_there():
    steps = ByHand(quality(10.0), document(1, 2, text=False))
    fetch = steps.begin()
    assert (fetch.first, fetch.level) == (0, 1)
    decode = steps.only(ev.Decode, ev.ChunkArrived(fetch.chunk, 0, "level 1 is missing"))
    assert decode.levels == (0,)
    steps.only(ev.Finish, ev.DecodeDone(decode.chunks, 0.001))


def test_what_a_corrupt_refinement_spoilt_is_decoded_again_at_its_old_level():
    steps = ByHand(quality(0.5), document(1, 2, text=False, scale=100), prior=0.4 * MB)
    fetch = steps.begin()
    assert fetch.level == 0
    assert not steps.tell(ev.TransferProgress(fetch.bytes, 0.02, 0.021), 0.021)  # 1.28 GB/s
    decode = steps.only(ev.Decode, ev.ChunkArrived(fetch.chunk, 0))
    finer = steps.only(ev.Fetch, ev.DecodeDone(decode.chunks, 0.001))
    assert (finer.first, finer.level) == (1, 1)
    again = steps.only(ev.Decode, ev.ChunkArrived(fetch.chunk, 1))
    assert again.levels == (1,)
    healed = steps.only(ev.Decode, ev.DecodeFailed(again.chunks, again.chunks, "checksum"))
    assert healed.levels == (0,)
    out = steps.tell(ev.DecodeDone(healed.chunks, 0.001))
    finish = out[-1]
    assert isinstance(finish, ev.Finish)
    assert finish.decisions[0].level == 0
    assert "refinement cannot be decoded: checksum" in finish.decisions[0].reason


# A driver that is held up.


def test_a_driver_that_was_held_up_makes_no_link_silent_and_no_first_byte_late():
    for seconds in (0.0, 0.35):
        steps = ByHand(quality(0.6), document(8))
        ttfb = steps.controller.estimates.ttfb.value
        steps.begin()
        if seconds:
            assert not steps.tell(ev.DriverPaused(seconds), 0.352)
        out = steps.tell(ev.Tick(), 0.36)
        assert any(isinstance(each, ev.Recompute) for each in out) == (not seconds)
        steps.tell(ev.FirstByte(0.359))
        assert (steps.controller.estimates.ttfb.value == ttfb) == bool(seconds)
    with pytest.raises(ArgumentError, match="measured time"):
        steps.tell(ev.DriverPaused(-1.0))


def test_a_driver_that_is_always_late_takes_a_dead_link_for_dead_all_the_same():
    for goal in (Goal(), quality(1.0)):
        steps = ByHand(goal, document(8))
        steps.begin()
        while steps.pass_ is None and steps.now < 2.0:
            at = min(steps.controller.wake_at, steps.now + 0.05)
            steps.tell(ev.DriverPaused(0.025), at + 0.025)
            steps.tell(ev.Tick(), steps.now)
        assert steps.now < 0.8


def test_what_was_decoded_more_coarsely_than_it_came_is_refined_where_time_is_left():
    """Decoding was believed to be slow, and is quick."""
    slow, true = (replace(COSTS, decode=DecodeCost(0.001, 1e-5, 1e-7 * by)) for by in (1.0, 0.1))
    outcome, played = one(quality(0.16), 500 * MB, document(16, text=False), costs=slow, true=true, decode_batch=4)
    first, again = {}, set()
    for _, decode in played.instructions(ev.Decode):
        for chunk, level in zip(decode.chunks, decode.levels, strict=True):
            if chunk in first and first[chunk] < level:
                again.add(chunk)
            first.setdefault(chunk, level)
    assert outcome.in_time
    fetched = {fetch.chunk: fetch.level for _, fetch in played.instructions(ev.Fetch) if not fetch.first}
    lowered = {chunk for chunk, level in first.items() if level < fetched[chunk]}
    assert lowered & again
    reasons = {each.chunk: each.reason for each in outcome.decisions}
    for chunk in lowered:
        assert reasons[chunk].startswith("refined" if chunk in again else "more coarsely than it came")


def test_two_loads_leave_each_other_time_to_decode():
    costs, true = (replace(COSTS, decode=DecodeCost(0.001 * by, 1e-5 * by, 1e-7 * by)) for by in (1.0, 1.5))
    in_time = {}
    for policy in (None, Fixed(0)):
        arrivals = [LoadArrival(0.0, ((document(8, text=False),),), quality(0.224)) for _ in range(2)]
        played = play(arrivals, 500 * MB, costs=costs, true=true, decode_batch=4, policy=policy, workers=2)
        in_time[policy] = [outcome.in_time for outcome in played.outcomes]
    assert in_time[None] == in_time[Fixed(0)] == [True, True]


# Head starts, variants, indexes.


def test_a_head_start_holds_up_decoding_and_not_fetching():
    _, played = one(Goal(), 30 * MB, document(text=False, head=0.3))
    began = played.instructions(ev.ComputePrefix)[0][0]
    done = next(entry.now for entry in played.log if isinstance(entry.event, ev.PrefixComputed))
    fetched = [now for now, _ in played.instructions(ev.Fetch)]
    assert min(fetched) <= began
    assert sum(now < done for now in fetched) == 8
    assert played.instructions(ev.Decode)[0][0] >= done


@pytest.mark.parametrize(("rate", "variant"), [(0.3 * MB, 1), (30 * MB, 0)])
def test_a_slow_link_gets_the_smaller_blob_with_more_head_start(rate, variant):
    _, played = one(Goal(), rate, document(), document(scale=0.25, head=0.3))
    assert {fetch.variant for _, fetch in played.instructions(ev.Fetch)} == {variant}


def test_a_variant_that_lacks_a_segment_that_nothing_stands_in_for_is_not_chosen():
    tokens, sizes = (256, 256), ((100,), (100,))
    broken = DocumentPlanInput(tokens, ((10,), ()), has_text=False)
    whole = DocumentPlanInput(tokens, sizes, has_text=False)
    for variants, right in (((broken, whole), 1), ((whole, broken), 0)):
        outcome, played = one(Goal(), 30 * MB, *variants)
        assert not outcome.failed
        assert {fetch.variant for _, fetch in played.instructions(ev.Fetch)} == {right}


def test_a_variant_that_does_not_fit_into_memory_is_not_chosen():
    outcome, played = one(Goal(), 30 * MB, document(text=False), document(text=False, scale=0.1), memory_bytes=2000)
    assert not outcome.failed
    assert {fetch.variant for _, fetch in played.instructions(ev.Fetch)} == {1}


# What cannot be.


def test_whoever_left_gets_nothing_more():
    steps = ByHand(Goal(), document(2))
    fetch = steps.begin()
    out = steps.tell(ev.LoadAbandoned(0))
    assert ev.Cancel(fetch.chunk, "its load is over") in out
    assert steps.tell(ev.ChunkArrived(fetch.chunk, 0)) == []
    assert steps.controller.held_bytes == 0
    assert steps.controller.wake_at == inf


def test_an_outcome_reported_twice_is_refused():
    steps = ByHand(Goal(), document(2, text=False))
    fetch = steps.begin()
    steps.tell(ev.ChunkArrived(fetch.chunk, fetch.level))
    with pytest.raises(ArgumentError, match="report each outcome once"):
        steps.tell(ev.ChunkArrived(fetch.chunk, fetch.level))


def test_time_never_goes_back():
    steps = ByHand(Goal(), document(2))
    steps.begin()
    with pytest.raises(ArgumentError, match="never go back"):
        steps.tell(ev.Tick(), -1.0)


def test_a_policy_without_giving_up_waits_for_its_fetches():
    outcome, played = one(Goal(), RateTrace((0.0, 0.03, 1.0), (3 * MB, 0.0, 3 * MB)), policy=Fixed(0))
    assert not played.instructions(ev.Cancel)
    assert outcome.levels[0] == 2048
