"""Questions in a chat: the template stands around linked documents, and everything else works as without."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import kvwire
from kvwire import Chat, Turn
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError
from kvwire.reuse import PLAIN
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
CHAT = Chat(system="Tell what you know.", turns=(Turn("user", "Hm?"), Turn("assistant", "Yes.")), before="Read:\n")
QUESTION = "And the lamp was"


@pytest.fixture(scope="module")
def chatting(small):
    tokenizer = copy.deepcopy(small.engine.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return TransformersEngine(small.engine.model, tokenizer, model_id=small.engine.meta.model_id)


@pytest.fixture(scope="module")
def names(small):
    return sorted(small.tokens)[:3]


@pytest.fixture
def corpus(small, chatting, names):
    made = Corpus(chatting, MemoryStore())
    made.set_profile(small.profile)
    list(made.encode([Document(name, tuple(small.tokens[name])) for name in names]))
    return made


def asked(small, chatting, corpus, names, question=QUESTION, chat=CHAT, tokens=1, **settings):
    with Loader(chatting, corpus, costs=small.costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask(names, question, chat=chat, tokens=tokens)


def whole_of(small, chatting, names, chat=CHAT, question=QUESTION):
    """What the template gives, with the documents' own tokens."""
    rendered = chatting.render_chat(chat, question)
    return [*rendered.head, *(token for name in names for token in small.tokens[name]), *rendered.tail]


@pytest.mark.parametrize("count", [1, 3])
def test_a_chat_that_is_repaired_whole_answers_as_a_prefill_of_it(small, chatting, corpus, names, count):
    answer = asked(small, chatting, corpus, names[:count], quality_floor=4, repair="all")
    full = chatting.forward(None, whole_of(small, chatting, names[:count]), 0, logits=1)
    assert mean_kl(full, answer.logits[None]) < 1e-6
    assert answer.computed == len(chatting.render_chat(CHAT, QUESTION).head)
    assert not answer.misses


def test_a_chat_keeps_repair_on(small, chatting, corpus, names):
    full = chatting.forward(None, whole_of(small, chatting, names), 0, logits=1)
    some = asked(small, chatting, corpus, names, quality_floor=4, repair_floor=0.3)
    blind = asked(small, chatting, corpus, names, quality_floor=4, repair="none")
    assert len(some.repair.rows)
    assert mean_kl(full, some.logits[None]) < mean_kl(full, blind.logits[None])


def test_plain_generation_on_the_same_prompt_says_the_same(small, chatting, corpus, names):
    answer = asked(small, chatting, corpus, names, tokens=12, repair=0.3)
    inputs = kvwire.generate_inputs(chatting, answer.prompt, QUESTION, chat=CHAT)
    stop = sorted(chatting.render_chat(CHAT, QUESTION).stop | chatting.end_tokens)
    out = chatting.model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=stop)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == list(answer.tokens)
    other = Chat(system="Say nothing.")
    with pytest.raises(ArgumentError, match="do not begin as this chat does"):
        kvwire.generate_inputs(chatting, answer.prompt, QUESTION, chat=other)
    with pytest.raises(ArgumentError, match="questions are texts"):
        kvwire.generate_inputs(chatting, answer.prompt, [1, 2], chat=CHAT)


def test_the_answer_ends_with_the_turn(small, chatting, corpus, names, monkeypatch):
    free = asked(small, chatting, corpus, names, tokens=6)
    rendered = type(chatting).render_chat
    stop = frozenset({free.tokens[2]})
    monkeypatch.setattr(type(chatting), "render_chat", lambda *given: replace(rendered(*given), stop=stop))
    answer = asked(small, chatting, corpus, names, tokens=6)
    first = free.tokens.index(free.tokens[2])
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.text == chatting.detokenize(answer.tokens[:-1], special=False)


def test_one_document_behind_a_system_text_has_kept_repairs(small, chatting, names):
    corpus = Corpus(chatting, MemoryStore())
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(names[0], tuple(small.tokens[names[0]]))]))
    first, again = (asked(small, chatting, corpus, names[:1], repair=0.3, keep_repairs=True) for _ in range(2))
    assert (first.repair.kept, again.repair.kept) == (0, len(first.repair.rows))


def test_kept_rows_leave_a_first_document_alone_that_was_computed(small, chatting, names):
    corpus = Corpus(chatting, MemoryStore(), coding=Coding(neutral_prefix=0))
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(small.tokens[name])) for name in names]))
    asked(small, chatting, corpus, names, repair=0.3, keep_repairs=True, quality_ceiling=0, max_kl=None)
    corpus.catalog.store.delete(corpus.find(names[0]).blob_key)
    answers = [
        asked(small, chatting, corpus, names, repair=0.3, keep_repairs=kept, quality_ceiling=0, max_kl=None)
        for kept in (True, False)
    ]
    ours, plain = (answer.prompt.document(0).keys[-1] for answer in answers)
    assert answers[0].repair.kept
    assert float((ours - plain).abs().max()) < 1e-4


def test_seams_are_told(small, chatting, names):
    corpus = Corpus(chatting, MemoryStore())
    corpus.set_profile(small.profile)
    text = "The lamp was lit."
    cuts = (text[:at] for at in range(1, len(text)))
    cut = next(
        at for at in cuts if chatting.tokenize(text) != [*chatting.tokenize(at), *chatting.tokenize(text[len(at) :])]
    )
    list(corpus.encode([Document("cut", (*small.tokens[names[0]], *chatting.tokenize(cut)))]))
    assert not asked(small, chatting, corpus, ["cut"], "\n").misses
    (told,) = asked(small, chatting, corpus, ["cut"], text[len(cut) :]).misses
    assert "differ from the chat template's" in told


def test_what_does_not_go_together_is_refused(small, chatting, corpus, names):
    with pytest.raises(ArgumentError, match="the question is a text"):
        asked(small, chatting, corpus, names, [1, 2, 3])
    for settings in ({"system": (3, 4)}, {"layout": PLAIN}):
        with pytest.raises(ArgumentError, match=r"Chat\(system"):
            asked(small, chatting, corpus, names, **settings)


@pytest.mark.parametrize("wrong", [[1], [b"a"], "a", [None]])
def test_documents_are_names(small, chatting, corpus, wrong):
    with pytest.raises(ArgumentError, match="documents are"):
        asked(small, chatting, corpus, wrong)


def test_a_question_may_be_a_text_without_a_chat(small, chatting, corpus, names):
    text = asked(small, chatting, corpus, names, chat=None, repair="none")
    ids = asked(small, chatting, corpus, names, chatting.tokenize(QUESTION, place="last"), chat=None, repair="none")
    assert torch.equal(text.logits, ids.logits)


def test_the_command_asks_in_a_chat(small, demo_model, tmp_path, run):
    model = tmp_path / "model"
    model.mkdir()
    for file in demo_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    told = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    texts = tmp_path / "texts"
    texts.mkdir()
    name, text = next(iter(small.texts.items()))
    (texts / f"{name}.txt").write_text(text)
    place = ["--model", model, "--store", f"file://{tmp_path}/store"]
    run("encode", texts, *place)
    base = ["ask", "--docs", name, "--question", QUESTION, "--tokens", "3", "--json", *place]
    plain, chat, other = (
        json.loads(run(*base, *more)[1])
        for more in ([], ["--chat"], ["--chat", "--system", "Be brief.", "--before", "Read: "])
    )
    assert (plain["computed_tokens"], chat["computed_tokens"]) == (0, 4)
    assert other["computed_tokens"] > chat["computed_tokens"]
    assert run(*base, "--before", "x")[0] == 2
