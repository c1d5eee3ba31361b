"""Several writers of one document that grows: one wins, nobody loses a turn, and none reads another tenant's."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from threading import Barrier, Thread

import pytest
from msgspec.structs import replace

from kvwire.errors import ArgumentError, ConflictError, CorruptError, NotFoundError, StorageError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import FolderStore, Keyring, MemoryStore, TierSettings, open_tiers
from kvwire.store.backends.http import exchange
from kvwire.store.records import BlobPart
from kvwire.store.schemes import open_store
from kvwire.transport import ServerSettings
from kvwire.transport.testing import serving

from ..store_wrappers import StoreWrapper

DIGEST = "0" * 64


@pytest.fixture(scope="module")
def ids(small):
    return tuple(token for ids in small.tokens.values() for token in ids)[:150]


@pytest.fixture(params=["plain", "sealed"])
def whose(request, tmp_path):
    """What a tenant's corpora have in common."""
    if request.param == "plain":
        return {}
    keys = tmp_path / "keys"
    keys.write_text(Keyring.new_line())
    keys.chmod(0o600)
    return {"keyring": Keyring.read(keys)}


def _grown(small, store, ids, **whose):
    """A document of two parts."""
    corpus = Corpus(small.engine, store, **whose)
    corpus.set_profile(small.profile)
    list(corpus.encode([Document("chat", ids[:120])]))
    corpus.append("chat", ids[120:])
    return corpus


class _Waiting(StoreWrapper):
    """All writers have read the entry before the first of them replaces it."""

    def __init__(self, inner, ready):
        super().__init__(inner)
        self._ready = ready

    def replace(self, key, data, etag):
        self._ready.wait(20)
        return self.inner.replace(key, data, etag)


class _Slow(StoreWrapper):
    """Whoever looks first and then writes gives others time in between."""

    def stat(self, key):
        found = self.inner.stat(key)
        time.sleep(0.02)
        return found


def _winners(small, stores, **whose):
    """How many of those that append at the same time are told that they did."""
    ready, won = Barrier(len(stores)), []

    def append(number, store):
        corpus = Corpus(small.engine, _Waiting(store, ready), **whose)
        with suppress(ConflictError):
            won.append(corpus.append("chat", (5, 6 + number)).entry.tokens)

    threads = [Thread(target=append, args=pair) for pair in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(won)


def test_writers_through_two_servers_over_one_store_lose_no_turn(small, ids, tmp_path):
    settings = ServerSettings(spool_folder=tmp_path, max_upload_bytes=3 << 20)
    store = MemoryStore()
    corpus = _grown(small, store, ids)
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(_Slow(store), settings=settings)) for _ in range(2)]
        stores = [stack.enter_context(closing(open_store(url))) for url in urls * 2]
        assert _winners(small, stores) == 1
    assert len(corpus.text(corpus.find("chat"))) == len(ids) + 2


def test_writers_through_two_nodes_that_write_back_lose_no_turn(small, ids, tmp_path):
    store = FolderStore(tmp_path / "remote")
    corpus = _grown(small, store, ids)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(open_tiers(
                FolderStore(tmp_path / "remote"), folder=tmp_path / f"node{number}", folder_bytes=1 << 24,
                write_back=True, settings=TierSettings(backoff_s=0.001, max_backoff_s=0.01),
            )))
            for number in range(2)
        ]  # fmt: skip
        assert _winners(small, stores) == 1
    assert len(corpus.text(corpus.find("chat"))) == len(ids) + 2


def test_what_cannot_be_compared_now_is_not_acknowledged(small, ids, tmp_path):
    class Away(StoreWrapper):
        def replace(self, key, data, etag):  # noqa: ARG002 - the store's signature
            msg = "the remote is away"
            raise StorageError(msg)

    store = FolderStore(tmp_path / "remote")
    corpus = _grown(small, store, ids)
    settings = TierSettings(backoff_s=0.001, max_backoff_s=0.01)
    tiers = open_tiers(Away(store), folder=tmp_path / "node", folder_bytes=1 << 24, write_back=True, settings=settings)
    with closing(tiers), pytest.raises(StorageError, match="away"):
        Corpus(small.engine, tiers).append("chat", (5, 6))
    assert corpus.text(corpus.find("chat")) == ids


def test_an_append_whose_answer_was_lost_is_done_once(small, ids, tmp_path, monkeypatch, whose):
    store, lost, ask = MemoryStore(), [], exchange.HttpExchange._ask_once

    def ask_once(self, method, address, headers, *others):
        reply = ask(self, method, address, headers, *others)
        if method == "PUT" and "If-Match" in headers and not lost:
            lost.append(reply.status)
            msg = "the connection broke before the answer came"
            raise exchange._BrokenError(msg)
        return reply

    monkeypatch.setattr(exchange.HttpExchange, "_ask_once", ask_once)
    corpus = _grown(small, store, ids, **whose)
    settings = ServerSettings(spool_folder=tmp_path / "spool", max_upload_bytes=3 << 20)
    (tmp_path / "spool").mkdir()
    with serving(store, settings=settings) as url, closing(open_store(url)) as http:
        Corpus(small.engine, http, **whose).append("chat", (5, 6))
    assert lost == [201]
    assert corpus.text(corpus.find("chat")) == (*ids, 5, 6)


def test_compacting_never_writes_over_an_append(small, ids, whose):
    store = MemoryStore()
    corpus = _grown(small, store, ids, **whose)

    class Between(StoreWrapper):
        done = False

        def replace(self, key, data, etag):
            wrote = self.inner.replace(key, data, etag)
            if wrote and not self.done:
                self.done = True
                Corpus(small.engine, store, **whose).append("chat", (5, 6))
            return wrote

    Corpus(small.engine, Between(store), **whose).compact("chat")
    assert corpus.text(corpus.find("chat")) == (*ids, 5, 6)


def test_an_entry_that_leads_to_another_tenant_or_document_is_not_grown(small, ids):
    store = MemoryStore()
    theirs = Corpus(small.engine, store, tenant="bob")
    theirs.set_profile(small.profile)
    list(theirs.encode([Document("secret", ids)]))
    mine = Corpus(small.engine, store, tenant="alice")
    mine.set_profile(small.profile)
    key, secret = mine.catalog.keys(mine.config).document("mine"), theirs.find("secret")
    for entry in (replace(secret, document_id="mine"), secret):
        store.put(key, entry.to_json())
        for fork in (None, "other"):
            with pytest.raises(CorruptError, match="another document, tenant"):
                mine.append("mine", (5, 6), fork=fork)
    with pytest.raises(NotFoundError):
        mine.find("other")


def test_a_fork_of_what_is_gone_leaves_no_entry(small, ids):
    store = MemoryStore()
    corpus = _grown(small, store, ids)
    part = corpus.catalog.keys(corpus.config).blob(corpus.find("chat").parts[1].sha256)

    class Collected(StoreWrapper):
        def stat(self, key):
            if key == part:
                self.inner.delete(part)
            return self.inner.stat(key)

    with pytest.raises(NotFoundError, match="encode the whole document anew"):
        Corpus(small.engine, Collected(store)).append("chat", (5, 6), fork="other")
    with pytest.raises(NotFoundError):
        corpus.find("other")


def test_parts_with_more_headers_than_are_ever_held_are_no_entry(small, ids):
    corpus = _grown(small, MemoryStore(), ids)
    entry, size = corpus.find("chat"), 1 << 20
    parts = [BlobPart(entry.sha256, size, size, 1, DIGEST), *(BlobPart(DIGEST, size, size, 1),) * 64]
    sums = {"size": 65 * size, "header_bytes": 65 * size, "tokens": 65}
    with pytest.raises(ArgumentError, match="headers are too long together"):
        replace(entry, parts=tuple(parts), levels=(), **sums)
