"""Encoding into an index of prefixes, from the library and from the command line."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from kvwire.errors import ArgumentError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore, MemoryStore, UseFile, copy_store


def entries(corpus):
    return list(corpus.catalog.store.keys(corpus.catalog.keys(corpus.meta.config_digest()).prefix_entries))


def documents(small):
    return [Document(name, tuple(ids)) for name, ids in small.tokens.items()]


def test_prompts_find_the_documents_that_were_encoded_into_an_index(small):
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(small.profile)
    for each in corpus.encode(documents(small), index=("kvwire:32", "lmcache:64")):
        ids = small.tokens[each.entry.document_id]
        assert corpus.index("kvwire:32").longest([*ids, 1, 2]).document == each.entry  # before the next is encoded
    opened = Corpus.open(corpus.catalog.store)
    for name, ids in small.tokens.items():
        hit = opened.index("lmcache:64").longest([*ids[:70], 0, 1, 2])
        assert (hit.document.document_id, hit.tokens) == (name, 70)
    assert opened.index().longest(next(iter(small.tokens.values()))) is None


def test_what_is_encoded_already_is_indexed_without_encoding(small):
    corpus = small.corpus()
    assert entries(corpus) == []
    done = list(corpus.encode(documents(small), index=("sglang:64",)))
    assert all(each.skipped for each in done)
    expected = sum(len(ids) // 64 for ids in small.tokens.values())
    assert len(entries(corpus)) == expected
    for key in entries(corpus)[::2]:
        corpus.catalog.store.delete(key)
    list(corpus.encode(documents(small), index=("sglang:64",), force=True))
    assert len(entries(corpus)) == expected


def test_a_text_without_a_blob_is_indexed_once_it_is_encoded(small, tmp_path):
    with closing(UseFile(tmp_path / "uses")) as uses:
        corpus = Corpus(small.engine, MemoryStore(), uses=uses)
        corpus.set_profile(small.profile)
        list(corpus.encode(documents(small), encode_after=2, index=("kvwire",)))
        assert entries(corpus) == []
        name = next(iter(small.tokens))
        for _ in range(2):
            corpus.count_use(name)
        list(corpus.promote(2, index=("kvwire",)))
        assert corpus.index().longest(small.tokens[name]).document.document_id == name


def test_documents_behind_a_neutral_prefix_are_in_no_index(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=4))
    with pytest.raises(ArgumentError, match="cannot begin a prompt"):
        next(corpus.encode(documents(small), index=("kvwire",)))


def test_an_index_that_is_none_is_refused_before_anything_is_encoded(small):
    corpus = Corpus(small.engine, MemoryStore())
    with pytest.raises(ArgumentError, match="an index is one of"):
        next(corpus.encode(documents(small), index=("vllm",)))
    assert list(corpus.catalog.store.keys("")) == []


def test_encode_and_store_index_write_entries(run, small, demo_model, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
    name, ids = next(iter(small.tokens.items()))
    words = ["encode", demo_model.parent / "documents" / f"{name}.txt", "--model", demo_model]
    code, *_ = run(*words, "--store", tmp_path / "store", "--index", "kvwire,lmcache:64", "--index", "sglang:32")
    assert code == 0
    with closing(FolderStore(tmp_path / "store")) as store:
        opened = Corpus.open(store)
        for scheme in ("kvwire", "lmcache:64", "sglang:32"):
            assert opened.index(scheme).longest(ids).document.document_id == name
    code, out, err = run("store", "index", "--store", tmp_path / "store", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["documents"] == len(small.tokens)
    with closing(FolderStore(tmp_path / "store")) as store:
        for other, tokens in small.tokens.items():
            assert Corpus.open(store).index().longest(tokens).document.document_id == other
    code, _, err = run(*words, "--store", tmp_path / "store", "--index", "other")
    assert code == 2
    assert "an index is one of kvwire, lmcache, sglang" in err
    assert "donors is an index, too" in err
