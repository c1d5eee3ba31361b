"""Token ids come from tokenizers, arrays and tensors: any integers are taken, and nothing is rounded to one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvwire.errors import ArgumentError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.store import MemoryStore
from kvwire.types import KVCache
from kvwire.types.cache import plain_token_ids

HELD = {
    "list": list,
    "array": np.array,
    "int16": lambda ids: np.array(ids, "int16"),
    "scalars": lambda ids: list(np.array(ids)),
    "tensor": torch.tensor,
    "iterator": iter,
}
NOT_IDS = {
    "fraction": [1, 2.5],
    "floats": np.array([1.0, 2.0]),
    "words": ["one", "two"],
    "text": "one",
    "bytes": b"one",
    "none": [None],
    "nested": [[1, 2]],
    "matrix": np.ones((2, 2), "int64"),
    "one": 7,
    "scalar": torch.tensor(7),
}


@pytest.mark.parametrize("held", HELD)
def test_any_integers_are_token_ids(held):
    ids = plain_token_ids(HELD[held]([3, 1, 4]))
    assert ids == (3, 1, 4)
    assert {type(each) for each in ids} == {int}
    assert Document("a", HELD[held]([3, 1, 4])) == Document("a", (3, 1, 4))


@pytest.mark.parametrize("held", NOT_IDS)
def test_what_is_no_integer_is_refused_before_anything_is_computed(small, held):
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(small.profile)
    first, *_ = small.tokens.values()
    list(corpus.encode([Document("a", first[:40])]))
    keys = [each.key for each in corpus.catalog.store.scan("")]
    wrong, shape = NOT_IDS[held], (1, 2, 4)
    with Loader(small.engine, corpus, costs=small.costs) as loader:
        for refused in (
            lambda: Document("b", wrong),
            lambda: corpus.append("a", wrong),
            lambda: KVCache.from_tensors([torch.zeros(shape)], [torch.zeros(shape)], token_ids=wrong),
            lambda: loader.ask(["a"], [1], texts={"a": wrong}),
            *([] if held == "text" else [lambda: loader.ask(["a"], wrong)]),  # a question may be a text
        ):
            with pytest.raises(ArgumentError, match="token ids must be integers"):
                refused()
    assert [each.key for each in corpus.catalog.store.scan("")] == keys


def test_arrays_are_appended_and_asked(small):
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(small.profile)
    first, *_ = small.tokens.values()
    list(corpus.encode([Document("a", np.array(first[:40]))]))
    entry = corpus.append("a", torch.tensor(first[40:50])).entry
    assert corpus.text(entry) == tuple(first[:50])
    with Loader(small.engine, corpus, costs=small.costs) as loader:
        assert loader.ask(["a"], np.array([5, 6, 7])).tokens == loader.ask(["a"], [5, 6, 7]).tokens
        assert loader.ask(iter(["a"]), [5, 6, 7]).tokens == loader.ask(["a"], [5, 6, 7]).tokens
        with pytest.raises(ArgumentError, match="a sequence of names"):
            loader.ask("a", [5, 6, 7])  # which would be the documents of its letters
        with pytest.raises(ArgumentError, match="a session needs a name"):
            loader.converse("", [5, 6, 7])  # which would be everyone's


def test_a_document_with_as_many_parts_as_it_can_have_becomes_one_blob(small, monkeypatch):
    monkeypatch.setattr("kvwire.runtime.grow.MAX_PARTS", 3)
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(small.profile)
    first, *_ = small.tokens.values()
    list(corpus.encode([Document("a", first[:40])]))
    parts = [len(corpus.append("a", first[end : end + 10]).entry.parts) for end in (40, 50, 60, 70)]
    assert parts == [2, 3, 0, 2]
    assert corpus.text(corpus.find("a")) == tuple(first[:80])
