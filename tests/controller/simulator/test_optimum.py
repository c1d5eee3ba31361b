from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import CostModel, DecodeCost, DocumentPlanInput, PrefillCost
from kvwire.controller.simulator.offline_optimum import Optimum, optimum
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

COSTS = CostModel(PrefillCost(0.005, 2e-4, 1e-9), DecodeCost(0.002, 1e-6, 1e-9), 1e-6, 16)
STEADY = RateTrace((0.0,), (1e7,), None)


@dataclass(frozen=True)
class Case:
    documents: tuple[DocumentPlanInput, ...]
    costs: CostModel
    rate: RateTrace
    start_s: float
    rtt_s: float
    floor: int
    workers: int

    def bound(self, objective: str, deadline_s: float | None = None) -> Optimum:
        return optimum(
            self.documents, self.costs, self.rate, start_s=self.start_s, rtt_s=self.rtt_s, objective=objective,
            deadline_s=deadline_s, floor=self.floor, workers=self.workers,
        )  # fmt: skip

    @property
    def closing_s(self) -> float:
        return self.costs.closing_s(sum(sum(document.tokens) for document in self.documents))


def finest_error(document: DocumentPlanInput) -> float:
    finest = [row[-1] for row in document.errors if len(row) == document.finest + 1]
    return max(finest, default=0.0)


def options(case: Case) -> list[list[tuple[int | None, float]]]:
    """What can be done about each chunk: (None to recompute, or bytes to fetch; share of the error)."""
    total = sum(sum(document.tokens) for document in case.documents)
    out = []
    for document in case.documents:
        for chunk, tokens in enumerate(document.tokens):
            found = [(None, finest_error(document) * tokens / total)] if document.has_text else []
            sizes = document.fetch_bytes[chunk] if document.fetch_bytes else ()
            wanted = min(case.floor, document.finest)
            lowest = wanted if 0 <= wanted < len(sizes) else len(sizes) if document.has_text else len(sizes) - 1
            levels = range(max(lowest, 0), len(sizes))
            found += [(sizes[level], document.errors[chunk][level] * tokens / total) for level in levels]
            out.append(found)
    return out


class Player:
    """Plays a schedule: chunks in one order, which is that of the link and of each lane; nothing is interrupted."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chunks = [
            (chunk, tokens, sum(document.tokens[:chunk]))
            for document in case.documents
            for chunk, tokens in enumerate(document.tokens)
        ]
        self.arrivals: dict[int, float] = {}

    def arrival(self, size: int) -> float:
        if size not in self.arrivals:
            after = self.case.start_s + self.case.rtt_s
            self.arrivals[size] = self.case.rate.time_to(size, after) - self.case.start_s
        return self.arrivals[size]

    def ready(self, order: tuple[int, ...], sizes: tuple[int | None, ...]) -> float:
        """When all is ready; infinite for an order that recomputes a chunk before an earlier one of its document."""
        costs = self.case.costs
        decode, prefill = Lane(costs.decode.base_s), Lane(costs.prefill.base_s)
        ends: dict[int, float] = {}
        received = 0
        for at in order:
            chunk, tokens, context = self.chunks[at]
            size = sizes[at]
            if size is None:
                if any(other not in ends for other in range(at - chunk, at)):
                    return inf
                needs = [ends[other] for other in range(at - chunk, at) if other not in prefill.together]
                lane, release = prefill, max(needs, default=0.0)
                seconds = costs.prefill.marginal(tokens, context)
            else:
                received += size
                lane, release = decode, self.arrival(received)
                seconds = costs.decode.token_s * tokens + costs.decode.byte_s * size
            if lane is prefill and prefill.together and not at - chunk <= prefill.together[-1] < at:
                lane.began_s = -inf  # a pass is of one document
            ends[at] = lane.add(at, release, seconds)
            if self.case.workers == 1:
                other = decode if lane is prefill else prefill
                other.free_s, other.began_s = ends[at], -inf
        return max(ends.values())


class Lane:
    """Runs one job after the other; a job that could have begun with the one before joins it at no fixed cost."""

    def __init__(self, base_s: float) -> None:
        self.base_s = base_s
        self.free_s, self.began_s = 0.0, -inf
        self.together: list[int] = []

    def add(self, chunk: int, release_s: float, seconds: float) -> float:
        if release_s > self.began_s:
            self.began_s = max(release_s, self.free_s)
            self.free_s = self.began_s + self.base_s
            self.together = []
        self.together.append(chunk)
        self.free_s += seconds
        return self.free_s


def outcomes(case: Case) -> list[tuple[float, float, int]]:
    """(TTFT, error, bytes) of every choice, each in its best order."""
    player = Player(case)
    orders = list(permutations(range(len(player.chunks))))
    out = []
    for chosen in product(*options(case)):
        sizes = tuple(size for size, _ in chosen)
        ready_s = min(player.ready(order, sizes) for order in orders)
        out.append((ready_s + case.closing_s, sum(error for _, error in chosen), sum(size or 0 for size in sizes)))
    return out


def documents_of(draw, counts, levels, sizes):
    out = []
    for count in counts:
        tokens = tuple(draw.choice((256, 256, 256, 100, 17)) for _ in range(count))
        has_text = draw.random() < 0.8
        fetch = tuple(tuple(sorted(draw.randrange(*sizes) << level for level in range(levels))) for _ in range(count))
        errors = tuple(
            tuple(0.04 * 4.0**-level * draw.uniform(0.8, 1.2) for level in range(levels)) for _ in range(count)
        )
        if has_text and draw.random() < 0.1:
            fetch = errors = ()
        layered = draw.random() < 0.7
        out.append(DocumentPlanInput(tokens, fetch, has_text, errors, layered))
    return tuple(out)


def case_of(seed: int, chunks: int, levels: int) -> Case:
    draw = random.Random(seed)
    cut = draw.randint(1, chunks)
    counts = [count for count in (cut, chunks - cut) if count]
    documents = documents_of(draw, counts, levels, (20_000, 120_000))
    prefill = PrefillCost(draw.choice((0.0, 0.002)), 10 ** draw.uniform(-5, -3), draw.choice((0.0, 1e-7)))
    decode = DecodeCost(draw.choice((0.0, 0.001)), 10 ** draw.uniform(-6, -4), 10 ** draw.uniform(-11, -8))
    rates = tuple(draw.choice((0.0, 1.0, 1.0, 3.0)) * 10 ** draw.uniform(5, 7.5) for _ in range(3))
    rate = RateTrace((0.0, 0.02, 0.1), (*rates[:2], rates[2] + 1e5), draw.choice((None, 0.3)))
    start_s = draw.choice((0.0, 0.05, 1.23))
    rtt_s = draw.choice((0.0, 0.01, 0.1))
    return Case(
        documents, CostModel(prefill, decode, 1e-6, 8), rate, start_s, rtt_s, draw.randrange(2), draw.randint(1, 2)
    )


def check_bound(case: Case, stretch: float) -> None:
    played = outcomes(case)
    soonest = min(ttft_s for ttft_s, _, _ in played)
    bound = case.bound("earliest")
    assert bound.ttft_s <= soonest * (1 + 1e-9)
    deadline_s = soonest * stretch
    in_time = [(error, size) for ttft_s, error, size in played if ttft_s <= deadline_s]
    best = case.bound("quality", deadline_s)
    fewest = case.bound("cheapest", deadline_s)
    if in_time:
        assert best.in_time
        assert fewest.in_time
        assert best.error <= min(error for error, _ in in_time) * (1 + 1e-9)
        assert fewest.bytes <= min(size for _, size in in_time) * (1 + 1e-9)


@settings(max_examples=120)
@given(seed=st.integers(0, 10**9), chunks=st.integers(1, 4), stretch=st.sampled_from((0.9, 1.0, 1.1, 1.5, 3.0)))
def test_no_schedule_betters_the_bound(seed, chunks, stretch):
    check_bound(case_of(seed, chunks, levels=2), stretch)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**9), workers=st.sampled_from((1, 2)))
def test_no_schedule_of_five_chunks_betters_the_bound(seed, workers):
    check_bound(replace(case_of(seed, 5, levels=1), workers=workers), 1.2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), stretch=st.sampled_from((1.0, 1.1, 1.3, 1.6, 2.0, 3.0)))
def test_no_schedule_of_several_documents_betters_the_bound(seed, stretch):
    """Passes cost much, and later tokens of a document more than its first ones."""
    draw = random.Random(seed)
    counts = draw.choice([(2, 1, 1), (1, 1, 2), (2, 2), (1, 1, 1, 1), (3, 1)])
    prefill = PrefillCost(
        draw.choice((0.002, 0.005, 0.01, 0.02)), 10 ** draw.uniform(-5, -3.5), draw.choice((0.0, 1e-7, 3e-7))
    )
    case = case_of(seed, 4, levels=2)
    documents = documents_of(draw, counts, 2, (20_000, 120_000))
    check_bound(replace(case, documents=documents, costs=replace(case.costs, prefill=prefill)), stretch)


def test_passes_of_few_documents_reach_only_so_far():
    """Two documents of eight chunks, of which time allows for one and a half: the fixed cost comes twice."""
    costs = CostModel(PrefillCost(0.05, 1e-4, 4e-8), DecodeCost(0, 0))
    lots = [alike(8, errors=(0.04,)), alike(8, errors=(0.04,))]
    lots = [replace(each, errors=((0.04, 0.0),) * 8, fetch_bytes=((1000, 10**9),) * 8) for each in lots]
    whole = costs.prefill.seconds(8 * 256)
    for more in (0, 2, 4):  # chunks of the other document
        other = costs.prefill.seconds(more * 256) if more else 0.0
        found = optimum(lots, costs, STEADY, objective="quality", deadline_s=whole + other, workers=2)
        assert 0.04 * (7 - more) / 16 < found.error <= 0.04 * (8 - more) / 16 * (1 + 1e-9)


def test_where_all_cannot_be_recomputed_in_time_that_way_bounds_nothing():
    """Passes of both documents take longer than the deadline, by less than a fixed cost."""
    costs = CostModel(PrefillCost(0.5, 1e-4, 4e-8), DecodeCost(0, 0))
    lots = [replace(alike(8), errors=((0.04, 0.0),) * 8, fetch_bytes=((1000, 10**9),) * 8) for _ in range(2)]
    deadline_s = costs.prefill.seconds(2048) + 0.99 * costs.prefill.seconds(2048)
    found = optimum(lots, costs, STEADY, objective="quality", deadline_s=deadline_s, workers=2)
    assert found.error > 1e-4  # some of a chunk is fetched


def test_very_many_documents_are_bounded_in_spans():
    few = Case((alike(1),) * 40, COSTS, STEADY, 0.0, 0.01, 0, 2)
    deadline_s = few.bound("earliest").ttft_s * 1.5
    found = few.bound("quality", deadline_s)
    assert found.in_time
    assert 0 < found.error < 0.04


def test_the_bound_is_met_by_most_small_loads():
    gaps = []
    for seed in range(60):
        case = case_of(seed, 3, levels=2)
        soonest = min(ttft_s for ttft_s, _, _ in outcomes(case))
        gaps.append(soonest / case.bound("earliest").ttft_s - 1)
    gaps.sort()
    assert gaps[len(gaps) // 2] < 0.001
    assert gaps[len(gaps) * 8 // 10] < 0.05


def alike(count, *, errors=(0.04, 0.01), text=True, **more):
    sizes = tuple(100_000 * (level + 1) for level in range(len(errors)))
    return DocumentPlanInput((256,) * count, (sizes,) * count, text, (errors,) * count, **more)


def test_fetching_ends_one_decode_after_the_link():
    costs = CostModel(PrefillCost(0, 1), DecodeCost(0.001, 1e-6, 1e-9))
    found = optimum([alike(10, layered=False)], costs, STEADY, rtt_s=0.05, objective="earliest")
    assert found.ttft_s == pytest.approx(0.05 + 1_000_000 / 1e7 + 0.001 + 256e-6 + 1e-4)
    assert found.bytes == 1_000_000
    assert found.error == pytest.approx(0.04, rel=1e-3)


def test_a_slow_decoder_works_from_the_first_arrival_on():
    costs = CostModel(PrefillCost(0, 1), DecodeCost(0.0, 1e-3))
    found = optimum([alike(10)], costs, STEADY, rtt_s=0.05, objective="earliest")
    assert found.ttft_s == pytest.approx(0.05 + 100_000 / 1e7 + 10 * 0.256)


def test_a_dead_link_leaves_recomputing():
    costs = CostModel(PrefillCost(0.5, 1e-3, 1e-6), DecodeCost(0.001, 1e-6))
    dead = RateTrace((0.0,), (0.0,), None)
    found = optimum([alike(4)], costs, dead, rtt_s=0.05, objective="earliest")
    assert found.ttft_s == pytest.approx(costs.prefill.seconds(1024))
    assert (found.bytes, found.error) == (0, 0.01)


def test_nothing_brings_what_has_no_text_over_a_dead_link():
    found = optimum([alike(4, text=False)], COSTS, RateTrace((0.0,), (0.0,), None), objective="quality", deadline_s=1.0)
    assert found.ttft_s == inf
    assert not found.in_time


def test_lanes_of_their_own_are_no_slower_than_a_shared_one():
    for seed in range(20):
        case = case_of(seed, 12, levels=3)
        shared, apart = (replace(case, workers=workers).bound("earliest").ttft_s for workers in (1, 2))
        assert apart <= shared * (1 + 1e-9)


@pytest.mark.parametrize("workers", [1, 2])
def test_more_time_is_never_worse(workers):
    case = replace(case_of(5, 40, levels=4), workers=workers)
    soonest = case.bound("earliest").ttft_s
    stretches = (1.0, 1.1, 1.3, 1.7, 2.5, 5.0, 20.0)
    quality = [case.bound("quality", soonest * stretch) for stretch in stretches]
    cheapest = [case.bound("cheapest", soonest * stretch) for stretch in stretches]
    assert all(found.in_time for found in quality + cheapest)
    assert all(a.error >= b.error * (1 - 1e-3) for a, b in pairwise(quality))
    assert all(a.bytes >= b.bytes * (1 - 1e-3) for a, b in pairwise(cheapest))
    assert quality[0].error > quality[-1].error
    assert cheapest[0].bytes > cheapest[-1].bytes


def test_without_a_deadline_quality_and_bytes_are_the_best_that_there_are():
    documents = [alike(4, errors=(0.04, 0.01, 0.001), text=False), alike(4, errors=(0.05,))]
    assert optimum(documents, COSTS, STEADY, objective="quality").error == pytest.approx((0.001 + 0.05) / 2)
    assert optimum(documents, COSTS, STEADY, objective="cheapest").bytes == 400_000


def test_what_is_not_in_time_becomes_the_earliest():
    soonest = optimum([alike(8)], COSTS, STEADY, objective="earliest")
    for objective in ("quality", "cheapest"):
        late = optimum([alike(8)], COSTS, STEADY, objective=objective, deadline_s=soonest.ttft_s * 0.99)
        assert late == replace(soonest, in_time=False)


def test_the_floor_holds_where_there_is_a_choice():
    document = DocumentPlanInput((256, 256), ((1000, 2000), (1000,)), True, ((0.1, 0.01), (0.1,)))
    found = optimum([document], COSTS, STEADY, objective="earliest", floor=1)
    assert found.bytes == 2000  # the second chunk lacks that level
    bare = optimum([replace(document, has_text=False)], COSTS, STEADY, objective="earliest", floor=1)
    assert bare.bytes == 3000


def test_a_blob_without_segments_leaves_recomputing():
    found = optimum([DocumentPlanInput((256, 256), ((), ()))], COSTS, STEADY, objective="earliest")
    assert (found.bytes, found.error) == (0, 0.0)


def test_a_head_start_is_computed_for_what_is_fetched():
    costs = CostModel(PrefillCost(0, 1e-3), DecodeCost(0, 0))
    found = optimum([alike(4, prefix_share=0.25)], costs, STEADY, objective="earliest")
    assert found.ttft_s >= 0.25 * 1.024


def test_a_chunk_may_be_lifted_in_part():
    # 16 chunks, of which the budget of bytes lifts five and a half by a level.
    costs = CostModel(PrefillCost(0, 1), DecodeCost(0, 0))
    found = optimum([alike(16)], costs, STEADY, objective="quality", deadline_s=(16 + 5.5) * 0.01)
    assert found.error == pytest.approx((10.5 * 0.04 + 5.5 * 0.01) / 16, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"objective": "fastest"},
        {"workers": 3},
        {"floor": -1},
        {"deadline_s": float("nan")},
        {"rtt_s": -1.0},
        {"start_s": inf},
        {"documents": []},
        {"documents": [DocumentPlanInput((1,), (), has_text=False)]},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong):
    settings_of = {"documents": [alike(2)], "objective": "quality", "deadline_s": 1.0, **wrong}
    with pytest.raises(ArgumentError):
        optimum(settings_of.pop("documents"), COSTS, STEADY, **settings_of)
