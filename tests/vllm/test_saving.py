"""Keeping prompts without vLLM: which are kept, and that what is kept is what an engine would have encoded."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvwire.engines.vllm import saving as module
from kvwire.engines.vllm.loading import PageLoader, without_weights
from kvwire.engines.vllm.pages import StridedPages, slots_of
from kvwire.engines.vllm.save_scheduling import PageSave, SaveScheduler
from kvwire.engines.vllm.saving import SAVED, PageSaver
from kvwire.engines.vllm.working import ConnectorWorker
from kvwire.errors import ArgumentError, MismatchError, NotFoundError, StorageError
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document, Encoded
from kvwire.runtime.saving import Rows
from kvwire.runtime.saving import Saver as RowsSaver
from kvwire.store import MemoryStore
from kvwire.types import KVCache, digest_tokens
from kvwire.vllm import Choice, request_body

from .halves import BLOCK, Halves, check
from .sharded import pages_of

BLOCKS = tuple((5 * i + 3) % 63 + 1 for i in range(12))
IDS = tuple(random.Random(11).choices(range(200), k=170))


# Which prompts are kept.


def decided(
    mode="asked", *, asks=True, salt=None, trouble="", here="", had=(), loaded=False, prompt=IDS, computed=True
):
    saving = SaveScheduler(mode, 16, here)
    saving.begin("r", salt, Choice(save=asks), trouble)
    for tokens in had:
        saving.note_cached("r", tokens)
    if loaded:
        saving.note_loaded("r")
    why = saving.end("r", prompt, BLOCKS, is_computed=computed)
    saves = saving.take()
    assert bool(saves) == isinstance(why, int)
    assert saving.take() == []
    assert saving.end("r", prompt, BLOCKS, is_computed=True) is None
    if saves:
        assert saves == [PageSave("r", tuple(prompt), BLOCKS)]
    return "" if saves else why


def test_a_document_is_kept_under_the_name_that_is_asked_for_where_that_is_allowed():
    assert "names of its own" in decided(asks="x")
    assert "names of its own" in decided("all", asks="x")
    assert 'say "save": NAME' in decided("named", asks=True)
    assert decided("named", asks=False) is None
    saving = SaveScheduler("named", 1)
    for name, computed in (("kept", True), ("early", False)):
        saving.begin(name, None, Choice(save=f"books/{name}"))
        saving.end(name, IDS[:1], BLOCKS, is_computed=computed)
    why = "it ended before its prompt was computed"
    assert saving.take() == [
        PageSave("kept", IDS[:1], BLOCKS, document="books/kept"),
        PageSave("early", (), (), document="books/early", trouble=why),
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"asks": False}, None),
        ({"asks": False, "mode": "all"}, ""),
        ({"asks": False, "mode": "off"}, None),
        ({"mode": "off"}, 'start it with "save": "asked"'),
        ({"loaded": True}, "were loaded"),
        ({"mode": "all", "asks": False, "loaded": True}, "were loaded"),
        ({"salt": "a tenant", "had": (32,)}, ""),
        ({"had": (32,)}, ""),
        ({"salt": "kvwire-prefix-level-1", "had": (0, 0)}, ""),
        ({"salt": "kvwire-prefix-level-1", "had": (0, 32)}, "may have been loaded"),
        ({"salt": "kvwire-documents-level-1", "mode": "all", "asks": False, "had": (16,)}, "may have been loaded"),
        ({"trouble": "an adapter"}, "an adapter"),
        ({"here": "several workers"}, "several workers"),
        ({"computed": False}, "before its prompt was computed"),
        ({"prompt": IDS[:15]}, "fewer than 16 tokens"),
    ],
)
def test_only_rows_that_were_computed_here_are_kept(given, why):
    found = decided(**given)
    assert found is why if why is None else (why in found and bool(why) == bool(found))


@pytest.mark.parametrize(
    ("had", "loaded", "level", "built_on"),
    [(0, False, 1, None), (0, True, 1, 2), (64, False, 1, 1), (64, True, 1, 1), (64, False, None, "ask for a level")],
)
def test_a_prefix_that_is_saved_grows_over_what_was_loaded(had, loaded, level, built_on):
    saving, asked = SaveScheduler("asked", 16), Choice(prefix=True, save=True, level=level, deadline_s=9.0)
    saving.begin("r", "kvwire-prefix-x", asked)
    saving.note_cached("r", had)
    if loaded:
        saving.note_loaded("r")
    level_of = lambda is_had: level if is_had else 2 if loaded else None  # noqa: E731 - short
    found = saving.end("r", IDS, BLOCKS, is_computed=True, answer=(5, 6), built_on=level_of)
    if isinstance(built_on, str):
        assert built_on in found
        return
    assert found == len(IDS) + 2
    assert saving.take() == [PageSave("r", (*IDS, 5, 6), BLOCKS, way="grown", level=built_on)]


def test_what_stands_before_documents_is_kept_once_it_was_computed():
    for mode, kept in (("asked", 24), ("all", 24), ("off", None), ("named", None)):
        saving = SaveScheduler(mode, 16)
        saving.begin("r", "kvwire-documents-x", Choice(("a",), level=1, head=24))
        assert saving.end("r", IDS, BLOCKS, is_computed=True, head=24) == kept or mode == "all"
        assert saving.take() == ([PageSave("r", IDS[:24], BLOCKS, way="exact")] if kept else [])


# What is kept.


class Model:
    """Pages that hold what the tiny model computes, as vLLM's would."""

    def __init__(self, told, dtype=torch.float32):
        self.told = told
        specs = told.corpus.meta.layers
        views = [torch.zeros(64, s.kv_heads, BLOCK, s.key_dim + s.value_dim, dtype=dtype) for s in specs]
        self.pages = StridedPages(views, [s.key_dim for s in specs])

    def compute(self, ids, blocks=BLOCKS):
        (cache,) = self.told.engine.prefill([ids])
        slots = slots_of(blocks, BLOCK, 0, len(ids))
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self.pages.write(layer, slots, keys, values)
        return cache


@pytest.fixture
def model(told):
    return Model(told)


@pytest.fixture
def saver(told, model):
    with closing(PageSaver(told.corpus, "kvwire:16")) as made:
        made.register(model.pages)
        yield made


def wait(saver, names):
    """Until the blocks of all of these were given back, and all that was copied is stored."""
    until, back = time.monotonic() + 60, set()
    while back != set(names) or saver._waiting:
        assert time.monotonic() < until
        time.sleep(0.005)
        back |= saver.copied()


def test_what_is_kept_is_what_an_engine_encodes(told, model, saver):
    model.compute(IDS)
    saver.start([PageSave("r", IDS, BLOCKS)])
    wait(saver, ["r"])
    hit = told.corpus.index("kvwire:16").longest([*IDS, 1, 2])
    assert saver._counts.take() == {"saved_prompts": 1, "saved_tokens": len(IDS), "saved_bytes": hit.document.size}
    assert hit.tokens == len(IDS)
    assert hit.document.document_id.startswith(SAVED)
    theirs = Corpus(told.engine, MemoryStore())
    theirs.set_profile(told.corpus.profile())
    (encoded,) = theirs.encode([Document("x", IDS)])
    assert hit.document.sha256 == encoded.entry.sha256
    assert told.corpus.text(hit.document) == IDS


def grown(told, model, saver, cache, ids, level, name):
    """Keep a prompt whose rows lie in pages."""
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        model.pages.write(layer, slots_of(BLOCKS, BLOCK, 0, len(ids)), keys, values)
    saver.start([PageSave(name, ids, BLOCKS, way="grown", level=level)])
    wait(saver, [name])
    return told.corpus.index("kvwire:16").longest([*ids, 1])


def test_a_conversation_grows_part_by_part(told, model, saver):
    """What is new becomes a part that says over which level it was computed; of the same tokens nothing is written."""
    engine, first = told.engine, IDS[:101]
    hit = grown(told, model, saver, engine.prefill([first])[0], first, None, "one")
    assert (hit.tokens, hit.info.context_level, hit.document.parts) == (101, None, ())
    loaded = told.corpus.decode(hit.document.document_id, 2, dtype=torch.float32)
    whole = link([loaded, engine.extend(loaded, IDS[101:])])
    hit = grown(told, model, saver, whole, IDS, 2, "two")
    assert (hit.tokens, hit.info.context_level, [part.tokens for part in hit.document.parts]) == (170, 2, [101, 69])
    assert saver._counts.take()["saved_tokens"] == 170
    exact = whole.slice(101, 170)
    found = told.corpus.decode(hit.document.document_id, 3, dtype=torch.float32).slice(101, 170)
    for mine, theirs in zip((*found.keys, *found.values), (*exact.keys, *exact.values), strict=True):
        assert (mine - theirs).norm() < 0.2 * theirs.norm()
    before = [each.document_id for each in told.corpus.catalog.documents(told.corpus.config)]
    grown(told, model, saver, whole, IDS, 2, "again")
    assert [each.document_id for each in told.corpus.catalog.documents(told.corpus.config)] == before


def test_a_conversation_behind_a_bos_stays_behind_it(told, model, saver):
    """Its document was computed behind a BOS, of which its blob has no rows."""
    engine, bos = told.engine, (77,)
    whole = engine.prefill([(*bos, *IDS)])[0]
    corpus = told.corpus.computed_by(without_weights(told.corpus, torch.float32))
    first = whole.slice(1, 101)
    cache = KVCache.from_tensors(first.keys, first.values, replace(first.meta, token_digest=""), IDS[:100])
    RowsSaver(corpus, told.corpus.index("kvwire:16")).save(Rows(IDS[:100], cache, bos, None))
    hit = grown(told, model, saver, whole, (*bos, *IDS), None, "grown")
    assert (hit.tokens, hit.opening, hit.info.neutral_prefix) == (171, 1, bos)
    assert [part.tokens for part in hit.document.parts] == [100, 70]


def test_rows_over_what_the_store_has_no_more_are_not_kept(told, model, saver, caplog):
    with caplog.at_level(logging.WARNING, "kvwire.vllm"):
        model.compute(IDS)
        saver.start([PageSave("r", IDS, BLOCKS, way="grown", level=1)])
        wait(saver, ["r"])
    assert "has no more what its rows were computed over" in caplog.text


def test_what_stands_before_documents_is_kept_without_loss(told, model, saver):
    exact = model.compute(IDS)
    for name in ("r", "again"):
        saver.start([PageSave(name, IDS[:24], BLOCKS, way="exact")])
        wait(saver, [name])
    entry = told.corpus.catalog.by_tokens(told.corpus.config, digest_tokens(IDS[:24]))
    assert entry.document_id.startswith("head-")
    found = told.corpus.decode(entry.document_id, 0, dtype=torch.float32)
    assert torch.equal(found.values[1], exact.values[1][:, :24])
    assert saver._counts.take()["saved_prompts"] == 1


def test_what_is_to_be_told_is_told_once_it_is_stored(told, model, saver, monkeypatch):
    model.compute(IDS)
    saver.start([PageSave("r", IDS, BLOCKS, "event"), PageSave("silent", IDS[:64], BLOCKS)])
    wait(saver, ["r", "silent"])
    assert saver.events() == ["event"]
    assert saver.events() == []
    saver.start([PageSave("again", IDS, BLOCKS, "another")])  # others may not have heard of it
    wait(saver, ["again"])
    assert saver.events() == ["another"]

    def fails(*_: object, **__: object):
        msg = "the disk is full"
        raise StorageError(msg)

    monkeypatch.setattr(told.corpus, "save", fails)
    saver.start([PageSave("lost", IDS[::-1], BLOCKS, "never")])
    wait(saver, ["lost"])
    assert saver.events() == []


def test_what_one_keeps_another_loads(told, model, saver):
    """Kept at a fraction of the pages' bytes, with token ids."""
    exact = model.compute(IDS)
    saver.start([PageSave("r", IDS, BLOCKS)])
    wait(saver, ["r"])
    with closing(Halves(told, index="kvwire:16", least_tokens=BLOCK)) as other:
        asked = request_body(told.corpus, Choice(level=3, prefix=True), [*IDS, 7, 8])
        bad, blocks, _, promised = other.load(asked)
        assert (bad, promised) == (set(), len(IDS))
        document = told.corpus.index("kvwire:16").longest(IDS).document
        check(other, blocks, told.corpus.decode(document.document_id, 3, dtype=torch.float32), 0, len(IDS))
        info = told.corpus.read_header(document)
        level = info.levels[3]
        for layer, (keys, _) in enumerate(other.pages(blocks, 0, len(IDS))):
            error = (keys - exact.keys[layer]).norm() / exact.keys[layer].norm()
            assert error < 0.2
        assert info.token_ids == IDS
        raw = sum(side.numel() * 2 for side in (*exact.keys, *exact.values))  # as bfloat16
        assert level.cumulative_bytes < raw


def test_pages_of_another_dtype_are_kept_as_they_are(told):
    model = Model(told, torch.bfloat16)
    with closing(PageSaver(told.corpus, "kvwire:16")) as saver:
        saver.register(model.pages)
        model.compute(IDS)
        saver.start([PageSave("r", IDS, BLOCKS)])
        wait(saver, ["r"])
    document = told.corpus.index("kvwire:16").longest(IDS).document
    assert told.corpus.read_header(document).meta.dtype == "bfloat16"


def test_blocks_are_given_back_before_anything_is_encoded(told, model, saver, monkeypatch):
    going, save = threading.Event(), Corpus.save

    def late(*given, **more):
        assert going.wait(30)
        return save(*given, **more)

    monkeypatch.setattr(Corpus, "save", late)
    model.compute(IDS)
    saver.start([PageSave("r", IDS, BLOCKS)])
    until = time.monotonic() + 30
    while saver.copied() != {"r"}:
        assert time.monotonic() < until
        time.sleep(0.005)
    for view in model.pages.views:  # somebody else's by now
        view.fill_(9.0)
    going.set()
    wait(saver, [])
    document = told.corpus.index("kvwire:16").longest(IDS).document
    (exact,) = told.engine.prefill([IDS])
    found = told.corpus.decode(document.document_id, 3, dtype=torch.float32)
    assert (found.values[0] - exact.values[0]).norm() < 0.2 * exact.values[0].norm()


def test_what_is_stored_already_is_not_encoded_again(told, model, saver, monkeypatch):
    model.compute(IDS)
    saver.start([PageSave("r", IDS, BLOCKS)])
    wait(saver, ["r"])
    monkeypatch.setattr(Corpus, "save", None)
    saver.start([PageSave("again", IDS, BLOCKS), PageSave("less", IDS[:100], BLOCKS)])
    wait(saver, ["again", "less"])


def test_one_prompt_is_kept_once_at_a_time(told, model, saver):
    model.compute(IDS)
    saver.start([PageSave(str(number), IDS, BLOCKS) for number in range(8)])
    wait(saver, [str(number) for number in range(8)])
    names = [each.document_id for each in told.corpus.catalog.documents(told.corpus.meta.config_digest())]
    assert sum(name.startswith(SAVED) for name in names) == 1


def test_more_than_there_is_room_for_is_left_out_and_told_once(model, saver, monkeypatch, caplog):
    going, kept = threading.Event(), []

    def late(corpus, document, *_given, **_more):
        assert going.wait(30)
        kept.append(document)
        return Encoded(corpus.find("a"), None, skipped=True, encode_s=0.0)

    monkeypatch.setattr(Corpus, "save", late)
    monkeypatch.setattr(module, "_MOST", 3)
    model.compute(IDS)
    prompts = [(*IDS[:100], number) for number in range(8)]
    with caplog.at_level(logging.WARNING, "kvwire.vllm"):
        saver.start([PageSave(str(number), ids, BLOCKS) for number, ids in enumerate(prompts)])
        going.set()
        wait(saver, [str(number) for number in range(8)])
    assert len(kept) == 3
    assert saver._counts.take()["unsaved_prompts"] == 5
    assert sum("faster than they are encoded" in each.message for each in caplog.records) == 1


def test_a_store_that_fails_costs_nothing_but_what_is_kept(model, saver, monkeypatch, caplog):
    def broken(*_given, **_more):
        msg = "the bucket is read-only"
        raise StorageError(msg)

    monkeypatch.setattr(Corpus, "save", broken)
    model.compute(IDS)
    with caplog.at_level(logging.WARNING, "kvwire.vllm"):
        for number in range(4):
            saver.start([PageSave(str(number), IDS[: 100 + number], BLOCKS)])
            wait(saver, [str(number)])
    assert [each.message for each in caplog.records] == ["a prompt was not kept: the bucket is read-only (told once)"]


def test_blocks_that_cannot_be_copied_are_given_back(told, caplog):
    with closing(PageSaver(told.corpus, "kvwire:16")) as saver, caplog.at_level(logging.WARNING, "kvwire.vllm"):
        saver.start([PageSave("r", IDS, BLOCKS)])
        wait(saver, ["r"])
        saver.register(Model(told).pages)
        saver.start([PageSave("s", IDS, BLOCKS[:2])])
        wait(saver, ["s"])
    assert "before it registered them" in caplog.text
    assert "do not lie in 2 blocks" in caplog.text


def outcomes(saver, count):
    """Of that many documents with names, once they are told."""
    until, done = time.monotonic() + 60, []
    while len(done) < count:
        assert time.monotonic() < until
        time.sleep(0.005)
        done += saver.outcomes()["done"]
    assert saver.outcomes() == {"under_way": 0, "done": []}
    return {each["document"]: each for each in done}


def named(count, **more):
    return [PageSave(str(n), (*IDS[:100], n), BLOCKS, document=f"d/{n}", **more) for n in range(count)]


def test_documents_with_names_wait_for_room_and_none_is_left_out(told, model, saver, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    model.compute(IDS)
    saver.start(named(7))
    done = outcomes(saver, 7)
    assert all(each["error"] == "" and each["encode_s"] > 0 for each in done.values())
    wait(saver, [])
    catalog, config = told.corpus.catalog, told.corpus.meta.config_digest()
    found = {each.document_id: told.corpus.text(each) for each in catalog.documents(config)}
    assert {name: found[name] for name in done} == {save.document: save.token_ids for save in named(7)}
    assert not [name for name in found if name.startswith(SAVED)]
    assert told.corpus.index("kvwire:16").longest(IDS[:100]) is None  # as of documents that are encoded


def test_who_waits_for_room_while_vllm_stops_is_told(told, model, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 1)
    monkeypatch.setattr(module, "_CLOSING_S", 60.0)
    model.compute(IDS)
    encoding, go_on = threading.Event(), threading.Event()
    keep = told.corpus.save

    def slow(*given, **more):
        encoding.set()
        assert go_on.wait(60)
        return keep(*given, **more)

    monkeypatch.setattr(told.corpus, "save", slow)
    saver = PageSaver(told.corpus, "kvwire:16")
    saver.register(model.pages)
    saver.start(named(3))
    assert encoding.wait(60)
    closing_ = threading.Thread(target=saver.close)
    closing_.start()
    done = []
    while len(done) < 2:  # told before the store has gone on
        done += saver.outcomes()["done"]
        time.sleep(0.005)
    go_on.set()
    closing_.join(60)
    assert all("run again" in each["message"] for each in done)
    assert [each["message"] for each in saver.outcomes()["done"]] == [""]


def test_two_names_of_one_text_share_a_blob(told, model, saver):
    model.compute(IDS)
    saver.start([PageSave(name, IDS, BLOCKS, document=name) for name in ("one", "two")])
    assert {each["error"] for each in outcomes(saver, 2).values()} == {""}
    assert told.corpus.find("one").sha256 == told.corpus.find("two").sha256


def test_why_a_document_is_not_kept_is_told(told, model, saver, monkeypatch):
    def fails(*_: object, **__: object):
        msg = "the disk is full; make room"
        raise StorageError(msg)

    model.compute(IDS)
    monkeypatch.setattr(told.corpus, "save", fails)
    troubled = PageSave("t", (), (), document="troubled", trouble="it has an adapter")
    short = PageSave("s", IDS, BLOCKS[:2], document="short")
    saver.start([*named(1), troubled, short])
    done = outcomes(saver, 3)
    assert (done["d/0"]["error"], done["d/0"]["message"]) == ("StorageError", "the disk is full; make room")
    assert done["troubled"]["message"] == "it has an adapter"
    assert "do not lie in 2 blocks" in done["short"]["message"]
    assert not saver._waiting
    wait(saver, [])


# The heads of several workers.


@pytest.mark.parametrize("ranks", [2, 4], ids=["a head each", "a head twice"])
def test_the_first_worker_keeps_all_heads(told, tmp_path, ranks):
    """Byte for byte what one worker keeps; where another one cannot read its pages, nothing is."""
    script, running = Path(__file__).parent / "sharded.py", []
    for rank in range(ranks):
        given = json.dumps([str(tmp_path), str(told.root), rank, ranks, IDS, BLOCKS, BLOCK])
        running.append(subprocess.Popen([sys.executable, script, given], stdout=subprocess.PIPE, text=True))
    answers = [json.loads(process.communicate(timeout=240)[0]) for process in running]
    assert [each["back"] for each in answers] == [["broken", "plain", "r"]] * ranks
    assert [each["counts"].get("saved_prompts") for each in answers] == [2] + [None] * (ranks - 1)
    done = {each["document"]: each["message"] for each in answers[0]["done"]}
    assert done == {"whole": "", "broken": "another of vLLM's workers could not read its pages; its log says why"}
    theirs = Corpus(told.engine, MemoryStore())
    theirs.set_profile(told.corpus.profile())
    with closing(PageSaver(theirs, "kvwire:16")) as alone:
        alone.register(pages_of(told.corpus, BLOCK))
        alone.start([PageSave("r", IDS, BLOCKS, document="alone")])
        outcomes(alone, 1)
    assert theirs.find("alone").sha256 == told.corpus.find("whole").sha256
    with pytest.raises(NotFoundError):
        told.corpus.find("broken")


def test_a_worker_that_fails_in_the_middle_holds_nobody_up(tmp_path):
    script = Path(__file__).parent / "out_of_step.py"
    running = [
        subprocess.Popen([sys.executable, script, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for answer in [json.loads(process.communicate(timeout=240)[0]) for process in running]:
        assert len(answer) == 3
        assert "restart vLLM" in answer[2]


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_each_worker_writes_its_own_heads(told, ranks, heads):
    side, specs = torch.arange(2.0).view(2, 1, 1), told.corpus.meta.layers
    pages = StridedPages([torch.zeros(4, heads, BLOCK, s.key_dim + s.value_dim) for s in specs], [16, 16])
    firsts = []
    for rank in range(ranks):
        with closing(ConnectorWorker(PageLoader(told.corpus, torch.float32), rank=rank, ranks=ranks)) as working:
            firsts.append(working._own(pages, 0, side).flatten().tolist())
    assert firsts == {1: [[0, 1]], 2: [[0], [1]], 4: [[0], [0], [1], [1]]}[ranks]


# The corpus's part.


def test_a_cache_that_is_not_the_documents_is_refused(told):
    (cache,) = told.engine.prefill([IDS])
    document = Document("x", IDS)
    with pytest.raises(ArgumentError, match="not that of 'x'"):
        told.corpus.save(replace(document, token_ids=IDS[:-1]), cache)
    with pytest.raises(ArgumentError, match="not that of 'x'"):
        told.corpus.save(document, replace(cache, meta=replace(cache.meta, offset=3)))
    other = replace(cache, meta=replace(cache.meta, model_revision="0" * 64))
    with pytest.raises(MismatchError, match="the cache is of model"):
        told.corpus.save(document, other)
    with pytest.raises(ArgumentError, match="an index is one of"):
        told.corpus.save(document, cache, index=("other",))
    assert told.corpus.save(document, cache).skipped is False
    assert told.corpus.save(document, cache, index=("sglang:16",)).skipped is True
    assert told.corpus.index("sglang:16").longest(IDS).document.document_id == "x"


def test_a_profile_for_readers_that_run_first_layers_cannot_be_used(told):
    corpus = Corpus(told.engine, MemoryStore(), coding=Coding(prefix_layers=1))
    list(corpus.encode([Document(name, ids) for name, ids in told.tokens.items()]))
    opened = Corpus.open(corpus.catalog.store)
    (cache,) = told.engine.prefill([IDS])
    with pytest.raises(MismatchError, match="run the model's first layers"):
        opened.save(Document("x", IDS), cache)
