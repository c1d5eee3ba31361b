"""A document that is encoded for several head starts: the link and the engine decide which blob is used."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING

import pytest

from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller import events as ev
from kvwire.errors import AuthError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore
from kvwire.transport import EmulatedLink

from .answers import troubles

if TYPE_CHECKING:
    from kvwire.controller import LogEntry

FAST, SLOW = 200e6, 10e3
"""Bytes per second: all is there in no time, and 1.6 s for a blob without head start against 0.8 s for one with."""
COSTS = CostModel(PrefillCost(0.002, 0.01), DecodeCost(0.0005, 1e-5))
"""Computing the document takes 2.5 s, a head start a third of that."""
FINE = 1e-3
"""KL divergence of the finest level, in nats, at most: about 1e-4 is what it is made for."""
NAME = "short"
STARTED = Coding(prefix_layers=1)
QUESTION = "It was plain to everybody that"


@pytest.fixture(scope="module")
def tokens(small):
    """Of one chunk, so that nothing is half fetched and half computed."""
    return tuple(next(iter(small.tokens.values()))[:250])


@pytest.fixture(scope="module")
def reference(small, tokens):
    return Reference.of(small.engine, [list(tokens)], small.engine.tokenize(QUESTION), 4)


@pytest.fixture(scope="module")
def profile(small):
    """Of a head start of one layer."""
    corpus = Corpus(small.engine, MemoryStore(), coding=STARTED)
    return corpus.calibrate([Document(name, tuple(ids)) for name, ids in small.tokens.items()])


def _encoded(small, tokens, profile, coding=None, *, name=NAME, store=None, tenant="default"):
    corpus = Corpus(small.engine, store or MemoryStore(), tenant=tenant, coding=coding)
    corpus.set_profile(profile)
    list(corpus.encode([Document(name, tokens)]))
    return corpus


@pytest.fixture
def plain(small, tokens):
    return _encoded(small, tokens, small.profile)


@pytest.fixture
def started(small, tokens, profile):
    return _encoded(small, tokens, profile, STARTED)


def _ask(small, corpora, rate, after=lambda: None):
    """The answer, the variants that were fetched, and how many were known. after: called once the answer is there."""
    log: list[LogEntry] = []
    settings = LoadSettings(
        quality_floor=4, bandwidth_prior=rate, ttfb_prior_s=0.1, open_s=20.0, record=log.append, compute_workers=1
    )
    link = EmulatedLink(rate, 0.002)
    loader = Loader(small.engine, corpora[0], variants=corpora[1:], costs=COSTS, link=link, settings=settings)

    async def ask():
        try:
            return await loader.ask_async([NAME], small.engine.tokenize(QUESTION), tokens=4)
        finally:
            after()

    answer = asyncio.run(ask())
    given = [each for entry in log for each in entry.instructions]
    (known,) = [entry.event for entry in log if isinstance(entry.event, ev.IndexKnown)]
    return answer, {each.variant for each in given if isinstance(each, ev.Fetch)}, len(known.variants)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("rate", [FAST, SLOW])
def test_a_slow_link_takes_the_head_start_and_a_fast_one_does_not(
    small, reference, plain, started, rate, swapped, monkeypatch
):
    begun, prefix_layers = [], type(small.engine).prefix_states
    monkeypatch.setattr(type(small.engine), "prefix_states", lambda *args: begun.append(1) or prefix_layers(*args))
    corpora = [started, plain] if swapped else [plain, started]
    answer, variants, known = _ask(small, corpora, rate)
    assert known == 2
    assert variants == {(rate == SLOW) ^ swapped}
    assert len(begun) == (rate == SLOW)
    assert [d.level for d in answer.decisions] == [4]
    assert not answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINE
    alone, _, _ = _ask(small, [corpora[min(variants)]], rate)
    assert answer.tokens == alone.tokens
    assert answer.logits.equal(alone.logits)
    assert answer.error == alone.error


def _no_entry(small, tokens, started):
    return _encoded(small, tokens, started.profile(), STARTED, name="another")


def _other_text(small, tokens, started):
    return _encoded(small, (*tokens[:-1], tokens[0]), started.profile(), STARTED)


def _other_chunks(small, tokens, started):
    return _encoded(small, tokens, started.profile(), Coding(prefix_layers=1, chunk_tokens=128))


def _text_only(small, tokens, _):
    corpus = Corpus(small.engine, MemoryStore(), coding=STARTED)
    corpus.catalog.add_text(small.engine.meta.config_digest(), NAME, tokens)
    return corpus


def _no_blob(_, __, started):
    started.catalog.store.delete(started.find(NAME).blob_key)
    return started


def _damaged_head(_, __, started):
    entry = started.find(NAME)
    blob = bytearray(started.catalog.store.get(entry.blob_key))
    blob[entry.header_bytes // 2] ^= 0x40
    started.catalog.store.put(entry.blob_key, bytes(blob))
    return started


def _no_profile(small, _, started):
    store = started.catalog.store
    store.delete_many([key for key in store.keys("") if key.endswith(".kvp")])
    return Corpus(small.engine, store)


def _not_allowed(small, _, started):
    class Denied(MemoryStore):
        def get(self, key, *_):
            msg = f"{key} is not for you"
            raise AuthError(msg)

    return Corpus(small.engine, Denied())


DAMAGES = (
    _no_entry, _other_text, _other_chunks, _text_only, _no_blob, _damaged_head, _no_profile, _not_allowed,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_variant_that_is_of_no_use_is_done_without(small, tokens, reference, plain, started, damage):
    answer, variants, known = _ask(small, [plain, damage(small, tokens, started)], SLOW * 20)
    assert known == 1
    assert variants == {0}
    assert not answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINE


@pytest.mark.parametrize("late", ["catalog/", ".kvw"])
def test_a_variant_that_never_answers_is_not_waited_for(small, reference, plain, started, late, monkeypatch):
    """Neither its catalog nor its head: the load ends while both still hang."""
    over = threading.Event()
    given = started.catalog.store.snapshot
    monkeypatch.setattr(
        started.catalog.store, "snapshot", lambda key: given(key) if late not in key or over.wait(60) else None
    )
    answer, variants, known = _ask(small, [plain, started], FAST, after=over.set)
    assert known == 1
    assert answer.timing.ttft_s < 30.0
    assert variants == {0}
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINE


def test_a_variant_stands_in_for_a_blob_that_is_lost(small, tokens, reference, plain, started):
    _no_blob(small, tokens, plain)
    answer, variants, known = _ask(small, [plain, started], 1e6)
    assert known == 2
    assert variants == {1}
    assert len(answer.misses) == 1
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINE


def test_the_command_line_names_tenants_of_variants(small, tokens, profile, demo_model, tmp_path, run):
    store = FolderStore(tmp_path)
    _encoded(small, tokens, small.profile, store=store)
    _encoded(small, tokens, profile, STARTED, store=store, tenant="started")
    words = ["ask", "--docs", NAME, "--question", "So", "--model", demo_model, "--store", tmp_path, "--tokens", "2"]
    words += ["--variant-tenant", "started", "--variant-tenant", "nobody", "--json"]
    code, out, err = run(*words)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["text"]
    assert not troubles(answer["misses"])
