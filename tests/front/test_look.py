"""Loads that look where the question looks while finer levels are on their way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive
from kvwire.errors import MismatchError
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings


class LookFirst(Adaptive):
    """Fetches the coarsest level of everything, and nothing finer until the question has looked."""

    def plan(self, request):
        plan = super().plan(replace(request, look_s=None))
        if request.look_s is None:
            return plan
        count = request.chunks.count
        levels, order = np.zeros(count, np.int64), range(count)
        return replace(plan, levels=levels, order=order, upgraded=frozenset(), refine=(), refine_levels=(), looks=True)


@pytest.fixture
def looking(small, monkeypatch):
    """Asks with every call of the engine that looks counted, and every entry of the controller's log kept."""
    calls, log = [], []
    look = type(small.engine).look

    def counted(engine, cache, token_ids, *, layers=()):
        calls.append(cache.tokens)
        return look(engine, cache, token_ids, layers=layers)

    monkeypatch.setattr(type(small.engine), "look", counted)

    def ask(deadline_s=20.0, **settings):
        chosen = LoadSettings(policy=LookFirst(), record=log.append, **settings)
        question = small.engine.tokenize("And the lamp was")
        with Loader(small.engine, small.corpus(), costs=small.costs, settings=chosen) as loader:
            return loader.ask(tuple(small.tokens), question, deadline_s=deadline_s)

    ask.calls, ask.log = calls, log
    return ask


def events(log, kind):
    return [entry.event for entry in log if isinstance(entry.event, kind)]


def test_the_question_looks_once_and_rows_are_chosen_by_what_it_saw(small, looking):
    answer = looking()
    total = sum(len(ids) for ids in small.tokens.values())
    assert looking.calls == [total]
    (looked,) = events(looking.log, ev.Looked)
    chunks = [sum(decision.chunk.document == at for decision in answer.decisions) for at in range(len(small.tokens))]
    assert [len(row) for row in looked.attention] == chunks
    assert answer.timing.look_s > 0
    assert answer.repair is not None
    assert max(decision.level for decision in answer.decisions if decision.level is not None) > 0


def test_attention_is_that_of_the_prompt(small, looking):
    """What is told for chunks, put together over their tokens, is one in the mean."""
    looking()
    (looked,) = events(looking.log, ev.Looked)
    tokens = {each.document: each.variants[0].tokens for each in events(looking.log, ev.IndexKnown)}
    weighed = sum(
        weight * count
        for at, row in enumerate(looked.attention)
        for weight, count in zip(row, tokens[at], strict=True)
    )  # fmt: skip
    assert weighed / sum(map(sum, tokens.values())) == pytest.approx(1.0, rel=1e-4)


def test_nobody_looks_where_settings_say_so(looking):
    answer = looking(look=False, repair="none")
    assert not looking.calls
    assert not events(looking.log, ev.Looked)
    assert answer.timing.look_s == 0


def test_a_look_that_fails_is_told_and_loses_nothing(small, looking, monkeypatch):
    def broken(*_args, **_named):
        msg = "its attention is not to be seen"
        raise MismatchError(msg)

    plain = looking(repair="none", look=False)
    monkeypatch.setattr(type(small.engine), "look", broken)
    answer = looking(repair="none")
    assert any("attention" in miss for miss in answer.misses)
    assert len(events(looking.log, ev.Looked)) == 1
    assert torch.allclose(answer.logits, plain.logits, atol=1e-4)
