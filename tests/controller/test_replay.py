"""What was recorded happens again, also from lines of JSON."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import Controller, ControllerSettings, DocumentPlanInput, Estimates, Goal, LogEntry, replay
from kvwire.controller import events as ev
from kvwire.controller.log import dump_entry, load_entry
from kvwire.controller.policies import (
    Adaptive,
    CacheBlend,
    CacheGen,
    CacheGenArtefact,
    CacheGenTimed,
    Fixed,
    Raw,
    TextOnly,
)
from kvwire.controller.simulator import Scenario, constant, machine_named, model_named, simulate, variants_for
from kvwire.controller.simulator.arrivals import LoadArrival, Trouble
from kvwire.controller.simulator.world import World
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import ChunkId
from kvwire.types.rates import RateTrace

from .courses import Course
from .playing import COSTS, MB, RTT_S, document

RATE = RateTrace((0.0, 0.05, 0.3), (4 * MB, 1 * MB, 6 * MB), 1.0)
TROUBLE = Trouble(fail=0.1, stall=0.1, corrupt=0.1, noise=0.2)
POLICIES = [
    Adaptive(),
    CacheBlend(),
    CacheGen(),
    CacheGenTimed(),
    CacheGenArtefact(lambda start, _: RATE.at(start)),
    Fixed(2),
    Raw(),
    TextOnly(),
]


def recorded(policy):
    """A log of three loads with troubles, and what a new controller needs to relive it."""
    estimates = Estimates(COSTS, 2 * MB, RTT_S)
    options = ControllerSettings(workers=2, decode_batch=2)
    log, new = [], Controller(estimates.copy(), options, policy)
    controller = Controller(estimates, options, policy, record=log.append)
    goals = [Goal(), Goal(objective="quality", deadline_s=0.6), Goal(objective="cheapest", deadline_s=0.4)]
    arrivals = [LoadArrival(0.05 * at, ((document(), document(head=0.2)),) * 2, goal) for at, goal in enumerate(goals)]
    World(controller, RATE, COSTS, rtt_s=RTT_S, trouble=TROUBLE, seed=3).run(arrivals)
    return log, new


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_load_with_troubles_happens_again(policy):
    log, new = recorded(policy)
    assert len(log) > 20
    replay([load_entry(dump_entry(entry)) for entry in log], new)


def test_a_changed_log_is_noticed():
    log, new = recorded(Adaptive())
    at = next(at for at, entry in enumerate(log) if any(isinstance(each, ev.Fetch) for each in entry.instructions))
    log[at] = replace(log[at], instructions=())
    with pytest.raises(ArgumentError, match=f"entry {at}: "):
        replay(log, new)


def test_other_estimates_are_noticed():
    log, _ = recorded(Adaptive())
    with pytest.raises(ArgumentError, match="compare policy, settings and estimates"):
        replay(log, Controller(Estimates(COSTS, 100 * MB, RTT_S), ControllerSettings(workers=2, decode_batch=2)))


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_whatever_is_recorded_survives_being_written_down(seed):
    course = Course(seed)
    course.play()
    for entry in course.log:
        line = dump_entry(entry)
        assert "\n" not in line
        assert load_entry(line) == entry


def lines():
    chunk = ChunkId(0, 1, 2)
    events = [
        ev.LoadRequested(0, 1, 2, Goal(objective="quality", deadline_s=1.0, ceiling=2)),
        ev.IndexKnown(0, 0, (DocumentPlanInput((1, 2), ((3, 4), ()), True, ((0.5, 0.25), ())),)),
        ev.TransferProgress(1, 0.0, 0.5, chunk),
        ev.DecodeFailed((chunk,), (chunk,), "checksum"),
    ]
    fetch = ev.Fetch(chunk, 0, 1, 4, 0, 30.0)
    return [dump_entry(LogEntry(0.5, event, (fetch, ev.Finish(0, (), "in time")))) for event in events]


def mutations(value):
    """The same JSON with each part in turn replaced by something else, or taken out."""
    others = (None, -1, 1.5, "other", [], {}, True, 1 << 60, [[[[[[[[]]]]]]]])
    for at in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in others:
            changed = value.copy()
            changed[at] = other
            yield changed
        for deeper in mutations(value[at]):
            changed = value.copy()
            changed[at] = deeper
            yield changed
        if isinstance(value, dict):
            yield {name: each for name, each in value.items() if name != at}
            yield value | {"more": 1}


def test_a_damaged_line_is_refused_or_reads_as_an_entry():
    read = refused = 0
    for line in lines():
        for changed in mutations(json.loads(line)):
            try:
                entry = load_entry(json.dumps(changed))
            except CorruptError:
                refused += 1
            else:
                read += 1
                assert load_entry(dump_entry(entry)) == entry
    assert refused > 10 * read > 0


@pytest.mark.parametrize(
    "line",
    ["", "[]", "null", "{", "[" * 100_000, '{"now":NaN,"event":{"kind":"Tick"},"instructions":[]}',
     '{"now":1e999,"event":{"kind":"Tick"},"instructions":[]}', '{"now":0,"event":{"kind":"Fetch"},"instructions":[]}',
     '{"now":0,"event":{"kind":["Tick"]},"instructions":[]}', '{"now":0,"event":{"kind":"Tick"},"instructions":{}}',
     '{"now":true,"event":{"kind":"Tick"},"instructions":[]}'],
)  # fmt: skip
def test_what_was_never_written_is_refused(line):
    with pytest.raises(CorruptError):
        load_entry(line)


def test_a_line_beyond_any_log_is_refused_unread():
    with pytest.raises(CorruptError, match="characters at most"):
        load_entry(" " * 16_000_001)


def test_a_line_that_nobody_would_read_is_not_written():
    with pytest.raises(ArgumentError, match="characters at most"):
        dump_entry(LogEntry(0.0, ev.ChunkFailed(ChunkId(0, 0, 0), "x" * 16_000_000), ()))


def test_an_index_of_forty_thousand_chunks_of_ten_levels_can_be_written():
    chunks, sizes = 40_000, tuple(range(1 << 33, (1 << 33) + 10))
    errors = tuple(1.2345678901234567e-05 for _ in sizes)
    document = DocumentPlanInput((256,) * chunks, (sizes,) * chunks, True, (errors,) * chunks)
    assert len(dump_entry(LogEntry(0.0, ev.IndexKnown(0, 0, (document,)), ()))) > 10_000_000


def test_a_simulated_load_of_a_rival_can_be_written_down_and_lived_again():
    model = model_named("llama-3.1-8b")
    scene = Scenario(
        model=model, machine=machine_named("h100"), documents=variants_for(model, [1000]), rate=constant(1e7),
        goal=Goal(), warm=False,
    )  # fmt: skip
    log = []
    simulate(scene, Fixed(0), record=log.append)
    assert any(isinstance(each, ev.Fetch) for entry in log for each in entry.instructions)
    assert [load_entry(dump_entry(entry)) for entry in log] == log


@pytest.mark.parametrize("number", [nan, inf])
def test_numbers_that_json_lacks_are_not_written(number):
    with pytest.raises(ArgumentError):
        dump_entry(LogEntry(number, ev.Tick(), ()))


def test_the_smallest_entry_is_readable_at_a_glance():
    assert (
        dump_entry(LogEntry(0.5, ev.LoadAbandoned(3), ()))
        == '{"now":0.5,"event":{"kind":"LoadAbandoned","load":3},"instructions":[]}'
    )
    assert [each.name for each in fields(LogEntry)] == ["now", "event", "instructions"]
