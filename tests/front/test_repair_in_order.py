"""Documents repaired in the prompt's order, beside the link, equal a repair at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch

from kvwire import reuse
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive, Fixed
from kvwire.reuse import LinkLayout, RepairInput, link, repair_prompt, rows_for, selector_of
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.links import plan_links
from kvwire.runtime.loader import Loader
from kvwire.runtime.repair import RepairInOrder
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.transport import LinkSettings

from ..engines.families import LENGTHS, cache_error, documents, engine_of, query
from .test_links import REPORT

TEXT = tuple(token for ids in documents() for token in ids)
SLOW = LinkSettings(4e4, 0.01)
LINK = {"max_in_flight": 2, "bandwidth_prior": 1e5}
"""Documents come one after another."""
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
    whole = replace(
        given.cache, keys=[k.clone() for k in given.cache.keys], values=[v.clone() for v in given.cache.values]
    )
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


class FromTheBack(Fixed):
    """Asks for the last documents first, as plans do that meet recomputation."""

    def plan(self, request):
        plan = super().plan(request)
        return replace(plan, order=list(plan.order)[::-1])


class LookFirst(Fixed):
    """Fetches the coarsest level of everything, and raises all to the finest once the question has looked."""

    def plan(self, request):
        if request.chunks.count:
            plan = Fixed(0).plan(request)
            return replace(plan, looks=request.look_s is not None)
        plan = Adaptive().plan(replace(request, look_s=None, refinable=None))
        some = request.refinable
        if request.look_s is not None or some is None:
            return replace(plan, looks=request.look_s is not None)
        ready = [at for at in range(len(some.level)) if some.ready[at]]
        return replace(plan, refine=ready, refine_levels=[int(some.top[at]) for at in ready])


@pytest.fixture(scope="module")
def five(small):
    """Five documents and their corpus."""
    text = [token for ids in small.tokens.values() for token in ids]
    tokens = {f"part {at}": text[200 * at : 200 * at + 180] for at in range(5)}
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(deviation=True))
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in tokens.items()]))
    return corpus, tokens


def asked(small, five, *, log=None, link=SLOW, names=None, deadline_s=None, texts=None, **settings):
    corpus, tokens = five
    chosen = LoadSettings(record=log.append if log is not None else None, **LINK, **settings)
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, link=link, settings=chosen) as loader:
        return loader.ask(tuple(names or tokens), question, deadline_s=deadline_s, texts=texts)


def jobs_of(log, kind=ev.Repair):
    return [each for entry in log for each in entry.instructions if isinstance(each, kind)]


def same(answer, later):
    assert not later.repair.beside
    assert torch.equal(answer.repair.rows, later.repair.rows)
    assert cache_error(answer.prompt.cache, later.prompt.cache) < 1e-5
    assert torch.allclose(answer.logits, later.logits, atol=1e-4)


@pytest.mark.parametrize("selector", ["first", "random", "deviation", "all"])
def test_a_load_repairs_documents_while_it_fetches_others(small, five, selector):
    log, chosen = [], {"repair": "all" if selector == "all" else 0.3, "selector": selector, "policy": Fixed(4)}
    before = contents(five[0])
    answer = asked(small, five, log=log, **chosen)
    ordered = [each.documents for each in jobs_of(log)]
    assert ordered == sorted(set(ordered))
    assert 0 < answer.repair.beside < len(answer.repair.rows)
    came = max(entry.now for entry in log if isinstance(entry.event, ev.ChunkArrived))
    assert min(entry.now for entry in log if isinstance(entry.event, ev.RepairDone)) < came
    assert contents(five[0]) == before
    same(answer, asked(small, five, repair_in_order=False, **chosen))


def contents(corpus):
    store = corpus.catalog.store
    return {listed.key: bytes(store.get(listed.key)) for listed in store.scan("")}


def test_rows_that_the_question_chose_are_computed_while_finer_levels_come(small, five):
    """Only documents that are raised no further are repaired before the last byte is here."""
    log, chosen = [], {"repair": 0.3, "selector": "attention", "policy": LookFirst(0)}
    answer = asked(small, five, log=log, deadline_s=30.0, **chosen)
    assert [entry for entry in log if isinstance(entry.event, ev.Looked)]
    assert 0 < answer.repair.beside < len(answer.repair.rows)
    repaired, raised = 0, 0
    for each in jobs_of(log, ev.Repair | ev.Fetch | ev.Decode):
        match each:
            case ev.Repair():
                repaired = each.documents
            case ev.Fetch() if each.first:
                raised += 1
                assert each.chunk.document >= repaired
            case ev.Decode():
                assert min(chunk.document for chunk in each.chunks) >= repaired
    assert raised
    later = asked(small, five, deadline_s=30.0, repair_in_order=False, **chosen)
    assert [each.level for each in answer.decisions] == [each.level for each in later.decisions]
    same(answer, later)


def test_documents_that_come_out_of_order_wait_for_those_before_them(small, five, monkeypatch):
    log, chosen = [], {"repair": 0.3, "selector": "first", "policy": FromTheBack(4)}
    monkeypatch.setattr("kvwire.controller.repair.RepairProgress.wants_order", False)
    answer = asked(small, five, log=log, **chosen)
    came = [entry.event.chunk.document for entry in log if isinstance(entry.event, ev.ChunkArrived)]
    assert came != sorted(came)
    for entry in log:
        for job in (each for each in entry.instructions if isinstance(each, ev.Repair)):
            here = {chunk for each in log if each.now <= entry.now and isinstance(each.event, ev.DecodeDone)
                    for chunk in each.event.chunks}  # fmt: skip
            assert {chunk.document for chunk in here} >= set(range(job.documents))
    same(answer, asked(small, five, repair_in_order=False, **chosen))


def test_a_document_that_is_lost_is_computed_from_text_and_the_others_behind_it_repaired(small, five):
    corpus, tokens = five
    names = [*[*tokens][:2], "lost", *[*tokens][2:]]
    texts = {"lost": [*tokens.values()][4][::-1]}
    chosen = {"repair": 0.3, "selector": "first", "policy": Fixed(4), "names": names, "texts": texts}
    log = []
    answer = asked(small, (corpus, tokens), log=log, **chosen)
    assert any(each.action == "recompute" for each in answer.decisions)
    assert jobs_of(log)
    same(answer, asked(small, (corpus, tokens), repair_in_order=False, **chosen))


def test_a_job_that_fails_is_done_at_the_end(small, five, monkeypatch):
    def broken(*_):
        msg = "out of memory"
        raise RuntimeError(msg)

    log, chosen = [], {"repair": 0.3, "selector": "first", "policy": Fixed(4)}
    with monkeypatch.context() as patch:
        patch.setattr("kvwire.runtime.repair.RepairInOrder.run", broken)
        answer = asked(small, five, log=log, **chosen)
    assert [entry.event.trouble for entry in log if isinstance(entry.event, ev.RepairDone)] == [
        "RuntimeError: out of memory"
    ]
    assert len(jobs_of(log)) == 1
    same(answer, asked(small, five, repair_in_order=False, **chosen))


def test_rows_that_are_kept_or_dropped_on_the_way_or_shifted_wait_for_the_end(small, five):
    for more in ({"selector": "blend"}, {"selector": "cacheblend"}, {"selector": "first", "keep_repairs": True}):
        log = []
        answer = asked(small, five, log=log, repair=0.3, policy=Fixed(4), **more)
        assert not jobs_of(log)
        assert not answer.repair.beside
    report = replace(REPORT, shift="0" * 64, shift_prompts=8, shift_gain=(0.1, 0.05, 0.15))
    assert plan_links(0.3, None, "first", report, None, shift=True).option.begins == "closing"
    assert plan_links(0.3, None, "first", report, None).option.begins == "documents"


def test_several_loads_at_once_answer_as_each_alone(small, five):
    corpus, tokens = five
    chosen = LoadSettings(repair=0.3, selector="first", policy=Fixed(4), **LINK)
    question, orders = small.engine.tokenize("And the lamp was"), [[*tokens], [*tokens][::-1], [*tokens][1:]]
    alone = [asked(small, five, names=names, repair=0.3, selector="first", policy=Fixed(4)) for names in orders]
    with Loader(small.engine, corpus, costs=small.costs, link=SLOW, settings=chosen) as loader:

        async def all_of_them():
            return await asyncio.gather(*(loader.ask_async(names, question) for names in orders))

        together = asyncio.run(all_of_them())
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.repair.rows, other.repair.rows)
        assert cache_error(one.prompt.cache, other.prompt.cache) < 1e-5


def test_closing_ends_jobs_that_run(small, five, monkeypatch):
    """A load that is left in the middle of a job computes no more rows, and the loader's lane is free again."""
    corpus, tokens = five
    begun, asked_of = threading.Event(), []
    run = RepairInOrder.run

    def slow(self, stop_at, is_gone):
        begun.set()
        while not is_gone():
            time.sleep(0.001)
        asked_of.append(run(self, stop_at, is_gone))
        return asked_of[-1]

    question = small.engine.tokenize("And the lamp was")
    chosen = LoadSettings(repair=0.3, selector="first", policy=Fixed(4), **LINK)
    with Loader(small.engine, corpus, costs=small.costs, link=SLOW, settings=chosen) as loader:

        async def left():
            task = asyncio.create_task(loader.ask_async(tuple(tokens), question))
            await asyncio.to_thread(begun.wait, 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        with monkeypatch.context() as patch:
            patch.setattr(RepairInOrder, "run", slow)
            asyncio.run(left())
            for _ in range(2000):
                if asked_of:
                    break
                time.sleep(0.005)
        assert asked_of == [0]
        assert loader.ask(tuple(tokens), question).repair.rows.numel()


def test_a_repair_that_time_runs_out_for_is_cut_and_told(small, five, monkeypatch):
    """Rows beside the link stay; the closing drops those that the deadline has no room for."""
    monkeypatch.setattr("kvwire.controller.repairing.Repairs.settle", drop)
    answer = asked(small, five, deadline_s=20.0, repair="auto", repair_floor=0.05, selector="first", policy=Fixed(4))
    assert answer.repair.beside
    assert answer.repair.is_cut
    assert int(answer.repair.rows.max()) < 4 * 180


def drop(self, load):
    """As where nothing is left of the time."""
    del self
    load.repair_share = 0.0


LINKS = LinkLayout("links", opening=(40,), links=tuple((41 + at, 50 + at) for at in range(5)), closing=(60,))


def test_link_tokens_are_computed_while_later_documents_come(small, five):
    log, chosen = [], {"layout": LINKS, "system": (3, 4, 5), "policy": Fixed(4)}
    answer = asked(small, five, log=log, **chosen)
    ordered = [each.documents for each in jobs_of(log)]
    assert ordered
    assert ordered == sorted(set(ordered))
    (request,) = (entry.event for entry in log if isinstance(entry.event, ev.LoadRequested))
    assert request.links == (3 + 1 + 2, 2, 2, 2, 2 + 1)
    done = [entry.event for entry in log if isinstance(entry.event, ev.RepairDone)]
    assert sum(each.rows for each in done) == sum(request.links[: ordered[-1]])
    assert done[-1].left == sum(request.links[ordered[-1] :])
    came = max(entry.now for entry in log if isinstance(entry.event, ev.ChunkArrived))
    assert min(entry.now for entry in log if isinstance(entry.event, ev.RepairDone)) < came
    later_log = []
    later = asked(small, five, log=later_log, repair_in_order=False, **chosen)
    assert not jobs_of(later_log)
    assert answer.computed == later.computed == sum(request.links)
    assert cache_error(answer.prompt.cache, later.prompt.cache) < 1e-5
    assert torch.allclose(answer.logits, later.logits, atol=1e-4)


def test_link_tokens_whose_job_fails_are_computed_at_the_end(small, five, monkeypatch):
    compute, calls = reuse.compute_links, []

    def broken(engine, linked, laid_out, start=0, stop=None):
        calls.append(stop)
        if len(calls) == 1:
            msg = "out of memory"
            raise RuntimeError(msg)
        return compute(engine, linked, laid_out, start, stop)

    log, chosen = [], {"layout": LINKS, "policy": Fixed(4)}
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "compute_links", broken)
        answer = asked(small, five, log=log, **chosen)
    assert len(jobs_of(log)) == 1
    assert calls[1:] == [None]
    later = asked(small, five, repair_in_order=False, **chosen)
    assert cache_error(answer.prompt.cache, later.prompt.cache) < 1e-5


def test_rows_beside_link_tokens_are_chosen_at_the_end(small, five):
    log = []
    answer = asked(small, five, log=log, layout=LINKS, repair=0.2, selector="first", policy=Fixed(4))
    assert not jobs_of(log)
    assert answer.repair.rows.numel()
