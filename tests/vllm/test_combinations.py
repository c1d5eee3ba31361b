"""Documents that are linked again and again become right by themselves: counted, repaired beside vLLM, then loaded."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import pytest
import torch

from kvwire.cli import main
from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.errors import ArgumentError, CorruptError
from kvwire.reuse import link
from kvwire.runtime.combinations import Combination, CombinationRepairer
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.quality import mean_kl
from kvwire.store import UseCounts, UseFile
from kvwire.vllm import BodyMaker, Wanted

from ..engines.test_chat import CHATML, HEADERS, TEXTS
from .conftest import chat_store
from .halves import Halves

TEXT = {"one": TEXTS[0] * 6, "two": TEXTS[1].strip() * 5 + "\n", "three": TEXTS[0] + TEXTS[1].strip() + "\n"}
LEVEL = 3


@pytest.fixture(scope="module", params=[(CHATML, False), (HEADERS, True)], ids=["chatml", "headers and a BOS"])
def place(request, tmp_path_factory):
    template, bos = request.param
    with chat_store(tmp_path_factory.mktemp("combined"), template, TEXT, bos=bos) as made:
        yield made


def bodies(place, counts, **wanted):
    """Bodies of a prompt and of a chat with all documents, the chat's with its tokens."""
    told, model = place
    pieces = open_tokenizer(model)
    maker = BodyMaker(Corpus.open(told.corpus.catalog.store), pieces, Wanted(LEVEL, **wanted), counts)
    inside = "".join(f"{{{{kvwire:{name}}}}}" for name in TEXT)
    prompt = maker.prepare({"prompt": f"{inside}Why?"}, is_chat=False).body
    chat = maker.prepare({"messages": [{"role": "user", "content": f"Read.\n{inside}Why?"}]}, is_chat=True).body
    rendered = pieces.tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
    return prompt, chat | {"prompt": rendered}


def kl(told, body, cache):
    """Divergence of what is said behind a cache from full prefill's, over the question and what follows."""
    engine, prompt = told.engine, body["prompt"]
    rest = [*prompt[cache.tokens :], *range(40, 56)]
    right = engine.forward(None, [*prompt[: cache.tokens], *rest], 0, logits=len(rest))
    return mean_kl(right, engine.forward(engine.past_key_values(cache), rest, cache.tokens))


def loaded(told, body):
    """What both halves write into pages, as a cache."""
    with closing(Halves(told)) as halves:
        bad, blocks, said, promised = halves.load(body)
        assert (bad, said.get("trouble")) == (set(), None)
        pairs = halves.pages(blocks, 0, promised)
    empty = told.engine.prefill([body["prompt"][:promised]])[0]
    for layer, (keys, values) in enumerate(pairs):
        empty.keys[layer].copy_(keys)
        empty.values[layer].copy_(values)
    return empty


def test_what_is_asked_a_second_time_becomes_right_by_itself(place):
    told, _ = place
    counts, repairer = UseCounts(), CombinationRepairer(told.corpus, told.engine, 1 << 30)
    before = bodies(place, counts)
    told.corpus.encoder().put_exact(Document("head", tuple(before[1]["prompt"][: head_of(before[1])])))
    blind = [kl(told, body, loaded(told, body)) for body in before]
    assert not list(repairer.repair_due(counts, 2))  # each was asked for once
    assert all("repair" not in body["kv_transfer_params"]["kvwire"] for body in bodies(place, counts))
    done = list(repairer.repair_due(counts, 2))
    assert [each.documents for each in done] == [tuple(TEXT)] * 2
    assert all(each.rows > 20 for each in done)
    after = bodies(place, counts)
    assert all(body["kv_transfer_params"]["kvwire"]["repair"] == "kept" for body in after)
    assert all(mine["cache_salt"] != theirs["cache_salt"] for mine, theirs in zip(before, after, strict=True))
    right = [kl(told, body, loaded(told, body)) for body in after]
    assert all(mine < 0.2 * theirs for mine, theirs in zip(right, blind, strict=True)), (blind, right)
    assert not list(repairer.repair_due(counts, 2))
    other = next(iter(bodies(place, None)))  # of a proxy that counts nothing
    assert "repair" not in other["kv_transfer_params"]["kvwire"]


def head_of(body):
    return body["kv_transfer_params"]["kvwire"]["head"]


def test_kept_rows_behind_a_chats_beginning_are_written_where_they_belong(place):
    told, _ = place
    counts, repairer = UseCounts(), CombinationRepairer(told.corpus, told.engine, 1 << 30)
    chat = bodies(place, counts)[1]
    told.corpus.encoder().put_exact(Document("head", tuple(chat["prompt"][: head_of(chat)])))
    list(repairer.repair_due(counts, 1))
    chat = bodies(place, counts)[1]
    whole = head_of(chat) + sum(len(ids) for ids in told.tokens.values())
    (right,) = told.engine.prefill([chat["prompt"][:whole]])
    found = loaded(told, chat)
    linked = link(
        [right.slice(0, head_of(chat)), *(told.corpus.decode(name, LEVEL, dtype=torch.float32) for name in TEXT)]
    )
    for mine, exact in zip(found.values, right.values, strict=True):
        assert (mine - exact).norm() < 0.2 * exact.norm()
    assert (found.values[-1] - right.values[-1]).norm() < 0.5 * (linked.values[-1] - right.values[-1]).norm()


@pytest.mark.parametrize("text", ["", "[]", '{"documents":["a"],"head":[]}', '{"documents":["a","b"],"head":["x"]}'])
def test_damaged_counts_are_told_and_left(place, text):
    told, _ = place
    with pytest.raises(CorruptError, match="delete the file of counts"):
        Combination.of_json(text)
    counts, repairer = UseCounts(), CombinationRepairer(told.corpus, told.engine, 1 << 30)
    for each in (text, Combination(("one", "gone")).to_json()):
        counts.add(told.corpus.scope, each)
    troubles = [each.trouble for each in repairer.repair_due(counts, 1)]
    assert len(troubles) == 2
    assert any("gone" in each for each in troubles)
    assert not list(repairer.repair_due(counts, 1))


def test_what_is_longer_than_the_window_is_refused(place):
    told, _ = place
    head = tuple([7] * 2040)
    with pytest.raises(ArgumentError, match="window 2048"):
        CombinationRepairer(told.corpus, told.engine, 1 << 30).repair(Combination(("one", "two"), head))


def test_the_command_repairs_what_the_file_counts(place, tmp_path, monkeypatch, capsys):
    told, model = place
    with closing(UseFile(tmp_path / "uses")) as counts:
        for _ in range(2):
            counts.add(told.corpus.scope, Combination(("two", "one")).to_json())
    monkeypatch.setattr(sys, "argv", [
        "kvwire", "repair", "--combinations", str(tmp_path / "uses"), "--model", str(model),
        "--store", f"file://{told.root}", "--json",
    ])  # fmt: skip
    main()
    assert json.loads(capsys.readouterr().out)["documents"] == ["two", "one"]
