"""Corpora in S3, behind tiers, and sealed: encoded and asked as everywhere else."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from click.testing import CliRunner

from kvwire.cli.app import cli
from kvwire.controller.policies import Fixed
from kvwire.errors import AuthError, CorruptError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, Keyring, MemoryStore, TieredStore
from kvwire.store.schemes import open_store
from kvwire.transport import parse_link

from ..s3_servers import ministack
from .answers import troubles

QUESTION = "It was plain to everybody that"
RING = Keyring([bytes(range(32))])


def encoded(small, store, **whose):
    corpus = Corpus(small.engine, store, **whose)
    corpus.set_profile(small.profile)
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    return corpus, list(corpus.encode(documents))


def ask(small, corpus, **settings):
    question = small.engine.tokenize(QUESTION)
    return Loader(small.engine, corpus, costs=small.costs, **settings).ask(list(small.tokens), question, tokens=4)


@pytest.fixture(scope="module")
def plain(small):
    return ask(small, encoded(small, MemoryStore())[0])


def test_a_sealed_corpus_gives_the_same_answer(small, plain):
    corpus, done = encoded(small, MemoryStore(), keyring=RING)
    answer = ask(small, corpus)
    assert not answer.misses
    assert answer.tokens == plain.tokens
    assert bool((answer.logits - plain.logits).abs().max() < 1e-3)
    assert all(corpus.catalog.store.stat(each.entry.blob_key).size == each.info.file_bytes for each in done)


def test_a_sealed_corpus_is_encoded_once(small):
    store = MemoryStore()
    encoded(small, store, keyring=RING)
    before = {key: store.get(key) for key in store.keys("")}
    assert all(each.skipped for each in encoded(small, store, keyring=RING)[1])
    assert {key: store.get(key) for key in store.keys("")} == before


def test_a_changed_segment_of_a_sealed_blob_is_recomputed(small, plain):
    corpus, done = encoded(small, MemoryStore(), keyring=RING)
    entry = done[0].entry
    damaged = bytearray(corpus.catalog.store.get(entry.blob_key))
    for row in done[0].info.segments:
        damaged[row[0].offset] ^= 1
    corpus.catalog.store.put(entry.blob_key, bytes(damaged))
    answer = ask(small, corpus, link=parse_link("100mbit"), settings=LoadSettings(policy=Fixed(0)))
    assert answer.misses
    assert any("changed since it was sealed" in miss for miss in answer.misses)
    assert answer.tokens == plain.tokens


def test_a_sealed_blob_that_is_gone_is_computed_from_its_sealed_text(small, plain):
    corpus, done = encoded(small, MemoryStore(), keyring=RING)
    corpus.catalog.store.delete(done[0].entry.blob_key)
    answer = ask(small, corpus)
    assert answer.misses
    assert answer.tokens == plain.tokens


@pytest.mark.parametrize("ring", [None, Keyring([bytes(32)])], ids=["no key", "another key"])
def test_a_sealed_corpus_without_its_key(small, ring):
    corpus, _ = encoded(small, MemoryStore(), keyring=RING)
    stranger = Corpus(small.engine, corpus.catalog.store, keyring=ring)
    with pytest.raises((AuthError, CorruptError)):
        ask(small, stranger)


def test_a_store_behind_tiers(small, plain, tmp_path):
    remote = FolderStore(tmp_path / "store")
    encoded(small, remote)
    store = open_store(remote.url, cache=str(tmp_path / "cache"), cache_size="1GB", memory_size="100MB")
    assert isinstance(store, TieredStore)
    corpus = Corpus(small.engine, store)
    first, second = ask(small, corpus), ask(small, corpus)
    assert first.tokens == second.tokens == plain.tokens
    assert not troubles([*first.misses, *second.misses])
    store.close()


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        assert getattr(result.exception, "exit_code", getattr(result.exception, "code", None)) == code, result.output
    return result


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory):
    with ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


def encode_and_ask(small, demo_model, tmp_path, *where):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in small.texts.items():
        (texts / f"{name}.txt").write_text(text)
    result = run("encode", texts, "--model", demo_model, *where, "--json")
    assert len(json.loads(result.stdout)["documents"]) == len(small.texts), result.output
    names = list(small.texts)
    asked = run("ask", "--docs", *names, "--question", QUESTION, "--model", demo_model, *where, "--json")
    return json.loads(asked.stdout)


def test_the_command_line_in_s3(small, demo_model, tmp_path, s3_server, monkeypatch):
    s3_server.set_environment(monkeypatch)
    where = ("--store", s3_server.address("front"), "--cache", tmp_path / "cache", "--keys", tmp_path / "keys")
    made = run("key").stdout
    (tmp_path / "keys").write_text(made)
    (tmp_path / "keys").chmod(0o600)
    with closing(open_store(s3_server.address("front"))) as store:
        Corpus(small.engine, store, keyring=Keyring.read(tmp_path / "keys")).set_profile(small.profile)
    answer = encode_and_ask(small, demo_model, tmp_path, *where)
    assert answer["text"]
    assert not troubles(answer["misses"])
    listed = run("store", "ls", *where, "--json").stdout.splitlines()
    assert {json.loads(line)["id"] for line in listed} == set(small.texts)
    verified = json.loads(run("store", "verify", *where, "--json").stdout)
    assert verified["sealed"] > 0
    assert not verified["damaged"]
