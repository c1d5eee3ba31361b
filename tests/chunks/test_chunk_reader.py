"""Chunks by their hashes: what is found, what is decoded, and what goes wrong."""

from __future__ import annotations

import random
from contextlib import closing, contextmanager

import pytest
import torch

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.adapters import ChunkSettings, heads_of
from kvwire.runtime.chunk_reader import ChunkReader, Troubles
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore, Keyring, hash_scheme, open_store
from kvwire.transport.testing import serving

from .conftest import CHUNK, tiny_model


@contextmanager
def reading(stored, scheme="lmcache", **given):
    settings, told = stored.settings(**given), []
    with closing(ChunkReader(settings.corpus(), scheme, settings, Troubles(told.append))) as reader:
        yield reader, told


def same(cache, exact):
    pairs = zip((*cache.keys, *cache.values), (*exact.keys, *exact.values), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_lossless_chunks_are_what_the_model_computes(stored):
    hashes = stored.hashes("a")
    with reading(stored) as (reader, told):
        assert reader.find(hashes) == set(hashes)
        got = dict(reader.read(hashes, torch.float32))
    assert len(hashes) == 5
    for chunk, each in enumerate(hashes):
        assert same(got[each], stored.exact("a", chunk * CHUNK, (chunk + 1) * CHUNK))
        assert got[each].meta.offset == chunk * CHUNK
    assert told == []


def test_a_level_is_what_the_corpus_decodes(stored):
    hashes = stored.hashes("b")
    with reading(stored, level=1, cache_salt="x") as (reader, _):
        got = dict(reader.read(hashes, torch.bfloat16))
        whole = reader.corpus.decode("b", 1, dtype=torch.bfloat16)
        document = reader.corpus.find("b")
        assert 0 < reader.bytes < document.levels[1][1]
    for chunk, each in enumerate(hashes):
        assert same(got[each], whole.slice(chunk * CHUNK, (chunk + 1) * CHUNK))


def test_only_the_segments_of_a_chunk_are_fetched(stored):
    with reading(stored, level=0, cache_salt="x") as (reader, _):
        (each,) = stored.hashes("a")[2:3]
        ((_, cache),) = reader.read([each], torch.float32)
        info = reader.corpus.read_header(reader.corpus.find("a"))
        assert reader.bytes == sum(info.chunk_bytes(chunk, 0) for chunk in (2, 3))
        assert same(cache, reader.corpus.decode("a", 0).slice(128, 192))


def test_a_prefix_that_two_documents_share_is_found(stored):
    with reading(stored) as (reader, _):
        (first,) = stored.hashes("c")
        assert first == stored.hashes("a")[0]
        ((_, cache),) = reader.read([first], torch.float32)
    assert same(cache, stored.exact("a", 0, CHUNK))


def test_what_no_document_begins_with_is_a_miss(stored):
    with reading(stored) as (reader, told):
        assert reader.find([b"\1" * 32, *stored.hashes("a")]) == set()
        assert reader.find([b"", b"\1\2"]) == set()
        assert list(reader.read([b"\1" * 32], torch.float32)) == []
    assert told == []


def test_another_length_of_chunks_is_told(stored):
    with reading(stored, chunk_tokens=128) as (reader, told):
        assert not reader.check_index()
        assert reader.find(stored.hashes("a", tokens=128)) == set()
    assert "kvwire store index --index lmcache:128" in told[0]
    with reading(stored) as (reader, told):
        assert reader.check_index()
    assert told == []


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_damaged_blob_is_a_miss_and_never_wrong(stored, part):
    for path in stored.blobs():
        data = bytearray(path.read_bytes())
        data[int(len(data) * part)] ^= 1
        path.write_bytes(data)
    hashes = [each for name in "ab" for each in stored.hashes(name)]
    with reading(stored) as (reader, told):
        got = dict(reader.read(hashes, torch.float32))
    assert len(got) < len(hashes)
    assert "counts as a miss" in told[0]
    for name in "ab":
        for chunk, each in enumerate(stored.hashes(name)):
            if each in got:
                assert same(got[each], stored.exact(name, chunk * CHUNK, (chunk + 1) * CHUNK))


def test_a_blob_that_goes_after_it_was_found_is_a_miss(stored):
    hashes = stored.hashes("a")
    with reading(stored) as (reader, told):
        assert reader.find(hashes)
        for path in stored.blobs():
            path.unlink()
        assert list(reader.read(hashes, torch.float32)) == []
        assert reader.find(hashes) == set()
    assert "counts as a miss" in told[0]


def test_a_blob_without_the_level_is_a_told_miss(stored):
    with reading(stored, level="very fine", cache_salt="x") as (reader, told):
        assert reader.find(stored.hashes("a")) == set()
    assert "no level 'very fine'" in told[0]


def test_a_blob_without_a_lossless_level_says_how_to_get_one(tmp_path):
    tokens, engine = tuple(random.Random(7).choices(range(200), k=150)), tiny_model()
    with closing(FolderStore(tmp_path / "store")) as store:
        list(Corpus(engine, store).encode([Document("a", tokens)], index=("lmcache:64",)))
    settings, told = ChunkSettings.read({"store": f"file://{tmp_path}/store"}, CHUNK, salted=True), []
    with closing(ChunkReader(settings.corpus(), "lmcache", settings, Troubles(told.append))) as reader:
        assert reader.find(hash_scheme("lmcache:64", "").hashes(tokens)) == set()
    assert "encode with --lossless, or serve another level" in told[0]


def test_troubles_are_told_once():
    told = []
    troubles = Troubles(told.append)
    for each in ("one", "one", "two"):
        troubles.tell(each)
    assert (told, troubles.count) == (["one", "two"], 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name the store"),
        ({"store": "file:///x", "stor": 1}, "no setting 'stor'"),
        ({"store": "file:///x", "model": 3}, r"got `int` - at `\$.model`"),
        ({"store": "file:///x", "level": True}, r"got `bool` - at `\$.level`"),
        ({"store": "file:///x", "level": 2}, "is not lossless"),
        ({"store": "file:///x", "level": "finest"}, "lossy_for_all"),
        ({"store": "file:///x", "cache_salt": "x"}, "no setting 'cache_salt'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, said):
    with pytest.raises(ArgumentError, match=said):
        ChunkSettings.read(given, 64, salted=False)


def test_settings_that_are_left_empty_are_the_usual_ones():
    empty = {"store": "s", "model": None, "served_as": None, "tenant": None, "token": None, "cache_size": None}
    assert ChunkSettings.read(empty, 64, salted=True) == ChunkSettings.read({"store": "s"}, 64, salted=True)


def test_a_lossy_level_needs_a_salt_or_a_word():
    read = ChunkSettings.read
    assert read({"store": "s", "level": 2, "cache_salt": "x"}, 64, salted=True).level == 2
    assert read({"store": "s", "level": "finest", "lossy_for_all": True}, 64, salted=False).lossy_for_all
    assert read({"store": "s"}, 64, salted=True).level == "lossless"


def test_a_setting_that_is_null_is_left_out():
    nothing = dict.fromkeys(("model", "served_as", "tenant", "salt", "cache_size", "level", "cache_salt"))
    read = ChunkSettings.read
    assert read({"store": "s"} | nothing, 64, salted=True) == read({"store": "s"}, 64, salted=True)


def test_a_store_that_is_not_there_is_refused(tmp_path):
    settings = ChunkSettings.read({"store": f"file://{tmp_path}/none"}, 64, salted=True)
    with pytest.raises(NotFoundError, match="no record"):
        settings.corpus()


def test_entries_that_are_damaged_are_told_misses(stored):
    with reading(stored) as (reader, told), closing(open_store(stored.url)) as store:
        for key in list(store.keys("")):
            if b'"lmcache-64"' in store.get(key):
                store.put(key, b"{}")
        assert reader.find(stored.hashes("a")) == set()
    assert "counts as a miss" in told[0]


def test_chunks_come_over_http_until_the_server_is_gone(stored):
    hashes = stored.hashes("a")
    with closing(FolderStore(stored.root)) as store, serving(store) as url:
        given = stored.settings(store=url)
        told = []
        reader = ChunkReader(given.corpus(), "lmcache", given, Troubles(told.append))
        assert reader.find(hashes) == set(hashes)
        got = dict(reader.read(hashes, torch.float32))
        assert told == []
    for chunk, each in enumerate(hashes):
        assert same(got[each], stored.exact("a", chunk * CHUNK, (chunk + 1) * CHUNK))
    assert list(reader.read(hashes, torch.float32)) == []
    assert reader.find(hashes) == set()
    assert any("counts as a miss" in each for each in told)
    assert "the index cannot be read" in told[-1]
    reader.close()


def test_sealed_documents_are_read(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(Keyring.new_line())
    keys.chmod(0o600)
    tokens, engine = tuple(random.Random(7).choices(range(200), k=150)), tiny_model()
    with closing(FolderStore(tmp_path / "store")) as store:
        corpus = Corpus(engine, store, keyring=Keyring.read(keys), coding=Coding(chunk_tokens=48))
        list(corpus.encode([Document("a", tokens)], index=("lmcache:64",)))
    given = {"store": f"file://{tmp_path}/store", "keys": str(keys), "level": 1, "lossy_for_all": True}
    settings = ChunkSettings.read(given, CHUNK, salted=True)
    with closing(ChunkReader(settings.corpus(), "lmcache", settings)) as reader:
        hashes = hash_scheme("lmcache:64", "").hashes(tokens)
        got = dict(reader.read(hashes, torch.float32))
        whole = reader.corpus.decode("a", 1)
    assert len(got) == 2
    for chunk, each in enumerate(hashes):
        assert same(got[each], whole.slice(chunk * CHUNK, (chunk + 1) * CHUNK))


def test_heads_of_workers():
    assert [heads_of(8, 4, worker) for worker in range(4)] == [slice(at, at + 2) for at in (0, 2, 4, 6)]
    assert [heads_of(2, 4, worker) for worker in range(4)] == [slice(at, at + 1) for at in (0, 0, 1, 1)]
    for heads, workers, worker in ((8, 3, 0), (8, 2, 2), (8, 2, -1)):
        with pytest.raises(ArgumentError, match="cannot be divided"):
            heads_of(heads, workers, worker)
