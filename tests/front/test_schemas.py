"""Schemas over a corpus: modules where the schema has them, arguments in their slots, and what does not fit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.reuse import Module, Parameter, Schema, fill_parameters, place_modules
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.schemas import sized
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

BELL, GATE = "02-the-bell-of-ashcombe", "09-the-toll-gate"
ROOM = 2000


@pytest.fixture(scope="module")
def schema(small):
    rooms = [Module("spare", tokens=100), Module("bell", BELL, ROOM)]
    slots = (Parameter("who", 7, 6), Parameter("where", 30, 3))
    return Schema((*rooms, Module("gate", GATE, len(small.tokens[GATE]), start=2300, parameters=slots)))


@pytest.fixture
def corpus(small):
    return small.corpus()


def asked(small, corpus, prompt, *, texts=None, **settings):
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask_schema(prompt, question, texts=texts), question


def in_the_library(small, corpus, prompt, question, lost=""):
    """The same without a loader: of the corpus where a blob is read, from the text where none is."""
    read = [name for name in prompt.documents if name != lost]
    caches = {name: corpus.decode(name) for name in read} | {lost: small.engine.prefill([small.tokens[GATE]])[0]}
    linked = place_modules([caches[name] for name in prompt.documents], prompt)
    fill_parameters(small.engine, linked, prompt.fills)
    return small.engine.forward(small.engine.past_key_values(linked.cache), question, prompt.tokens, logits=1)


@pytest.mark.parametrize("names", [["gate"], ["gate", "bell"]])
def test_a_load_puts_modules_and_arguments_where_the_schema_has_them(small, corpus, schema, names):
    arguments = {"gate.who": small.engine.tokenize(" Old Mary"), "gate.where": []}
    assert 0 < len(arguments["gate.who"]) <= 6
    prompt = schema.prompt(names, arguments)
    answer, question = asked(small, corpus, prompt, quality_floor=4)
    wanted = in_the_library(small, corpus, prompt, question)
    assert mean_kl(wanted, answer.logits[None]) < 1e-6
    assert answer.prompt.starts == prompt.starts
    assert answer.repair is None
    plain, _ = asked(small, corpus, schema.prompt(names), quality_floor=4)
    assert mean_kl(wanted, plain.logits[None]) > 1e-4


def test_a_module_whose_blob_is_lost_is_computed_where_it_stands(small, corpus, schema):
    prompt = schema.prompt(["bell", "gate"])
    corpus.catalog.store.delete(corpus.find(GATE).blob_key)
    answer, question = asked(small, corpus, prompt, quality_floor=4)
    assert {decision.chunk.document for decision in answer.decisions if decision.action == "recompute"} == {1}
    assert mean_kl(in_the_library(small, corpus, prompt, question, lost=GATE), answer.logits[None]) < 1e-6


FALLBACK = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


def in_bytes(ids):
    """As tokenizers with byte fallback read bytes: none of a run of them is a character before the run is valid."""
    return FALLBACK.decode([f"<0x{each:02X}>" for each in ids])


def located_naive(whole, slot, ids, detokenize):
    """All cuts between whole characters: the last one before the slot's text, the first one after it."""
    cuts = [count for count in range(len(ids) + 1) if whole.startswith(detokenize(ids[:count]))]
    lengths = {count: len(detokenize(ids[:count])) for count in cuts}
    before = whole.index(slot.text)
    first = max(count for count in cuts if lengths[count] <= before)
    return first, min(count for count in cuts if lengths[count] >= before + len(slot.text)) - first


@settings(deadline=None)
@given(st.text("ab é日本😀\u200d", min_size=1, max_size=24), st.data())
def test_a_slot_holds_whole_characters(small, text, data):
    """Also where a character has several tokens, of which the first ones alone are replacement characters."""
    first = data.draw(st.integers(0, len(text) - 1))
    words = text[first : data.draw(st.integers(first + 1, len(text)))]
    times = sum(text.startswith(words, at) for at in range(len(text)))
    slot = Parameter("words", text=words)
    module = Module("a", parameters=(slot,))
    for ids, detokenize in ((small.engine.tokenize(text), small.engine.detokenize), (text.encode(), in_bytes)):
        texts = {"a": tuple(ids)}
        if times != 1:
            with pytest.raises(ArgumentError, match=f"is {times} times"):
                sized(Schema((module,)), Corpus(small.engine, MemoryStore()), detokenize, texts)
            continue
        found = sized(Schema((module,)), Corpus(small.engine, MemoryStore()), detokenize, texts).modules[0]
        assert found.tokens == len(ids)
        (slot_found,) = found.parameters
        assert (slot_found.at, slot_found.tokens) == located_naive(text, slot, ids, detokenize)


def test_a_slot_is_not_filled_in_another_text(small, corpus):
    """Neither once the document was replaced, nor in a text that was given for it: the slot is where it was."""
    words = " ".join(small.texts[GATE].split()[3:6])
    schema = Schema((Module(GATE, tokens=ROOM, parameters=(Parameter("words", text=words),)),))
    prompt = sized(schema, corpus, small.engine.detokenize).prompt([GATE], {f"{GATE}.words": [5]})
    asked(small, corpus, prompt)
    other = tuple(small.tokens[GATE][1:])
    with pytest.raises(ArgumentError, match="locate the schema's slots again"):
        asked(small, corpus, prompt, texts={GATE: other})
    list(corpus.encode([Document(GATE, other)]))
    with pytest.raises(ArgumentError, match="locate the schema's slots again"):
        asked(small, corpus, prompt)
    again = sized(schema, corpus, small.engine.detokenize)
    assert asked(small, corpus, again.prompt([GATE], {f"{GATE}.words": [5]}))[0].misses == ()
    given_text = sized(schema, Corpus(small.engine, MemoryStore()), small.engine.detokenize, {GATE: other})
    assert given_text == again


def test_loads_of_schemas_refuse_what_cannot_be(small, corpus, schema):
    with pytest.raises(ArgumentError, match="repair none or auto"):
        asked(small, corpus, schema.prompt(["gate"]), repair=0.2)
    for taken in ({"system": (5, 6)}, {"first_tokens": 9}):
        with pytest.raises(ArgumentError, match="leave out first_tokens, layout and system"):
            asked(small, corpus, schema.prompt(["gate"]), **taken)
    narrow = Schema((Module("bell", BELL, 20),))
    with pytest.raises(ArgumentError, match="has room for 20 tokens"):
        asked(small, corpus, narrow.prompt(["bell"]))
    far = Schema((Module("bell", BELL, ROOM, start=small.engine.window - ROOM),))
    with pytest.raises(ArgumentError, match="name fewer documents or shorten the question"):
        asked(small, corpus, far.prompt(["bell"]))
    with pytest.raises(NotFoundError):
        asked(small, Corpus(small.engine, MemoryStore()), schema.prompt(["bell"]))


def test_a_corpus_tells_lengths_and_slots(small, corpus):
    words = " ".join(small.texts[GATE].split()[3:6])
    assert small.texts[GATE].count(words) == 1
    open_schema = Schema((Module(BELL), Module(GATE, parameters=(Parameter("words", text=words),))))
    known = sized(open_schema, corpus, small.engine.detokenize)
    assert [module.tokens for module in known.modules] == [len(small.tokens[BELL]), len(small.tokens[GATE])]
    (slot,) = known.modules[1].parameters
    covered = small.engine.detokenize(small.tokens[GATE][slot.at : slot.at + slot.tokens])
    assert covered.strip() == words
    assert sized(known, Corpus(small.engine, MemoryStore())) == known
    with pytest.raises(ArgumentError, match="give detokenize"):
        sized(open_schema, corpus)
    nowhere = Schema((Module(GATE, parameters=(Parameter("words", text="no such words"),)),))
    with pytest.raises(ArgumentError, match="0 times"):
        sized(nowhere, corpus, small.engine.detokenize)


def test_the_command_reads_schemas(run, small, demo_model, tmp_path):
    store, file = f"file://{tmp_path}/store", tmp_path / "schema.json"
    folder = demo_model.parent / "documents"
    files = [folder / f"{name}.txt" for name in (BELL, GATE)]
    assert run("encode", *files, "--model", demo_model, "--store", store)[0] == 0
    words = " ".join(small.texts[GATE].split()[3:6])
    slot = {"name": "words", "text": words}
    said = {"modules": [{"name": "bell", "document": BELL}, {"name": "gate", "document": GATE, "parameters": [slot]}]}
    file.write_text(json.dumps(said))
    asking = ("ask", "--schema", file, "--question", "Who?", "--tokens", 1, "--model", demo_model, "--store", store)
    code, out, err = run(*asking, "--docs", "gate", "bell", "--argument", "gate.words= a lamp", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert list(dict.fromkeys(row["document"] for row in found["decisions"])) == ["bell", "gate"]
    assert run(*asking, "--docs", "gate", "--texts", folder)[0] == 0
    assert run(*asking, "--docs", "gate", "--argument", "gate.words")[0] == 2
    assert run(*asking, "--docs", "gate", "--argument", f"gate.words={words} {words} {words}")[0] == 2
    assert run(*asking, "--docs", "tower")[0] == 2
    other = tmp_path / "other"
    assert run(*asking[:-1], f"file://{other}", "--docs", "gate", "--texts", folder)[0] == 0
    assert run(*asking[:-1], f"file://{other}", "--docs", "gate")[0] == 3
    assert run("ask", "--docs", BELL, *asking[3:], "--argument", "gate.words=x")[0] == 2
    file.write_text("[]")
    assert run(*asking, "--docs", "gate")[0] == 2
    file.unlink()
    assert run(*asking, "--docs", "gate")[0] != 0


def test_a_schema_of_documents_as_token_ids(small):
    """Nothing of a schema needs a tokenizer."""
    corpus = Corpus(small.engine, MemoryStore())
    list(corpus.encode([Document("a", tuple(range(5, 45)))]))
    prompt = sized(Schema((Module("a", start=9),)), corpus).prompt(["a"])
    answer, _ = asked(small, corpus, prompt)
    assert answer.prompt.cache.tokens == 49
