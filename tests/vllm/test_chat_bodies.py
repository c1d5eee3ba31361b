"""Chats with documents in the user's turn: the template's own tokens, and rows from its first token on."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import pytest
import torch

from kvwire.cli import main
from kvwire.engines.transformers import open_engine
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore
from kvwire.types import Chat, Turn
from kvwire.vllm import Choice, chat_body

from ..engines.families import config_of, make_model
from ..engines.test_chat import CHATML, ENDS, HEADERS, QUESTION, TEXTS, tokenizer_of
from .conftest import Told
from .halves import Halves, check

CHAT = Chat("Be of help.", (Turn("user", "Hello"), Turn("assistant", "Yes?")), before="Read this:\n")
CHOICE = Choice(("one", "two"), level=2)


@pytest.fixture(scope="module", params=[(CHATML, False), (HEADERS, True)], ids=["chatml", "headers and a BOS"])
def model(request, tmp_path_factory):
    template, bos = request.param
    folder = tmp_path_factory.mktemp("chat") / "model"
    config = config_of("llama")
    config.vocab_size, config.max_position_embeddings = 512, 2048
    make_model(config).save_pretrained(folder)
    tokenizer_of(template, bos=bos).save_pretrained(folder)
    return folder


@pytest.fixture
def place(model, tmp_path):
    engine = open_engine(model, dtype=torch.float32)
    with closing(FolderStore(tmp_path / "store")) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=32, neutral_prefix=0))
        names = {"one": TEXTS[0] * 9, "two": TEXTS[1].strip() * 5 + "\n"}
        tokens = {name: tuple(engine.tokenize(text)) for name, text in names.items()}
        list(corpus.encode([Document(name, ids) for name, ids in tokens.items()]))
        yield Told(tmp_path / "store", engine, corpus, tokens), names


def test_a_chat_is_loaded_from_its_first_token_to_the_question(model, place):
    told, texts = place
    tokens = told.corpus.put_chat_head(CHAT)
    told.corpus = Corpus.open(told.corpus.catalog.store)
    body = chat_body(told.corpus, CHOICE, CHAT, QUESTION, tokenizer=model, max_tokens=3)
    turns = [
        {"role": "system", "content": "Be of help."}, {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Read this:\n" + texts["one"] + texts["two"] + QUESTION},
    ]  # fmt: skip
    tokenizer = told.engine.tokenizer
    assert body["prompt"] == tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(body["stop_token_ids"]) == [ENDS[tokenizer.chat_template]]
    with closing(Halves(told)) as halves:
        bad, blocks, said, promised = halves.load(body)
        (head,) = told.engine.prefill([body["prompt"][:tokens]])
        cache = link([head, *(told.corpus.decode(name, 2, dtype=torch.float32) for name in texts)])
        assert (bad, promised, said["level"]) == (set(), cache.tokens, 2)
        check(halves, blocks, cache, 0, cache.tokens)


def test_without_the_rows_before_the_documents_it_is_told_what_to_do(model, place):
    told, _ = place
    with pytest.raises(NotFoundError, match="run kvwire encode --chat once"):
        chat_body(told.corpus, CHOICE, CHAT, QUESTION, tokenizer=model)
    told.corpus.put_chat_head(CHAT)
    body = chat_body(told.corpus, CHOICE, CHAT, QUESTION, tokenizer=model)
    body["prompt"][0] += 1
    with closing(Halves(told)) as halves:
        _, _, said, promised = halves.load(body)
    assert promised == 0
    assert "run kvwire encode --chat once" in said["trouble"]


def test_tokens_that_are_not_the_templates_are_refused(model, place):
    told, _ = place
    told.corpus.put_chat_head(CHAT)
    cut = Document("cut", tuple(told.engine.tokenize("The keeper lit the la")))  # " lamp" is one token
    list(told.corpus.encode([cut]))
    with pytest.raises(ArgumentError, match="differ from the chat template's at token"):
        chat_body(told.corpus, Choice(("cut",), level=1), CHAT, "mp at six?", tokenizer=model)
    with pytest.raises(ArgumentError, match="a chat's request names documents"):
        chat_body(told.corpus, Choice(prefix=True, level=1), CHAT, QUESTION, tokenizer=model)


def test_commands_keep_a_chats_head_and_print_its_body(model, tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kvwire", *words, "--model", str(model), "--store", url])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    url, said = f"file://{tmp_path / 'kv'}", ("--chat", "--system", "Be of help.")
    (tmp_path / "one.txt").write_text(TEXTS[0] * 40)
    assert run("encode", str(tmp_path / "one.txt"), *said)[0] == 0
    asked = ("salt", "--docs", "one", "--level", "1", "--question", QUESTION)
    code, out, _ = run(*asked, *said)
    assert code == 0
    with closing(FolderStore(tmp_path / "kv")) as store:
        corpus = Corpus.open(store)
        with closing(Halves(Told(tmp_path / "kv", None, corpus, {}))) as halves:
            body = json.loads(out)
            assert halves.load(body)[3] == body["kv_transfer_params"]["kvwire"]["head"] + corpus.find("one").tokens
    (tmp_path / "two.txt").write_text(TEXTS[0] * 40 + " \n")
    code, _, err = run("encode", str(tmp_path / "two.txt"), str(tmp_path / "one.txt"), *said)
    assert (code, "'two' in a chat: the tokens differ" in err, "'one' in a chat" in err) == (0, True, False)
    code, _, err = run(*asked, *said, "--before", "Read:")
    assert (code, "run kvwire encode --chat once" in err) == (3, True)
    for words in (("--before", "Read:"), ("--chat", "--computed", "one")):
        assert run(*asked, *words)[0] == 2
