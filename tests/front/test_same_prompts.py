"""Prompts that begin alike and are asked at once: what they share is computed once, and no answer changes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller.learning import JoinedEstimator, PrefillEstimator
from kvwire.engines.transformers import TransformersEngine
from kvwire.runtime import passes
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

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
        return await asyncio.gather(*(made.ask_prompt_async(ids, reuse="none", tokens=2) for ids in prompts))

    return asyncio.run(all_at_once())


def loader(small, costs=CHEAP):
    return Loader(small.engine, Corpus(small.engine, MemoryStore()), costs=costs, settings=LoadSettings())


def check_same(small, prompts, answers):
    for ids, answer in zip(prompts, answers, strict=True):
        wanted = small.engine.forward(None, ids, 0, logits=1)[-1]
        assert torch.allclose(answer.logits, wanted.float(), atol=1e-4)
        assert not answer.misses


@pytest.mark.parametrize("costs", [CHEAP, JOINED])
def test_the_same_prompt_is_computed_once(small, computed, costs):
    prompts = [text(1, 900)] * 3
    with loader(small, costs) as made:
        computed.clear()
        answers = asked(made, prompts)
        assert sum(computed) == 899
        computed.clear()
        asked(made, prompts[:1])  # nothing is kept when none is under way
        assert sum(computed) == 899
    check_same(small, prompts, answers)


@pytest.mark.parametrize("shared", [0, 40, 300, 600])
def test_what_prompts_share_is_computed_once_and_the_rest_is_their_own(small, computed, shared):
    prompts = [(*text(1, shared), *text(seed, 700 - shared)) for seed in (2, 3)]
    with loader(small) as made:
        computed.clear()
        answers = asked(made, prompts)
    assert sum(computed) <= 2 * 699 - max(0, shared - 256)  # whole chunks at least
    assert sum(computed) >= 2 * 699 - shared
    check_same(small, prompts, answers)


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
    assert sum(learnt) <= sum(computed) + 4 * 2  # what is asked last, and the answers


def test_rows_of_a_load_that_has_ended_are_computed(small, computed, monkeypatch):
    monkeypatch.setattr(passes.PromptWorker, "copy", lambda *_, **__: 0)
    prompts = [text(1, 900)] * 3
    with loader(small, JOINED) as made:
        check_same(small, prompts, asked(made, prompts))


def test_rows_behind_lossy_ones_are_no_others(small):
    """A document whose first chunk was fetched: what is computed behind it is not a prefill's."""
    name, ids = next(iter(small.tokens.items()))
    corpus = small.corpus(chunk_tokens=64)
    entry = corpus.find(name)
    (key,) = corpus.catalog.blobs.of(entry)
    info, data = corpus.read_header(entry), corpus.catalog.store.get(key)
    for chunk in range(1, info.chunks):
        at = info.reads(chunk, 0)[0].offset
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    corpus.catalog.store.put(key, data)
    fetched = CostModel(PrefillCost(10.0, 1.0), DecodeCost(1e-5, 1e-6))
    with Loader(small.engine, corpus, costs=fetched, settings=LoadSettings(repair="none")) as made:

        async def both():
            return await asyncio.gather(
                made.ask_async([name], (5, 6, 7)), made.ask_prompt_async((*ids, 5, 6, 7), reuse="none")
            )

        lossy, exact = asyncio.run(both())
    assert {each.level is None for each in lossy.decisions} == {True, False}
    check_same(small, [(*ids, 5, 6, 7)], [exact])
