"""Repair in document order: when jobs begin, what they leave for the closing, and what is predicted of that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvwire.controller import Goal, RepairOption, replay
from kvwire.controller import events as ev
from kvwire.controller.core import Controller
from kvwire.controller.estimates import Estimates
from kvwire.controller.repair import beside_link, expected_rows, rows_of
from kvwire.controller.settings import ControllerSettings
from kvwire.controller.simulator.loads import LoadArrival, Trouble
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, RTT_S, document, play

SIX = ((document(text=False),),) * 6
AT_END = RepairOption(least=0.15, most=0.15, looks=False, error=0.1)
IN_ORDER = replace(AT_END, begins="documents")


def arrival(option, *, at=0.0, documents=SIX, goal=None):
    return LoadArrival(at, documents, goal or Goal(objective="earliest"), index_s=0.0, repair=option)


def with_links(*, in_order=True, rows=200):
    """Six documents with link tokens behind each, so many that they take as long as a repair."""
    if in_order:
        return replace(arrival(None), links=(rows,) * 6)
    return replace(arrival(None), query_tokens=arrival(None).query_tokens + 6 * rows)


def jobs_of(played, load=0):
    return [instruction for _, instruction in played.instructions(ev.Repair, load)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rate", [1 * MB, 4 * MB, 20 * MB, 400 * MB])
def test_repair_beside_the_link_is_never_later_and_is_predicted(rate, workers):
    at_end, in_order = (play([arrival(option)], rate, workers=workers) for option in (AT_END, IN_ORDER))
    (late,), (soon,) = at_end.outcomes, in_order.outcomes
    assert not jobs_of(at_end)
    assert soon.ttft_s <= late.ttft_s + 1e-9
    (finish,) = (each for _, each in in_order.instructions(ev.Finish))
    assert finish.repair == 0.15
    assert bool(jobs_of(in_order)) == (rate <= 4 * MB)
    if rate <= 1 * MB:
        assert len(jobs_of(in_order)) >= 3
        rows = sum(entry.event.rows for entry in in_order.log if isinstance(entry.event, ev.RepairDone))
        assert rows >= 0.6 * rows_of(0.15, 6 * 2048, 2048)
        assert late.ttft_s - soon.ttft_s > 0.5 * COSTS.prefill.seconds(rows)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rate", [1 * MB, 4 * MB, 20 * MB, 400 * MB])
def test_link_tokens_beside_the_link_are_never_later(rate, workers):
    at_end, in_order = (play([with_links(in_order=each)], rate, workers=workers) for each in (False, True))
    (late,), (soon,) = at_end.outcomes, in_order.outcomes
    assert soon.ttft_s <= late.ttft_s + 1e-9
    assert jobs_of(in_order) or rate > 4 * MB
    assert not jobs_of(in_order) or rate < 400 * MB
    rows = sum(entry.event.rows for entry in in_order.log if isinstance(entry.event, ev.RepairDone))
    assert rows == 200 * max((each.documents for each in jobs_of(in_order)), default=0)
    assert late.ttft_s - soon.ttft_s >= 0.9 * COSTS.prefill.token_s * rows


@pytest.mark.parametrize("rate", [1 * MB, 4 * MB, 20 * MB, 400 * MB])
def test_what_a_load_expects_is_what_comes(rate):
    for option in (AT_END, IN_ORDER):
        seen = []

        def watched(controller, seen=seen):
            class Watching:
                def __getattr__(self, name):
                    return getattr(controller, name)

                def handle(self, event, now):
                    out = controller.handle(event, now)
                    seen.extend(each.first_s for each in controller.loads.values() if each.first_s is not None)
                    return out

            return Watching()

        (outcome,) = play([arrival(option)], rate, wrap=watched).outcomes
        assert outcome.ttft_s == pytest.approx(seen[0], rel=0.06)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=7),
    st.floats(0.5, 60.0),
    st.floats(0.01, 1.0),
    st.sampled_from([1, 2]),
    st.integers(0, 1000),
)
@example([4, 1, 4, 1, 2, 3, 5], 0.8, 1.0, 1, 44)  # text sees the first documents after all rows were asked for
def test_whatever_happens_rows_are_computed_once_and_in_order(counts, rate, share, workers, seed):
    """Chunks that fail or are late: the world refuses jobs over what is not there, and decoding what was repaired."""
    documents = tuple((document(chunks),) for chunks in counts)
    option = replace(IN_ORDER, least=share, most=share)
    trouble = Trouble(fail=0.2, stall=0.2, stall_s=0.3, corrupt=0.1, noise=0.3)
    played = play(
        [arrival(option, documents=documents, at=0.1 * number) for number in range(3)], rate * MB, workers=workers,
        trouble=trouble, seed=seed,
    )  # fmt: skip
    for load, outcome in enumerate(played.outcomes):
        assert outcome.decisions
        ordered = [job.documents for job in jobs_of(played, load)]
        assert ordered == sorted(set(ordered))
        assert all(documents < len(counts) for documents in ordered)
        assert len({(job.share, job.front) for job in jobs_of(played, load)}) <= 1
        ((_, finish),) = played.instructions(ev.Finish, load)
        assert all(job.front == finish.front for job in jobs_of(played, load))
    entries = played.log
    assert entries == played.log
    replay(played.log, Controller(Estimates(COSTS, rate * MB, RTT_S), ControllerSettings(workers=workers)))


def test_rows_that_the_question_chooses_wait_until_it_has_looked():
    looked = replace(IN_ORDER, begins="looked", looks=True)
    assert not jobs_of(play([arrival(looked)], 2 * MB))


@pytest.mark.parametrize("rate", [1 * MB, 4 * MB])
def test_jobs_do_not_hold_up_text_that_is_computed(rate):
    """Documents that are computed behind each other need no repair, and the engine's time is theirs."""
    six = ((document(),),) * 6
    at_end, in_order = (play([arrival(option, documents=six)], rate).outcomes[0] for option in (AT_END, IN_ORDER))
    assert at_end.recomputed
    assert in_order.ttft_s <= 1.06 * at_end.ttft_s


FALLS = [(1 * MB, 1e-3 * MB), (4 * MB, 1e-3 * MB), (16 * MB, 1e-2 * MB)]


@pytest.mark.parametrize(("before", "after"), FALLS)
@pytest.mark.parametrize("kind", ["repair", "links"])
def test_what_idle_compute_beats_is_given_up_though_jobs_have_run(kind, before, after):
    """The link falls after the first jobs: what is left is computed from text."""
    six = ((document(),),) * 6
    rate = RateTrace((0.0, 0.3), (before, after), 1e3)
    loads = {
        "repair": (arrival(AT_END, documents=six), arrival(IN_ORDER, documents=six)),
        "links": tuple(replace(with_links(in_order=each), documents=six) for each in (False, True)),
    }
    (late,), (soon,) = (play([load], rate).outcomes for load in loads[kind])
    assert soon.ttft_s <= 1.25 * late.ttft_s


@pytest.mark.parametrize("kind", ["repair", "links"])
def test_who_is_in_time_by_jobs_beside_the_link_is_not_refused(kind):
    def asked(deadline_s, at):
        goal = Goal(deadline_s=deadline_s, on_late="refuse")
        plain = arrival(IN_ORDER, at=at, goal=goal)
        return plain if kind == "repair" else replace(plain, repair=None, links=(200,) * 6)

    first = arrival(None)  # tells how fast the link is
    alone = play([first, asked(100.0, 10.0)], 1 * MB).outcomes[1]
    assert alone.decisions
    for share in (1.1, 1.2, 1.5):
        outcome = play([first, asked(share * alone.ttft_s, 10.0)], 1 * MB).outcomes[1]
        assert outcome.decisions, share
        assert outcome.in_time


def test_a_load_with_a_deadline_is_repaired_in_time():
    goal = Goal(objective="quality", deadline_s=4.0)
    option = replace(IN_ORDER, least=0.0, most=0.3, shares=(0.0, 0.3), left=(1.0, 0.1))
    for rate in (1 * MB, 3 * MB, 10 * MB):
        played = play([arrival(option, goal=goal)], rate)
        plain = play([arrival(None, goal=goal)], rate)
        assert played.outcomes[0].in_time or not plain.outcomes[0].in_time


def test_a_job_of_a_load_that_is_over_frees_the_lane():
    played = play([replace(arrival(IN_ORDER), leaves_s=0.9), arrival(IN_ORDER, at=1.0)], 2 * MB)
    assert played.outcomes[1].decisions


def test_a_job_that_is_not_running_cannot_end():
    controller = Controller(Estimates(COSTS, MB, RTT_S), ControllerSettings())
    controller.handle(ev.LoadRequested(0, 2, 8, Goal(), IN_ORDER), 0.0)
    with pytest.raises(ArgumentError, match="no repair of"):
        controller.handle(ev.RepairDone(0, 1, 1, 0, 0.1), 0.0)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8), st.floats(0, 1), st.data(),
)  # fmt: skip
def test_rows_of_all_documents_are_the_share(tokens, share, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))) | {0, len(tokens)})
    parts = [expected_rows(share, tokens, tokens[0], a, b) for a, b in pairwise(cuts)]
    total = rows_of(share, sum(tokens), tokens[0])
    assert total <= sum(parts) <= total + len(parts)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 0.5)), min_size=2, max_size=7), st.floats(0, 0.8),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_what_is_done_beside_the_link_ends_before_it(steps, job, workers):
    """Against going through the documents by hand, one engine for everything."""
    arrived, now = [], 0.0
    for pause, _ in steps:
        now += pause
        arrived.append(now)
    decode = [seconds for _, seconds in steps]
    done = beside_link(arrived, decode, lambda first, last: job * (last - first), workers)
    assert 0 <= done < len(steps)
    if done:
        rest = sum(decode[done:]) if workers == 1 else 0.0
        assert arrived[done - 1] + decode[done - 1] + (job if done == 1 else 0) + rest <= arrived[-1] + 1e-9
