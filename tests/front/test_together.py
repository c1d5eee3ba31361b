"""Several loads whose lost chunks are computed in one pass, with the real engine and the real driver."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch

from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller import events as ev
from kvwire.controller.policies import TextOnly
from kvwire.engines.base import Engine
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.costs import joins, measure_costs
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.joined_passes import recompute_together
from kvwire.runtime.loader import Loader
from kvwire.runtime.passes import PromptWorker
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.types import ChunkId

QUESTION = (5, 6, 7, 8)
PREFILL = PrefillCost(1.0, 1e-6)
COSTS = CostModel(PREFILL, DecodeCost(0.0005, 1e-5), joined=PREFILL)
"""Of an engine whose passes are all fixed cost: whatever waits is joined."""


@pytest.fixture(scope="module")
def texts(small):
    """Eight documents of unequal lengths."""
    ids = [each for tokens in small.tokens.values() for each in tokens]
    return {f"d{at}": tuple(ids[at * 97 : at * 97 + 20 + 31 * at]) for at in range(8)}


@pytest.fixture
def lost(small, texts):
    """A corpus whose blobs are gone: everything is computed from texts."""
    corpus = Corpus(small.engine, MemoryStore())
    for each in corpus.encode([Document(name, ids) for name, ids in texts.items()]):
        corpus.catalog.store.delete(each.entry.blob_key)
    return corpus


class Watched:
    """The engine, which counts joined passes, may fail them, and may be held up in one."""

    def __init__(self, engine, monkeypatch):
        engine.check_together()  # which runs one
        self.rows, self.fails, self.inside, self.go_on = [], False, threading.Event(), threading.Event()
        self.first = []  # token ids of the first pass
        self.go_on.set()
        real = type(engine).extend_together

        def watched(this, prefixes, token_ids, *, offsets):
            self.rows.append(len(token_ids))
            self.first = self.first or [tuple(ids) for ids in token_ids]
            self.inside.set()
            assert self.go_on.wait(20)
            if self.fails:
                raise torch.OutOfMemoryError
            return real(this, prefixes, token_ids, offsets=offsets)

        monkeypatch.setattr(type(engine), "extend_together", watched)


def ask_all(loader, pairs):
    async def all_of_them():
        return await asyncio.gather(*(loader.ask_async(list(pair), QUESTION) for pair in pairs))

    return asyncio.run(all_of_them())


def hold_exact(engine, texts, pairs, answers):
    for pair, answer in zip(pairs, answers, strict=True):
        exact = link(engine.prefill([texts[name] for name in pair]))
        ours = answer.prompt.cache
        for a, b in zip((*ours.keys, *ours.values), (*exact.keys, *exact.values), strict=True):
            assert float((a - b).abs().max() / b.abs().max()) < 1e-5
        assert {each.action for each in answer.decisions} == {"recompute"}


PAIRS = [("d0",), ("d1", "d2"), ("d3",), ("d4",), ("d5",), ("d6", "d0"), ("d7",), ("d2",)]


def test_loads_at_once_are_joined_and_equal_documents_alone(small, lost, texts, monkeypatch):
    watched, log = Watched(small.engine, monkeypatch), []
    with Loader(small.engine, lost, costs=COSTS, settings=LoadSettings(record=log.append)) as loader:
        answers = ask_all(loader, PAIRS)
        learnt = loader.estimates.joined
    hold_exact(small.engine, texts, PAIRS, answers)
    assert watched.rows
    assert max(watched.rows) > 2
    assert learnt.is_measured
    done = [entry.event for entry in log if isinstance(entry.event, ev.RecomputedTogether)]
    assert [len(each.passes) for each in done] == watched.rows
    assert all(each.joined for each in done)
    assert all(answer.timing.recompute_s > 0 for answer in answers)


def test_a_joined_pass_that_fails_is_run_load_by_load(small, lost, texts, monkeypatch):
    watched, log = Watched(small.engine, monkeypatch), []
    watched.fails = True
    with Loader(small.engine, lost, costs=COSTS, settings=LoadSettings(record=log.append)) as loader:
        answers = ask_all(loader, PAIRS)
        assert not loader.estimates.joined.is_measured
    hold_exact(small.engine, texts, PAIRS, answers)
    assert watched.rows
    done = [entry.event for entry in log if isinstance(entry.event, ev.RecomputedTogether)]
    assert done
    assert not any(each.joined or each.failed for each in done)


def test_one_row_that_cannot_be_computed_leaves_the_others_whole(small, lost, texts, monkeypatch):
    Watched(small.engine, monkeypatch)
    real, bad = type(small.engine).check_ids, texts["d3"]

    def checked(this, token_ids, start=0):
        if tuple(token_ids) == bad:
            raise RuntimeError
        return real(this, token_ids, start)

    monkeypatch.setattr(type(small.engine), "check_ids", checked)

    async def all_of_them(loader):
        asked = (loader.ask_async(list(pair), QUESTION) for pair in PAIRS)
        return await asyncio.gather(*asked, return_exceptions=True)

    with Loader(small.engine, lost, costs=COSTS) as loader:
        answers = asyncio.run(all_of_them(loader))
    monkeypatch.setattr(type(small.engine), "check_ids", real)
    failed = [pair for pair, answer in zip(PAIRS, answers, strict=True) if isinstance(answer, Exception)]
    assert failed == [("d3",)]
    whole = [(pair, answer) for pair, answer in zip(PAIRS, answers, strict=True) if pair != ("d3",)]
    hold_exact(small.engine, texts, *zip(*whole, strict=True))


def test_a_load_that_leaves_in_the_middle_of_a_joined_pass_leaves_the_others_whole(small, lost, texts, monkeypatch):
    watched = Watched(small.engine, monkeypatch)
    watched.go_on.clear()

    async def one_leaves(loader):
        tasks = [asyncio.create_task(loader.ask_async(list(pair), QUESTION)) for pair in PAIRS]
        await asyncio.to_thread(watched.inside.wait, 20)
        (gone, *_) = [at for at, pair in enumerate(PAIRS) if not tasks[at].done() and texts[pair[0]] in watched.first]
        tasks[gone].cancel()
        await asyncio.gather(tasks[gone], return_exceptions=True)
        watched.go_on.set()
        return gone, await asyncio.gather(*tasks, return_exceptions=True)

    with Loader(small.engine, lost, costs=COSTS) as loader:
        gone, answers = asyncio.run(one_leaves(loader))
    assert isinstance(answers.pop(gone), asyncio.CancelledError)
    hold_exact(small.engine, texts, PAIRS[:gone] + PAIRS[gone + 1 :], answers)


def test_an_engine_without_it_is_never_asked(small, lost, texts, monkeypatch):
    watched = Watched(small.engine, monkeypatch)
    monkeypatch.setattr(type(small.engine), "can_join", Engine.can_join)
    with Loader(small.engine, lost, costs=COSTS) as loader:
        assert loader.costs.joined is None
        hold_exact(small.engine, texts, PAIRS, ask_all(loader, PAIRS))
    assert not watched.rows


def test_costs_of_joined_passes_are_measured_and_remembered(small, lost, tmp_path, monkeypatch):
    assert joins(small.engine)
    assert measure_costs(small.engine).joined.seconds(256) > 0
    memory = EstimatesFile(tmp_path / "estimates.json")
    with Loader(small.engine, lost, memory=memory) as loader:
        assert loader.costs.joined is not None
        loader.ask(["d1"], QUESTION)
    with Loader(small.engine, lost, memory=memory) as again:
        assert again.costs.joined is not None
    monkeypatch.setattr(type(small.engine), "can_join", Engine.can_join)
    with Loader(small.engine, lost, memory=memory) as unable:
        assert unable.costs.joined is None


def test_documents_behind_neutral_prefixes_are_joined_as_well(small, texts, monkeypatch):
    watched, chosen = Watched(small.engine, monkeypatch), LoadSettings(policy=TextOnly())
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=8))
    list(corpus.encode([Document(name, ids) for name, ids in texts.items()]))
    with Loader(small.engine, corpus, costs=replace(COSTS, joined=None), settings=chosen) as loader:
        alone = ask_all(loader, PAIRS)
    assert not watched.rows
    with Loader(small.engine, corpus, costs=COSTS, settings=chosen) as loader:
        answers = ask_all(loader, PAIRS)
    assert watched.rows
    for ours, theirs in zip(answers, alone, strict=True):
        assert {each.action for each in ours.decisions} == {"recompute"}
        for a, b in zip(ours.prompt.cache.keys, theirs.prompt.cache.keys, strict=True):
            assert float((a - b).abs().max() / b.abs().max()) < 1e-5


class Stub(PromptWorker):
    """A load of which only the pass is of interest; ``written`` notes what it computes."""

    def can_be_row(self, _):
        return True

    def row(self, *_, **__):
        return None, [1], 0

    def _extend(self, first, *_, **__):
        self._engine.extend(None, QUESTION)
        written.append(first.load)


written: list[int] = []


def test_a_stop_that_was_meant_for_an_earlier_pass_does_not_end_a_joined_one(small, monkeypatch):
    told, engine = [], small.engine

    class Driver:
        clock = staticmethod(time.monotonic)

        async def compute(self, work):
            return await asyncio.get_running_loop().run_in_executor(None, work)

        def tell(self, event):
            told.append(event)

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(type(engine), "extend_together", no_memory)
    written.clear()
    loads = [Stub(engine, [], Driver(), "auto", ()) for _ in range(2)]
    for number, load in enumerate(loads):
        load.number = number
    loads[1].stop_pass()
    passes = tuple(ev.Recompute(ChunkId(0, 0, load), ChunkId(0, 1, load)) for load in range(2))
    asyncio.run(recompute_together(engine, loads[0]._driver, ev.RecomputeTogether(passes), loads))
    assert written == [0, 1]
    (done,) = told
    assert not done.failed
