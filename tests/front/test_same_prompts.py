"""Prompts that begin alike and are asked at once: what they share is computed once, and no answer changes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kvwire
from kvwire.codec import read_header
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller import events as ev
from kvwire.controller.learning import JoinedEstimator, PrefillEstimator
from kvwire.engines.transformers import TransformersEngine
from kvwire.reuse import LinkedPrompt
from kvwire.runtime import joined_passes, passes
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.document import FoundDocument, OpenDocument
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.types import ChunkId

CHEAP = CostModel(PrefillCost(1e-6, 1e-7), DecodeCost(1.0, 1e-3))
JOINED = replace(CHEAP, joined=PrefillCost(1e-7, 1e-8))


@pytest.fixture
def computed(monkeypatch):
    """Tokens of each pass that fills prompts."""
    counts, alone, together = [], TransformersEngine.extend, TransformersEngine.extend_together

    def extend(self, prefix, token_ids, **options):
        counts.append(len(token_ids))
        return alone(self, prefix, token_ids, **options)

    def extend_together(self, prefixes, token_ids, **options):
        counts.append(sum(map(len, token_ids)))
        return together(self, prefixes, token_ids, **options)

    monkeypatch.setattr(TransformersEngine, "extend", extend)
    monkeypatch.setattr(TransformersEngine, "extend_together", extend_together)
    return counts


def text(seed, tokens):
    return tuple(random.Random(seed).choices(range(5, 4000), k=tokens))


def asked(made, prompts):
    async def all_at_once():
        return await asyncio.gather(*(made.ask_prompt_async(ids, reuse="none", tokens=32) for ids in prompts))

    return asyncio.run(all_at_once())


def loader(small, costs=CHEAP):
    return Loader(small.engine, Corpus(small.engine, MemoryStore()), costs=costs, settings=LoadSettings())


def check_same(small, prompts, answers):
    for ids, answer in zip(prompts, answers, strict=True):
        wanted = small.engine.forward(None, ids, 0, logits=1)[-1]
        assert torch.allclose(answer.logits, wanted.float(), atol=1e-4)
        assert not answer.misses


@pytest.mark.parametrize("costs", [CHEAP, JOINED])
def test_nothing_is_kept_when_no_load_is_under_way(small, computed, costs):
    with loader(small, costs) as made:
        for _ in range(2):
            computed.clear()
            answers = asked(made, [text(1, 900)])
            assert sum(computed) == 899
    check_same(small, [text(1, 900)], answers)


@pytest.mark.parametrize("costs", [CHEAP, JOINED])
def test_any_prompts_at_once_are_answered_as_alone(small, costs):
    draw = random.Random(5)
    with loader(small, costs) as made:
        for _ in range(4):
            base = text(draw.random(), 800)
            prompts = [
                (*base[: draw.randrange(800)], *text(draw.random(), draw.randrange(2, 200))) for _ in range(4)
            ]  # fmt: skip
            check_same(small, prompts, asked(made, prompts))


@pytest.mark.parametrize("costs", [CHEAP, JOINED])
def test_copies_teach_nothing_of_what_passes_take(small, computed, monkeypatch, costs):
    learnt = []
    monkeypatch.setattr(PrefillEstimator, "add", lambda _, tokens, *__: learnt.append(tokens))
    monkeypatch.setattr(JoinedEstimator, "add_rows", lambda _, rows, *__: learnt.extend(tokens for tokens, _ in rows))
    with loader(small, costs) as made:
        learnt.clear()
        computed.clear()
        asked(made, [text(1, 900)] * 4)
    assert sum(learnt) <= sum(computed) + 4 * 32  # what is asked last, and the answers


def test_rows_of_a_load_that_has_ended_are_computed(small, computed, monkeypatch):
    monkeypatch.setattr(passes.PromptWorker, "copy", lambda *_, **__: 0)
    prompts = [text(1, 900)] * 3
    with loader(small, JOINED) as made:
        check_same(small, prompts, asked(made, prompts))


class Workers:
    """Prompts of loads under way, which are filled by hand."""

    def __init__(self, engine):
        self.engine, self.driver = engine, SimpleNamespace(loads={})

    def begin(self, ids, info=None):
        number, opening = max(self.driver.loads, default=-1) + 1, self.engine.opening_tokens
        worker = passes.PromptWorker(self.engine, [f"load {number}"], self.driver, "cpu", (), shares=True)
        cache = self.engine.allocate(len(opening) + len(ids))
        worker.prompt = LinkedPrompt([len(ids)], self.engine.meta, cache=cache, opening=opening)
        if opening:
            worker.prompt.write_opening(self.engine.prefill([opening])[0])
        worker.documents[0] = OpenDocument(FoundDocument(None, "", None, None, ids), ids, info)
        worker.number, self.driver.loads[number] = number, SimpleNamespace(work=worker)
        return worker

    def fill(self, worker):
        tokens = worker.prompt.tokens[0]
        chunks = tuple(ChunkId(load=worker.number, document=0, chunk=chunk) for chunk in range(-(-tokens // 256)))
        worker._extend_all(chunks, [chunks[0]], behind=False)

    def check(self, worker):
        opening = self.engine.opening_tokens
        (wanted,) = self.engine.prefill([(*opening, *worker.documents[0].token_ids)])
        ours = worker.prompt.cache
        for mine, theirs in zip((*ours.keys, *ours.values), (*wanted.keys, *wanted.values), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)
        assert ours.kept is None


@pytest.mark.parametrize("shared", [0, 40, 300, 700])
def test_what_prompts_share_is_computed_once_and_the_rest_is_their_own(small, computed, shared):
    workers = Workers(small.engine)
    loads = [workers.begin((*text(1, shared), *text(seed, 700 - shared))) for seed in (2, 3, 4)]
    for each in loads:
        workers.fill(each)
        workers.check(each)
    assert sum(computed) == 3 * 700 - 2 * shared


def joined(worker, first, last):
    asked = ev.Recompute(*(ChunkId(load=worker.number, document=0, chunk=chunk) for chunk in (first, last)))
    return joined_passes._Row(worker, asked)


@pytest.mark.parametrize("ends", [(2, 2, 2), (1, 2, 0), (0, 1, 2)])
@pytest.mark.parametrize("computed_before", [0, 1, 2])
def test_joined_rows_that_begin_alike_are_computed_once(small, computed, ends, computed_before):
    """Of loads that stand at different places, too."""
    workers = Workers(small.engine)
    loads = [workers.begin(text(1, 768)) for _ in ends]
    if computed_before:
        joined_passes._fill(small.engine, [joined(loads[0], 0, computed_before - 1)])
    firsts = [computed_before, 0, 0]
    rows = [joined(load, first, last) for load, first, last in zip(loads, firsts, ends, strict=True) if first <= last]
    joined_passes._fill(small.engine, rows)
    furthest = max([computed_before - 1, *(row.asked.last.chunk for row in rows)])
    assert sum(computed) == 256 * (furthest + 1)
    for row in rows:
        tokens = row.span[1]
        (wanted,) = small.engine.prefill([text(1, 768)[:tokens]])
        ours = row.jobs.prompt.cache.slice(0, tokens)
        for mine, theirs in zip((*ours.keys, *ours.values), (*wanted.keys, *wanted.values), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


def test_rows_behind_lossy_ones_are_no_others(small):
    """A document whose first chunk was fetched: what is computed behind it is not a prefill's."""
    workers, ids = Workers(small.engine), text(1, 600)
    fetched = workers.begin(ids)
    for side in (*fetched.prompt.cache.keys, *fetched.prompt.cache.values):
        side.fill_(3.0)
    chunk = ChunkId(load=fetched.number, document=0, chunk=1)
    fetched._extend_all((chunk,), [chunk], behind=False)
    prompt = workers.begin(ids)
    workers.fill(prompt)
    assert not prompt.copied
    workers.check(prompt)


def test_what_is_fetched_after_a_pass_that_failed_is_no_prefill(small, computed, monkeypatch):
    """Its first rows were copied before it failed; what is fetched is written over them."""
    workers, shared = Workers(small.engine), text(1, 100)
    first = workers.begin((*shared, *text(2, 300)))
    workers.fill(first)
    second = workers.begin((*shared, *text(3, 300)))
    with monkeypatch.context() as broken:
        broken.setattr(TransformersEngine, "extend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            workers.fill(second)
    for side in (*second.prompt.cache.keys, *second.prompt.cache.values):
        side.fill_(3.0)
    del workers.driver.loads[first.number]
    third = workers.begin((*shared, *text(4, 300)))
    workers.fill(third)
    workers.check(third)


def test_rows_of_a_document_encoded_without_a_bos_are_no_prompts(bos_engine, small):
    ids = text(1, 400)
    blob = kvwire.encode(bos_engine.prefill([ids])[0], small.profile)
    workers = Workers(bos_engine)
    stored = workers.begin(ids, replace(read_header(blob), chunk_tokens=256))
    workers.fill(stored)
    prompt = workers.begin(ids)
    workers.fill(prompt)
    workers.check(prompt)
    again = workers.begin(ids)
    workers.fill(again)
    assert again.copied
    workers.check(again)


def test_rows_of_a_pruned_document_that_was_computed_are_whole(small):
    workers, ids = Workers(small.engine), text(1, 300)
    pruned = workers.begin(ids)
    pruned.prompt.keep(0, [torch.rand(spec.kv_heads, 300) < 0.5 for spec in small.engine.meta.layers])
    workers.fill(pruned)
    prompt = workers.begin((*ids, *text(2, 50)))
    workers.fill(prompt)
    assert prompt.copied
    workers.check(prompt)
