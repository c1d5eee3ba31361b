"""Documents whose layers and heads store different tokens, asked through a loader."""

import pytest
import torch

import kvwire
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.reuse import link
from kvwire.runtime.corpus import Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.types import KVCache

FETCHED = CostModel(PrefillCost(10.0, 1.0), DecodeCost(1e-5, 1e-6))

QUESTION = (7, 21, 30, 4)


@pytest.fixture
def pruned(small):
    """A corpus whose first document is pruned, losslessly, and the caches of both."""
    corpus, (name, ids) = small.corpus(lossless=True), next(iter(small.tokens.items()))
    caches = small.engine.prefill(list(small.tokens.values()))
    drawn = torch.Generator().manual_seed(3)
    masks = [torch.rand(spec.kv_heads, caches[0].tokens, generator=drawn) < 0.5 for spec in caches[0].meta.layers]
    first = KVCache.from_tensors(caches[0].keys, caches[0].values, caches[0].meta, ids, kept=masks)
    blob = kvwire.encode(first, small.profile, lossless=True)
    header = corpus.catalog.blobs.reader().read_header(blob)
    corpus.encoder().write(Document(name, tuple(ids)), blob, header, small.profile)
    return corpus, [first, *caches[1:]]


def test_holes_that_differ_by_head_are_asked(small, pruned):
    corpus, (first, *_) = pruned
    engine = small.engine
    with Loader(engine, corpus, costs=FETCHED, settings=LoadSettings(repair="none", exact=True)) as loader:
        answer = loader.ask([next(iter(small.tokens))], QUESTION, tokens=3)
    assert not answer.misses
    past = engine.own_past(first)
    wanted = engine.forward(past, QUESTION, first.tokens, logits=1)[-1]
    assert torch.allclose(answer.logits, wanted.float(), atol=1e-3)
    tokens = [int(wanted.argmax())]
    while len(tokens) < len(answer.tokens):
        at = first.tokens + len(QUESTION) + len(tokens) - 1
        tokens.append(int(engine.forward(past, tokens[-1:], at, logits=1)[-1].argmax()))
    assert list(answer.tokens) == tokens


@pytest.mark.parametrize("selector", ["attention", "blend", "first"])
def test_links_behind_holes_that_differ_are_repaired(small, pruned, selector):
    corpus, caches = pruned
    engine, names = small.engine, list(small.tokens)
    settings = LoadSettings(repair=1.0, selector=selector, exact=True)
    with Loader(engine, corpus, costs=FETCHED, settings=settings) as loader:
        answer = loader.ask(names, QUESTION, deadline_s=60.0)
    assert answer.repair is not None
    linked = link(caches[: len(names)])
    prompt = engine.allocate(linked.tokens)
    for ours, theirs in zip((*prompt.keys, *prompt.values), (*linked.keys, *linked.values), strict=True):
        ours.copy_(theirs)
    prompt = KVCache(prompt.keys, prompt.values, prompt.meta, kept=linked.kept)
    ids = [token for each in small.tokens.values() for token in each]
    engine.update_rows(prompt, ids, answer.repair.rows)
    wanted = engine.forward(engine.own_past(prompt), QUESTION, linked.tokens, logits=1)[-1]
    assert torch.allclose(answer.logits, wanted.float(), atol=1e-2)
