from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from msgspec import structs

from kvwire.codec import decode
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, NotFoundError, StorageError
from kvwire.runtime.calibrate import HELD_OUT, calibration_texts
from kvwire.runtime.coding import Coding, Document
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.encode import Encoder
from kvwire.runtime.loader import Loader
from kvwire.store import FolderStore, MemoryStore, UseCounts, UseFile, collect, open_store

from ..posing_s3 import posing_s3, use_keys


def test_documents_come_in_order_whatever_is_known(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(neutral_prefix=0))
    corpus.set_profile(small.profile)
    ids = next(iter(small.tokens.values()))
    documents = [Document(str(size), tuple(ids[:size])) for size in (70, 30, 50, 20, 90)]
    list(corpus.encode([documents[2]]))
    done = list(corpus.encode(documents))
    assert [e.entry.document_id for e in done] == [d.document_id for d in documents]
    assert [e.skipped for e in done] == [False, False, True, False, False]
    for encoded, document in zip(done, documents, strict=True):
        blob = corpus.catalog.store.get(encoded.entry.blob_key)
        cache = decode(blob, profile=small.profile)
        (exact,) = small.engine.prefill([document.token_ids])
        assert cache.token_ids == document.token_ids
        error = float((cache.values[-1] - exact.values[-1]).norm() / exact.values[-1].norm())
        assert error < 0.2


def test_the_same_text_under_another_name_is_one_blob(small):
    corpus = small.corpus()
    name, ids = next(iter(small.tokens.items()))
    (encoded,) = corpus.encode([Document("another name", tuple(ids))])
    assert encoded.skipped
    assert corpus.find("another name").blob_key == corpus.find(name).blob_key
    (again,) = corpus.encode([Document(name, tuple(ids))], force=True)
    assert not again.skipped
    assert again.entry.sha256 == encoded.entry.sha256


def test_a_blob_does_not_depend_on_what_is_encoded_with_it(small):
    first, second = (Document(name, tuple(ids)) for name, ids in small.tokens.items())
    digests = []
    for together in ([first], [second, first]):
        corpus = Corpus(small.engine, MemoryStore())
        corpus.set_profile(small.profile)
        digests.append([e.entry.sha256 for e in corpus.encode(together)][-1])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("before", ["nothing", "another text"])
def test_a_writer_killed_between_its_two_entries_is_made_up_for(small, before):
    """The entry of the tokens is there, the document's own is not, or still that of its text before."""
    corpus, (name, ids) = small.corpus(), next(iter(small.tokens.items()))
    entry, store = corpus.find(name), corpus.catalog.store
    space = corpus.catalog.keys(small.engine.meta.config_digest())
    if before == "nothing":
        store.delete(space.document(name))
    else:
        (other,) = corpus.encode([Document(name, tuple(ids[:70]))])
        store.put(space.token_entry(entry.token_digest), entry.to_json())
        assert corpus.find(name) == other.entry != entry
    (again,) = corpus.encode([Document(name, tuple(ids))])
    assert again.skipped
    assert corpus.find(name) == again.entry == entry


def test_a_store_that_takes_no_writes_is_told_before_a_profile_is_fitted(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "calibrate", lambda *_: pytest.fail("fitted in vain"))
    (tmp_path / "file").touch()
    corpus = Corpus(small.engine, FolderStore(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot write"):
        next(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))


def test_a_blob_of_more_tokens_than_the_model_takes_is_refused(small):
    """Whoever writes the catalog too may claim any number in both."""
    corpus, name = small.corpus(), next(iter(small.tokens))
    entry = corpus.find(name)
    info, window = corpus.read_header(entry), small.engine.window
    corpus.check_blob(replace(info, tokens=window), structs.replace(entry, tokens=window))
    with pytest.raises(CorruptError, match=f"claims {window + 1} tokens, the model's window is {window}"):
        corpus.check_blob(replace(info, tokens=window + 1), structs.replace(entry, tokens=window + 1))


def test_text_is_stored_beside_every_blob(small):
    corpus = small.corpus()
    for name, ids in small.tokens.items():
        assert corpus.text(corpus.find(name)) == tuple(ids)
    store = corpus.catalog.store
    store.delete_many([key for key in store.keys("") if key.endswith(".kvt")])
    with pytest.raises(NotFoundError):
        corpus.text(corpus.find(name))
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    assert all(encoded.skipped for encoded in corpus.encode(documents))  # a store of an older kvwire gets its texts
    assert corpus.text(corpus.find(name)) == tuple(ids)


def test_documents_are_kept_as_text_until_they_were_used_often(small):
    uses = UseCounts()
    corpus = Corpus(small.engine, MemoryStore(), uses=uses)
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    first, second = (document.document_id for document in documents)
    done = list(corpus.encode(documents, encode_after=2))
    assert [(e.blob, e.skipped, e.entry.is_text) for e in done] == [(None, False, True)] * 2
    with pytest.raises(ArgumentError):
        _ = done[0].info
    assert all(e.skipped for e in corpus.encode(documents, encode_after=2))
    assert corpus.profile() is None
    corpus.set_profile(small.profile)

    loader = Loader(small.engine, corpus, costs=small.costs)
    answers = [loader.ask([first], [1, 2, 3]), loader.ask([first, second], [1, 2, 3])]
    assert {d.action for answer in answers for d in answer.decisions} == {"recompute"}
    assert [answer.misses for answer in answers] == [(), ()]
    assert [e.entry.document_id for e in corpus.promote(2)] == [first]
    assert [corpus.find(name).is_text for name in (first, second)] == [False, True]
    assert list(corpus.promote(2)) == []

    assert loader.ask([first, second], [1, 2, 3]).bytes > 0
    done = list(corpus.encode(documents, encode_after=2))
    assert [(e.skipped, e.entry.is_text) for e in done] == [(True, False), (False, False)]


def test_a_blob_of_an_older_profile_is_not_given_up_for_its_text(small):
    corpus = Corpus(small.engine, MemoryStore(), uses=UseCounts())
    name, ids = next(iter(small.tokens.items()))
    list(corpus.encode([Document(name, tuple(ids))]))
    corpus.set_profile(small.profile)
    (kept,) = corpus.encode([Document(name, tuple(ids))], encode_after=5)
    assert kept.skipped
    assert not kept.entry.is_text
    (changed,) = corpus.encode([Document(name, tuple(ids[:-1]))], encode_after=5)
    assert changed.entry.is_text


def test_a_profile_that_cannot_be_read_intact_stays_the_one_in_use(small):
    store = MemoryStore()
    Corpus(small.engine, store).set_profile(small.profile)
    corpus = Corpus(small.engine, store)
    config, (name, ids) = small.engine.meta.config_digest(), next(iter(small.tokens.items()))
    key = corpus.catalog.keys(config).profile(small.profile.digest)
    store.put(key, b"\0" + small.profile.data[1:])
    with pytest.raises(CorruptError, match="delete-damaged"):
        list(corpus.encode([Document(name, tuple(ids))]))
    assert corpus.catalog.profiles.current(config) == small.profile.digest
    (encoded,) = corpus.encode([Document(name, tuple(ids))], force=True)
    assert encoded.entry.profile_digest == corpus.catalog.profiles.current(config) != small.profile.digest

    corpus = Corpus(small.engine, store)
    store.delete(corpus.catalog.keys(config).profile(encoded.entry.profile_digest))
    (again,) = corpus.encode([Document("another", tuple(ids))])
    assert corpus.profile().digest == again.entry.profile_digest


def test_counting_needs_somewhere_to_count(small):
    corpus = Corpus(small.engine, MemoryStore())
    with pytest.raises(ArgumentError, match="uses"):
        list(corpus.encode([Document("a", (1, 2))], encode_after=1))
    assert list(corpus.promote(1)) == []


@pytest.mark.parametrize("damage", ["bytes", "version"])
def test_a_damaged_file_of_counts_costs_no_answer(small, tmp_path, damage):
    path, name = tmp_path / "uses", next(iter(small.tokens))
    if damage == "bytes":
        path.write_bytes(b"not a database, " * 100)
    else:
        with closing(sqlite3.connect(path)) as later:
            later.execute("PRAGMA user_version=99")
    store = small.corpus().catalog.store
    with closing(UseFile(path)) as uses:
        corpus = Corpus(small.engine, store, uses=uses)
        with pytest.raises(CorruptError if damage == "bytes" else FormatVersionError):
            uses.add("a/", name)
        assert Loader(small.engine, corpus, costs=small.costs).ask([name], [1, 2, 3]).misses == ()


def test_nothing_that_a_corpus_needs_is_garbage(small):
    corpus = small.corpus()
    store = corpus.catalog.store
    list(Corpus(small.engine, store, uses=UseCounts()).encode([Document("text", (5, 6, 7))], encode_after=1))
    for one in store._objects.values():
        one.modified -= 3 * 24 * 3600
    assert collect(store).bytes == 0
    name, ids = next(iter(small.tokens.items()))
    (encoded,) = corpus.encode([Document("another name", tuple(ids))])
    assert encoded.skipped
    for document in (name, "another name"):
        corpus.catalog.remove(small.engine.meta.config_digest(), document)
    assert store.stat(encoded.entry.blob_key).modified > 0
    assert collect(store).blobs == 0  # the other name's blob was written again, so it is young
    assert collect(store, grace_s=0.0).blobs == 1


def test_errors_are_measured_on_texts_that_the_fit_has_not_seen():
    def drawn(count, tokens):
        return [Document(str(number), tuple([number] * tokens)) for number in range(count)]

    def told(documents, tokens):
        return [[(ids[0], len(ids)) for ids in texts] for texts in calibration_texts(documents, tokens)]

    chosen, others = told(drawn(8, 1000), 4600)
    assert chosen == [(0, 1000), (1, 1000), (2, 1000), (3, 1000), (4, 600)]
    assert others == [(4, 400), (5, 1000), (6, 1000), (7, 1000)]
    assert len(told(drawn(99, 100), 450)[1]) == HELD_OUT
    assert told(drawn(1, 20_000), 16_384) == [[(0, 16_384)], [(0, 3616)]]
    chosen, others = told(drawn(13, 100), 10_000)
    assert [first for first, _ in chosen] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12]
    assert [first for first, _ in others] == [5, 11]
    assert told(drawn(5, 100), 10_000)[1] == []
    assert told(drawn(13, 60), 10_000) == [[(number, 60) for number in range(13)], []]
    short = [*drawn(5, 10), Document("5", (5,) * 100)]
    assert told(short, 10_000) == [[*((number, 10) for number in range(5)), (5, 100)], []]
    assert told([*drawn(2, 8192), Document("2", (2,) * 64)], 16_384)[1] == []  # too little to tell anything


@pytest.mark.parametrize("held_out", [True, False])
def test_the_curve_is_of_held_out_texts_and_the_profile_says_so(small, monkeypatch, held_out):
    seen = []

    def spy(_, profile, documents, *__):
        seen.extend(documents)
        return replace(profile, error_to_kl=(1.0, 1.0))

    monkeypatch.setattr("kvwire.runtime.calibrate.calibrate_error", spy)
    ids = max(small.tokens.values(), key=len)
    texts = [tuple(ids[start : start + 70]) for start in range(0, 70 * (6 if held_out else 5), 70)]
    corpus = Corpus(small.engine, MemoryStore())
    profile = corpus.calibrate([Document(str(number), text) for number, text in enumerate(texts)], tokens=100_000)
    assert profile.notes["kl_held_out"] == int(held_out)
    assert seen == (texts[5:] if held_out else texts)


def test_what_is_not_in_a_bucket_may_be_the_bucket(small, monkeypatch):
    use_keys(monkeypatch)
    missing = pytest.raises(NotFoundError, match="check the tenant, and that the bucket is there")
    with posing_s3() as s3, closing(open_store(s3.address())) as store, missing:
        Corpus(small.engine, store).find("x")


def test_a_header_that_cannot_be_read_is_to_be_encoded_again(small):
    corpus, name = small.corpus(), next(iter(small.tokens))
    entry, store = corpus.find(name), corpus.catalog.store
    damaged = bytearray(store.get(entry.blob_key))
    damaged[200] ^= 1
    store.put(entry.blob_key, bytes(damaged))
    with pytest.raises(CorruptError, match=f"the blob of '{name}' cannot be read: encode the document again"):
        corpus.read_header(entry)
    store.delete(entry.blob_key)
    with pytest.raises(NotFoundError, match=f"the blob of '{name}' cannot be read: encode the document again"):
        corpus.read_header(entry)
