"""Appends that are repeated: with the length that the document had before, whatever happened to the first one."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, closing
from threading import Barrier, Thread

import pytest

from kvwire.errors import ArgumentError, ConflictError, NotFoundError, StorageError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import FolderStore, Keyring, MemoryStore, collect, copy_store, index_documents, verify_store
from kvwire.store.schemes import open_store
from kvwire.transport import HttpStore, HttpStoreSettings, ServerSettings
from kvwire.transport.testing import serving

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault
from ..store_wrappers import StoreWrapper

LOST = ProxyFault(FaultKind.LOST_ANSWER)
TURN = (5, 6, 7)


@pytest.fixture(scope="module")
def ids(small):
    return tuple(token for ids in small.tokens.values() for token in ids)[:120]


def _begun(small, store, ids, **whose):
    corpus = Corpus(small.engine, store, **whose)
    corpus.set_profile(small.profile)
    list(corpus.encode([Document("chat", ids)]))
    return corpus


def _text(corpus, document="chat"):
    return corpus.text(corpus.find(document))


def test_an_append_that_is_repeated_is_done_once(small, ids):
    corpus = _begun(small, MemoryStore(), ids)
    first = corpus.append("chat", TURN, after=120)
    before = set(corpus.catalog.store.keys(""))
    again = corpus.append("chat", TURN, after=120)
    assert (first.skipped, again.skipped) == (False, True)
    assert again.entry == first.entry == corpus.find("chat")
    assert again.info.tokens == 123
    assert set(corpus.catalog.store.keys("")) == before
    corpus.append("chat", TURN, after=again.entry.tokens)
    assert _text(corpus) == (*ids, *TURN, *TURN)


def test_another_length_than_expected_is_named_and_nothing_is_written(small, ids):
    corpus = _begun(small, MemoryStore(), ids)
    for after in (0, 119, 121):
        with pytest.raises(ConflictError, match=rf"has 120 tokens, and was to have {after} before"):
            corpus.append("chat", TURN, after=after)
    corpus.append("chat", (1, 2, 3), after=120)
    with pytest.raises(ConflictError, match="has 123 tokens, and was"):  # as many as there would be, but others
        corpus.append("chat", TURN, after=120)
    corpus.append("chat", TURN, after=123)
    with pytest.raises(ConflictError, match="has 126 tokens, those to append already among them"):
        corpus.append("chat", (1, 2, 3), after=120)
    assert _text(corpus) == (*ids, 1, 2, 3, *TURN)
    with pytest.raises(NotFoundError):
        corpus.append("nobody", TURN, after=0)
    with pytest.raises(ArgumentError, match="number of tokens"):
        corpus.append("chat", TURN, after="126")


def test_what_fills_the_window_is_there_already_and_not_too_long(small, ids):
    corpus = _begun(small, MemoryStore(), ids)
    rest = tuple(1 + number % 50 for number in range(corpus.window - 120))
    corpus.append("chat", rest, after=120)
    assert corpus.append("chat", rest, after=120).skipped


def test_a_document_with_a_profile_of_its_own_is_appended_to_once(small, ids):
    corpus = Corpus(small.engine, MemoryStore())
    list(corpus.encode([Document("chat", ids[:20])]))
    for _ in range(2):
        entry = corpus.append("chat", TURN, after=20).entry
    assert (entry.parts, _text(corpus)) == ((), (*ids[:20], *TURN))


def test_a_fork_that_is_repeated_is_made_once(small, ids):
    corpus = _begun(small, MemoryStore(), ids)
    first = corpus.append("chat", TURN, after=120, fork="other")
    corpus.append("chat", (8,), after=120)  # what it was forked from goes its own way
    again = corpus.append("chat", TURN, after=120, fork="other")
    assert (again.skipped, again.entry) == (True, first.entry)
    with pytest.raises(ConflictError, match="'chat' has 121 tokens"):
        corpus.append("chat", (9,), after=120, fork="other")
    with pytest.raises(ArgumentError, match="'other' already"):
        corpus.append("chat", (9,), after=121, fork="other")
    assert (_text(corpus), _text(corpus, "other")) == ((*ids, 8), (*ids, *TURN))


class _Together(StoreWrapper):
    """All writers have read the entry before the first of them replaces it."""

    def __init__(self, inner, ready):
        super().__init__(inner)
        self._ready, self._is_first = ready, True

    def replace(self, key, data, etag):
        if self._is_first:
            self._is_first = False
            self._ready.wait(20)
        return self.inner.replace(key, data, etag)


@pytest.mark.parametrize("fork", ["", "other"])
@pytest.mark.parametrize("turns", [(TURN, TURN), (TURN, (8, 9))], ids=["of one message", "of two"])
def test_a_message_that_two_workers_get_is_appended_once(small, ids, turns, fork):
    store = MemoryStore()
    corpus, ready, done = _begun(small, store, ids), Barrier(2), {}

    def write(number):
        try:
            mine = Corpus(small.engine, _Together(store, ready))
            done[number] = mine.append("chat", turns[number], after=120, fork=fork)
        except (ArgumentError, ConflictError) as error:
            done[number] = error

    threads = [Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [number for number, found in done.items() if not isinstance(found, Exception)]
    assert len(won) == (2 if turns[0] == turns[1] else 1)
    assert _text(corpus, fork or "chat") == (*ids, *turns[won[0]])


def test_without_a_length_the_same_words_of_two_writers_are_never_taken_for_one(small, ids):
    store = MemoryStore()
    corpus, ready, lost = _begun(small, store, ids), Barrier(2), []

    def write():
        try:
            Corpus(small.engine, _Together(store, ready)).append("chat", TURN)
        except ConflictError as error:
            lost.append(error)

    threads = [Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 1
    assert _text(corpus) == (*ids, *TURN)


@pytest.fixture(params=["plain", "sealed"])
def whose(request, tmp_path):
    if request.param == "plain":
        return {}
    keys = tmp_path / "keys"
    keys.write_text(Keyring.new_line())
    keys.chmod(0o600)
    return {"keyring": Keyring.read(keys)}


@pytest.mark.parametrize("lost", [1, 100], ids=["once", "always"])
def test_an_answer_that_is_lost_costs_no_turn_and_doubles_none(small, ids, tmp_path, whose, lost):
    store, left = MemoryStore(), [lost]
    corpus = _begun(small, store, ids, **whose)

    def plan(request):
        if request.method != "PUT" or "/catalog/" not in request.path or not left[0]:
            return None
        left[0] -= 1
        return LOST

    with ExitStack() as stack:
        url = stack.enter_context(serving(store, settings=ServerSettings(spool_folder=tmp_path)))
        proxy = stack.enter_context(FaultProxy(url, plan))
        http = stack.enter_context(closing(open_store(proxy.url)))
        client = Corpus(small.engine, http, **whose)
        if lost == 1:
            assert client.append("chat", TURN).entry == corpus.find("chat")
        else:
            with pytest.raises(StorageError, match="connection failed"):
                client.append("chat", TURN, after=120)
            left[0] = 0
            assert client.append("chat", TURN, after=120).skipped
        assert proxy.faults[FaultKind.LOST_ANSWER] >= 1
    assert _text(corpus) == (*ids, *TURN)


def test_every_write_whose_first_answer_is_lost_leaves_the_store_that_others_leave(small, ids, tmp_path):
    stores = {}
    for kind in ("sound", "lossy"):
        store, seen = MemoryStore(), set()

        def plan(request, seen=seen):
            if request.method in ("GET", "HEAD") or (request.method, request.path) in seen:
                return None
            seen.add((request.method, request.path))
            return LOST

        with ExitStack() as stack:
            url = stack.enter_context(serving(store, settings=ServerSettings(spool_folder=tmp_path)))
            proxy = stack.enter_context(FaultProxy(url, plan if kind == "lossy" else None))
            http = stack.enter_context(closing(HttpStore(proxy.url, settings=HttpStoreSettings(backoff_s=0.001))))
            corpus = Corpus(small.engine, http)
            corpus.set_profile(small.profile)
            for _ in range(2):
                list(corpus.encode([Document("one", ids), Document("two", ids[:60])], index=["kvwire"]))
                corpus.save(Document("three", ids[:60]), small.engine.prefill([ids[:60]])[0])
            entry = corpus.append("one", TURN, after=120).entry
            corpus.append("one", TURN, after=entry.tokens, fork="four")
            corpus.compact("one")
            index_documents(corpus.catalog, corpus.catalog.keys(corpus.config), ["kvwire"])
            assert corpus.catalog.remove(corpus.config, "two")
            collect(http, tenant_hash=corpus.catalog.tenant, grace_s=0.0)
            assert (kind == "lossy") == (proxy.faults[FaultKind.LOST_ANSWER] > 10)
            assert not verify_store(store, [corpus.catalog]).damaged
            stores[kind] = {key: store.get(key) for key in store.keys("")}
            target = FolderStore(tmp_path / f"copy of {kind}")
            with closing(target):
                assert not copy_store(http, target).failures
                assert set(target.keys("")) == set(stores[kind])
    assert stores["lossy"] == stores["sound"]


VICTIM = """
import os, sys
from kvwire.engines.transformers import open_engine
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore

class Dying(FolderStore):
    def replace(self, key, data, etag):
        super().replace(key, data, etag)
        os.kill(os.getpid(), 9)

Corpus(open_engine(sys.argv[1]), Dying(sys.argv[2])).append("chat", (5, 6, 7), after=120)
"""


def test_a_writer_that_is_killed_once_its_entry_is_written_is_repeated_without_harm(small, ids, demo_model, tmp_path):
    with closing(FolderStore(tmp_path)) as store:
        _begun(small, store, ids)
    killed = subprocess.run([sys.executable, "-c", VICTIM, demo_model, tmp_path], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    with closing(FolderStore(tmp_path)) as store:
        corpus = Corpus(small.engine, store)
        assert corpus.append("chat", TURN, after=120).skipped
        assert _text(corpus) == (*ids, *TURN)


def test_the_command_is_repeated_safely_and_tells_the_next_length(run, demo_model, small, tmp_path):
    source, turn = tmp_path / "chat.txt", tmp_path / "turn.txt"
    source.write_text(next(iter(small.texts.values()))[:2000])
    turn.write_text("And then the bell rang again, twice.")
    count = len(small.engine.tokenize(turn.read_text()))
    where = ("--store", f"file://{tmp_path}/kv", "--model", demo_model)
    assert run("encode", source, *where)[0] == 0
    code, out, _ = run("append", "chat", "--file", turn, "--json", *where)
    length = json.loads(out)["tokens"]
    append = ("append", "chat", "--file", turn, "--after", length, *where)
    told = [json.loads(run(*append, "--json")[1]) for _ in range(2)]
    assert [(one["tokens"], one["added"], one["skipped"]) for one in told] == [
        (length + count, count, False),
        (length + count, 0, True),
    ]
    assert told[1]["written_bytes"] == 0
    code, out, _ = run(*append)
    assert (code, f"{length + count} tokens (there already) in 3 parts, 0 bytes written" in out) == (0, True)
    code, out, _ = run(*append, "--compact")
    assert (code, "1 parts" in out) == (0, True)
    code, _, err = run("append", "chat", "--text", "Other.", "--after", length, *where)
    assert (code, f"has {length + count} tokens" in err) == (7, True)
    assert run("append", "chat", "--compact", "--after", length, *where)[0] == 2
    assert run("append", "chat", "--text", "a", "--after", "-1", *where)[0] == 2
