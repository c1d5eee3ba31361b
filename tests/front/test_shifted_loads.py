"""Loads that add the mean shift of links: where they do, what it leaves alone, and what becomes of one that is lost."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

from kvwire.controller.policies import Fixed
from kvwire.reuse import LinkLayout, LinkShift, Module, Schema
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.links import LinkPlanner
from kvwire.runtime.loader import Loader
from kvwire.runtime.passes import PromptWorker
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

from .test_links import REPORT, asked
from .test_shift import random_shift, shifted

PLAIN = {"repair": "none", "quality_floor": 4}


@pytest.fixture
def shift(small):
    return random_shift(small.engine, size=0.3)


def measured(small, shift, corpus=None):
    """A corpus whose report names a shift."""
    corpus = corpus or small.corpus()
    corpus.set_link_shift(shift)
    corpus.set_link_report(shifted(REPORT, shift))
    return corpus


def same(one, other):
    tensors = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in tensors)


def test_a_load_adds_the_shift_that_its_report_names(small, shift):
    corpus = measured(small, shift)
    blind, _ = asked(small, corpus, shift=False, **PLAIN)
    answer, _ = asked(small, corpus, **PLAIN)
    lengths = [len(ids) for ids in small.tokens.values()]
    assert answer.shifted == sum(min(count, shift.tokens) for count in lengths[1:])
    assert blind.shifted == 0
    wanted = blind.prompt.cache
    assert not same(answer.prompt.cache, wanted)
    shift.apply(wanted, lengths)
    assert same(answer.prompt.cache, wanted)
    assert not torch.equal(answer.logits, blind.logits)
    assert answer.timing.link_s > 0


def test_without_a_shift_every_bit_is_as_before(small, shift):
    plain, _ = asked(small, small.corpus(), shift=False, **PLAIN)
    unlearnt, _ = asked(small, small.corpus(), **PLAIN)
    assert same(plain.prompt.cache, unlearnt.prompt.cache)
    assert torch.equal(plain.logits, unlearnt.logits)
    answer, _ = asked(small, measured(small, shift), **PLAIN)
    first = plain.prompt.tokens[0]
    assert same(answer.prompt.cache.slice(0, first), plain.prompt.cache.slice(0, first))
    alone = [next(iter(small.tokens))]
    with Loader(small.engine, measured(small, shift), costs=small.costs, settings=LoadSettings(**PLAIN)) as loader:
        assert loader.ask(alone, small.engine.tokenize("And then")).shifted == 0


def test_rows_are_computed_over_shifted_documents(small, shift):
    """The report's figures are those with the shift: less is needed."""
    corpus = measured(small, shift)
    answer, _ = asked(small, corpus)
    assert answer.shifted
    assert len(answer.repair.rows) == pytest.approx(0.05 * answer.prompt.cache.tokens, abs=1)
    without, _ = asked(small, corpus, shift=False)
    assert len(without.repair.rows) == pytest.approx(0.15 * without.prompt.cache.tokens, abs=1)
    assert not answer.link_warning
    whole, _ = asked(small, corpus, repair="all")
    assert whole.shifted == 0


def test_warnings_are_those_of_what_was_done(small, shift):
    corpus = measured(small, shift)
    assert "lose 20%" in asked(small, corpus, repair="none")[0].link_warning
    assert "lose 40%" in asked(small, corpus, repair="none", shift=False)[0].link_warning
    corpus.catalog.store.delete(corpus.catalog.keys(corpus.config).shift(shift.digest))
    lost, _ = asked(small, corpus, repair="none")
    assert "lose 40%" in lost.link_warning
    assert lost.shifted == 0
    assert any("mean shift of links was not added" in miss and "check-model again" in miss for miss in lost.misses)


def test_a_shift_that_is_lost_is_looked_for_again(small, shift):
    corpus = measured(small, shift)
    key = corpus.catalog.keys(corpus.config).shift(shift.digest)
    corpus.catalog.store.put(key, shift.data[:-4])
    question = small.engine.tokenize("And then")
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(**PLAIN)) as loader:
        first = loader.ask(tuple(small.tokens), question)
        corpus.catalog.store.put(key, shift.data)
        second = loader.ask(tuple(small.tokens), question)
        corpus.catalog.store.delete(key)
        third = loader.ask(tuple(small.tokens), question)
    assert (bool(first.shifted), bool(second.shifted), bool(third.shifted)) == (False, True, True)
    assert any("damaged" in miss for miss in first.misses)
    assert not second.misses


def test_a_shift_of_another_model_is_not_added(small, shift):
    corpus, other = small.corpus(), replace(shift, config="c" * 64)
    corpus.catalog.models.put_link_shift(corpus.config, other.data)
    corpus.set_link_report(shifted(REPORT, other))
    answer, _ = asked(small, corpus, **PLAIN)
    assert answer.shifted == 0
    assert any("not on this one" in miss for miss in answer.misses)


def test_a_load_does_not_wait_for_a_slow_shift(small, shift, monkeypatch):
    over = threading.Event()

    def slow(reader, digest):
        over.wait(60)
        return f"late {digest}"

    monkeypatch.setattr(LinkPlanner, "_read_shift", slow)
    corpus = measured(small, shift)
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(open_s=0.2, **PLAIN)) as loader:
        try:
            answer = loader.ask(tuple(small.tokens), question)
        finally:
            over.set()
    assert answer.shifted == 0
    assert any("has not come in time" in miss for miss in answer.misses)


def test_text_that_saw_the_documents_before_it_stays(small, shift):
    """Documents that are computed from text behind each other are as in a prefill; those that are decoded are not."""
    texts = {f"text of {name}": ids[::-1] for name, ids in small.tokens.items()}
    chosen = LoadSettings(repair=0.01, selector="first", policy=Fixed(4))
    with Loader(small.engine, measured(small, shift), costs=small.costs, settings=chosen) as loader:
        answer = loader.ask((*texts, *small.tokens), small.engine.tokenize("And the lamp was"), texts=texts)
    front = sum(map(len, texts.values()))
    assert answer.front == front
    assert answer.shifted == sum(min(len(ids), shift.tokens) for ids in small.tokens.values())
    (exact,) = small.engine.prefill([[token for ids in texts.values() for token in ids]])
    seen = answer.prompt.cache.slice(0, front)
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(seen.values, exact.values, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_chunks_that_saw_what_is_before_them_are_spared(small, shift, monkeypatch, fails):
    """Also those behind documents that were decoded, and only where the pass over them did see these."""
    extend, apply = PromptWorker._extend, LinkShift.apply
    saw, spared = set(), []

    def watched(jobs, first, last, *, behind):
        if behind and fails:
            msg = "out of memory"
            raise RuntimeError(msg)
        extend(jobs, first, last, behind=behind)
        if behind:
            at, document = jobs.prompt.offset(first.document), jobs.documents[first.document]
            saw.update(range(at + document.span(first.chunk)[0], at + document.span(last.chunk)[1]))

    def noted(shift, cache, lengths, stays=()):
        spared.extend(token for first, stop in stays for token in range(first, stop))
        return apply(shift, cache, lengths, stays)

    monkeypatch.setattr(PromptWorker, "_extend", watched)
    monkeypatch.setattr(LinkShift, "apply", noted)
    first, second = small.tokens.values()
    texts = {"a": first[::-1], "b": second[::-1]}
    chosen = LoadSettings(repair=0.01, selector="first", policy=Fixed(4))
    with Loader(small.engine, measured(small, shift), costs=small.costs, settings=chosen) as loader:
        answer = loader.ask(("a", "b", *small.tokens), small.engine.tokenize("And"), texts=texts)
    assert sorted(spared) == sorted(saw)
    assert bool(saw) != fails
    shifted_rows = [
        range(at, at + min(n, shift.tokens)) for at, n in zip(answer.prompt.starts, answer.prompt.tokens, strict=True)
    ]
    assert answer.shifted == sum(token not in saw for rows in shifted_rows[1:] for token in rows)


def test_repairs_that_are_kept_are_of_documents_as_they_were_encoded(small, shift):
    answer, _ = asked(small, measured(small, shift), repair=0.1, keep_repairs=True, quality_floor=4)
    plain, _ = asked(small, small.corpus(), repair=0.1, shift=False, quality_floor=4)
    assert answer.shifted == 0
    assert torch.equal(answer.logits, plain.logits)


def test_documents_behind_a_neutral_prefix_and_layouts_are_not_shifted(small, shift):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=8))
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    assert asked(small, measured(small, shift, corpus), **PLAIN)[0].shifted == 0
    answer, _ = asked(small, measured(small, shift), layout=LinkLayout(name="links", opening=(3,)), repair="none")
    assert answer.shifted == 0
    answer, _ = asked(small, measured(small, shift), system=(1, 2, 3), repair="none")
    assert answer.shifted  # the second document, which lacks the first as it does without a system text


def test_modules_of_a_schema_are_not_shifted(small, shift):
    corpus = measured(small, shift)
    modules = tuple(Module(name, name, tokens=len(ids)) for name, ids in small.tokens.items())
    prompt = Schema(modules).prompt(list(small.tokens), {})
    with Loader(small.engine, corpus, costs=small.costs) as loader:
        assert loader.ask_schema(prompt, small.engine.tokenize("And")).shifted == 0


def test_the_command_tells_of_it(run, small, shift, demo_model, tmp_path, monkeypatch):
    store = f"file://{tmp_path}/store"
    documents = demo_model.parent / "documents"
    names = list(small.tokens)
    files = [documents / f"{name}.txt" for name in names]
    assert run("encode", *files, "--model", demo_model, "--store", store)[0] == 0
    from kvwire.store import FolderStore

    opened = FolderStore(tmp_path / "store")
    measured(small, shift, Corpus(small.engine, opened))
    opened.close()
    words = ("ask", "--docs", *names, "--question", "Who?", "--tokens", 1, "--repair", "none",
             "--model", demo_model, "--store", store)  # fmt: skip
    monkeypatch.setenv("KVWIRE_ESTIMATES", str(tmp_path / "estimates.json"))
    assert run(*words)[0] == 0  # compiles and measures, beside other tests; what it learns is kept
    code, out, _ = run(*words, "--json")
    assert code == 0
    assert json.loads(out)["shifted_tokens"] == shift.tokens, out
    assert json.loads(run(*words, "--json", "--no-shift")[1])["shifted_tokens"] == 0
    assert "tokens moved by the learnt mean shift" in run(*words)[1]
    assert "mean shift" not in run(*words, "--no-shift")[1]
