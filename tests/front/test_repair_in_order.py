"""Documents repaired in the prompt's order, beside the link, equal a repair at the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from kvwire.controller import events as ev
from kvwire.controller.policies import Fixed
from kvwire.reuse import RepairInput, link, repair_prompt, rows_for, selector_of
from kvwire.runtime.loader import Loader
from kvwire.runtime.repair_in_order import RepairInOrder
from kvwire.runtime.settings import LoadSettings
from kvwire.transport import LinkSettings

from ..engines.families import LENGTHS, cache_error, documents, engine_of, query

TEXT = tuple(token for ids in documents() for token in ids)
SLOW = LinkSettings(4e6, 0.01)
EVERY = ("llama", "qwen3", "mistral", "gemma3", "phi", "gpt-neox", "cohere", "glm", "deepseek-v3")
NAMES = ("first", "random", "deviation", "all", "attention", "product")


def given_for(engine):
    """A linked prompt, with what selectors want to know of it."""
    linked = link(engine.prefill(documents()))
    deviation = torch.rand(len(TEXT), generator=torch.Generator().manual_seed(3))
    seen = engine.look(linked, query())
    return RepairInput(engine, linked, TEXT, tuple(LENGTHS), tuple(query()), deviation, seen=seen)


def in_order(given, name, share):
    """What jobs do: documents that are not here yet hold garbage, and come when those before them are done."""
    whole = replace(given.cache, keys=[k.clone() for k in given.cache.keys], values=[v.clone() for v in given.cache.values])
    start = 0
    for side in (given.cache.keys, given.cache.values):
        for tensor in side:
            tensor.fill_(torch.nan)
    jobs = RepairInOrder(given, selector_of(name), share, rows_for(share, given.documents))
    for length in LENGTHS:
        for ours, theirs in ((given.cache.keys, whole.keys), (given.cache.values, whole.values)):
            for mine, tensor in zip(ours, theirs, strict=True):
                if mine.numel():
                    mine[:, start : start + length] = tensor[:, start : start + length]
        start += length
        jobs.run(start, lambda: False)
    assert not jobs.left
    return jobs.joined(None, selector_of(name), share)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", EVERY)
def test_jobs_in_order_equal_a_repair_at_once(family, name):
    engine = engine_of(family)
    ours, theirs = given_for(engine), given_for(engine)
    first = [tensor[:, : LENGTHS[0]].clone() for tensor in ours.cache.keys]
    done = in_order(ours, name, 0.4 if name != "all" else 1.0)
    wanted = repair_prompt(theirs, selector_of(name), 0.4 if name != "all" else 1.0)
    assert torch.equal(done.rows, wanted.rows)
    assert done.cost == wanted.cost
    assert cache_error(ours.cache, theirs.cache) < 1e-5
    if name != "all":
        kept = zip(first, ours.cache.keys, strict=True)
        assert all(torch.equal(before, after[:, : LENGTHS[0]]) for before, after in kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "glm"])
def test_jobs_in_order_are_exact_in_double_precision(family, name):
    engine = engine_of(family)
    double = type(engine)(__import__("copy").deepcopy(engine.model).double(), model_id=family)
    ours, theirs = given_for(double), given_for(double)
    share = 0.4 if name != "all" else 1.0
    in_order(ours, name, share)
    repair_prompt(theirs, selector_of(name), share)
    assert cache_error(ours.cache, theirs.cache) < 1e-10


def loaded(small, corpus, *, log=None, link_settings=SLOW, documents=None, **settings):
    chosen = LoadSettings(record=log.append if log is not None else None, **settings)
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, link=link_settings, settings=chosen) as loader:
        return loader.ask(tuple(documents or small.tokens), question)


def at_the_end(monkeypatch):
    """Loads that repair nothing before their last chunk is here."""
    monkeypatch.setattr("kvwire.runtime.links._begins", lambda _: "closing")


def jobs_of(log, kind=ev.Repair):
    return [each for entry in log for each in entry.instructions if isinstance(each, kind)]


def test_a_load_repairs_documents_while_it_fetches_others(small, monkeypatch):
    log = []
    answer = loaded(small, small.corpus(), log=log, repair=0.3, selector="first", policy=Fixed(4))
    asked = jobs_of(log)
    assert asked and [each.documents for each in asked] == sorted({each.documents for each in asked})
    assert 0 < answer.repair.beside < len(answer.repair.rows)
    last_came = max(entry.now for entry in log if isinstance(entry.event, ev.ChunkArrived))
    assert min(entry.now for entry in log if isinstance(entry.event, ev.RepairDone)) < last_came
    at_the_end(monkeypatch)
    later = loaded(small, small.corpus(), repair=0.3, selector="first", policy=Fixed(4))
    assert not later.repair.beside
    assert torch.equal(answer.repair.rows, later.repair.rows)
    assert cache_error(answer.prompt.cache, later.prompt.cache) < 1e-5
    assert torch.allclose(answer.logits, later.logits, atol=1e-4)
