"""A loader that is asked again and again holds no more than it did: servers run for months."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from contextlib import closing

import pytest
import torch

from kvwire.errors import ArgumentError, KvwireError, NotFoundError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.store import Catalog, MemoryStore, donors
from kvwire.store.prefix import index
from kvwire.store.schemes import open_store
from kvwire.transport.testing import serving

FEW, MANY = 8, 24
SETTLED_S = 10.0


@pytest.fixture(autouse=True)
def _collects_again():
    yield
    gc.enable()


def count_tensors():
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def held(at_most=0):
    """How many objects there are of kvwire's own classes, and of what may hold much, by class; tensors before gc.

    Python collects garbage after hundreds of loads: no cycle may keep a load's caches until then. A thread that has
    just ended its work still holds the last load's for a moment: wait until there are no more tensors than at_most.
    """
    deadline = time.monotonic() + SETTLED_S
    while (tensors := count_tensors()) > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    names = [kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("kvwire.")]
    return Counter(names) + Counter(tensors=tensors, tasks=sum(issubclass(kind, asyncio.Task) for kind in kinds))


@pytest.mark.parametrize("way", ["documents", "prompts", "saved prompts", "turns"])
def test_ever_new_questions_leave_nothing(small, tmp_path, monkeypatch, way):
    for module in (donors, index):
        monkeypatch.setattr(module, "MOST_INFOS", 4)  # what is remembered of late is full after a few
    texts = [tuple(ids[:150]) for ids in small.tokens.values()]
    asked = {
        "documents": lambda loader, number, new: loader.ask(["0", "1"][:: number % 2 or -1], new, tokens=2),
        "prompts": lambda loader, _, new: loader.ask_prompt([*texts[0], *new], tokens=2),
        "saved prompts": lambda loader, _, new: loader.ask_prompt([*texts[0], *new], tokens=2, save=True),
        "turns": lambda loader, number, new: loader.converse(f"session {number // 4}", new, tokens=2),
    }
    with serving(open_store(f"file://{tmp_path}")) as url, closing(open_store(url)) as store:
        corpus = Corpus(small.engine, store)
        corpus.set_profile(small.profile)
        list(corpus.encode([Document(str(at), text) for at, text in enumerate(texts)], index=("kvwire",)))
        with Loader(small.engine, corpus, costs=small.costs, memory=EstimatesFile(None)) as loader:
            for number in range(FEW + MANY):
                if number == FEW:
                    before = held(count_tensors())
                    gc.disable()
                asked[way](loader, number, range(20 + 41 * number, 60 + 41 * number))
            more = held(before["tensors"]) - before
    assert not {kind: count for kind, count in more.items() if count >= MANY // 2}


def test_what_is_not_there_or_refused_leaves_no_error_behind(small):
    """An error's traceback holds all that its frames did: with one of these it would be a cycle."""
    with (
        serving(MemoryStore()) as url,
        closing(open_store(url)) as store,
        Loader(small.engine, Corpus(small.engine, store), costs=small.costs, memory=EstimatesFile(None)) as loader,
    ):
        record = Catalog(store).keys(small.engine.meta.config_digest()).model_record

        def miss():
            with pytest.raises(NotFoundError):
                loader.ask(["nowhere"], [5, 6])
            loader.ask_prompt(range(5, 80))
            with pytest.raises(ArgumentError):
                store.put(record, b"{")

        miss()
        gc.collect()
        gc.disable()
        before = errors_held()
        for _ in range(MANY):
            miss()
        deadline = time.monotonic() + SETTLED_S
        while errors_held() - before >= MANY // 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert errors_held() - before < MANY // 2


def errors_held():
    return sum(isinstance(each, KvwireError) for each in gc.get_objects())
