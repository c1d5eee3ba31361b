"""Prefix mode of both halves without vLLM: what is promised, what is loaded, and whose salt it takes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvwire.engines.vllm.loading import PageLoader
from kvwire.engines.vllm.opening import ConnectorSettings
from kvwire.engines.vllm.requests import current_profile_digest, salt_of
from kvwire.engines.vllm.scheduling import ConnectorScheduler
from kvwire.errors import ArgumentError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import index_documents
from kvwire.transport import LinkSettings
from kvwire.vllm import Choice, request_body, request_salt

from .halves import BLOCK, Halves, check, damage

PREFIX = Choice(level=1, prefix=True)


@pytest.fixture
def indexed(told):
    """The documents with an index of chunks of 16 tokens."""
    index_documents(told.corpus.catalog, told.corpus.catalog.keys(told.corpus.meta.config_digest()), ["kvwire:16"])
    return told


@pytest.fixture
def halves(indexed):
    with closing(Halves(indexed, index="kvwire:16", least_tokens=BLOCK)) as made:
        yield made


def body(told, ids, choice=PREFIX):
    return request_body(told.corpus, choice, list(ids))


def alone(told, name, level=1):
    return told.corpus.decode(name, level, dtype=torch.float32)


def test_any_prompt_gets_the_document_that_it_begins_with(halves, indexed):
    prompt = [*indexed.tokens["a"], 1, 2, 3]
    bad, blocks, said, promised = halves.load(body(indexed, prompt))
    assert (bad, promised, said["promised_tokens"]) == (set(), 150, 150)
    check(halves, blocks, alone(indexed, "a"), 0, 150)
    assert "trouble" not in said


def test_a_prompt_gets_as_much_of_a_document_as_it_shares(halves, indexed):
    prompt = [*indexed.tokens["a"][:71], 255, *indexed.tokens["a"][72:]]
    bad, blocks, _, promised = halves.load(body(indexed, prompt))
    assert (bad, promised) == (set(), 71)
    check(halves, blocks, alone(indexed, "a"), 0, 71)
    after = halves.pages(blocks, 71, 150)
    assert not any(side.any() for layer in after for side in layer)


def test_no_more_chunks_are_fetched_than_are_needed(indexed, monkeypatch):
    loaded = []
    load = PageLoader.load
    monkeypatch.setattr(PageLoader, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    sizes = []
    for tokens in (32, 150):
        with closing(Halves(indexed, index="kvwire:16")) as halves:
            halves.load(body(indexed, [*indexed.tokens["a"][:tokens], 255]))
        sizes.append(loaded[-1].bytes)
    entry = indexed.corpus.find("a")
    info = indexed.corpus.read_header(entry)
    assert info.chunks == 5
    rest = sum(info.chunk_bytes(chunk, 1) for chunk in range(1, 5))
    assert sizes[1] - sizes[0] == rest


def test_the_last_token_of_a_prompt_is_always_computed(halves, indexed):
    _, _, _, promised = halves.load(body(indexed, indexed.tokens["b"]))
    assert promised == 96


@pytest.mark.parametrize(("computed", "promised"), [(0, 150), (64, 86), (128, 22), (144, 0)])
def test_less_than_a_block_is_not_worth_a_load(halves, indexed, computed, promised):
    bad, blocks, _, got = halves.load(body(indexed, [*indexed.tokens["a"], 1, 2, 3]), computed)
    assert (bad, got) == (set(), promised)
    check(halves, blocks, alone(indexed, "a"), computed, computed + promised)


def test_two_prompts_with_one_salt_do_not_share_their_ends(halves, indexed):
    """The ends of documents that fill no block are kept by salt, which says nothing of a prefix."""
    for name in "abab":
        bad, blocks, _, promised = halves.load(body(indexed, [*indexed.tokens[name], 1, 2, 3]))
        assert (bad, promised) == (set(), len(indexed.tokens[name]))
        check(halves, blocks, alone(indexed, name), 0, promised)


def test_a_prompt_that_nobody_stored_is_computed(halves, indexed):
    _, _, said, promised = halves.load(body(indexed, [9, 9, *indexed.tokens["a"]]))
    assert promised == 0
    assert "refused" not in said
    assert "trouble" not in said


def test_a_prompt_with_a_bos_in_front_is_told(halves, indexed):
    """As ``tokenizer(text)`` makes them: no document is ever found, so it says why."""
    _, _, said, promised = halves.load(body(indexed, [9, *indexed.tokens["a"]]))
    assert promised == 0
    assert "behind the prompt's first token, 9" in said["trouble"]


def test_a_damaged_chunk_costs_what_follows_it(halves, indexed):
    sound = alone(indexed, "a")
    damage(indexed, "a", 2)  # tokens 64 to 96
    bad, blocks, _, promised = halves.load(body(indexed, [*indexed.tokens["a"], 1]))
    assert promised == 150
    assert bad == set(blocks[64 // BLOCK : -(-150 // BLOCK)])
    check(halves, blocks, sound, 0, 64)


def test_an_index_that_leads_nowhere_is_told_and_computed(halves, indexed):
    catalog = indexed.corpus.catalog
    assert catalog.remove(indexed.corpus.meta.config_digest(), "a")
    _, _, said, promised = halves.load(body(indexed, [*indexed.tokens["a"], 1]))
    assert promised == 0
    assert "leads nowhere" in said["trouble"]
    assert "counts as a miss" in said["trouble"]


def test_what_comes_after_the_deadline_is_bad(indexed):
    asked = body(indexed, [*indexed.tokens["a"], 1], Choice(deadline_s=0.2, prefix=True))
    with closing(Halves(indexed, link=LinkSettings(1000.0), index="kvwire:16")) as halves:
        bad, blocks, _, promised = halves.load(asked)
        assert promised == 150
        assert bad == set(blocks[: -(-promised // BLOCK)])


@pytest.mark.parametrize("salt", [None, "", "kvwire-prefix", "0" * 64])
def test_a_request_with_another_salt_gets_nothing_and_is_told(halves, indexed, salt):
    asked = body(indexed, [*indexed.tokens["a"], 1])
    bad, _, said, promised = halves.load(asked | {"cache_salt": salt})
    assert (bad, promised) == (set(), 0)
    assert f'send "cache_salt": "{asked["cache_salt"]}"' in said["refused"]


def test_every_difference_gives_another_salt(told):
    tenant, config, profile = "0" * 32, told.corpus.meta.config_digest(), "a" * 64
    salts = {
        salt_of(PREFIX, tenant, config, (), profile),
        salt_of(PREFIX, "1" * 32, config, (), profile),
        salt_of(PREFIX, tenant, "f" * 64, (), profile),
        salt_of(PREFIX, tenant, config, (), "b" * 64),
        salt_of(PREFIX, tenant, config, (), ""),
        salt_of(replace(PREFIX, level=2), tenant, config, (), profile),
        salt_of(replace(PREFIX, deadline_s=1.0), tenant, config, (), profile),
        salt_of(Choice(("a",), level=1), tenant, config, [None]),
    }
    assert len(salts) == 8
    assert salt_of(replace(PREFIX, save=True), tenant, config, (), profile) in salts
    own = request_salt(told.corpus, PREFIX)
    assert own.startswith(f"kvwire-prefix-level-1-profile-{current_profile_digest(told.corpus)[:12]}-")


def test_a_document_of_another_profile_is_not_loaded(indexed):
    """The salt names the profile: rows of another one are other rows."""
    salt = request_salt(indexed.corpus, PREFIX)
    corpus = Corpus(indexed.engine, indexed.corpus.catalog.store, coding=Coding(chunk_tokens=32))
    corpus.calibrate([Document("d", indexed.tokens["c"])])
    assert request_salt(indexed.corpus, PREFIX) != salt
    with closing(Halves(indexed, index="kvwire:16")) as halves:
        asked = body(indexed, [*indexed.tokens["a"], 1])
        _, _, said, promised = halves.load(asked)
        assert promised == 0
        assert "another profile" in said["trouble"]
        _, _, said, _ = halves.load(asked | {"cache_salt": salt})
        assert "refused" in said


def test_rows_that_are_not_of_token_ids_alone_get_nothing(indexed):
    asked = body(indexed, [*indexed.tokens["a"], 1])
    with closing(ConnectorScheduler(indexed.corpus, index="kvwire:16")) as scheduling:
        scheduling.begin("adapter", asked["kv_transfer_params"], asked["prompt"], asked["cache_salt"], "an adapter")
        assert scheduling.promised("adapter", 0) == 0
        assert scheduling.end("adapter") == {"kvwire": {"trouble": "an adapter"}}


@pytest.mark.parametrize(
    ("params", "say"),
    [
        ({"prefix": True}, "say how good"),
        ({"prefix": 1, "level": 1}, "true or false"),
        ({"prefix": False, "level": 1}, "documents is a list"),
        ({"prefix": True, "documents": ["a"], "level": 1}, "not both"),
        ({"save": True, "documents": ["a"], "level": 1}, "never saved"),
        ({"save": 1}, "true or false"),
        ({"save": ""}, "prefix or save is true"),
        ({"save": "a\nb"}, "name it otherwise"),
        ({"save": "x", "documents": ["a"], "level": 1}, "never saved"),
    ],
)
def test_what_is_no_choice_is_refused(params, say):
    with pytest.raises(ArgumentError, match=say):
        Choice.read(params)


@pytest.mark.parametrize(
    "choice", [PREFIX, Choice(deadline_s=0.5, prefix=True, save=True), Choice(save=True)],
)  # fmt: skip
def test_a_choice_is_read_as_it_was_written(choice):
    assert Choice.read(choice.params()) == choice


def test_a_request_that_only_saves_needs_no_salt(told):
    assert request_body(told.corpus, Choice(save=True), [1, 2]) == {
        "prompt": [1, 2],
        "kv_transfer_params": {"kvwire": {"save": True}},
    }


def test_settings_name_index_and_saving():
    made = ConnectorSettings.read({"store": "file:///x", "index": "kvwire:128", "save": "asked"})
    assert (made.index, made.save) == ("kvwire:128", "asked")
    with pytest.raises(ArgumentError, match="save is one of off, asked, all"):
        ConnectorSettings.read({"store": "file:///x", "save": "yes"})
    with pytest.raises(ArgumentError, match="an index is one of"):
        ConnectorSettings.read({"store": "file:///x", "index": "vllm"})
