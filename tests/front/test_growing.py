"""Documents that grow by parts: read as one, equal to one encode of the whole, and never in danger."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from itertools import pairwise
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from kvwire.codec import inspect
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.errors import ArgumentError, ConflictError, CorruptError, MismatchError, NotFoundError, StorageError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import NEUTRAL_TEXT
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, Keyring, MemoryStore, collect, copy_store, rebuild, verify_store
from kvwire.store.schemes import open_store
from kvwire.transport import ServerSettings
from kvwire.transport.testing import serving
from kvwire.types import BlobPrefix, digest_tokens

from ..store_wrappers import StoreWrapper
from .answers import troubles

TURNS = (120, 30, 1, 77, 256, 40)
"""Tokens of each turn: within chunks, of one token, and of a whole chunk."""
QUESTION = "It was plain to everybody that"
COSTS = CostModel(PrefillCost(0.01, 0.01), DecodeCost(0.0005, 1e-5))
"""Computing takes so long that whatever can be fetched is."""
NEVER = CostModel(PrefillCost(10.0, 1.0), DecodeCost(0.0005, 1e-5))
"""Computing takes so long that a busy machine fetches, too."""
FINEST_KL = 4e-4
MOST_MORE = 4096
"""Bytes that each append may write beyond its share of one encode: a header of 1 KB, lists that a longer chunk shares,
and the entry with a row for each part. Nothing that was written before is among them."""
DAY = 24 * 3600.0


@pytest.fixture(scope="module")
def ids(small):
    whole = tuple(token for ids in small.tokens.values() for token in ids)
    return whole[: sum(TURNS)]


@pytest.fixture(scope="module")
def cache(small, ids):
    """Of the whole, as a chat's engine has it."""
    return small.engine.prefill([ids])[0]


@pytest.fixture(scope="module")
def reference(small, ids):
    return Reference.of(small.engine, [list(ids)], small.engine.tokenize(QUESTION), 4)


def _turns(ids):
    ends = [sum(TURNS[: number + 1]) for number in range(len(TURNS))]
    return [(ids[end - count : end], end) for count, end in zip(TURNS, ends, strict=True)]


def _corpus(small, store=None, coding=None, **whose):
    corpus = Corpus(small.engine, MemoryStore() if store is None else store, coding=coding, **whose)
    corpus.set_profile(small.profile)
    return corpus


def _grow(corpus, ids, cache=None):
    (first, end), *others = _turns(ids)
    if cache is None:
        list(corpus.encode([Document("chat", first)]))
    else:
        corpus.save(Document("chat", first), cache.slice(0, end))
    for turn, end in others:
        corpus.append("chat", turn, cache=None if cache is None else cache.slice(0, end))
    return corpus


@pytest.fixture
def chat(small, ids, cache):
    return _grow(_corpus(small), ids, cache)


def _error(ours, real):
    pairs = zip((*ours.keys, *ours.values), (*real.keys, *real.values), strict=True)
    return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)


def _ask(small, corpus, costs=COSTS, floor=4, **settings):
    loader = Loader(small.engine, corpus, costs=costs, settings=LoadSettings(quality_floor=floor, **settings))
    return loader.ask(["chat"], small.engine.tokenize(QUESTION), deadline_s=20.0)


# What is read.


def test_a_document_of_parts_is_one_document(small, chat, ids, cache):
    entry = chat.find("chat")
    assert (entry.tokens, len(entry.parts)) == (len(ids), len(TURNS))
    info = chat.read_header(entry)
    assert info.token_ids == chat.text(entry) == ids
    assert [stop - start for start, stop in map(info.chunk_span, range(info.chunks))] == list(TURNS)
    assert [list(info.chunks_of(*info.chunk_span(chunk))) for chunk in range(info.chunks)] == [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
    ]
    assert list(info.chunks_of(119, 151)) == [0, 1, 2]
    whole = _corpus(small)
    whole.save(Document("chat", ids), cache)
    for level in range(len(info.levels)):
        ours, theirs = chat.decode("chat", level), whole.decode("chat", level)
        assert _error(ours, cache) <= 1.02 * _error(theirs, cache) + 1e-9


@pytest.mark.parametrize("with_cache", [False, True])
def test_lossless_parts_are_bit_equal_to_the_whole(small, ids, cache, with_cache):
    corpus = _grow(_corpus(small, coding=Coding(lossless=True)), ids, cache if with_cache else None)
    exact = corpus.decode("chat", "lossless")
    whole = _corpus(small, coding=Coding(lossless=True))
    if with_cache:
        whole.save(Document("chat", ids), cache)
        theirs = whole.decode("chat", "lossless")
        assert all(
            torch.equal(a, b) for a, b in zip((*exact.keys, *exact.values), (*theirs.keys, *theirs.values), strict=True)
        )
    assert _error(exact, cache) < 1e-6  # an engine's rows of longer texts differ in their last bits


def test_parts_are_decoded_alike_by_any_method(small, ids, cache):
    for coding in (Coding(lossless=True), Coding(method="cachegen"), Coding(prefix_layers=1)):
        corpus = Corpus(small.engine, MemoryStore(), coding=coding)
        corpus.calibrate([Document(name, tuple(text)) for name, text in small.tokens.items()], 2048)
        grown = _grow(corpus, ids)
        info = grown.read_header(grown.find("chat"))
        assert info.token_ids == ids
        answer = _ask(small, grown, floor=min(4, len(info.levels) - 1))
        assert not troubles(answer.misses)
        assert {decision.action for decision in answer.decisions} == {"fetch"}


def test_behind_a_neutral_prefix_parts_keep_the_first_ones(small, ids):
    coding = Coding(neutral_prefix=16)
    corpus = Corpus(small.engine, MemoryStore(), coding=coding)
    corpus.calibrate([Document(name, tuple(text)) for name, text in small.tokens.items()], 2048)
    grown = _grow(corpus, ids)
    info = grown.read_header(grown.find("chat"))
    assert info.neutral_prefix == tuple(small.engine.tokenize(NEUTRAL_TEXT))[-16:]
    (whole,) = small.engine.prefill([[*info.neutral_prefix, *ids]])
    exact = grown.decode("chat", offset=16)
    alone = _error(small.engine.prefill([ids])[0], grown.decode("chat"))
    assert _error(exact, whole.slice(16, 16 + len(ids))) < 0.05 * alone


def test_sealed_parts_are_read_as_one(small, ids, cache):
    keyring = Keyring([bytes(range(32))])
    corpus = _grow(_corpus(small, keyring=keyring), ids, cache)
    assert corpus.read_header(corpus.find("chat")).token_ids == ids
    assert _error(corpus.decode("chat"), cache) == pytest.approx(
        _error(_grow(_corpus(small), ids, cache).decode("chat"), cache)
    )
    assert not troubles(_ask(small, corpus).misses)


def test_without_its_first_tokens_a_document_is_as_if_they_were_masked(small, ids, cache):
    """AttentionStore's truncation: keys come off their positions, so that what is left can begin at 0."""
    gone, question = 100, small.engine.tokenize(QUESTION)
    corpus = _grow(_corpus(small, coding=Coding(lossless=True)), ids, cache)
    left = corpus.decode("chat", "lossless", first=gone)
    assert (left.tokens, left.meta.offset) == (len(ids) - gone, 0)
    model, total = small.engine.model, len(ids) + len(question)
    mask = torch.ones(1, total)
    mask[:, :gone] = 0
    with torch.inference_mode():
        masked = model(
            torch.tensor([question]), past_key_values=small.engine.past_key_values(cache), attention_mask=mask,
            position_ids=torch.arange(len(ids), total)[None],
        ).logits  # fmt: skip
        ours = model(torch.tensor([question]), past_key_values=small.engine.past_key_values(left)).logits
        anew = model(torch.tensor([[*ids[gone:], *question]])).logits[:, -len(question) :]
    assert float((ours - masked).abs().max()) < 1e-3
    assert float((ours - anew).abs().max()) > 10 * float((ours - masked).abs().max())
    with pytest.raises(ArgumentError, match="leave out 0 to"):
        corpus.decode("chat", first=len(ids))


# Loads.


class Written(StoreWrapper):
    """Counts the bytes that are written."""

    count = 0

    def _do(self, request, call):
        result = call(request.data)
        if request.method in ("put", "create") and result is not False:
            self.count += len(request.data)
        return result


def _written(corpus):
    return corpus.catalog.store.count


def test_fifty_parts_are_loaded_over_http_as_one_document(small, reference, ids):
    corpus = _corpus(small, Written(MemoryStore()))
    size = len(ids) // 50
    ends = [size * number for number in range(1, 50)] + [len(ids)]
    cache = small.engine.prefill([ids])[0]
    corpus.save(Document("chat", ids[:size]), cache.slice(0, size))
    for start, end in pairwise(ends):
        corpus.append("chat", ids[start:end], cache=cache.slice(0, end))
    assert len(corpus.find("chat").parts) == 50
    whole = _corpus(small, Written(MemoryStore()))
    whole.save(Document("chat", ids), cache)
    told, alone = _written(corpus), _written(whole)
    assert told - alone < 49 * MOST_MORE
    with serving(corpus.catalog.store) as url, closing(open_store(url)) as store:
        answer = _ask(small, Corpus(small.engine, store), NEVER)
    assert {decision.action for decision in answer.decisions} == {"fetch"}
    assert {decision.chunk.document for decision in answer.decisions} == {0}
    assert not troubles(answer.misses)
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL


def test_a_part_that_is_gone_costs_time_and_no_quality(small, chat, reference):
    part = chat.find("chat").parts[2]
    chat.catalog.store.delete(chat.catalog.keys(chat.config).blob(part.sha256))
    answer = _ask(small, chat)
    assert {decision.action for decision in answer.decisions} == {"recompute"}
    assert reference.compare(small.engine, answer.prompt.cache)[0] < 1e-6
    assert answer.misses
    with pytest.raises(NotFoundError):
        chat.decode("chat")
    with pytest.raises(NotFoundError):
        chat.append("chat", (5, 6))


def test_a_flipped_part_is_computed_anew(small, chat, reference):
    part, store = chat.find("chat").parts[4], chat.catalog.store
    key = chat.catalog.keys(chat.config).blob(part.sha256)
    data = bytearray(store.get(key))
    data[part.header_bytes + 9] ^= 1
    store.put(key, bytes(data))
    answer = _ask(small, chat)
    assert [decision.action for decision in answer.decisions].count("recompute") == 1
    assert reference.compare(small.engine, answer.prompt.cache)[0] < FINEST_KL
    (damage,) = verify_store(store, [chat.catalog]).damaged
    assert damage.key == key
    with pytest.raises(CorruptError):
        chat.decode("chat")


def test_parts_in_another_order_are_refused(small, chat):
    entry, catalog = chat.find("chat"), chat.catalog
    first, second, third, *others = entry.parts
    bad = replace(entry, parts=(first, third, second, *others))
    catalog.store.put(catalog.keys(chat.config).document("chat"), bad.to_json())
    with pytest.raises(CorruptError, match="not the one behind its first 120 tokens"):
        chat.decode("chat")
    with pytest.raises(CorruptError):
        chat.append("chat", (5, 6))
    with pytest.raises(CorruptError):
        _ask(small, chat)


def test_a_part_is_no_document(chat):
    entry, catalog = chat.find("chat"), chat.catalog
    part = entry.parts[1]
    alone = replace(
        entry, document_id="part", parts=(), blob_key=catalog.keys(chat.config).blob(part.sha256), sha256=part.sha256,
        size=part.size, header_bytes=part.header_bytes, tokens=part.tokens, token_digest="a" * 64, levels=(),
    )  # fmt: skip
    catalog.add(alone)
    with pytest.raises(CorruptError, match="not the one that the catalog names"):
        chat.decode("part")


# Writers.


def test_what_cannot_be_appended_is_told(small, chat, ids, cache):
    for tokens, words, error in (
        ((), "nothing to append", ArgumentError),
        ((1,) * 4096, "window is 4096", ArgumentError),
    ):
        with pytest.raises(error, match=words):
            chat.append("chat", tokens)
    with pytest.raises(NotFoundError, match="encode it first"):
        chat.append("another", (5, 6))
    chat.catalog.add_text(chat.config, "text", (5, 6))
    with pytest.raises(ArgumentError, match="kept as text"):
        chat.append("text", (5, 6))
    with pytest.raises(ArgumentError, match="not that of"):
        chat.append("chat", ids[:3], cache=cache)
    with pytest.raises(ArgumentError, match="already"):
        chat.append("chat", (5, 6), fork="text")
    exact = _grow(_corpus(small, coding=Coding(lossless=True)), ids, cache)
    longer = small.engine.prefill([[*ids, 5, 6]])[0]
    half = type(longer).from_tensors(
        [each.bfloat16() for each in longer.keys], [each.bfloat16() for each in longer.values],
        dataclasses.replace(longer.meta, dtype="bfloat16"), (*ids, 5, 6),
    )  # fmt: skip
    with pytest.raises(MismatchError, match="bit for bit"):
        exact.append("chat", (5, 6), cache=half)
    assert exact.find("chat").tokens == len(ids)


def test_a_document_of_another_model_is_not_found(small, chat):
    other = SimpleNamespace(
        meta=dataclasses.replace(small.engine.meta, model_revision="f" * 40), window=4096, model_config_digest="",
    )  # fmt: skip
    with pytest.raises(NotFoundError, match="with this very model"):
        Corpus(other, chat.catalog.store).append("chat", (5, 6))


def test_a_document_with_a_profile_of_its_own_is_encoded_anew(small, ids):
    corpus = Corpus(small.engine, MemoryStore())
    list(corpus.encode([Document("chat", ids[:20])]))
    assert not corpus.find("chat").profile_digest
    found = corpus.append("chat", ids[20:30])
    assert (found.entry.parts, found.entry.tokens) == ((), 30)
    assert corpus.read_header(corpus.find("chat")).token_ids == ids[:30]


@pytest.mark.parametrize("kind", ["memory", "folder", "http"])
def test_of_two_writers_one_wins_and_the_other_is_told(small, ids, cache, tmp_path, kind):
    store = FolderStore(tmp_path) if kind == "folder" else MemoryStore()
    with closing(store):
        _grow(_corpus(small, store), ids, cache)
        if kind != "http":
            _race(small, [store] * 4, ids)
            return
        with serving(store, settings=ServerSettings(spool_folder=tmp_path, max_upload_bytes=3 << 20)) as url:
            stores = [open_store(url) for _ in range(4)]
            _race(small, stores, ids)
            for each in stores:
                each.close()


def _race(small, stores, ids):
    together, done = Barrier(len(stores)), {}

    def write(number):
        corpus = Corpus(small.engine, _Waiting(stores[number], together))
        try:
            done[number] = corpus.append("chat", (10 + number, 7))
        except ConflictError as error:
            done[number] = error

    threads = [Thread(target=write, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number, found in done.items() if not isinstance(found, ConflictError)]
    corpus = Corpus(small.engine, stores[0])
    assert corpus.text(corpus.find("chat")) == (*ids, 10 + winner, 7)
    loser = (winner + 1) % len(stores)
    assert "append or ask again" in str(done[loser])
    corpus.append("chat", (10 + loser, 7))
    assert corpus.read_header(corpus.find("chat")).token_ids == (*ids, 10 + winner, 7, 10 + loser, 7)


class _Waiting(StoreWrapper):
    """All writers have read the entry before the first of them replaces it."""

    def __init__(self, inner, together):
        super().__init__(inner)
        self._together = together

    def replace(self, key, data, etag):
        self._together.wait(20)
        return self.inner.replace(key, data, etag)


class AgedStore(MemoryStore):
    def age(self, seconds):
        for one in self._objects.values():
            one.modified -= seconds


def test_a_writer_that_dies_leaves_the_old_document_and_an_orphan(small, ids, cache):
    store = AgedStore()
    chat = _grow(_corpus(small, store), ids, cache)
    before = set(store.keys(""))

    class Dying(StoreWrapper):
        def replace(self, key, data, etag):  # noqa: ARG002 - the store's signature
            msg = "the writer is gone"
            raise StorageError(msg)

    with pytest.raises(StorageError, match="gone"):
        Corpus(small.engine, Dying(store)).append("chat", (5, 6))
    assert chat.read_header(chat.find("chat")).token_ids == ids
    orphans = set(store.keys("")) - before
    assert {key[-4:] for key in orphans} == {".kvw", "kvtp"}
    store.age(2 * DAY)
    assert (collect(store).blobs, set(store.keys(""))) == (1, before)
    assert chat.read_header(chat.find("chat")).token_ids == ids


def test_forks_share_their_prefix_and_collectors_know_it(small, ids, cache):
    store = AgedStore()
    chat = _grow(_corpus(small, store), ids, cache)
    fork = chat.append("chat", (5, 6), fork="other").entry
    assert chat.find("chat").parts == fork.parts[:-1]
    assert chat.read_header(chat.find("other")).token_ids == (*ids, 5, 6)
    assert chat.read_header(chat.find("chat")).token_ids == ids
    chat.append("chat", (8, 9))
    store.age(2 * DAY)
    assert collect(store).blobs == 0
    assert chat.catalog.remove(chat.config, "chat")
    store.age(2 * DAY)
    assert collect(store).blobs == 1
    assert _error(chat.decode("other"), small.engine.prefill([(*ids, 5, 6)])[0]) > 0
    assert chat.catalog.remove(chat.config, "other")
    assert collect(store, allow_empty_catalog=True).blobs == len(fork.parts)


def test_a_document_is_made_one_blob_again(small, ids, cache):
    store = AgedStore()
    chat = _grow(_corpus(small, store), ids, cache)
    found = chat.compact("chat")
    assert (found.entry.parts, found.skipped) == ((), False)
    assert chat.compact("chat").skipped
    assert chat.read_header(chat.find("chat")).token_ids == ids
    store.age(2 * DAY)
    assert collect(store).blobs == len(TURNS)
    chat.append("chat", (5, 6))
    assert len(chat.find("chat").parts) == 2


def test_encoding_the_same_text_again_leaves_the_parts(small, chat, ids):
    (found,) = chat.encode([Document("chat", ids)])
    assert found.skipped
    assert len(chat.find("chat").parts) == len(TURNS)
    (alias,) = chat.encode([Document("chat", ids)])
    assert alias.skipped


def test_copies_and_checks_know_parts(small, chat, ids):
    target = MemoryStore()
    copied = copy_store(chat.catalog.store, target)
    assert not copied.failures
    there = Corpus(small.engine, target)
    assert there.read_header(there.find("chat")).token_ids == ids
    assert there.text(there.find("chat")) == ids
    assert not verify_store(target, [there.catalog]).damaged
    part = chat.find("chat").parts[3]
    target.delete(there.catalog.keys(there.config).blob(part.sha256))
    (damage,) = verify_store(target, [there.catalog]).damaged
    assert "blob of document 'chat' is not there" in damage.problem


def test_a_lost_catalog_is_made_anew_with_its_parts(small, chat, ids):
    store = chat.catalog.store
    chat.append("chat", (5, 6), fork="other")
    for key in list(store.keys(chat.catalog.keys(chat.config).documents)):
        store.delete(key)
    done = rebuild(store)
    assert not done.failures
    names = {entry.document_id: chat.text(entry) for entry in chat.catalog.documents(chat.config)}
    assert names == {"chat": ids, "other": (*ids, 5, 6)}
    assert chat.read_header(chat.find("other")).token_ids == names["other"]
    assert rebuild(store).kept == 2


def test_the_index_finds_what_a_grown_document_begins_with(small, chat, ids):
    index = chat.index("kvwire:64")
    index.write(chat.find("chat"), ids)
    chat.append("chat", (5, 6))
    hit = chat.index("kvwire:64").longest((*ids, 5, 6, 7))
    assert (hit.document.document_id, hit.tokens) == ("chat", len(ids) + 2)


def test_a_part_says_what_it_stands_behind(chat, ids):
    catalog, part = chat.catalog, chat.find("chat").parts[1]
    blob = catalog.store.get(catalog.keys(chat.config).blob(part.sha256))
    assert inspect(blob).prefix == BlobPrefix(120, digest_tokens(ids[:120]), "chat")


def test_the_command_appends_forks_and_compacts(run, demo_model, small, tmp_path):
    store, source = f"file://{tmp_path}/kv", tmp_path / "chat.txt"
    source.write_text(next(iter(small.texts.values()))[:2000])
    where = ("--store", store, "--model", demo_model)
    assert run("encode", source, *where)[0] == 0
    more = tmp_path / "more.txt"
    more.write_text("And then the bell rang again, twice.")
    code, out, _ = run("append", "chat", "--file", more, *where)
    assert (code, "2 parts" in out) == (0, True)
    assert f"({len(small.engine.tokenize(more.read_text()))} more)" in out
    code, out, _ = run("append", "chat", "--text", "Nobody answered.", "--fork", "other", "--json", *where)
    assert code == 0
    told = json.loads(out)
    assert (told["id"], told["parts"]) == ("other", 3)
    assert told["written_bytes"] < told["bytes"] / 5
    code, out, _ = run("store", "stat", "other", "--store", store)
    assert "in 3 parts" in out
    code, out, _ = run("ask", "--docs", "other", "--question", "Who?", "--tokens", 2, "--json", *where)
    assert code == 0
    code, out, _ = run("append", "other", "--compact", *where)
    assert (code, "1 parts" in out) == (0, True)
    assert run("store", "verify", "--store", store)[0] == 0
    for words, exit_code in (
        ((), 2),
        (("--text", "a", "--file", more), 2),
        (("--file", tmp_path / "no"), 3),
        (("--text", ""), 2),
        (("--fork", "x", "--compact"), 2),
    ):
        assert run("append", "chat", *words, *where)[0] == exit_code
    assert run("append", "nobody", "--text", "a", *where)[0] == 3
