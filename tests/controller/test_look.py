"""The question looks at coarse levels while finer ones are fetched, and says where these should go."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.controller.chunk_table import ChunkTable
from kvwire.controller.policies import Adaptive
from kvwire.controller.policies.adaptive import Refining
from kvwire.controller.simulator import Scenario, simulate
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.simulator.machines import machine_named
from kvwire.controller.simulator.models import model_named
from kvwire.controller.simulator.sizes import documents_for
from kvwire.controller.snapshot import PlanRequest, UpgradeCandidates
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, ByHand, LookFirst, document, play, quality

MODEL, MACHINE = model_named("llama-3.1-70b"), machine_named("4xa100")
DOCUMENTS = tuple((each,) for each in documents_for(MODEL, [4096] * 8))


def uneven(documents, *, seed=0):
    """Attention that a fifth of the chunks gets nearly all of."""
    random = np.random.default_rng(seed)
    rows = [np.where(random.random(len(variants[0].tokens)) < 0.2, 4.6, 0.1) for variants in documents]
    mean = float(np.concatenate(rows).mean())
    return tuple(tuple((row / mean).tolist()) for row in rows)


def loaded(attention=(), goal=None, gbit=5.0, *, query=32, documents=DOCUMENTS):
    scenario = Scenario(
        model=MODEL, machine=MACHINE, documents=documents, rate=RateTrace((0.0,), (gbit * 1e9 / 8,)),
        goal=goal or quality(1.0), attention=attention, query_tokens=query,
    )  # fmt: skip
    (outcome,) = simulate(scenario, Adaptive())
    return outcome


def looks(outcome):
    return [span for span in outcome.spans if span.what == "look"]


def seen(outcome, attention):
    """Error of an outcome, weighed by what the question attends to."""
    total = tokens = 0.0
    for decision in outcome.decisions:
        given_, chunk = DOCUMENTS[decision.chunk.document][0], decision.chunk.chunk
        weight = attention[decision.chunk.document][chunk]
        total += weight * given_.tokens[chunk] * given_.error(chunk, decision.level)
        tokens += given_.tokens[chunk]
    return total / tokens


def test_finer_levels_go_where_the_question_looks():
    attention = uneven(DOCUMENTS)
    alike, looked = loaded(), loaded(attention)
    assert len(looks(looked)) == 1
    assert not looks(alike)
    assert looked.in_time
    assert looked.seen_error == pytest.approx(seen(looked, attention))
    assert looked.seen_error < 0.8 * seen(alike, attention)
    assert alike.seen_error == alike.error


def test_nobody_looks_where_time_is_not_for_quality():
    attention = uneven(DOCUMENTS)
    for goal in (Goal(), Goal(objective="earliest", deadline_s=2.0), Goal(objective="cheapest", deadline_s=2.0)):
        assert not looks(loaded(attention, goal))


def test_nobody_looks_where_everything_gets_finest_or_nothing_gets_finer():
    attention = uneven(DOCUMENTS)
    assert not looks(loaded(attention, quality(2.0), gbit=30.0))
    assert not looks(loaded(attention, quality(0.5), gbit=0.3))


def test_looking_makes_nothing_late():
    attention = uneven(DOCUMENTS)
    for gbit, deadline_s in ((1.0, 0.5), (1.0, 1.0), (10.0, 0.5)):
        assert loaded(attention, quality(deadline_s), gbit).in_time >= loaded((), quality(deadline_s), gbit).in_time


@pytest.mark.parametrize(("query", "gbit", "deadline_s"), [(32, 3, 1.0), (768, 3, 1.5), (1024, 3, 1.5), (32, 1, 2.0)])
def test_loads_that_look_lose_little_where_they_gain_nothing(query, gbit, deadline_s):
    attention = uneven(DOCUMENTS)
    alike, looked = (loaded(each, quality(deadline_s), gbit, query=query) for each in ((), attention))
    assert looked.in_time
    assert looked.seen_error <= 1.3 * seen(alike, attention)


def test_a_look_that_sees_nothing_changes_nothing_that_follows():
    arrival = LoadArrival(0.0, ((document(chunks=20),),), quality(1.0), 32, attention=((1.0,) * 20,))
    even = play([arrival], 30 * MB, policy=LookFirst())
    assert len(even.instructions(ev.Look)) == 1

    class Blind:
        """Tells the controller that nothing was to be seen."""

        def __init__(self, controller):
            self._controller = controller

        def __getattr__(self, name):
            return getattr(self._controller, name)

        def handle(self, event, now):
            blind = replace(event, attention=()) if isinstance(event, ev.Looked) else event
            return self._controller.handle(blind, now)

    blind = play([arrival], 30 * MB, policy=LookFirst(), wrap=Blind)
    assert blind.outcomes[0].in_time
    assert blind.outcomes[0].levels == even.outcomes[0].levels


@pytest.mark.parametrize("attention", [((1.0,),), ((1.0,) * 8, (1.0,)), ((nan,) * 8,), ((-1.0,) * 8,)])
def test_attention_that_cannot_be_is_refused_and_changes_nothing(attention):
    hand = ByHand(quality(1.0), document(), policy=LookFirst())
    hand.tell(ev.LoadRequested(0, 1, 0, quality(1.0), looks=True))
    out = hand.tell(ev.IndexKnown(0, 0, (document(),)))
    waiting = list(out)
    while not any(isinstance(each, ev.Look) for each in waiting):
        each = waiting.pop(0)
        if isinstance(each, ev.Fetch):
            waiting += hand.tell(ev.ChunkArrived(each.chunk, each.level))
        elif isinstance(each, ev.Decode):
            waiting += hand.tell(ev.DecodeDone(each.chunks, 0.001))
        elif isinstance(each, ev.Recompute):
            chunks = tuple(replace(each.first, chunk=at) for at in range(each.first.chunk, each.last.chunk + 1))
            waiting += hand.tell(ev.RecomputeDone(chunks, 0.001))
    with pytest.raises(ArgumentError, match="attention"):
        hand.tell(ev.Looked(0, attention, 0.01))
    hand.tell(ev.Looked(0, ((1.0,) * 8,), 0.01))
    with pytest.raises(ArgumentError, match="no look"):
        hand.tell(ev.Looked(0, ((1.0,) * 8,), 0.01))


# The best steps first, against trying them one by one.


def one_by_one(finer, some, left_s):
    """Of all steps the best for its bytes that keeps the time, again and again, until the first that does not."""
    levels = some.level.copy()
    best = np.full(len(levels), np.inf)
    order = {}
    while True:
        able = [at for at in range(len(levels)) if levels[at] < some.top[at]]
        if not able:
            return levels

        def gain(at, levels=levels):
            more = some.sizes[levels[at] + 1, at] - some.sizes[levels[at], at]
            less = some.tokens[at] * (some.errors[levels[at], at] - some.errors[levels[at] + 1, at])
            return min(best[at], less / max(more, 1))

        # Of equals the one with fewer steps behind it, then the first.
        at = max(able, key=lambda each: (gain(each), -order.get(each, 0), -each))
        raised = levels.copy()
        raised[at] += 1
        if finer.end_s(raised) > left_s:
            return levels
        best[at] = gain(at)
        order[at] = order.get(at, 0) + 1
        levels = raised


@st.composite
def candidates(draw):
    count, levels = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.cumsum(random.integers(1, 100_000, (levels, count)), axis=0)
    errors = np.sort(10.0 ** random.uniform(-6, 0, (levels, count)), axis=0)[::-1] * random.uniform(0.1, 5, count)
    top = random.integers(0, levels, count)
    return UpgradeCandidates(
        level=np.minimum(random.integers(0, levels, count), top), top=top, sizes=sizes, errors=errors,
        tokens=random.integers(1, 300, count), ready=np.ones(count, np.bool_),
    )  # fmt: skip


@given(candidates(), st.floats(0.0, 0.5), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_the_best_steps_are_those_that_one_by_one_finds(some, left_s, workers):
    request = PlanRequest(
        chunks=ChunkTable().open({})[0], costs=COSTS, goal=quality(1.0), bandwidth=1e6, bandwidth_low=1e6,
        prompt_tokens=1000,
        refinable=some, left_s=left_s, workers=workers,
    )  # fmt: skip
    finer = Refining(request, some)
    if finer.ready_s > left_s:
        return
    assert finer.best_within(left_s).tolist() == one_by_one(finer, some, left_s).tolist()
