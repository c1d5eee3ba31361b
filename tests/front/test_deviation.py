"""Deviations from encoding to a repaired answer."""

from __future__ import annotations

import pytest
import torch

from kvwire.errors import ArgumentError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import BLOCK, NEIGHBOUR_TOKENS, Neighbours
from kvwire.runtime.repair import by_token
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.types import BlockDeviation


def documents_of(small):
    return [Document(name, tuple(ids)) for name, ids in small.tokens.items()]


def with_deviation(small, store):
    corpus = Corpus(small.engine, store, coding=Coding(deviation=True))
    corpus.set_profile(small.profile)
    return corpus


def test_documents_are_encoded_again_for_their_deviations_and_once(small):
    store, documents = MemoryStore(), documents_of(small)
    plain = Corpus(small.engine, store)
    plain.set_profile(small.profile)
    assert all(each.info.deviation is None for each in plain.encode(documents))
    corpus = with_deviation(small, store)
    done = list(corpus.encode(documents))
    assert not any(each.skipped for each in done)
    for each in done:
        record = each.info.deviation
        assert record.block == BLOCK
        assert len(record.codes) == -(-each.info.tokens // BLOCK)
        assert max(record.values) > 0
    assert all(each.skipped for each in corpus.encode(documents))
    assert all(each.skipped for each in plain.encode(documents))  # who does not ask for them leaves them


def test_the_product_repairs_what_was_loaded(small):
    corpus = with_deviation(small, MemoryStore())
    list(corpus.encode(documents_of(small)))
    names = list(small.tokens)[:2]
    settings = LoadSettings(repair=0.1, selector="product")
    with Loader(small.engine, corpus, costs=small.costs, settings=settings) as loader:
        answer = loader.ask(names, small.tokens[names[0]][:8], tokens=1)
    repaired = answer.repair
    assert repaired.selector == "product"
    first = len(small.tokens[names[0]])
    assert len(repaired.rows) > 0
    assert int(repaired.rows[0]) >= first


def test_without_deviations_the_way_out_is_named(small):
    corpus, names = small.corpus(), list(small.tokens)[:2]
    settings = LoadSettings(repair=0.1, selector="deviation")
    with (
        Loader(small.engine, corpus, costs=small.costs, settings=settings) as loader,
        pytest.raises(ArgumentError, match="encode with deviations"),
    ):
        loader.ask(names, small.tokens[names[0]][:8], tokens=1)


def test_a_lone_document_stands_behind_its_own_end(small):
    ids = tuple(next(iter(small.tokens.values())))[:200]
    (cache,) = small.engine.prefill([ids])
    alone = Neighbours(small.engine, [ids]).measure(cache, ids)
    behind_its_end = Neighbours(small.engine, [ids[-NEIGHBOUR_TOKENS:]]).measure(cache, ids)
    assert alone == behind_its_end
    assert max(alone.values) > 0


def test_a_document_as_long_as_the_window_is_measured_as_far_as_it_fits(small, monkeypatch):
    ids = tuple(next(iter(small.tokens.values())))[:100]
    (cache,) = small.engine.prefill([ids])
    neighbours = Neighbours(small.engine, [ids[::-1]])
    whole = neighbours.measure(cache, ids)
    monkeypatch.setattr(type(small.engine), "window", property(lambda _: 164))
    short = neighbours.measure(cache, ids)
    assert short.codes[:4] == whole.codes[:4]
    assert set(short.codes[4:]) == {0}


def test_deviations_of_a_prompt():
    records = [(5, BlockDeviation(2, bytes([192, 204, 180]))), (3, BlockDeviation(16, bytes([0])))]
    assert torch.equal(by_token(records), torch.tensor([1.0, 1, 2, 2, 0.5, 0, 0, 0]))
    assert by_token([*records, (4, None)]) is None
    assert by_token([]) is None
