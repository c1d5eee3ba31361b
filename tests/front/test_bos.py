"""A tokenizer that puts a BOS in front of whole texts: documents are computed behind it, prompts begin with one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from kvwire.controller import Goal
from kvwire.engines.transformers import generate_inputs
from kvwire.engines.vllm.loading import PageLoader
from kvwire.engines.vllm.matching import match_documents, match_prefix
from kvwire.engines.vllm.requests import Choice, request_body
from kvwire.errors import ArgumentError, CorruptError
from kvwire.reuse import PLAIN, LinkedPrompt, moved
from kvwire.runtime.adapters import ChunkSettings
from kvwire.runtime.chunk_reader import ChunkReader, Troubles
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.link_check import check_links, prompts_of
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import NEUTRAL_TEXT, link_opened, opened, opening_of, prefill_documents
from kvwire.runtime.quality import Reference, mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.store.upkeep.indexing import index_documents

from ..engines.families import cache_error

QUESTION = "And then the bell"
EXACT = LoadSettings(repair="none", exact=True)


@pytest.fixture(scope="module")
def pieces(small):
    text = [token for ids in small.tokens.values() for token in ids]
    return {f"d{n}": tuple(text[n * 300 : (n + 1) * 300]) for n in range(2)}


def without_bos(engine, monkeypatch):
    """The engine as it was read before: no opening tokens."""
    monkeypatch.setattr(type(engine), "opening_tokens", ())


def corpus_of(engine, pieces, store=None, **coding):
    corpus = Corpus(engine, store or MemoryStore(), coding=Coding(**{"lossless": True} | coding))
    list(corpus.encode([Document(name, ids) for name, ids in pieces.items()]))
    return corpus


def ask(small, engine, corpus, names, settings=EXACT, question=None):
    with Loader(engine, corpus, costs=small.costs, settings=settings) as loader:
        return loader.ask(names, question or engine.tokenize(QUESTION, place="last"))


def whole(engine, pieces, names, system=()):
    """Logits of the question's last token after a prefill of all, as a user of transformers runs it."""
    ids = [token for name in names for token in pieces[name]]
    return engine.forward(None, opened(engine, [*system, *ids, *engine.tokenize(QUESTION, place="last")]), 0)[-1:]


def damage(corpus, name):
    """Make a blob unreadable behind its header, so that its chunks are recomputed."""
    entry = corpus.find(name)
    stored = bytearray(corpus.catalog.store.get(entry.blob_key))
    stored[entry.header_bytes :] = bytes(len(stored) - entry.header_bytes)
    corpus.catalog.store.put(entry.blob_key, bytes(stored))


def test_the_tokenizer_has_a_bos_and_the_others_have_none(small, bos_engine, pieces):
    assert bos_engine.opening_tokens == (0,)
    assert small.engine.opening_tokens == ()
    ids = pieces["d0"]
    assert opening_of(small.engine, ids) == ()
    assert opening_of(bos_engine, ids) == (0,)
    assert opening_of(bos_engine, (0, *ids)) == ()
    assert opening_of(bos_engine, ids * (bos_engine.window // len(ids)) + ids[: bos_engine.window % len(ids)]) == ()
    assert opening_of(bos_engine, (-1, *ids)) == ()
    assert opened(bos_engine, (0, 5)) == opened(bos_engine, (5,)) == (0, 5)


def test_documents_are_computed_behind_the_bos_which_is_dropped(small, bos_engine, pieces):
    corpus = corpus_of(bos_engine, pieces)
    for name, ids in pieces.items():
        info = corpus.read_header(corpus.find(name))
        assert (info.neutral_prefix, info.opening, info.tokens) == ((0,), 1, len(ids))
        (prefill,) = bos_engine.prefill([(0, *ids)])
        found = corpus.decode(name, "lossless")
        assert cache_error(moved(found, 1), prefill.slice(1, len(ids) + 1)) < 1e-5
        assert cache_error(moved(found, 0), small.engine.prefill([ids])[0]) > 1e-2


@pytest.mark.parametrize("layers", [0, 1])
def test_one_document_and_a_question_are_a_full_prefill_with_bos(small, bos_engine, pieces, layers):
    corpus = corpus_of(bos_engine, pieces, prefix_layers=layers)
    answer = ask(small, bos_engine, corpus, ["d0"])
    wanted = whole(bos_engine, pieces, ["d0"])
    assert all(each.action == "fetch" for each in answer.decisions)
    assert answer.prompt.opening == (0,)
    assert mean_kl(wanted, answer.logits[None]) < (1e-6 if not layers else 1e-3)
    assert mean_kl(whole(small.engine, pieces, ["d0"]), answer.logits[None]) > 1e-4
    assert not answer.misses


def test_recomputed_documents_are_those_that_were_fetched(small, bos_engine, pieces):
    corpus = corpus_of(bos_engine, pieces)
    fetched = ask(small, bos_engine, corpus, ["d0", "d1"])
    for name in pieces:
        damage(corpus, name)
    computed = ask(small, bos_engine, corpus, ["d0", "d1"])
    assert all(each.action == "recompute" for each in computed.decisions)
    assert cache_error(computed.prompt.cache, fetched.prompt.cache) < 1e-4
    assert mean_kl(fetched.logits[None], computed.logits[None]) < 1e-6


def test_documents_kept_as_text_are_computed_behind_the_bos(small, bos_engine, pieces):
    corpus = corpus_of(bos_engine, pieces)
    with Loader(bos_engine, Corpus(bos_engine, MemoryStore()), costs=small.costs, settings=EXACT) as loader:
        texts = {name: list(ids) for name, ids in pieces.items()}
        answer = loader.ask(["d0", "d1"], bos_engine.tokenize(QUESTION, place="last"), texts=texts)
    assert cache_error(answer.prompt.cache, ask(small, bos_engine, corpus, ["d0", "d1"]).prompt.cache) < 1e-4


@pytest.mark.parametrize("repair", ["all", 0.3])
def test_repaired_rows_see_the_bos_and_are_kept(small, bos_engine, pieces, repair):
    corpus, names = corpus_of(bos_engine, pieces), ["d0", "d1"]
    wanted = whole(bos_engine, pieces, names)
    settings = LoadSettings(repair=repair, quality_floor=4, keep_repairs=True)
    answer = ask(small, bos_engine, corpus, names, settings)
    linked = mean_kl(wanted, ask(small, bos_engine, corpus, names).logits[None])
    repaired = mean_kl(wanted, answer.logits[None])
    assert repaired < (1e-6 if repair == "all" else linked)
    assert answer.front >= 1
    again = ask(small, bos_engine, corpus, names, settings)
    assert again.repair.kept > 0 or repair == "all"
    assert mean_kl(answer.logits[None], again.logits[None]) < 1e-3


def test_linked_documents_are_what_check_model_and_the_reference_measure(bos_engine, small, pieces):
    question = bos_engine.tokenize(QUESTION, place="last")
    reference = Reference.of(bos_engine, list(pieces.values()), question, 4, neutral=0)
    assert reference.start == 601
    assert mean_kl(reference.full[len(question) - 1 :][:1], whole(bos_engine, pieces, ["d0", "d1"])) < 1e-7
    answer = ask(small, bos_engine, corpus_of(bos_engine, pieces), ["d0", "d1"])
    assert reference.compare(bos_engine, answer.prompt.cache)[0] < 1e-6
    text = [token for ids in small.tokens.values() for token in ids]
    report = check_links(bos_engine, prompts_of([text], 2, bos_engine.window))
    assert report.repaired["first"][-1] < report.linked if "first" in report.repaired else report.linked > 0


def test_a_system_text_gets_one_bos(small, bos_engine, pieces):
    corpus, system = corpus_of(bos_engine, pieces), bos_engine.tokenize("Tell the truth. ", place="first")
    answers = [
        ask(small, bos_engine, corpus, ["d0"], replace(EXACT, system=tuple(each), layout=PLAIN))
        for each in (system, [0, *system])
    ]
    assert [answer.prompt.cache.tokens for answer in answers] == [len(system) + 301] * 2
    assert torch.equal(answers[0].logits, answers[1].logits)
    settings = LoadSettings(repair="all", quality_floor=4, system=tuple(system))
    repaired = ask(small, bos_engine, corpus, ["d0"], settings)
    assert mean_kl(whole(bos_engine, pieces, ["d0"], system), repaired.logits[None]) < 1e-6


def test_repairs_behind_a_system_text_are_kept_for_it_alone(small, bos_engine, pieces):
    corpus = corpus_of(bos_engine, pieces)
    systems = [tuple(bos_engine.tokenize(text, place="first")) for text in ("Tell the truth. ", "Lie to me. ")]
    settings = [LoadSettings(repair=0.3, keep_repairs=True, quality_floor=4, system=each) for each in (*systems, ())]
    kept = [ask(small, bos_engine, corpus, ["d0", "d1"], settings[number]).repair.kept for number in (0, 0, 1, 2, 1, 2)]
    assert kept[:1] + kept[2:4] == [0, 0, 0]
    assert min(kept[1], kept[4], kept[5]) > 0


def test_a_documents_own_bos_is_told_behind_a_system_text(small, bos_engine, pieces):
    own = {"d0": (0, *pieces["d0"])}
    corpus = corpus_of(bos_engine, own)
    system = tuple(bos_engine.tokenize("Tell the truth. ", place="first"))
    for each in ((), system):
        answer = ask(small, bos_engine, corpus, ["d0"], LoadSettings(quality_floor=4, system=each, repair="none"))
        assert any("BOS of its own" in miss for miss in answer.misses)


def test_appended_tokens_stand_behind_the_same_bos(small, bos_engine, pieces):
    corpus, ids = corpus_of(bos_engine, pieces), pieces["d1"]
    corpus.append("d0", ids[:80])
    grown = {"d0": (*pieces["d0"], *ids[:80])}
    assert corpus.read_header(corpus.find("d0")).opening == 1
    answer = ask(small, bos_engine, corpus, ["d0"])
    assert all(each.action == "fetch" for each in answer.decisions)
    assert mean_kl(whole(bos_engine, grown, ["d0"]), answer.logits[None]) < 1e-6
    corpus.compact("d0")
    assert corpus.read_header(corpus.find("d0")).opening == 1


def test_a_neutral_prefix_stands_behind_the_bos(small, bos_engine, pieces):
    corpus = corpus_of(bos_engine, pieces, neutral_prefix=5)
    ids = pieces["d1"]
    info = corpus.read_header(corpus.find("d1"))
    assert (info.neutral_prefix, info.opening) == ((0, *bos_engine.tokenize(NEUTRAL_TEXT)[-5:]), 1)
    (prefill,) = bos_engine.prefill([[*info.neutral_prefix, *ids]])
    assert cache_error(moved(corpus.decode("d1", "lossless"), 6), prefill.slice(6, 306)) < 1e-5
    again = Corpus(bos_engine, corpus.catalog.store, coding=Coding(lossless=True, neutral_prefix=5))
    assert all(each.skipped for each in again.encode([Document(name, ids) for name, ids in pieces.items()]))
    damage(corpus, "d1")
    answer = ask(small, bos_engine, corpus, ["d0", "d1"])
    assert cache_error(moved(answer.prompt.document(1), 6), prefill.slice(6, 306)) < 1e-4


def test_an_old_corpus_loads_is_told_and_is_encoded_again(small, bos_engine, pieces, monkeypatch, caplog):
    store = MemoryStore()
    with monkeypatch.context() as patch:
        without_bos(bos_engine, patch)
        old = corpus_of(bos_engine, pieces, store)
    keys = {name: old.find(name).blob_key for name in pieces}
    answer = ask(small, bos_engine, Corpus(bos_engine, store), ["d0", "d1"])
    told = [each for each in answer.misses if "encoded without the BOS" in each]
    assert len(told) == 2
    assert all("encode it again" in each for each in told)
    damage(old, "d1")  # rows of an old document are computed as its others were
    assert cache_error(ask(small, bos_engine, old, ["d0", "d1"]).prompt.cache, answer.prompt.cache) < 1e-4
    with caplog.at_level(logging.WARNING, "kvwire.encode"):
        corpus = Corpus(bos_engine, store, coding=Coding(lossless=True))
        done = list(corpus.encode([Document(name, ids) for name, ids in pieces.items()]))
    assert not any(each.skipped for each in done)
    assert sum("without the BOS" in each.message for each in caplog.records) == 1
    assert all(corpus.find(name).blob_key != key for name, key in keys.items())
    assert corpus.profile().notes["opening"] == 1
    assert not ask(small, bos_engine, corpus, ["d0", "d1"]).misses
    assert all(each.skipped for each in corpus.encode([Document(name, ids) for name, ids in pieces.items()]))


def test_a_few_lines_do_not_replace_what_many_texts_taught(bos_engine, pieces, monkeypatch):
    store = MemoryStore()
    with monkeypatch.context() as patch:
        without_bos(bos_engine, patch)
        old = corpus_of(bos_engine, pieces, store)
    corpus = Corpus(bos_engine, store, coding=Coding(lossless=True))
    list(corpus.encode([Document("short", pieces["d0"][:80])]))
    assert corpus.profile().digest == old.profile().digest


def test_an_empty_document_is_refused_as_everywhere(bos_engine):
    with pytest.raises(ArgumentError, match="without tokens"):
        bos_engine.prefill([()])
    with pytest.raises(ArgumentError, match="without tokens"):
        list(Corpus(bos_engine, MemoryStore()).encode([Document("empty", ())]))


def test_a_first_document_with_a_bos_of_its_own_is_told(small, bos_engine, pieces):
    own = pieces | {"d0": (0, *pieces["d0"])}
    corpus = corpus_of(bos_engine, own)
    (told,) = ask(small, bos_engine, corpus, ["d0", "d1"]).misses
    assert "'d0' begins with a BOS of its own" in told
    assert not any("'d0' begins" in each for each in ask(small, bos_engine, corpus, ["d1", "d0"]).misses)


def test_without_a_bos_nothing_is_said_and_nothing_stands_in_front(small, pieces):
    corpus = corpus_of(small.engine, pieces)
    info = corpus.read_header(corpus.find("d0"))
    assert (info.neutral_prefix, info.opening) == ((), 0)
    assert "opening" not in corpus.profile().notes
    answer = ask(small, small.engine, corpus, ["d0"])
    assert (answer.prompt.opening, answer.prompt.cache.tokens, answer.misses) == ((), 300, ())


def test_linked_prompts_take_an_opening_of_its_length_alone(bos_engine, pieces):
    caches = prefill_documents(bos_engine, list(pieces.values()))
    prompt = LinkedPrompt([300, 300], bos_engine.meta, opening=bos_engine.opening_tokens)
    assert (prompt.starts, prompt.lengths, prompt.cache.tokens) == ((1, 301), (301, 300), 601)
    for index, cache in enumerate(caches):
        prompt.write(index, 0, cache)
    with pytest.raises(ArgumentError, match="head of this prompt is 1 tokens"):
        prompt.write_opening(caches[0])
    prompt.write_opening(bos_engine.prefill([[0]])[0])
    assert cache_error(prompt.cache, link_opened(bos_engine, caches)) == 0
    with pytest.raises(ArgumentError, match="cannot start at position 0"):
        LinkedPrompt([300], bos_engine.meta, starts=[0], opening=(0,))


@pytest.mark.parametrize("opening", [2, -1])
def test_blobs_name_no_more_opening_tokens_than_they_have(bos_engine, pieces, opening):
    from kvwire.codec import encode

    (cache,) = prefill_documents(bos_engine, [pieces["d0"]])
    with pytest.raises((ArgumentError, CorruptError), match="opening tokens"):
        encode(cache, neutral_prefix=(0,), opening=opening)


def test_a_question_with_a_bos_in_front_is_told(small, bos_engine, pieces):
    corpus, question = corpus_of(bos_engine, pieces), bos_engine.tokenize(QUESTION, place="last")
    assert any(
        "begins with a BOS" in each for each in ask(small, bos_engine, corpus, ["d0"], question=[0, *question]).misses
    )
    assert not ask(small, bos_engine, corpus, ["d0"], question=question).misses


@pytest.fixture
def indexed(bos_engine, pieces):
    corpus = Corpus(bos_engine, MemoryStore(), coding=Coding(lossless=True))
    list(corpus.encode([Document(name, ids) for name, ids in pieces.items()], index=("kvwire", "sglang:32")))
    return corpus


def test_prompts_as_tokenizers_make_them_find_documents(bos_engine, indexed, pieces):
    prompt = [0, *pieces["d0"], 7, 8]
    hit = indexed.index().longest(prompt)
    assert (hit.document.document_id, hit.tokens, hit.opening) == ("d0", 301, 1)
    assert hit.token_ids == (0, *pieces["d0"])
    assert indexed.index().longest(prompt[1:]) is None
    assert indexed.index("sglang:32").longest(prompt[:80]).tokens == 80
    again = Corpus(bos_engine, indexed.catalog.store, coding=Coding(lossless=True))
    done = list(again.encode([Document(name, ids) for name, ids in pieces.items()], index=("kvwire",)))
    assert all(each.skipped for each in done)
    found = index_documents(indexed.catalog, indexed.catalog.keys(indexed.config), ("lmcache:64",))
    assert (found.documents, found.left_out, found.failures) == (3, 0, ())  # with the one of the BOS
    assert indexed.index("lmcache:64").longest(prompt).tokens == 301


@pytest.mark.parametrize("level", ["lossless", "finest"])
def test_chunks_for_other_engines_begin_with_the_rows_of_the_bos(bos_engine, indexed, pieces, level):
    (prefill,) = bos_engine.prefill([(0, *pieces["d1"])])
    reader = ChunkReader(indexed, "sglang", ChunkSettings(level=level, chunk_tokens=32, store=""))
    hashes = indexed.index("sglang:32").scheme.hashes([0, *pieces["d1"]])
    assert reader.find(hashes) == set(hashes)
    read = dict(reader.read(hashes, torch.float32))
    bound = 1e-5 if level == "lossless" else 0.1
    for number, each in enumerate(hashes):
        assert read[each].meta.offset == 32 * number
        assert cache_error(read[each], prefill.slice(32 * number, 32 * number + 32)) < bound
    indexed.catalog.remove(indexed.config, "bos-0")
    told, settings = [], ChunkSettings(level=level, chunk_tokens=32, store="")
    reader = ChunkReader(indexed, "sglang", settings, Troubles(told.append))
    assert reader.find(hashes) == set()
    assert any("rows of its BOS" in each for each in told)


def test_vllm_matches_the_bos_and_the_document_behind_it(indexed, pieces):
    matched = match_prefix(indexed, indexed.index(), Choice(prefix=True), [0, *pieces["d0"], 7])
    assert [(piece.document_id, piece.tokens) for piece in matched.pieces] == [("bos-0", 1), ("d0", 300)]
    assert matched.pieces[1].token_ids == pieces["d0"]
    question = [7, 8]
    body = request_body(indexed, Choice(documents=("d0", "d1")), question)
    assert body["prompt"] == [0, *pieces["d0"], *pieces["d1"], *question]
    matched = match_documents(indexed, Choice(documents=("d0", "d1")), body["prompt"])
    assert [(piece.document_id, piece.tokens) for piece in matched.pieces] == [("bos-0", 1), ("d0", 300), ("d1", 300)]
    assert not matched.trouble
    indexed.catalog.remove(indexed.config, "bos-0")
    matched = match_documents(indexed, Choice(documents=("d0",)), body["prompt"])
    assert (matched.pieces, "lacks the rows of the BOS" in matched.trouble) == ((), True)
    matched = match_prefix(indexed, indexed.index(), Choice(prefix=True), [0, *pieces["d0"], 7])
    assert (matched.pieces, "lacks the rows of the BOS" in matched.trouble) == ((), True)


def test_ids_for_generate_begin_with_the_bos(small, bos_engine, indexed, pieces):
    answer = ask(small, bos_engine, indexed, ["d0"])
    question = bos_engine.tokenize(QUESTION, place="last")
    for ids in (pieces["d0"], (0, *pieces["d0"])):
        made = generate_inputs(bos_engine, answer.prompt, question, document_ids=[ids])
        assert made["input_ids"].tolist() == [[0, *pieces["d0"], *question]]


@pytest.mark.parametrize("level", [2, 4])
def test_engines_without_weights_here_load_the_bos_and_documents(bos_engine, indexed, pieces, level):
    names, ids = ["bos-0", "d0", "d1"], [(0,), pieces["d0"], pieces["d1"]]
    goal = Goal(floor=level, ceiling=level)
    with PageLoader(Corpus.open(indexed.catalog.store), torch.float32) as loader:
        loaded = loader.load(names, ids, goal, level)
        part = loader.load(names[:2], ids[:2], goal, level)
    assert (loaded.tokens, part.tokens, loaded.troubles) == (601, 301, ())
    linked = link_opened(bos_engine, prefill_documents(bos_engine, list(pieces.values())))
    assert cache_error(loaded.cache.slice(0, 1), linked.slice(0, 1)) == 0
    assert cache_error(loaded.cache, linked) < (0.4 if level == 2 else 0.1)


def test_the_command_tells_of_the_bos(run, bos_model, tmp_path):
    (tmp_path / "a.txt").write_text("A bell rang over the toll gate. " * 20)
    words = ("--store", tmp_path / "store")
    assert run("encode", tmp_path / "a.txt", "--model", bos_model, "--neutral-prefix", 0, *words)[0] == 0
    code, out, _ = run("inspect", "a", *words)
    assert code == 0
    assert "computed behind 1 tokens that were dropped, the first 1 of them the tokenizer's BOS" in out
