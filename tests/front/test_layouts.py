"""Loads and commands with layouts: link tokens, markers, system text and soft tokens, up to the answer."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvwire.engines.transformers import TransformersEngine, open_engine
from kvwire.errors import ArgumentError, LinkBoundError, MismatchError
from kvwire.reuse import (
    PLAIN,
    LinkLayout,
    SoftTokens,
    kvlink,
    link_documents,
    repair_laid_out,
    selector_of,
    soft_links,
    turborag,
    wrappers,
)
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.document import FoundDocument, OpenDocument
from kvwire.runtime.links import plan_links
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore
from kvwire.transport.testing import serving

KVLINK_VOCABULARY = 128_256
LINKS = LinkLayout("some links", opening=(40,), links=((41, 42), (43, 44), (45, 46)), closing=(47,), ending=(48,))


def tiny(vocabulary: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
        )
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def names(small):
    return list(small.tokens)[:2]


@pytest.fixture
def corpus(small):
    return small.corpus()


def asked(small, corpus, names, *, texts=None, engine=None, **settings):
    engine = engine or small.engine
    question = small.engine.tokenize("And the lamp was")
    with Loader(engine, corpus, costs=small.costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask(names, question, texts=texts), question


def in_the_library(engine, corpus, names, layout, question, system=()):
    """The same without a loader."""
    caches = [corpus.decode(name) for name in names]
    prompt = layout.lay_out([layout.own_length(cache.tokens) for cache in caches], question, system)
    linked = link_documents(engine, caches, prompt)
    past = engine.own_past(linked.cache)
    return engine.forward(past, [*question, *layout.ending], prompt.question_start, logits=1)


def test_a_load_computes_link_tokens(small, corpus, names):
    system = tuple(small.engine.tokenize("Tell what you know."))
    answer, question = asked(small, corpus, names, layout=LINKS, system=system, quality_floor=4)
    assert not answer.misses
    wanted = in_the_library(small.engine, corpus, names, LINKS, question, system)
    assert mean_kl(wanted, answer.logits[None]) < 1e-6
    assert answer.computed == len(system) + 2 + 2 * 2
    assert answer.timing.front_s > 0
    assert answer.repair is None
    plain, _ = asked(small, corpus, names, quality_floor=4, repair="none")
    assert mean_kl(plain.logits[None], answer.logits[None]) > 1e-4
    assert (plain.computed, plain.timing.front_s) == (0, 0.0)


def test_the_plain_layout_is_todays_load_bit_for_bit(small, corpus, names):
    before, _ = asked(small, corpus, names, quality_floor=4, repair="none")
    after, _ = asked(small, corpus, names, quality_floor=4, repair="none", layout=PLAIN)
    assert torch.equal(before.logits, after.logits)


def test_a_system_text_stands_before_the_documents(small, corpus, names):
    system = tuple(small.engine.tokenize("Tell what you know."))
    answer, question = asked(small, corpus, names, system=system, quality_floor=4, repair="none")
    assert answer.computed == len(system)
    assert answer.timing.front_s > 0
    assert not answer.misses
    assert mean_kl(in_the_library(small.engine, corpus, names, PLAIN, question, system), answer.logits[None]) < 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_a_system_text_leaves_repair_and_its_floor_on(small, corpus, names, count):
    """All rows of all documents, the first one's too, are what a prefill of the whole prompt computes."""
    system = tuple(small.engine.tokenize("Tell what you know."))
    whole = [*system, *(token for name in names[:count] for token in small.tokens[name])]
    answer, question = asked(small, corpus, names[:count], system=system, quality_floor=4, repair="all")
    full = small.engine.forward(None, [*whole, *question], 0, logits=1)
    assert mean_kl(full, answer.logits[None]) < 1e-6
    some, _ = asked(small, corpus, names[:count], system=system, quality_floor=4, repair_floor=0.3)
    blind, _ = asked(small, corpus, names[:count], system=system, quality_floor=4, repair="none")
    assert not some.misses
    assert int(some.repair.rows[0]) >= len(system)
    assert len(some.repair.rows) == pytest.approx(0.3 * (len(whole) - len(system)), abs=0.02 * len(whole))
    assert mean_kl(full, some.logits[None]) < mean_kl(full, blind.logits[None])


def test_a_first_document_that_is_computed_sees_the_system_text(small, corpus, names):
    corpus.catalog.store.delete(corpus.find(names[0]).blob_key)
    system = tuple(small.engine.tokenize("Tell what you know."))
    answer, question = asked(small, corpus, names[:1], system=system, repair="none")
    assert {each.action for each in answer.decisions} == {"recompute"}
    full = small.engine.forward(None, [*system, *small.tokens[names[0]], *question], 0, logits=1)
    assert mean_kl(full, answer.logits[None]) < 1e-6
    assert answer.front == answer.prompt.cache.tokens


def test_kept_repairs_belong_to_the_system_text_that_they_saw(small, names):
    corpus = small.corpus()
    systems = [tuple(small.engine.tokenize(text)) for text in ("Tell what you know.", "Say nothing at all.")]
    first, again, other = (
        asked(small, corpus, names, system=each, quality_floor=4, repair=0.3, keep_repairs=True)[0]
        for each in (systems[0], systems[0], systems[1])
    )
    assert (first.repair.kept, other.repair.kept) == (0, 0)
    assert again.repair.kept == len(first.repair.rows)
    assert mean_kl(first.logits[None], again.logits[None]) < 1e-3


def test_lost_documents_are_computed_in_their_places(small, corpus, names):
    for name in names:
        corpus.catalog.store.delete(corpus.find(name).blob_key)
    system = tuple(small.engine.tokenize("Tell what you know."))
    answer, question = asked(small, corpus, names, layout=LINKS, system=system)
    assert {each.action for each in answer.decisions} == {"recompute"}
    prompt = LINKS.lay_out([small.tokens[name] for name in names], question, system)
    wanted = small.engine.masked_forward(prompt.token_ids, prompt.visible())[-1:]
    assert mean_kl(wanted, answer.logits[None]) < 1e-6  # its sum in float32 is off by some 2e-7
    assert float((wanted[0] - answer.logits).abs().max() / wanted.abs().max()) < 1e-5
    assert answer.prompt.starts == prompt.starts
    assert answer.front == 0


def repaired_in_the_library(engine, caches, texts, question, system, selector, share):
    prompt = LINKS.lay_out(texts, question, system)
    linked = link_documents(engine, caches, prompt)
    asking = [*question, *LINKS.ending]
    done = repair_laid_out(engine, linked, prompt, texts, asking, selector_of(selector), share)
    return done.rows, engine.forward(engine.own_past(linked.cache), asking, prompt.question_start, logits=1)


@pytest.mark.parametrize(("selector", "share"), [("attention", 0.15), ("first", 0.3), ("auto", 0.15), ("all", 1.0)])
def test_rows_are_repaired_beside_link_tokens(small, corpus, names, selector, share):
    """The same rows as in the library, and the same answer; of blobs, and of texts whose blobs are lost."""
    system = tuple(small.engine.tokenize("Tell what you know."))
    texts = [small.tokens[name] for name in names]
    chosen = {"repair": "all"} if share == 1 else {"repair": share, "selector": selector}
    settings = {"layout": LINKS, "system": system, "quality_floor": 4, **chosen}
    selector = "attention" if selector == "auto" else selector
    answer, question = asked(small, corpus, names, **settings)
    caches = [corpus.decode(name) for name in names]
    rows, logits = repaired_in_the_library(small.engine, caches, texts, question, system, selector, share)
    assert answer.repair.rows.tolist() == rows.tolist()
    assert abs(len(rows) - share * sum(map(len, texts))) < 1
    assert mean_kl(logits, answer.logits[None]) < 1e-6
    unrepaired, _ = asked(small, corpus, names, **{**settings, "repair": "none"})
    assert mean_kl(logits, unrepaired.logits[None]) > 1e-5
    assert answer.computed == unrepaired.computed
    for name in names:
        corpus.catalog.store.delete(corpus.find(name).blob_key)
    lost, _ = asked(small, corpus, names, **settings)
    exact = small.engine.prefill(texts)
    rows, logits = repaired_in_the_library(small.engine, exact, texts, question, system, selector, share)
    assert lost.repair.rows.tolist() == rows.tolist()
    assert mean_kl(logits, lost.logits[None]) < 1e-6
    assert {each.action for each in lost.decisions} == {"recompute"}


def test_all_rows_of_a_layout_are_a_pass_over_the_whole_prompt(small, corpus, names):
    system = tuple(small.engine.tokenize("Tell what you know."))
    answer, question = asked(small, corpus, names, layout=LINKS, system=system, repair="all")
    prompt = LINKS.lay_out([small.tokens[name] for name in names], question, system)
    whole = small.engine.forward(None, prompt.token_ids, 0, logits=1)
    assert mean_kl(whole, answer.logits[None]) < 1e-6


def test_a_single_document_sees_what_stands_before_it(small, corpus, names):
    system, name = tuple(small.engine.tokenize("Tell what you know.")), names[:1]
    answer, question = asked(small, corpus, name, layout=LINKS, system=system, quality_floor=4, repair="all")
    prompt = LINKS.lay_out([small.tokens[name[0]]], question, system)
    wanted = small.engine.forward(None, prompt.token_ids, 0, logits=1)
    assert mean_kl(wanted, answer.logits[None]) < 1e-6  # shapes round differently
    assert len(answer.repair.rows) == len(small.tokens[name[0]])
    some, _ = asked(small, corpus, name, layout=LINKS, system=system, quality_floor=4, repair=0.2)
    assert len(some.repair.rows) == -int(-0.2 * len(small.tokens[name[0]]) // 1)
    for more in ({"layout": LINKS, "repair": "none"}, {"repair": 0.2}):
        assert asked(small, corpus, name, quality_floor=4, **more)[0].repair is None


def test_a_selector_that_drops_rows_is_not_taken_by_itself(small, corpus, names, monkeypatch):
    """A report may have found one best for plain links."""
    monkeypatch.setattr("kvwire.runtime.links.DEFAULT_SELECTOR", "blend")
    assert plan_links(0.15, None, "auto", None, None).selector.name == "blend"
    answer, _ = asked(small, corpus, names, layout=LINKS, repair=0.15)
    assert answer.repair.selector == "attention"


def test_nothing_of_a_prompt_is_stored_under_a_documents_name(small, corpus, names):
    """Link rows depend on several documents: whoever could store them would poison what others load."""
    store = corpus.catalog.store
    before = {key: store.get(key) for key in store.keys("")}
    asked(small, corpus, names, layout=LINKS, quality_floor=4, keep_repairs=True)
    asked(small, corpus, names, layout=LINKS, quality_floor=4, keep_repairs=True, repair=0.2)
    assert {key: store.get(key) for key in store.keys("")} == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layout": LinkLayout("one", links=((1,),))}, "link tokens for 1 documents, the prompt has 2"),
        ({"layout": kvlink(5)}, "has the token 128255, the model's vocabulary ends before"),
        ({"layout": soft_links(2)}, r"give the file of them \(--soft-tokens\)"),
        ({"layout": LINKS, "repair": 0.2, "selector": "cacheblend"}, "drops rows from layer to layer"),
        ({"layout": LINKS, "system": (7,) * 4000}, "put around them and question are"),
        ({"layout": turborag([1], [2])}, "encode it with that layout"),
    ],
)
def test_what_does_not_fit_is_refused(small, corpus, names, settings, words):
    with pytest.raises((ArgumentError, MismatchError), match=words):
        asked(small, corpus, names, **settings)


def test_a_bound_on_links_asks_for_a_measurement_of_plain_links_alone(small, corpus, names):
    with pytest.raises(LinkBoundError):
        asked(small, corpus, names, link_bound=0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama with the vocabulary of KVLink's checkpoints, whose tokenizer knows some words."""
    folder = tmp_path_factory.mktemp("kvlink")
    tiny(KVLINK_VOCABULARY).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, 200)}, unk_token="?"))  # noqa: S106 - a word
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)  # noqa: S106 - a word
    return folder


def text(seed: int, count: int) -> str:
    return " ".join(f"w{(seed * 37 + i * i) % 199 + 1}" for i in range(count))


@pytest.mark.parametrize("name", ["kvlink:0", "kvlink:1", "kvlink:5", "kvlink:5:evaluation"])
def test_kvlink_end_to_end_over_http(checkpoint, tmp_path, run, name):
    """Encoded into a folder, served, asked with the preset: the answer is that of one masked pass over the prompt."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for index, count in enumerate((40, 7, 90)):
        (texts / f"d{index}.txt").write_text(text(index, count))
    store = f"file://{tmp_path / 'store'}"
    code, _, err = run("encode", texts, "--model", checkpoint, "--store", store, "--lossless")
    assert code == 0, err
    documents = ["d2", "d0", "d1"]
    with serving(FolderStore(tmp_path / "store")) as url:
        code, out, err = run(
            "ask", "--docs", *documents, "--question", "w5 w9 w2", "--system", "w3 w4", "--links", name, "--floor", 7,
            "--model", checkpoint, "--store", url, "--tokens", 3, "--json",
        )  # fmt: skip
        asked_whole = run(
            "ask", "--docs", *documents, "--question", "w5 w9 w2", "--system", "w3 w4", "--links", name, "--repair",
            "all", "--model", checkpoint, "--store", url, "--json",
        )  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    engine = open_engine(checkpoint)
    counts = name.split(":")
    layout = kvlink(int(counts[1]), chat="evaluation" if len(counts) > 2 else "")
    ids = [engine.tokenize((texts / f"{each}.txt").read_text()) for each in documents]
    prompt = layout.lay_out(ids, engine.tokenize("w5 w9 w2"), engine.tokenize("w3 w4"))
    logits = engine.masked_forward(prompt.token_ids, prompt.visible())
    assert answer["tokens"][0] == int(logits[-1].argmax())
    assert answer["computed_tokens"] == len(prompt.front_rows()[0])
    assert asked_whole[0] == 0, asked_whole
    assert json.loads(asked_whole[1])["tokens"][0] == int(engine.forward(None, prompt.token_ids, 0)[-1].argmax())
    assert answer["front_s"] > 0
    plain = PLAIN.lay_out(ids, engine.tokenize("w5 w9 w2"))
    assert not torch.equal(engine.masked_forward(plain.token_ids, plain.visible())[-1], logits[-1])


@pytest.fixture
def soft_file(small, tmp_path):
    """Soft tokens of the small corpus's model, as training would leave them."""
    generator = torch.Generator().manual_seed(1)
    table = small.engine.model.get_input_embeddings().weight
    rows = table[torch.randint(0, len(table), (5,), generator=generator)].detach()
    soft = SoftTokens(rows, "wrappers:3+2", small.engine.meta.model_id, small.engine.meta.model_revision)
    path = tmp_path / "soft.safetensors"
    path.write_bytes(soft.to_bytes())
    return path


def own_engine(small):
    """The same model with hooks of its own."""
    meta = small.engine.meta
    return TransformersEngine(copy.deepcopy(small.engine.model), small.engine.tokenizer, model_id=meta.model_id,
                              revision=meta.model_revision, tokenizer_id=meta.tokenizer_digest)  # fmt: skip


def wrapped_corpus(small, soft, *, store=None, tenant="default"):
    engine = own_engine(small)
    engine.use_soft_tokens(soft)
    corpus = Corpus(engine, store or MemoryStore(), tenant=tenant, coding=Coding(layout=soft.link_layout))
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    return engine, corpus


def test_wrapped_documents_load_as_one_masked_pass_has_them(small, names, soft_file):
    """Encoded with the wrappers inside, loaded with and without the file; and from the text where the blob is lost."""
    soft = SoftTokens.from_bytes(soft_file.read_bytes())
    engine, corpus = wrapped_corpus(small, soft)
    info = corpus.read_header(corpus.find(names[0]))
    assert info.soft_tokens == soft.name(engine.vocabulary_size)
    assert info.tokens == len(small.tokens[names[0]]) + 5
    layout = soft.link_layout
    question = small.engine.tokenize("And the lamp was")
    prompt = layout.lay_out([small.tokens[name] for name in names], question)
    wanted = engine.masked_forward(prompt.token_ids, prompt.visible())[-1:]
    answer, _ = asked(small, corpus, names, engine=engine, layout=layout, quality_floor=4)
    unwrapped = PLAIN.lay_out([small.tokens[name] for name in names], question)
    without = small.engine.masked_forward(unwrapped.token_ids, unwrapped.visible())[-1:]
    assert mean_kl(wanted, answer.logits[None]) < 0.01 * mean_kl(wanted, without)
    assert answer.computed == 0
    assert all(each.action == "level" or each.level is not None for each in answer.decisions)
    bare, _ = asked(small, Corpus(small.engine, corpus.catalog.store), names, quality_floor=4, repair="none")
    assert mean_kl(answer.logits[None], bare.logits[None]) < 1e-6
    for name in names:
        corpus.catalog.store.delete(corpus.find(name).blob_key)
    anew, _ = asked(small, corpus, names, engine=engine, layout=layout)
    assert {each.action for each in anew.decisions} == {"recompute"}
    assert mean_kl(wanted, anew.logits[None]) < 1e-6
    texts = {name: small.tokens[name] for name in names}
    given, _ = asked(small, corpus, names, engine=engine, layout=layout, texts=texts)
    assert mean_kl(wanted, given.logits[None]) < 1e-6


def test_wrapped_and_unwrapped_blobs_are_kept_apart(small, names, soft_file):
    soft = SoftTokens.from_bytes(soft_file.read_bytes())
    store = MemoryStore()
    engine, corpus = wrapped_corpus(small, soft, store=store)
    first = corpus.find(names[0])
    again = list(corpus.encode([Document(names[0], tuple(small.tokens[names[0]]))]))
    assert [each.skipped for each in again] == [True]
    other = SoftTokens(soft.embeddings.flip(0), soft.layout, soft.model_id, soft.model_revision)
    engine.use_soft_tokens(other)
    with pytest.raises(MismatchError, match="other soft tokens; encode with those"):
        list(corpus.encode([Document(names[0], tuple(small.tokens[names[0]]))]))
    corpus.calibrate([Document(name, corpus.text(corpus.find(name))) for name in names])
    (changed,) = corpus.encode([Document(names[0], tuple(small.tokens[names[0]]))])
    assert not changed.skipped
    assert changed.entry.blob_key != first.blob_key
    plain = Corpus(small.engine, store)
    with pytest.raises(MismatchError, match="other soft tokens; encode with those"):
        list(plain.encode([Document(names[0], tuple(small.tokens[names[0]]))]))
    plain.set_profile(small.profile)
    (unwrapped,) = plain.encode([Document(names[0], tuple(small.tokens[names[0]]))])
    assert not unwrapped.skipped
    assert unwrapped.info.soft_tokens is None
    assert unwrapped.entry.token_digest != first.token_digest


def test_other_soft_tokens_are_refused(small, names, soft_file):
    soft = SoftTokens.from_bytes(soft_file.read_bytes())
    engine, corpus = wrapped_corpus(small, soft)
    other = SoftTokens(soft.embeddings.flip(0), soft.layout, soft.model_id, soft.model_revision)
    engine.use_soft_tokens(other)
    with pytest.raises(MismatchError, match=r"was encoded with the soft tokens .*in use are"):
        asked(small, corpus, names, engine=engine, layout=soft.link_layout)
    with pytest.raises(MismatchError, match="encode it with that layout"):
        asked(small, small.corpus(), names, engine=engine, layout=soft.link_layout)


def test_soft_tokens_are_compared_with_all_that_names_them(small, names, soft_file):
    soft = SoftTokens.from_bytes(soft_file.read_bytes())
    engine, corpus = wrapped_corpus(small, soft)
    entry = corpus.find(names[0])
    info, used = corpus.read_header(entry), soft.name(engine.vocabulary_size)
    for changed in ({}, {"digest": "0" * 64}, {"first": used.first + 1}, {"count": used.count + 1}):
        document = OpenDocument(FoundDocument(corpus, names[0], entry, None, None), None)
        document = document.with_header(replace(info, soft_tokens=replace(used, **changed)), None)
        expected = pytest.raises(MismatchError, match="encode the document again") if changed else nullcontext()
        with expected:
            document.with_soft_tokens(used)


def test_layouts_with_tokens_in_caches_are_encoded_alone(small, soft_file):
    for wrong in ({"neutral_prefix": 8}, {"prefix_layers": 1}, {"deviation": True}):
        with pytest.raises(ArgumentError, match="encode without prefix layers"):
            Coding(layout=wrappers(3, 2), **wrong)
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(layout=wrappers(3, 2)))
    with pytest.raises(ArgumentError, match=r"give the file of them \(--soft-tokens\)"):
        list(corpus.encode([Document("a", (1, 2, 3))]))
    soft = SoftTokens.from_bytes(soft_file.read_bytes())
    engine = own_engine(small)
    engine.use_soft_tokens(soft)
    corpus = Corpus(engine, MemoryStore(), coding=Coding(layout=soft.link_layout))
    with pytest.raises(ArgumentError, match="cannot begin a prompt"):
        list(corpus.encode([Document("a", (1, 2, 3))], index=["kvwire"]))


def test_soft_tokens_on_the_command_line(small, demo_model, run, tmp_path, soft_file):
    """Encode, inspect, plan, ask and the errors of each file that is none."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, words in small.texts.items():
        (texts / f"{name}.txt").write_text(words)
    store, names = f"file://{tmp_path / 'store'}", list(small.texts)[:2]
    common = ("--model", demo_model, "--store", store)
    code, _, err = run("encode", texts, *common, "--soft-tokens", soft_file)
    assert code == 0, err
    code, out, _ = run("inspect", names[0], "--store", store, "--json")
    assert code == 0
    assert json.loads(out)["soft_tokens"] == SoftTokens.from_bytes(soft_file.read_bytes()).digest
    code, out, _ = run("inspect", names[0], "--store", store)
    assert "computed with 5 soft tokens" in out
    code, out, err = run("plan", "--docs", *names, *common, "--link", "50mbit", "--json")
    assert code == 0, err
    assert names[0] in out
    ask = ("ask", "--docs", *names, "--question", "And the lamp was", *common, "--tokens", 4, "--json", "--floor", 4)
    answers = [run(*ask, *more) for more in ((), ("--soft-tokens", soft_file), ("--links", "wrappers:3+2"))]
    assert [code for code, _, _ in answers] == [0, 0, 0], answers
    assert len({tuple(json.loads(out)["tokens"]) for _, out, _ in answers}) == 1
    code, _, err = run(*ask, "--links", "wrappers:8+8", "--soft-tokens", soft_file)
    assert code != 0
    assert "takes 16 soft tokens, the file has 5" in err
    for wrong, words in ((tmp_path / "none", "is not there"), (texts / f"{names[0]}.txt", "no file of soft tokens")):
        code, _, err = run(*ask, "--soft-tokens", wrong)
        assert code != 0
        assert words in err
    code, _, err = run(*ask, "--links", "kvlink:5")
    assert code != 0
    assert "has the token 128255" in err
