"""Documents behind neutral texts: where they stand, and rows of them that are computed from text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.errors import ArgumentError, LinkBoundError
from kvwire.reuse import moved
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import NEUTRAL_TEXT, compute_behind, neutral_prefix
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

from ..engines.families import FAMILIES, cache_error, engine_of, tokens
from .test_links import REPORT

BEHIND = 24


def pieces(small):
    text = [token for ids in small.tokens.values() for token in ids]
    return {f"d{n}": tuple(text[n * 400 : (n + 1) * 400]) for n in range(2)}


def encoded(small, **coding):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(**{"neutral_prefix": BEHIND} | coding))
    list(corpus.encode([Document(name, ids) for name, ids in pieces(small).items()]))
    return corpus


@pytest.mark.parametrize("family", FAMILIES)
def test_fronts_and_what_follows_them_are_one_document(family):
    engine, ids = engine_of(family), tokens(21, 3)
    prefix = tuple(tokens(6, 4))
    (whole,) = engine.prefill([[*prefix, *ids]])
    together = compute_behind(engine, prefix, ids)
    assert together.meta.offset == 6
    assert cache_error(together, whole.slice(6, 27)) < 1e-5
    front = moved(compute_behind(engine, prefix, ids[:8]), 17)  # wherever it stands in a prompt
    rest = compute_behind(engine, prefix, ids[8:], front)
    assert cache_error(rest, whole.slice(14, 27)) < 2e-5


def test_a_prefix_is_the_end_of_the_neutral_text_as_long_as_the_window_allows(small):
    engine = small.engine
    text = tuple(engine.tokenize(NEUTRAL_TEXT))
    assert neutral_prefix(engine, (5, 6, 7), BEHIND) == text[-BEHIND:]
    assert neutral_prefix(engine, (5, 6, 7), len(text)) == text
    with pytest.raises(ArgumentError, match=f"has {len(text)} tokens"):
        neutral_prefix(engine, (5, 6, 7), len(text) + 1)
    assert neutral_prefix(engine, (5,) * (engine.window - 2), BEHIND) == text[-2:]
    assert neutral_prefix(engine, (5,) * engine.window, BEHIND) == ()
    assert neutral_prefix(engine, (5, 6, 7), 0) == ()


def test_a_model_without_a_tokenizer_has_no_neutral_text():
    engine = engine_of("llama")
    assert not engine.has_tokenizer
    assert neutral_prefix(engine, (5, 6), 0) == ()
    with pytest.raises(ArgumentError, match="--neutral-prefix 0"):
        neutral_prefix(engine, (5, 6), BEHIND)


def with_sinks(profile):
    """The profile as one of a model that has sinks."""
    groups = [
        replace(g, sink=np.zeros(g.width, np.float32), sink_steps=np.ones(g.width, np.float32)) for g in profile.groups
    ]
    return replace(profile, groups=tuple(groups))


def test_documents_are_computed_alone_by_default_whatever_the_model(small):
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(with_sinks(small.profile))
    document = Document("d", pieces(small)["d0"])
    runs = [next(corpus.encode([document], index=index)) for index in ([], ["kvwire"])]
    assert [run.skipped for run in runs] == [False, True]
    assert runs[0].info.neutral_prefix == ()
    assert corpus.encoder().coding.is_prefill


def test_documents_behind_neutral_texts_begin_no_prompt(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=BEHIND))
    corpus.set_profile(with_sinks(small.profile))
    document = Document("d", pieces(small)["d0"])
    (found,) = corpus.encode([document])
    assert found.info.can_begin  # its own first token is there, too
    assert next(corpus.encode([document])).skipped
    assert not corpus.encoder().coding.is_prefill
    with pytest.raises(ArgumentError, match="cannot begin a prompt"):
        list(corpus.encode([document], index=["kvwire"]))


@pytest.mark.parametrize("alone", [False, True])
def test_a_document_that_grew_stays_as_it_was_computed(small, alone):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=0 if alone else BEHIND))
    corpus.set_profile(with_sinks(small.profile))
    ids = pieces(small)["d0"]
    list(corpus.encode([Document("d", ids[:300])], index=["kvwire"] if alone else []))
    before = corpus.read_header(corpus.find("d"))
    corpus.append("d", ids[300:])
    compacted = corpus.compact("d").info
    assert (compacted.neutral_prefix, compacted.can_begin) == (before.neutral_prefix, before.can_begin)
    assert bool(compacted.neutral_prefix) != alone


def test_a_document_that_begins_a_prompt_has_its_own_first_token(small):
    """As the model computes it, whatever it stood behind at encode time."""
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=BEHIND))
    corpus.set_profile(with_sinks(small.profile))
    list(corpus.encode([Document(name, ids) for name, ids in pieces(small).items()]))
    (first,) = small.engine.prefill([pieces(small)["d0"][:1]])
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(repair="none")) as loader:
        answers = [loader.ask(names, small.engine.tokenize("And then")) for names in (["d0", "d1"], ["d1", "d0"])]
    begun, elsewhere = (answer.prompt.document(n).values[-1][:, :1] for n, answer in enumerate(answers))
    assert all(each.action == "fetch" for answer in answers for each in answer.decisions)
    assert float((begun - first.values[-1]).abs().max()) < 0.51
    assert float((elsewhere - first.values[-1]).norm()) > 2 * float((begun - first.values[-1]).norm())


def test_blobs_hold_documents_as_they_are_behind_their_prefix(small):
    corpus, documents = encoded(small, lossless=True), pieces(small)
    for name, ids in documents.items():
        info = corpus.read_header(corpus.find(name))
        assert info.neutral_prefix == tuple(small.engine.tokenize(NEUTRAL_TEXT))[-BEHIND:]
        (whole,) = small.engine.prefill([[*info.neutral_prefix, *ids]])
        wanted = moved(whole.slice(BEHIND, BEHIND + 400), 0)
        assert cache_error(corpus.decode(name, "lossless"), wanted) < 1e-5
        assert cache_error(corpus.decode(name, "lossless"), small.engine.prefill([ids])[0]) > 1e-2


@pytest.mark.parametrize("lost", ["all", "chunk"])
def test_rows_from_text_stand_behind_the_same_prefix(small, lost, monkeypatch):
    corpus, documents = encoded(small, lossless=True, chunk_tokens=100), pieces(small)
    entry = corpus.find("d1")
    header = entry.header_bytes
    stored = bytearray(corpus.catalog.store.get(entry.blob_key))
    info = corpus.read_header(entry)
    damaged = range(info.chunks) if lost == "all" else (2,)
    for chunk in damaged:
        for segment in info.segments[chunk]:
            assert segment.offset >= header
            stored[segment.offset] ^= 1
    corpus.catalog.store.put(entry.blob_key, bytes(stored))
    settings = LoadSettings(repair="none", quality_floor=4)
    with Loader(small.engine, corpus, costs=small.costs, settings=settings) as loader:
        answer = loader.ask(["d0", "d1"], small.engine.tokenize("And then"))
    assert {d.chunk.chunk for d in answer.decisions if d.chunk.document and d.action == "recompute"} >= set(damaged)
    (whole,) = small.engine.prefill([[*neutral_prefix(small.engine, (1,), BEHIND), *documents["d1"]]])
    wanted, found = moved(whole.slice(BEHIND, BEHIND + 400), 400), answer.prompt.document(1)
    (alone,) = small.engine.prefill([documents["d1"]])
    errors = [
        [((a - b).norm() / b.norm()).item() for a, b in zip(found.values, other.values, strict=True)]
        for other in (wanted, alone)
    ]
    assert max(errors[0]) < (1e-5 if lost == "all" else 0.1)
    assert max(errors[0]) < 0.5 * max(errors[1])


def test_what_is_there_is_known_by_its_prefix(small):
    corpus = encoded(small)
    documents = [Document(name, ids) for name, ids in pieces(small).items()]
    assert all(each.skipped for each in corpus.encode(documents))
    other = Corpus(small.engine, corpus.catalog.store, coding=Coding(neutral_prefix=0))
    assert not any(each.skipped for each in other.encode(documents))
    assert other.read_header(other.find("d0")).neutral_prefix == ()


def test_settings_that_do_not_go_together():
    for wrong in ({"neutral_prefix": -1}, {"neutral_prefix": 3, "prefix_layers": 1}):
        with pytest.raises(ArgumentError, match="neutral prefix"):
            Coding(**wrong)


def test_all_rows_repaired_are_a_prefill_whatever_stood_before_documents(small):
    corpus, documents = encoded(small), pieces(small)
    question = small.engine.tokenize("And then")
    settings = LoadSettings(repair="all")
    with Loader(small.engine, corpus, costs=small.costs, settings=settings) as loader:
        answer = loader.ask(["d0", "d1"], question)
    wanted = small.engine.forward(None, [*documents["d0"], *documents["d1"], *question], 0, logits=1)[0]
    assert torch.allclose(answer.logits, wanted, atol=1e-3)


@pytest.mark.parametrize("is_like", [True, False])
def test_what_links_lose_holds_for_documents_computed_alike(small, is_like):
    corpus, names = encoded(small), list(pieces(small))
    corpus.set_link_report(replace(REPORT, linked=0.01, neutral=BEHIND if is_like else 0))
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(repair="none")) as loader:
        warning = loader.ask(names, (5, 6, 7)).link_warning
        assert not loader.ask(names[:1], (5, 6, 7)).link_warning
    assert ("computed alone" in warning and "check-model" in warning) != is_like
    assert bool(warning) != is_like
    bound = LoadSettings(repair="none", link_bound=0.1)
    with Loader(small.engine, corpus, costs=small.costs, settings=bound) as loader:
        if is_like:
            assert loader.ask(names, (5, 6, 7)).tokens
        else:
            with pytest.raises(LinkBoundError, match="encode documents alike"):
                loader.ask(names, (5, 6, 7))


def test_the_command_says_so(run, demo_model, tmp_path):
    store = f"file://{tmp_path}/store"
    file = demo_model.parent / "documents" / "09-the-toll-gate.txt"
    words = ("--model", demo_model, "--store", store)
    assert run("encode", file, "--neutral-prefix", 16, *words)[0] == 0
    code, out, _ = run("inspect", file.stem, "--store", store)
    assert code == 0
    assert "computed behind 16 tokens that were dropped" in out
    assert run("encode", file, "--neutral-prefix", 16, "--prefix-layers", 1, *words)[0] == 2
