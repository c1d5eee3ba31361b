"""What the controller does when link, blobs or memory fail one load."""

from __future__ import annotations

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.controller.simulator.loads import LoadArrival, Trouble
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, ByHand, document, one, play


def test_a_link_that_dies_for_good_costs_time_and_nothing_else():
    outcome, played = one(Goal(), RateTrace((0.0, 0.03), (3 * MB, 0.0)), document(16))
    assert not outcome.failed
    assert sum(outcome.levels) + outcome.recomputed == 16 * 256
    assert any("nothing arrived" in each.reason for _, each in played.instructions(ev.Cancel))
    alone = COSTS.prefill.seconds(16 * 256)
    assert outcome.ttft_s < alone + 0.5


def test_a_stall_that_passes_is_sat_out_where_there_is_no_text():
    outcome, _ = one(Goal(), RateTrace((0.0, 0.03, 1.5), (3 * MB, 0.0, 3 * MB)), document(text=False))
    assert not outcome.failed
    assert 1.5 < outcome.ttft_s < 1.8


def test_a_link_that_died_is_used_again_when_it_is_back():
    rate = RateTrace((0.0, 0.02, 5.0), (5 * MB, 0.0, 5 * MB))
    arrivals = [LoadArrival(at, ((document(),),), Goal()) for at in (0.0, 10.0)]
    dead, back = play(arrivals, rate).outcomes
    assert dead.recomputed == 2048
    assert back.recomputed <= 512
    assert back.ttft_s < 0.5 * dead.ttft_s


def test_a_dead_link_costs_later_loads_less_and_less():
    arrivals = [LoadArrival(1.0 * at, ((document(),),), Goal()) for at in range(30)]
    outcomes = play(arrivals, RateTrace((0.0, 0.02), (5 * MB, 0.0))).outcomes
    alone = COSTS.prefill.seconds(2048)
    delayed = [outcome.ttft_s > 1.2 * alone for outcome in outcomes]
    assert sum(delayed[:10]) > sum(delayed[10:20]) >= sum(delayed[20:])
    assert all(outcome.ttft_s < alone + 0.35 for outcome in outcomes)


def test_a_blob_of_which_nothing_comes_is_given_up():
    outcome, played = one(Goal(), 30 * MB, document(16), trouble=Trouble(fail=1.0), max_failures=3, max_in_flight=1)
    assert outcome.recomputed == 16 * 256
    assert len(played.instructions(ev.Fetch)) == 3
    assert any("3 fetches in a row failed" in decision.reason for decision in outcome.decisions)


def test_a_chunk_given_up_with_its_blob_is_fetched_when_its_text_fails():
    steps = ByHand(Goal(), document(4, 1), max_failures=1, max_in_flight=1)
    lost = steps.begin().chunk
    steps.tell(ev.ChunkFailed(lost, "missing"))
    while steps.pass_ is None:
        steps.tell(ev.Tick(), steps.controller.wake_at)
    given_up, steps.now = steps.pass_.first, steps.now + 0.01
    assert given_up != lost
    assert steps.only(ev.Fetch, ev.RecomputeFailed(given_up, "memory")).chunk == given_up


def test_corrupt_chunks_are_recomputed():
    outcome, played = one(Goal(), 30 * MB, trouble=Trouble(corrupt=1.0))
    assert outcome.recomputed == 2048
    assert len(played.instructions(ev.Release)) == len(played.instructions(ev.Fetch))
    assert any("decode failed: checksum" in decision.reason for decision in outcome.decisions)


def test_a_chunk_that_can_neither_be_fetched_nor_recomputed_fails_the_load():
    outcome, _ = one(Goal(), 30 * MB, document(text=False), trouble=Trouble(fail=1.0))
    assert outcome.failed
    assert "fetch failed" in outcome.reason


def test_a_memory_bound_below_any_chunk_means_recomputing():
    outcome, played = one(Goal(), 30 * MB, memory_bytes=1000)
    assert outcome.recomputed == 2048
    assert not played.instructions(ev.Fetch)


def test_a_memory_bound_below_any_chunk_fails_a_load_without_text():
    outcome, _ = one(Goal(), 30 * MB, document(text=False), memory_bytes=1000)
    assert outcome.failed
    assert "memory bound of 1000 bytes" in outcome.reason


def test_a_small_memory_bound_makes_chunks_wait_for_each_other():
    outcome, _ = one(Goal(), 30 * MB, document(text=False), memory_bytes=30_000)
    assert outcome.levels == (2048, 0, 0, 0)
