"""A corpus asks the level kind of its method: what to fit, what fits, what is missing."""

from __future__ import annotations

import json

import pytest

from kvwire.codec import CacheGenProfile, Ladder, error_of_method
from kvwire.controller import DocumentPlanInput, kl_floor
from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.quality import Reference
from kvwire.store import MemoryStore


def test_a_corpus_of_the_other_method_fits_its_own_profile(small):
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding("cachegen", chunk_tokens=64))
    done = list(corpus.encode(documents))
    assert isinstance(corpus.profile(), CacheGenProfile)
    assert {encoded.info.method for encoded in done} == {"cachegen"}
    assert all(encoded.skipped for encoded in corpus.encode(documents))
    own = Corpus(small.engine, corpus.catalog.store)
    with pytest.raises(MismatchError, match="another method or prefix layers"):
        list(own.encode([Document("new", documents[0].token_ids[:70])]))


def test_the_levels_of_the_other_method_have_a_kl_divergence_to_expect_and_a_floor_by_it(small):
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding("cachegen"))
    done = list(corpus.encode(documents))
    scale, exponent = corpus.profile().error_to_kl
    for encoded in done:
        kls = [level.predicted_kl for level in encoded.info.levels]
        assert kls == pytest.approx([scale * level.measured_error**exponent for level in encoded.info.levels])
        assert kls[0] > kls[1] > kls[2] > 0
        assert kl_floor(encoded.info, kls[1]) == 1
        assert DocumentPlanInput.from_blob(encoded.info, max_kl=kls[1]).floor == 1
    first = done[0]
    reference = Reference.of(small.engine, [documents[0].token_ids], small.engine.tokenize("It was plain"), 64)
    for level, told in enumerate(first.info.levels):
        kl, _ = reference.compare(small.engine, corpus.decode(documents[0].document_id, level))
        assert kl / 10 < told.predicted_kl < 10 * kl


def test_commands_call_the_error_of_each_method_by_its_name(run, small, tmp_path, demo_model):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "story.txt").write_text(small.texts[next(iter(small.texts))][:1500])
    for method in ("kvwire", "cachegen"):
        place = ("--store", f"file://{tmp_path / method}", "--model", demo_model)
        code, encoded, err = run("encode", texts, *place, "--method", method)
        assert code == 0, err
        shown = run("inspect", "story", *place)[1]
        for out in (encoded, shown):
            assert f"error: {error_of_method(method)}; KL:" in out
            assert ("attention" in out) == (method == "kvwire")
        told = json.loads(run("inspect", "story", *place, "--json")[1])
        assert told["error_of"] == error_of_method(method)
        assert all(level["predicted_kl"] > 0 for level in told["levels"])


def test_a_method_that_needs_a_profile_says_so(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding("cachegen"))
    short = Document("short", tuple(next(iter(small.tokens.values()))[:20]))
    with pytest.raises(ArgumentError, match="CacheGen's method needs a profile, and that 64 tokens"):
        list(corpus.encode([short]))


def test_settings_that_a_method_does_not_know():
    for settings in ({"prefix_layers": 1}, {"ladder": Ladder()}):
        with pytest.raises(ArgumentError, match="neither prefix layers nor ladder"):
            Coding("cachegen", **settings)
    with pytest.raises(ArgumentError, match="no method 'zip'"):
        Coding("zip")
