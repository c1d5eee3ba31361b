from __future__ import annotations

import asyncio
import platform
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvwire
from kvwire.codec import BlobDecoder
from kvwire.codec.workers import cores
from kvwire.controller import PrefillCost
from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, CorruptError, KvwireError, NotFoundError, StorageError
from kvwire.reuse import link
from kvwire.runtime import execute as loads
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings, controls_of
from kvwire.store import MemoryStore
from kvwire.store.schemes import open_store
from kvwire.transport import FetchSettings, HttpStore, ReadTimeouts, parse_link
from kvwire.transport.testing import serving

from .answers import troubles

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "It was plain to everybody that"
QUICK = LoadSettings(fetch=FetchSettings(retries=1, backoff_s=0.01, patience=ReadTimeouts(1.0, 1.0)))
"""Gives up on a dead server within a second or two."""
FINEST_KL = 6e-4
"""The finest level's is 0.98e-4 to 1.01e-4 here, by how many threads multiply matrices."""
TIE = 0.05
"""Nats between two tokens of which either may be the likeliest."""


def _names(small):
    return list(small.tokens)


@pytest.fixture(scope="module")
def reference(small):
    return Reference.of(small.engine, list(small.tokens.values()), small.engine.tokenize(QUESTION), 8)


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, left: list[int], *, counted: bool
) -> None:
    while data := await source.read(4096):
        if counted:
            data, left[0] = data[: left[0]], left[0] - len(data)
        target.write(data)
        await target.drain()
        if left[0] <= 0:
            break
    target.close()


@contextmanager
def dying(url: str, after_bytes: int) -> Iterator[str]:
    """A proxy that passes so many bytes of answers on and then cuts every connection for ever."""
    host, port = url.removeprefix("http://").split(":")
    left, ready, done, ports = [after_bytes], threading.Event(), threading.Event(), []
    handlers = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        if left[0] <= 0:
            writer.close()
            return
        back, forth = await asyncio.open_connection(host, int(port))
        asking = asyncio.create_task(_pass_on(reader, forth, left, counted=False))
        with suppress(OSError):
            await _pass_on(back, writer, left, counted=True)
        asking.cancel()
        for stream in (writer, forth):
            stream.close()
        await asyncio.gather(asking, writer.wait_closed(), forth.wait_closed(), return_exceptions=True)

    async def run() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)
            server.close()
            await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        done.set()
        thread.join()


def _ask(small, corpus, *, settings=None, link=None, **options):
    loader = Loader(small.engine, corpus, costs=small.costs, link=parse_link(link) if link else None, settings=settings)
    return loader.ask(_names(small), small.engine.tokenize(QUESTION), **options)


def test_the_answer_is_that_of_exact_caches(small, reference):
    answer = _ask(small, small.corpus(), settings=LoadSettings(quality_floor=4), tokens=8)
    kl, _ = reference.compare(small.engine, answer.prompt.cache)
    assert all(d.action == "fetch" and d.level == 4 for d in answer.decisions)
    assert kl < FINEST_KL
    past = small.engine.past_key_values(answer.prompt.cache)
    best = small.engine.forward(past, reference.tokens, reference.start).argmax(-1)
    exact = reference.logits.argmax(-1)
    behind = reference.logits.gather(1, exact[:, None]) - reference.logits.gather(1, best[:, None])
    assert behind.max() < TIE  # processors round differently, and a tie may end either way
    if (best == exact).all():
        assert answer.tokens[:7] == reference.tokens[-7:]
    assert answer.text
    assert not answer.misses


@pytest.mark.parametrize("tokens", [4, 64, 72])
def test_the_question_runs_on_the_prompt_without_a_copy_of_it(small, reference, monkeypatch, tokens):
    pasts, growing = [], type(small.engine).growing_past
    monkeypatch.setattr(
        type(small.engine), "growing_past", lambda *args: pasts.append(growing(*args)) or pasts[-1]
    )  # fmt: skip
    monkeypatch.setattr(type(small.engine), "end_tokens", frozenset())
    answer = _ask(small, small.corpus(), settings=LoadSettings(quality_floor=4), tokens=tokens)
    prompt, engine = answer.prompt.cache, small.engine
    stays = [layer.keys.data_ptr() for layer in pasts[0].layers] == [keys.data_ptr() for keys in prompt.keys]
    assert stays == (tokens <= 64)
    assert len(answer.tokens) == tokens
    # What was written behind the prompt is no part of it, and another question makes nothing of it.
    past = engine.past_key_values(prompt)
    logits = engine.forward(past, engine.tokenize(QUESTION), prompt.tokens, logits=1)
    assert int(logits[-1].argmax()) == answer.first_token
    out = engine.generate(past, answer.first_token, prompt.tokens + len(engine.tokenize(QUESTION)), tokens)
    assert tuple(out) == answer.tokens


def test_no_more_memory_is_set_aside_than_the_window_lets_fill(small, monkeypatch):
    asked, allocate = [], type(small.engine).allocate
    monkeypatch.setattr(
        type(small.engine), "allocate", lambda self, tokens: asked.append(tokens) or allocate(self, tokens)
    )
    corpus, question = small.corpus(), small.engine.tokenize(QUESTION)
    tokens = sum(len(ids) for ids in small.tokens.values()) + len(question)
    _ask(small, corpus, tokens=2)
    monkeypatch.setattr(type(small.engine), "window", tokens + 3)
    _ask(small, corpus, tokens=9)
    assert asked == [tokens + 2, tokens + 3]


def test_coarser_levels_cost_fewer_bytes_and_some_quality(small, reference):
    corpus = small.corpus()
    answers = [_ask(small, corpus, settings=LoadSettings(quality_floor=level)) for level in (0, 2)]
    kls = [reference.compare(small.engine, answer.prompt.cache)[0] for answer in answers]
    assert answers[0].bytes < answers[1].bytes
    assert kls[1] < kls[0] < 0.05


def test_over_http_and_a_slow_link_with_a_deadline(small, reference):
    with serving(small.corpus().catalog.store) as url, closing(open_store(url)) as store:
        answer = _ask(small, Corpus(small.engine, store), link="20mbit,5ms", deadline_s=5.0)
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 0.02
    assert answer.timing.ttft_s > 0.005
    assert answer.bytes > 0


def test_decoding_beside_forward_passes_gives_the_same(small, reference):
    settings = LoadSettings(quality_floor=4, bandwidth_prior=1e6, compute_workers=2)
    answer = _ask(small, small.corpus(), link="8mbit,1ms", settings=settings, tokens=8)
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL
    assert "fetch" in {decision.action for decision in answer.decisions}
    assert not troubles(answer.misses)


def test_what_the_text_lets_expect_is_there_before_the_first_chunk(small, monkeypatch):
    """It is computed while chunks are on their way, so that decoding need not."""
    corpus = small.corpus()
    profile = replace(small.profile)  # nothing of it is known yet
    corpus.set_profile(profile)
    (expectations,) = profile.expectations
    left, decode = [], BlobDecoder.decode_chunk

    def noted(self, chunk, segments, level=None):
        left.append(len(expectations.missing(np.unique(self.info.token_ids))))
        decode(self, chunk, segments, level)

    assert len(expectations.missing(np.arange(100))) == 100
    monkeypatch.setattr(BlobDecoder, "decode_chunk", noted)
    costs = replace(small.costs, prefill=PrefillCost(60.0, 1.0))
    _ask(replace(small, costs=costs), corpus, settings=LoadSettings(quality_floor=4), link="20mbit,200ms")
    assert left
    assert not any(left)


def test_what_cannot_be_prepared_is_left_to_decoding(small, monkeypatch, caplog):
    def broken(*_):
        raise MemoryError
        yield

    monkeypatch.setattr(loads, "expect", broken)
    answer = _ask(small, small.corpus(), settings=LoadSettings(quality_floor=4), link="20mbit,20ms")
    assert {decision.action for decision in answer.decisions} == {"fetch"}
    assert not answer.misses
    assert "decoding prepares it itself" in caplog.text
    assert "MemoryError" in caplog.text


@pytest.mark.parametrize("method", ["kvwire", "cachegen"])
def test_only_what_decoding_needs_is_prepared(small, monkeypatch, method):
    """Each document once; and CacheGen's levels expect nothing of a text."""
    asked = []
    monkeypatch.setattr(loads, "expect", lambda _, ids: iter(asked.append(len(ids)) or ()))
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(method=method))
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    costs = replace(small.costs, prefill=PrefillCost(60.0, 1.0))
    answer = _ask(replace(small, costs=costs), corpus)
    assert {decision.action for decision in answer.decisions} == {"fetch"}
    assert sorted(asked) == (sorted(map(len, small.tokens.values())) if method == "kvwire" else [])


def test_a_link_too_slow_for_anything_means_recomputing_exactly(small, reference):
    answer = _ask(
        small, small.corpus(), link="40kbit,1ms", settings=replace(QUICK, bandwidth_prior=5e3, quality_floor=4)
    )
    assert {d.action for d in answer.decisions} == {"recompute"}
    kl, agreement = reference.compare(small.engine, answer.prompt.cache)
    assert kl < 1e-6
    assert agreement == 1.0


def test_linked_recompute_equals_linked_prefill(small):
    """Recomputing chunk by chunk at the document's place in the prompt gives what shifting its prefill there gives."""
    answer = _ask(
        small, small.corpus(), link="40kbit,1ms", settings=replace(QUICK, bandwidth_prior=5e3, quality_floor=4)
    )
    exact = link([small.engine.prefill([ids])[0] for ids in small.tokens.values()])
    for ours, theirs in zip(
        (*answer.prompt.cache.keys, *answer.prompt.cache.values), (*exact.keys, *exact.values), strict=True
    ):
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_a_pass_that_takes_too_long_is_stopped_and_its_chunks_are_fetched(small, reference, monkeypatch):
    """An engine that stands still until it is asked to stop: what it was to compute comes over the link in time."""
    stops, held = [], []
    stoppable, extend = small.engine.stoppable, small.engine.extend

    def noted(stop):
        stops.append(stop)
        return stoppable(stop)

    def stuck(prefix, ids, *, offset=0):
        if not held:
            held.append(stops[-1].wait(60))
        return extend(prefix, ids, offset=offset)

    monkeypatch.setattr(small.engine, "stoppable", noted)
    monkeypatch.setattr(small.engine, "extend", stuck)
    log = []
    settings = LoadSettings(bandwidth_prior=1e5, record=log.append)
    answer = _ask(small, small.corpus(), link="800kbit,1ms", settings=settings, deadline_s=10.0)
    assert held == [True]
    ended = [entry.event for entry in log if isinstance(entry.event, ev.RecomputeInterrupted)]
    assert ended
    gone = {(each.document, each.chunk) for each in ended[0].chunks}
    assert gone
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 0.02
    assert not troubles(answer.misses)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_server_that_dies_halfway_costs_time_only(small, reference, share):
    corpus = small.corpus()
    config = small.engine.meta.config_digest()
    sizes = [corpus.catalog.by_document(config, name) for name in _names(small)]
    after = int(sum(e.levels[-1][1] for e in sizes) * share)
    with serving(corpus.catalog.store) as url, dying(url, after) as proxy:
        remote = Corpus(small.engine, _split(url, proxy))
        answer = _ask(small, remote, settings=replace(QUICK, quality_floor=4))
    assert answer.misses
    assert "recompute" in {d.action for d in answer.decisions}
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def _split(sound, url):
    """Catalog and profile from a sound server, blobs from a dying one."""

    class Split(HttpStore):
        def http_address(self, key, *, renew=False):
            place = super() if key.endswith(".kvw") else HttpStore(sound)
            return place.http_address(key, renew=renew)

    return Split(url)


def _damage(corpus, small, name, where):
    entry = corpus.catalog.by_document(small.engine.meta.config_digest(), name)
    blob = bytearray(corpus.catalog.store.get(entry.blob_key))
    position = entry.header_bytes // 2 if where == "head" else (entry.header_bytes + len(blob)) // 2
    blob[position] ^= 0x40
    data = bytes(blob[: entry.header_bytes + 10]) if where == "cut" else bytes(blob)
    corpus.catalog.store.put(entry.blob_key, data)


def test_a_flipped_segment_is_recomputed_and_said(small, reference):
    corpus = small.corpus()
    _damage(corpus, small, _names(small)[0], "segment")
    answer = _ask(small, corpus, settings=replace(QUICK, quality_floor=4))
    assert any("checksum" in miss or "CRC" in miss for miss in answer.misses)
    assert [d.action for d in answer.decisions].count("recompute") == 1
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def test_a_damaged_segment_is_told_where_its_next_attempt_is_not_waited_for(small):
    corpus = small.corpus()
    _damage(corpus, small, _names(small)[0], "segment")
    patient = FetchSettings(retries=1, backoff_s=10.0, max_backoff_s=10.0)
    answer = _ask(small, corpus, settings=replace(QUICK, quality_floor=4, fetch=patient))
    (miss,) = answer.misses
    assert "given up: " in miss
    assert "CRC-32" in miss


def test_a_blob_cut_behind_its_head_is_recomputed(small, reference):
    corpus = small.corpus()
    _damage(corpus, small, _names(small)[0], "cut")
    answer = _ask(small, corpus, settings=replace(QUICK, quality_floor=4))
    assert answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def _lose_texts(corpus):
    store = corpus.catalog.store
    store.delete_many([key for key in store.keys("") if key.endswith(".kvt")])


def test_a_lost_blob_is_computed_from_its_text(small, reference):
    corpus, config = small.corpus(), small.engine.meta.config_digest()
    store, (first, second) = corpus.catalog.store, _names(small)
    store.delete(corpus.catalog.by_document(config, first).blob_key)
    _damage(corpus, small, second, "head")
    answer = _ask(small, corpus, settings=QUICK)
    assert {d.action for d in answer.decisions} == {"recompute"}
    assert len(answer.misses) == 2
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_lost_head_needs_the_text(small, reference):
    corpus, name = small.corpus(), _names(small)[0]
    _damage(corpus, small, name, "head")
    _lose_texts(corpus)
    with pytest.raises(CorruptError, match=f"'{name}' and its text cannot be read: give the text"):
        _ask(small, corpus, settings=QUICK)
    answer = _ask(small, corpus, settings=replace(QUICK, quality_floor=4), texts={name: small.tokens[name]})
    assert answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def test_a_lost_profile_means_recomputing(small, reference):
    corpus = small.corpus()
    store = corpus.catalog.store
    for key in list(store.keys("")):
        if key.endswith(".kvp"):
            store.delete(key)
    answer = _ask(small, Corpus(small.engine, store), settings=QUICK)
    assert {d.action for d in answer.decisions} == {"recompute"}
    assert answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


@contextmanager
def silent() -> Iterator[str]:
    """A server that accepts connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_silent_server_does_not_hold_a_load_up(small, reference):
    corpus = small.corpus()
    _lose_texts(corpus)
    with serving(corpus.catalog.store) as sound, silent() as url:
        remote = Corpus(small.engine, _split(sound, url))
        with pytest.raises(StorageError, match="nothing came"):
            _ask(small, remote, settings=LoadSettings(fetch=FetchSettings(retries=0, patience=ReadTimeouts(0.3, 0.3))))
        answer = _ask(
            small, remote, settings=LoadSettings(open_s=30.0, repair="none"), deadline_s=4.0, texts=small.tokens
        )
    assert len(answer.misses) == len(small.tokens)
    assert answer.timing.fetch_s == 0
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_stored_text_stands_in_for_a_head_that_is_late(small, reference):
    corpus = small.corpus()
    with serving(corpus.catalog.store) as sound, silent() as url:
        remote = Corpus(small.engine, _split(sound, url))
        answer = _ask(small, remote, settings=LoadSettings(open_s=30.0, repair="none"), deadline_s=2.0)
    assert len(answer.misses) == len(small.tokens)
    assert all("no header within 0.5 s" in miss for miss in answer.misses)
    assert {d.action for d in answer.decisions} == {"recompute"}
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_heads_are_not_waited_for_one_by_one(small, reference):
    """What is known is fetched while the head of another document is still awaited."""
    corpus, config = small.corpus(), small.engine.meta.config_digest()
    late = corpus.catalog.by_document(config, _names(small)[0]).blob_key
    fetched, log = threading.Event(), []
    snapshot = corpus.catalog.store.snapshot

    def patient(key):
        assert key != late or fetched.wait(10)
        return snapshot(key)

    def record(entry):
        log.append(entry)
        if isinstance(entry.event, ev.ChunkArrived):
            fetched.set()

    corpus.catalog.store.snapshot = patient
    answer = _ask(small, corpus, settings=LoadSettings(quality_floor=4, record=record))
    known = [entry.event.document for entry in log if isinstance(entry.event, ev.IndexKnown)]
    assert known == [1, 0]
    assert not answer.misses
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def _broken(*_args, **_named):
    msg = "out of memory"
    raise RuntimeError(msg)


def test_whatever_breaks_in_decoding_is_recomputed(small, reference, monkeypatch):
    monkeypatch.setattr("kvwire.codec.BlobDecoder.decode_chunk", _broken)
    answer = _ask(small, small.corpus())
    assert {d.action for d in answer.decisions} == {"recompute"}
    assert all("RuntimeError: out of memory" in miss for miss in answer.misses)
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_load_that_cannot_go_on_ends_with_an_error(small, monkeypatch):
    monkeypatch.setattr("kvwire.codec.BlobDecoder.decode_chunk", _broken)
    monkeypatch.setattr(type(small.engine), "extend", _broken)
    with pytest.raises(StorageError, match="cannot be made ready"):
        _ask(small, small.corpus())


def test_swapped_blobs_are_noticed(small, reference):
    """Two sound blobs in each other's place: the catalog's digests tell."""
    corpus, config = small.corpus(), small.engine.meta.config_digest()
    store = corpus.catalog.store
    first, second = (corpus.catalog.by_document(config, name).blob_key for name in _names(small))
    data = store.get(first), store.get(second)
    store.put(first, data[1])
    store.put(second, data[0])
    answer = _ask(small, corpus)
    assert len(answer.misses) == 2
    assert all("not the one that the catalog names" in miss for miss in answer.misses)
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_changed_text_wins_over_the_blob_of_the_old_one(small):
    name = _names(small)[0]
    answer = _ask(small, small.corpus(), texts={name: small.tokens[name][:-5]})
    assert any("has changed" in miss for miss in answer.misses)
    assert answer.prompt.tokens[0] == len(small.tokens[name]) - 5


def test_unknown_documents_and_prompts_that_do_not_fit(small):
    corpus = small.corpus()
    loader = Loader(small.engine, corpus, costs=small.costs)
    with pytest.raises(NotFoundError, match="encode it first"):
        loader.ask(["nobody"], [1])
    with pytest.raises(ArgumentError, match="window"):
        loader.ask([_names(small)[1]] * 7, [1])
    with pytest.raises(ArgumentError):
        loader.ask([], [1])
    with pytest.raises(KvwireError):
        loader.ask(_names(small), [])


def test_nothing_is_looked_up_any_more_after_the_first_error(small, monkeypatch):
    corpus, let_go = small.corpus(), threading.Event()
    find, (first, second) = corpus.find, _names(small)
    asked = threading.Event()

    def slow(name):
        if name == first:
            asked.set()
            assert let_go.wait(10)
        else:
            assert asked.wait(10)
        return find("nobody" if name == second else name)

    monkeypatch.setattr(corpus, "find", slow)
    loader = Loader(small.engine, corpus, costs=small.costs)

    async def ask():
        try:
            with pytest.raises(NotFoundError, match="nobody"):
                await loader.ask_async([first, second], [1])
            assert asyncio.all_tasks() == {asyncio.current_task()}
        finally:
            let_go.set()

    asyncio.run(ask())


def test_controls_are_those_of_the_settings():
    assert controls_of(LoadSettings(), on_gpu=False).workers == 1
    on_gpu = controls_of(LoadSettings(), on_gpu=True)
    assert (on_gpu.workers, on_gpu.max_in_flight) == (2, LoadSettings().max_in_flight)
    assert on_gpu.decode_batch > on_gpu.decode_threads == 1
    assert controls_of(LoadSettings(), on_gpu=False).decode_threads == min(cores(), 8)
    assert controls_of(LoadSettings(decode_threads=3), on_gpu=False).decode_batch == 6
    given = controls_of(LoadSettings(compute_workers=1, decode_batch=3, memory_bytes=9, patience_s=2.0), on_gpu=True)
    assert (given.workers, given.decode_batch, given.memory_bytes, given.patience_s) == (1, 3, 9, 2.0)


def test_an_engines_name_tells_processor_and_versions(small):
    import torch

    _, engine = Loader(small.engine, small.corpus(), costs=small.costs)._runner.keys
    parts = engine.split(" | ")
    assert f"torch {torch.__version__} kvwire {kvwire.__version__}" in parts
    assert any(platform.machine() in part for part in parts)


def test_measured_costs_are_plausible(small, monkeypatch):
    from kvwire.runtime.costs import measure_costs

    monkeypatch.setattr("kvwire.runtime.costs.BUDGET_S", 1e6)
    costs = measure_costs(small.engine, small.profile)
    assert 0 < costs.prefill.seconds(256) < 60
    assert costs.prefill.seconds(1024) > costs.prefill.seconds(64)
    assert 0 < costs.decode.seconds(256, 30_000) < costs.prefill.seconds(256) * 10


def test_costs_of_decoding_are_those_side_by_side(small, monkeypatch):
    """As many chunks are decoded at a time as loads decode, each into memory of its own, at each level."""
    from kvwire.runtime import costs

    begun, together, lock = [], [0, 0], threading.Lock()
    decode = BlobDecoder.decode_chunk

    def noted(self, chunk, segments, level=None):
        with lock:
            begun.append((id(self), level, self.info.tokens))
            together[0] += 1
            together[1] = max(together)
        time.sleep(0.005)
        decode(self, chunk, segments, level)
        with lock:
            together[0] -= 1

    monkeypatch.setattr(BlobDecoder, "decode_chunk", noted)
    monkeypatch.setattr(costs, "BUDGET_S", 1e6)
    for threads in (1, 3):
        begun.clear()
        together[1] = 0
        measured = costs.measure_costs(small.engine, small.profile, threads=threads)
        assert together[1] == threads
        assert {tokens for *_, tokens in begun} == {16, 64, 256}
        assert {level for _, level, _ in begun} == {0, 1, 2, 3, 4}
        assert len({each for each, _, tokens in begun if tokens == 64}) == threads
        assert measured.decode.seconds(1, 0) > 0.004


class _Clock:
    """Time that passes with the work of an engine alone: so many seconds a token, and no more than a moment else."""

    def __init__(self, monkeypatch, engine, token_s):
        from kvwire.runtime import costs

        self.now, self.passes, extend = 0.0, [], engine.extend

        def slow(prefix, token_ids, **named):
            self.passes.append((len(token_ids), prefix.tokens if prefix else 0))
            self.now += token_s * len(token_ids)
            return extend(prefix, token_ids, **named)

        monkeypatch.setattr(engine, "extend", slow)
        monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_what_takes_long_is_not_repeated_as_often(small, monkeypatch):
    from kvwire.runtime import costs

    clock = _Clock(monkeypatch, small.engine, 0.0)
    for first, seconds, runs in ((2.0, 2.0, 1), (0.05, 0.2, 2), (0.001, 0.001, 4), (0.001, 0.5, 2)):
        ran = []

        def work(first=first, seconds=seconds, ran=ran):
            clock.now += seconds if ran else first
            ran.append(seconds)

        assert costs._best(work, small.engine, clock.now + 1.0) == pytest.approx(min(first, seconds))
        assert len(ran) == runs


@pytest.mark.parametrize("token_s", [1e-6, 1e-3, 0.1])
def test_measuring_keeps_to_its_budget_and_extrapolates(small, monkeypatch, token_s):
    """A slow engine is measured by short passes alone, and what long ones cost is right all the same."""
    from kvwire.runtime import costs

    clock = _Clock(monkeypatch, small.engine, token_s)
    found = costs.measure_costs(small.engine, small.profile, threads=1)
    least = 33 * token_s  # a token to warm up, and the shortest pass
    assert clock.now <= max(2.0, 2 * least)
    assert (256, 0) in clock.passes or token_s > 1e-5
    assert max(clock.passes)[0] == {1e-6: 1024, 1e-3: 128, 0.1: 32}[token_s]
    assert found.prefill.seconds(1024) == pytest.approx(1024 * token_s, rel=0.05)


def test_warming_up_and_measuring_solve_nothing_that_only_encoders_need(small, monkeypatch):
    from kvwire.codec import Profile
    from kvwire.codec.profile import group
    from kvwire.runtime.costs import measure_costs, warm_up

    def refused(*_):
        msg = "solved"
        raise AssertionError(msg)

    monkeypatch.setattr(group, "solve", refused)
    profile = Profile.from_bytes(small.profile.data)
    warm_up(small.engine, profile)
    measure_costs(small.engine, profile, threads=1)
