from __future__ import annotations

import statistics

import pytest

from kvwire.controller import (
    BandwidthEstimator,
    Cancel,
    ChunkArrived,
    ChunkFailed,
    CostCorrection,
    CostModel,
    Decode,
    DecodeDone,
    DocumentPlanInput,
    Fail,
    Fetch,
    Finish,
    LoadSession,
    PrefillCost,
    Recompute,
    RecomputeDone,
    RecomputeFailed,
    SessionSettings,
    Started,
    Tick,
    TransferProgress,
    TtfbEstimator,
)
from kvwire.errors import ArgumentError
from kvwire.types import BlobInfo, CacheMeta, ChunkId, LevelInfo, SegmentInfo

from .fake_executor import COSTS, MB, SIZES, SLOW, FakeExecutor, document, new_session


def load(documents, trace, *, prior=10 * MB, costs=COSTS, believed=None, deadline_s=None, faults=None, **settings):
    session = new_session(documents, prior=prior, costs=believed or costs, **settings)
    executor = FakeExecutor(session, documents, trace, costs, **(faults or {}))
    executor.run(deadline_s)
    return executor


def levels(executor):
    return [decision.level for decision in executor.end.decisions if decision.action == "fetch"]


def actions(executor):
    return [decision.action for decision in executor.end.decisions]


def test_meets_a_deadline_with_margin_and_uses_it():
    executor = load([document(10), document(10)], [(0, 5 * MB)], prior=5 * MB, costs=SLOW, deadline_s=1.2)
    assert executor.first_token_s <= 1.2
    assert executor.end.reason.startswith("in time")
    assert statistics.mean(levels(executor)) > 0.3  # 20 chunks at level 0 would take 0.4 s


def test_a_longer_deadline_gives_finer_levels():
    quality = [
        statistics.mean(levels(load([document(10)] * 2, [(0, 5 * MB)], prior=5 * MB, costs=SLOW, deadline_s=deadline)))
        for deadline in (0.7, 1.2, 2.5)
    ]
    assert quality == sorted(quality)
    assert quality[0] < quality[-1] == 2


def test_drops_levels_when_bandwidth_halves_midway():
    documents = [document(20)] * 2
    steady = load(documents, [(0, 8 * MB)], prior=8 * MB, costs=SLOW, deadline_s=2.6)
    halved = load(documents, [(0, 8 * MB), (0.8, 4 * MB)], prior=8 * MB, costs=SLOW, deadline_s=2.6)
    assert steady.first_token_s <= 2.6
    assert halved.first_token_s <= 2.6
    assert statistics.mean(levels(halved)) < statistics.mean(levels(steady))
    assert levels(halved)[-1] > min(levels(halved))  # fetched from the back: it began finer than it went on


def test_rises_when_bandwidth_turns_out_higher_than_the_prior():
    executor = load([document(20)], [(0, 20 * MB)], prior=1 * MB, costs=SLOW, deadline_s=2.0)
    assert executor.first_token_s <= 2.0
    assert levels(executor).count(2) > 10


def test_recomputes_all_when_the_link_dies():
    documents = [document(10), document(10)]
    executor = load(documents, [(0, 10 * MB), (0.1, 0.0)])
    assert executor.end.reason == "all chunks are ready"
    assert executor.session.fallbacks == len(executor.cancelled) > 0
    assert actions(executor).count("recompute") >= 14
    assert any("silent" in decision.reason for decision in executor.end.decisions)
    alone = sum(COSTS.prefill.seconds(256, 256 * chunk) for chunk in range(10)) * 2
    assert executor.now < alone + 0.5


def test_a_dead_link_from_the_start_costs_about_a_stall():
    executor = load([document(10)], [(0, 0.0)])
    assert set(actions(executor)) == {"recompute"}
    assert executor.now < sum(COSTS.prefill.seconds(256, 256 * chunk) for chunk in range(10)) + 0.4


def test_a_link_that_comes_back_is_used_again():
    executor = load([document(40)], [(0, 20 * MB), (0.1, 0.0), (0.8, 20 * MB)], costs=SLOW)
    assert actions(executor).count("fetch") > 25


def test_a_failed_segment_is_recomputed_and_says_why():
    bad = ChunkId(0, 7)
    executor = load([document(10)], [(0, 50 * MB)], costs=SLOW, faults={"bad_fetches": frozenset({bad})})
    decision = executor.end.decisions[7]
    assert decision.action == "recompute"
    assert "fetch failed: checksum" in decision.reason
    assert executor.session.fallbacks == 1


def test_a_failed_decode_is_recomputed():
    bad = ChunkId(0, 9)
    executor = load([document(10)], [(0, 50 * MB)], costs=SLOW, faults={"bad_decodes": frozenset({bad})})
    assert executor.end.decisions[9].action == "recompute"
    assert "decode failed: corrupt" in executor.end.decisions[9].reason
    assert executor.session.fallbacks == 1


def test_a_failed_fetch_without_text_fails_the_load():
    documents = [document(4), document(4, text=False)]
    executor = load(documents, [(0, 5 * MB)], faults={"bad_fetches": frozenset({ChunkId(1, 2)})})
    assert isinstance(executor.end, Fail)
    assert "checksum" in executor.end.reason
    assert executor.flows == {}  # open fetches were cancelled first


def test_neither_text_nor_blob_fails_at_once():
    session = new_session([document(2, text=False, blob=False)])
    assert [type(made) for made in session.handle(Started(), 0.0)] == [Fail]
    assert session.handle(Tick(), 1.0) == []


def test_text_only_documents_are_recomputed_in_merged_passes():
    quick = CostModel(PrefillCost(0.05, 2e-4), COSTS.decode)
    session = new_session([document(6, blob=False)], costs=quick)
    assert session.handle(Started(), 0.0) == [Recompute(ChunkId(0, 0), ChunkId(0, 3))]
    done = RecomputeDone(tuple(ChunkId(0, number) for number in range(4)), 0.2)
    assert session.handle(done, 0.2) == [Recompute(ChunkId(0, 4), ChunkId(0, 5))]


def test_passes_that_are_long_anyway_are_not_merged():
    session = new_session([document(6, blob=False)], costs=SLOW)
    assert session.handle(Started(), 0.0) == [Recompute(ChunkId(0, 0), ChunkId(0, 0))]


def test_compute_priors_twice_off_heal():
    believed = CostModel(PrefillCost(0.0025, 1e-4, 5e-10), COSTS.decode, COSTS.link_s_per_token, COSTS.query_tokens)
    documents = [document(20)] * 2
    wrong = load(documents, [(0, 5 * MB)], prior=5 * MB, believed=believed)
    right = load(documents, [(0, 5 * MB)], prior=5 * MB)
    assert wrong.now < 1.2 * right.now
    assert wrong.session.last_plan is not None


def test_what_a_load_measures_serves_the_next_one():
    bandwidth, correction = BandwidthEstimator(1 * MB), CostCorrection()
    settings = SessionSettings(quality_floor=0)
    documents = [document(20)]
    session = LoadSession(
        documents, COSTS, settings, bandwidth=bandwidth, ttfb=TtfbEstimator(0.1), correction=correction
    )
    twice = CostModel(COSTS.prefill.scaled(2), COSTS.decode.scaled(3))
    FakeExecutor(session, documents, [(0, 4 * MB)], twice).run()
    assert correction.prefill.value == pytest.approx(2, rel=0.1)
    assert correction.decode.value == pytest.approx(3, rel=0.1)
    assert bandwidth.value == pytest.approx(4 * MB, rel=0.1)


@pytest.mark.parametrize("token_s", [8e-4, 16e-4])  # 0.21 s and 0.41 s a chunk
def test_the_forecast_does_not_drift_while_all_goes_as_foreseen(token_s):
    costs = CostModel(PrefillCost(0.005, token_s), COSTS.decode)
    session = new_session([document(4)] * 2, prior=1 * MB, costs=costs, max_in_flight=2)
    made = session.handle(Started(), 0.0)
    fetches = [item.chunk for item in made if isinstance(item, Fetch)]
    assert Recompute(ChunkId(0, 0), ChunkId(0, 0)) in made
    first = session.last_plan.finish_s
    for chunk, size, began, ended in ((fetches[0], 100_000, 0.02, 0.131), (fetches[1], 50_000, 0.131, 0.187)):
        session.handle(TransferProgress(size, began, ended, chunk), ended)  # 0.9 MB/s: what planning counts with
    session.handle(ChunkArrived(fetches[0], 0), 0.187)
    assert 0.187 + session.last_plan.finish_s == pytest.approx(first, rel=0.03)


def test_silence_lowers_the_estimate():
    bandwidth = BandwidthEstimator(10 * MB)
    session = LoadSession(
        [document(4, text=False)], COSTS, SessionSettings(quality_floor=0), bandwidth=bandwidth, ttfb=TtfbEstimator(0.0)
    )
    session.handle(Started(), 0.0)
    for number in range(20):
        session.handle(Tick(), 0.05 * number)
    assert bandwidth.value < 1 * MB


def test_both_resources_beat_either_alone():
    documents = [document(20)]
    both = load(documents, [(0, 2 * MB)], prior=2 * MB)
    fetch_only = load([document(20, text=False)], [(0, 2 * MB)], prior=2 * MB)
    text_only = load([document(20, blob=False)], [(0, 2 * MB)], prior=2 * MB)
    assert both.now < 0.75 * min(fetch_only.now, text_only.now)


def test_two_workers_decode_beside_a_recomputation():
    heavy = CostModel(COSTS.prefill, type(COSTS.decode)(0.03, 0), decode_overlap=1.0)
    documents = [document(20)]
    one = load(documents, [(0, 50 * MB)], costs=heavy)
    two = load(documents, [(0, 50 * MB)], costs=heavy, compute_workers=2, faults={"workers": 2})
    assert two.now < one.now


def test_a_failed_recomputation_is_fetched_instead():
    session = new_session([document(2)], prior=1.0, costs=CostModel(PrefillCost(0.05, 2e-4), COSTS.decode))
    assert session.handle(Started(), 0.0) == [Recompute(ChunkId(0, 0), ChunkId(0, 1))]
    made = session.handle(RecomputeFailed(ChunkId(0, 0), "out of memory"), 0.1)
    assert made == [Fetch(ChunkId(0, 0), 0, SIZES[0])]


def test_replay_gives_the_same_instructions():
    documents = [document(10), document(6, blob=False), document(5, text=False)]
    trace = [(0, 5 * MB), (0.5, 1 * MB), (1.0, 0.0), (1.6, 9 * MB)]
    executor = load(documents, trace, deadline_s=2.0, faults={"bad_fetches": frozenset({ChunkId(0, 5)})})
    again = new_session(documents)
    for entry in executor.session.log:
        assert tuple(again.handle(entry.event, entry.now)) == entry.instructions
    assert again.log == executor.session.log


def fetching_session():
    session = new_session([document(2)], costs=SLOW)
    made = session.handle(Started(), 0.0)
    assert made == [Fetch(ChunkId(0, 1), 0, SIZES[0]), Fetch(ChunkId(0, 0), 0, SIZES[0])]
    return session


@pytest.mark.parametrize(
    "event",
    [
        Started(),
        ChunkArrived(ChunkId(0, 1), 2),  # another level than was asked for
        ChunkArrived(ChunkId(5, 0), 0),
        DecodeDone(ChunkId(0, 1), 0.1),
        RecomputeDone((ChunkId(0, 0),), 0.1),
        RecomputeFailed(ChunkId(0, 0), "never ran"),
        TransferProgress(-1, 0.0, 0.1),
    ],
)
def test_an_event_that_cannot_be_is_refused_and_changes_nothing(event):
    session = fetching_session()
    with pytest.raises(ArgumentError):
        session.handle(event, 0.1)
    assert session.handle(ChunkArrived(ChunkId(0, 1), 0), 0.1) == [Decode(ChunkId(0, 1), 0)]
    with pytest.raises(ArgumentError):
        session.handle(ChunkArrived(ChunkId(0, 1), 0), 0.2)  # twice
    with pytest.raises(ArgumentError):
        session.handle(ChunkFailed(ChunkId(0, 1), "late"), 0.2)


def test_events_come_in_order():
    session = new_session([document(2)])
    with pytest.raises(ArgumentError):
        session.handle(Tick(), 0.0)
    with pytest.raises(ArgumentError):
        session.handle(Started(float("nan")), 0.0)
    session.handle(Started(1.0), 5.0)
    with pytest.raises(ArgumentError):
        session.handle(Tick(), 4.0)


def test_what_is_reported_of_a_cancelled_fetch_is_ignored():
    session = fetching_session()
    made = session.handle(Tick(), 1.0)
    assert made == [Cancel(ChunkId(0, 0)), Recompute(ChunkId(0, 0), ChunkId(0, 0))]
    assert session.handle(ChunkArrived(ChunkId(0, 0), 0), 1.1) == []
    assert session.handle(ChunkFailed(ChunkId(0, 0), "cancelled"), 1.1) == []


def test_a_fetch_is_not_given_up_before_its_context_is_ready():
    session = new_session([document(2)], costs=SLOW, compute_workers=2)
    session.handle(Started(), 0.0)
    assert session.handle(ChunkArrived(ChunkId(0, 0), 0), 0.05) == [Decode(ChunkId(0, 0), 0)]
    assert session.handle(Tick(), 1.0) == []
    assert session.handle(DecodeDone(ChunkId(0, 0), 1.0), 1.05) == []
    assert session.handle(Tick(), 1.1) == [Cancel(ChunkId(0, 1)), Recompute(ChunkId(0, 1), ChunkId(0, 1))]


def test_settings_that_cannot_be_are_refused():
    for bad in ({"max_in_flight": 0}, {"compute_workers": 3}, {"stall_s": 0}, {"cancel_margin": 0.5}):
        with pytest.raises(ArgumentError):
            SessionSettings(quality_floor=0, **bad)
    for bad in ({"tokens": ()}, {"tokens": (1, 0)}, {"tokens": (1,), "fetch_bytes": ((2, 1),)}):
        with pytest.raises(ArgumentError):
            DocumentPlanInput(**bad)


def test_a_blob_says_what_planning_needs():
    rows = tuple(tuple(SegmentInfo(c, k, 0, 10 * (k + 1), 0, 0, 0, 0.0) for k in range(3)) for c in range(2))
    levels = tuple(LevelInfo(name, 1.0, 0, 0, 0.0, 0.0) for name in "abc")
    info = BlobInfo((1, 0), CacheMeta(), 300, 256, 64, 124, "", levels, rows, token_ids=None)
    assert DocumentPlanInput.from_blob(info) == DocumentPlanInput((256, 44), ((10, 30, 60),) * 2, has_text=False)
    assert DocumentPlanInput.from_blob(info, has_text=True).has_text


def test_a_lossless_level_is_planned_only_where_there_is_nothing_else():
    rows = tuple(tuple(SegmentInfo(0, k, 0, 10 * (k + 1), 0, 0, 0, 0.0) for k in range(2)) for _ in range(1))
    exact = LevelInfo("lossless", 0.0, 0, 0, 0.0, 0.0, alone=True, lossless=True)
    both = BlobInfo((1, 0), CacheMeta(), 9, 256, 64, 94, "", (LevelInfo("a", 1.0, 0, 0, 0.0, 0.0), exact), rows, None)
    assert DocumentPlanInput.from_blob(both).fetch_bytes == ((10,),)
    alone = BlobInfo((1, 0), CacheMeta(), 9, 256, 64, 74, "", (exact,), (rows[0][:1],), None)
    assert DocumentPlanInput.from_blob(alone).fetch_bytes == ((10,),)


def test_an_empty_load_is_finished_at_once():
    assert [type(made) for made in new_session([]).handle(Started(), 0.0)] == [Finish]
