from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, StorageError
from kvwire.offline import (
    DocumentRef,
    RunOptions,
    encode_serially,
    encode_side_by_side,
    find_documents,
    prepare_profile,
)
from kvwire.offline.pipeline import ahead
from kvwire.offline.steps import Batches
from kvwire.runtime.corpus import Coding, Corpus
from kvwire.store import MemoryStore

from ..store_wrappers import StoreWrapper

EMPTY = 2
TIMES = dict.fromkeys(["read_s", "tokenize_s", "look_up_s", "prefill_s", "encode_s", "upload_s"], 0.0)


def untimed(works):
    return [replace(work.row, **TIMES) for work in works]


def blobs(corpus):
    store = corpus.catalog.store
    return {key: store.get(key) for key in store.keys("") if key.endswith(".kvw")}


def another(corpus, store=None, **options):
    made = Corpus(corpus.encoder().engine, store or MemoryStore(), **options)
    made.set_profile(corpus.profile())
    return made


@given(st.lists(st.integers(), max_size=12), st.integers(1, 4))
@settings(deadline=None)
def test_ahead_is_map(items, depth):
    assert list(ahead(str, items, depth)) == [str(item) for item in items]


def test_what_a_thread_raises_is_raised_where_its_result_would_come():
    found = ahead(lambda item: 1 // item, [1, 1, 0, 1])
    assert [next(found), next(found)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_whoever_stops_taking_leaves_no_thread():
    before, seen = threading.active_count(), []
    found = ahead(lambda item: seen.append(item) or item, ahead(abs, iter(range(1000))))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    found.close()
    assert len(seen) < 12
    assert threading.active_count() <= before + 1  # the first one's, which ends with its generator


def test_side_by_side_is_as_one_after_another(corpus, refs):
    other = another(corpus)
    profile = corpus.profile()
    serial = untimed(encode_serially(corpus, refs, profile))
    assert serial == untimed(encode_side_by_side(other, refs, profile))
    assert {row.status for row in serial} == {"encoded"}
    assert blobs(corpus) == blobs(other)
    assert len(blobs(corpus)) == len(refs)


def test_a_blob_does_not_depend_on_its_neighbours(corpus, refs):
    profile = corpus.profile()
    together = {work.row.id: work.row.blob for work in encode_side_by_side(corpus, refs[::-1], profile)}
    for ref in refs:
        (alone,) = encode_serially(another(corpus), [ref], profile)
        assert alone.row.blob == together[ref.document_id]


class Watched:
    """An engine whose batches are counted, and differ in a bit where that is wanted."""

    def __init__(self, engine, *, differs):
        self._engine, self._differs, self.batches = engine, differs, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, documents, **options):
        self.batches.append(len(documents))
        found = self._engine.prefill(documents, **options)
        if self._differs and len(documents) > 1:
            found[-1].values[-1][0, -1, 0] += 1e-6
        return found


@pytest.mark.parametrize("differs", [False, True])
def test_documents_of_one_length_are_computed_at_once_where_that_changes_no_bit(corpus, refs, folder, engine, differs):
    for ref in refs:
        ids = engine.tokenize((folder / f"{ref.document_id}.txt").read_text())
        (folder / f"{ref.document_id}.txt").write_text(engine.detokenize(ids[:30]))
    lengths = [len(engine.tokenize((folder / f"{ref.document_id}.txt").read_text())) for ref in refs]
    watched = Watched(engine, differs=differs)
    plain, profile = Coding(neutral_prefix=0), corpus.profile()
    batched, corpus = Corpus(watched, MemoryStore(), coding=plain), Corpus(engine, MemoryStore(), coding=plain)
    corpus.set_profile(profile)
    batched.set_profile(profile)
    alone = untimed(encode_serially(corpus, refs, profile))
    batches = Batches(watched)
    assert untimed(encode_side_by_side(batched, refs, profile, batches=batches)) == alone
    assert lengths.count(30) > 4
    assert max(watched.batches) > 1
    before = len(watched.batches)
    works = encode_side_by_side(batched, refs, profile, RunOptions(force=True), batches)
    assert [row.blob for row in untimed(works)] == [row.blob for row in alone]
    assert (max(watched.batches[before:]) > 1) is not differs


@given(st.lists(st.integers(0, 3), max_size=8))
@settings(deadline=None, max_examples=25)
def test_groups_hold_every_document_in_its_order(engine, kinds):
    corpus = Corpus(engine, MemoryStore())
    texts = ("One two three.", "One two four.", "", "A much longer sentence than the others are.")
    with tempfile.TemporaryDirectory() as name:
        refs = []
        for number, kind in enumerate(kinds):
            path = Path(name) / f"{number}.txt"
            path.write_text(texts[kind])
            refs.append(DocumentRef(str(number), str(path), "text", str(path)))
        works = encode_side_by_side(corpus, refs, None)
        rows = list(untimed(works))
    assert [row.id for row in rows] == [ref.document_id for ref in refs]
    firsts = {kind: kinds.index(kind) for kind in kinds}
    wanted = ["encoded" if firsts[kind] == at else "there already" for at, kind in enumerate(kinds)]
    wanted = ["failed" if kind == EMPTY else status for kind, status in zip(kinds, wanted, strict=True)]
    assert [row.status for row in rows] == wanted


def test_what_is_there_is_not_encoded_again(corpus, refs):
    profile = corpus.profile()
    first = untimed(encode_side_by_side(corpus, refs[:5], profile))
    again = untimed(encode_side_by_side(corpus, refs, profile))
    assert [row.status for row in again] == ["there already"] * 5 + ["encoded"] * 4
    assert [replace(row, status="encoded") for row in again[:5]] == first
    forced = untimed(encode_side_by_side(corpus, refs[:2], profile, RunOptions(force=True)))
    assert forced == first[:2]


def test_whoever_stops_in_the_middle_goes_on_there(corpus, refs):
    works = encode_side_by_side(corpus, refs, corpus.profile())
    done = [next(works).row.id for _ in range(4)]
    works.close()
    for document_id in done:
        corpus.decode(document_id)
    rows = untimed(encode_side_by_side(corpus, refs, corpus.profile()))
    assert [row.status for row in rows[:4]] == ["there already"] * 4
    assert len(blobs(corpus)) == len(refs)


def test_the_same_text_twice_is_encoded_once(corpus, folder):
    text = (folder / "0" / "00.txt").read_text()
    for name in ("x", "y", "z"):
        (folder / f"{name}.txt").write_text(text)
    for run in (encode_serially, encode_side_by_side):
        fresh = another(corpus)
        rows = untimed(run(fresh, find_documents([str(folder)]), corpus.profile()))
        same = [row for row in rows if row.id in ("0/00", "x", "y", "z")]
        assert [row.status for row in same] == ["encoded"] + ["there already"] * 3
        assert len({row.blob for row in same}) == 1


def test_whoever_stops_among_equal_texts_is_not_waited_for(corpus, folder):
    text = (folder / "0" / "00.txt").read_text()
    for number in range(40):
        (folder / f"pair{number:02}.txt").write_text(text + str(number // 2))
    refs = find_documents([str(folder)])
    for taken in (1, 3, 7):
        works = encode_side_by_side(another(corpus), refs, corpus.profile())
        for _ in range(taken):
            next(works)
        works.close()
    assert not [each for each in threading.enumerate() if each.name == "kvwire-encode"]


def test_what_nobody_foresaw_is_a_row_too(corpus, refs, monkeypatch):
    engine = corpus.encoder().engine
    prefill, calls = engine.prefill, iter(range(100))

    def short_of_memory(ids):
        if next(calls) % 3 == 1:
            msg = "out of memory"
            raise RuntimeError(msg)
        return prefill(ids)

    fresh = another(corpus)
    monkeypatch.setattr(engine, "prefill", short_of_memory)
    rows = [work.row for work in encode_side_by_side(fresh, refs, corpus.profile())]
    failed = [row for row in rows if row.status == "failed"]
    assert failed
    assert {row.reason for row in failed} == {"RuntimeError: out of memory"}
    assert {row.status for row in rows if row not in failed} == {"encoded"}


def test_a_failure_is_a_row_and_the_rest_goes_on(corpus, folder, engine, texts):
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "empty.txt").write_text("")
    (folder / "long.txt").write_text("word upon word " * 2000)
    (folder / "same.jsonl").write_text('{"id": "0/00", "text": "x"}\n')
    refs = find_documents([str(folder), str(folder / "same.jsonl")])
    (folder / "1" / "01.txt").unlink()
    rows = untimed(encode_side_by_side(corpus, refs, corpus.profile()))
    assert [row.id for row in rows] == [ref.document_id for ref in refs]
    failed = {
        (row.id, row.source.rpartition(".")[2]): (row.reason, row.advice) for row in rows if row.status == "failed"
    }
    assert set(failed) == {("latin", "txt"), ("empty", "txt"), ("long", "txt"), ("0/00", "jsonl"), ("1/01", "txt")}
    assert failed["latin", "txt"][1] == "convert it first"
    assert "window of 600" in failed["long", "txt"][0]
    assert failed["long", "txt"][1] == "split the document"
    assert failed["empty", "txt"] == ("the document is empty", "correct the document, then run again")
    assert "both be document" in failed["0/00", "jsonl"][0]
    assert "check that it is there" in failed["1/01", "txt"][1]
    assert len(blobs(corpus)) == len(texts) - 1


class Full(StoreWrapper):
    """Takes so many blobs, and then no more."""

    def __init__(self, store, room):
        super().__init__(store)
        self.room = room

    def put(self, key, data):
        if key.endswith(".kvw"):
            self.room -= 1
            if self.room < 0:
                msg = "no space is left"
                raise StorageError(msg)
        super().put(key, data)


def test_a_full_store_is_a_row_each_and_the_model_stops(corpus, refs):
    full = another(corpus, Full(MemoryStore(), 0))
    refs = [*refs, *(replace(ref, document_id=f"more/{ref.document_id}") for ref in refs)]
    passes = []
    compute = Corpus.encoder(full).engine.prefill
    rows = []
    for work in encode_serially(full, refs, corpus.profile()):
        rows.append(work.row)
        passes.append(compute)
    assert {row.status for row in rows} == {"failed"}
    assert {row.reason for row in rows[:8]} == {"no space is left"}
    assert "run again: finished documents are skipped" in rows[0].advice
    assert all("not tried: the store failed 8 times" in row.reason for row in rows[8:])
    assert all(row.prefill_s == 0 for row in rows[8:])
    again = another(corpus, Full(MemoryStore(), 3))
    rows = untimed(encode_side_by_side(again, refs[:5], corpus.profile()))
    assert [row.status for row in rows] == ["encoded"] * 3 + ["failed"] * 2


def test_a_new_profile_is_fitted_once_and_on_a_sample(engine, refs):
    corpus = Corpus(engine, MemoryStore())
    profile = prepare_profile(corpus, refs)
    assert profile is not None
    assert corpus.profile().digest == profile.digest
    assert prepare_profile(corpus, refs[:1]).digest == profile.digest
    serial = Corpus(engine, MemoryStore())
    documents = [work.document for work in encode_serially(corpus, refs, profile)]
    list(serial.encode(documents))
    assert blobs(serial) == blobs(corpus)


def test_while_documents_get_another_profile_all_are_readable(engine, refs, story):
    corpus = Corpus(engine, MemoryStore())
    first = prepare_profile(corpus, refs[:3])
    list(encode_serially(corpus, refs, first))
    second = prepare_profile(corpus, refs, RunOptions(refit=True))
    assert second.digest != first.digest
    statuses = []
    for count, work in enumerate(encode_serially(corpus, refs, second), start=1):
        statuses.append(work.row.status)
        for ref in refs:
            corpus.decode(ref.document_id)
        digests = [corpus.find(ref.document_id).profile_digest for ref in refs]
        assert digests == [second.digest] * count + [first.digest] * (len(refs) - count)
    assert set(statuses) == {"encoded"}
    again = untimed(encode_side_by_side(corpus, refs, prepare_profile(corpus, refs)))
    assert {row.status for row in again} == {"there already"}


def test_deviations_are_as_where_all_documents_are_encoded_at_once(corpus, refs):
    profile, coding = corpus.profile(), Coding(deviation=True)
    ours, plain = another(corpus, coding=coding), another(corpus, coding=coding)
    ours.encoder().prepare(list)
    documents = [work.document for work in encode_side_by_side(ours, refs[:3], profile)]
    list(plain.encode(documents))
    assert blobs(ours) == blobs(plain)


def test_documents_that_are_seldom_used_need_counts(corpus, refs):
    with pytest.raises(ArgumentError, match="pass uses"):
        prepare_profile(corpus, refs, RunOptions(encode_after=2))
