"""A corpus asks the level kind of its method: what to fit, what fits, what is missing."""

from __future__ import annotations

import pytest

from kvwire.codec import CacheGenProfile, Ladder
from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import MemoryStore


def test_a_corpus_of_the_other_method_fits_its_own_profile(small):
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding("cachegen", chunk_tokens=64))
    done = list(corpus.encode(documents))
    assert isinstance(corpus.profile(), CacheGenProfile)
    assert {encoded.info.method for encoded in done} == {"cachegen"}
    assert all(encoded.skipped for encoded in corpus.encode(documents))
    own = Corpus(small.engine, corpus.catalog.store)
    with pytest.raises(MismatchError, match="another method or head start"):
        list(own.encode([Document("new", documents[0].token_ids[:70])]))


def test_a_method_that_needs_a_profile_says_so(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding("cachegen"))
    short = Document("short", tuple(next(iter(small.tokens.values()))[:20]))
    with pytest.raises(ArgumentError, match="CacheGen's method needs a profile, and that 64 tokens"):
        list(corpus.encode([short]))


def test_settings_that_a_method_does_not_know():
    for settings in ({"prefix_layers": 1}, {"ladder": Ladder()}):
        with pytest.raises(ArgumentError, match="neither head start nor ladder"):
            Coding("cachegen", **settings)
    with pytest.raises(ArgumentError, match="no method 'zip'"):
        Coding("zip")
