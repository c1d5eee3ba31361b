"""Loads that are asked to be exact: lossless levels, or texts, and nothing else."""

import json

import pytest
import torch

from kvwire import controller as ctl
from kvwire.engines.transformers import open_engine
from kvwire.errors import ArgumentError
from kvwire.reuse import link
from kvwire.runtime import runner as loaders
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.document import FoundDocument, OpenDocument
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore

SLOW = ctl.CostModel(ctl.PrefillCost(60.0, 10.0), ctl.DecodeCost(0.0001, 1e-7))
"""With an engine that is so slow, what can be fetched is fetched."""
EXACT = LoadSettings(exact=True, repair="none", shift=False)


@pytest.fixture(scope="module")
def store(small):
    """Two documents with a lossless level, and one without."""
    place = MemoryStore()
    corpus = Corpus(small.engine, place, coding=Coding(lossless=True))
    corpus.set_profile(small.profile)
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    list(corpus.encode(documents))
    list(Corpus(small.engine, place).encode([Document("lossy", documents[0].token_ids[:300])]))
    return place


def exact_prompt(small, names, more):
    ids = dict(small.tokens) | more
    return link([small.engine.prefill([ids[name]])[0] for name in names])


def parts_of(cache):
    return [*cache.keys, *cache.values]


@pytest.mark.parametrize("deadline_s", [None, 30.0])
def test_lossless_levels_are_bit_for_bit_what_the_engine_computes(small, store, deadline_s):
    corpus, question = Corpus(small.engine, store), small.engine.tokenize("It was plain")
    with Loader(small.engine, corpus, costs=SLOW, settings=EXACT) as loader:
        answer = loader.ask(list(small.tokens), question, deadline_s=deadline_s, tokens=4)
    levels = corpus.read_header(corpus.find(next(iter(small.tokens)))).levels
    assert [level.lossless for level in levels] == [*(len(levels) - 1) * [False], True]
    assert {(each.action, each.level) for each in answer.decisions} == {("fetch", len(levels) - 1)}
    expected = exact_prompt(small, list(small.tokens), {})
    assert all(map(torch.equal, parts_of(answer.prompt.cache), parts_of(expected)))
    assert (answer.error, answer.misses) == (0.0, ())


def test_a_document_without_a_lossless_level_is_computed_and_told(small, store):
    corpus, question = Corpus(small.engine, store), small.engine.tokenize("It was plain")
    with Loader(small.engine, corpus, costs=SLOW, settings=EXACT) as loader:
        answer = loader.ask(["lossy"], question)
    assert {decision.action for decision in answer.decisions} == {"recompute"}
    assert answer.misses == ("lossy: it has no lossless level; encode it with --lossless",)
    expected = exact_prompt(small, ["lossy"], {"lossy": next(iter(small.tokens.values()))[:300]})
    for part, other in zip(parts_of(answer.prompt.cache), parts_of(expected), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-4)


def test_a_lossless_level_of_another_dtype_is_not_exact(small, store, demo_model):
    engine = open_engine(demo_model, dtype=torch.bfloat16)
    corpus, name = Corpus(engine, store), next(iter(small.tokens))
    with Loader(engine, corpus, costs=SLOW, settings=EXACT) as loader:
        answer = loader.ask([name], engine.tokenize("It was plain"))
    assert {decision.action for decision in answer.decisions} == {"recompute"}
    assert answer.misses == (
        f"{name}: its numbers are float32, this engine computes bfloat16: encode it with --dtype bfloat16 --lossless",
    )
    expected = link([engine.prefill([small.tokens[name]])[0]])  # in one pass; a slow machine takes several
    for part, other in zip(parts_of(answer.prompt.cache), parts_of(expected), strict=True):
        torch.testing.assert_close(part, other, rtol=0.05, atol=0.1)


def test_numbers_of_another_dtype_are_told_where_the_text_is_not_known(small, store):
    corpus, name = Corpus(small.engine, store), next(iter(small.tokens))
    entry = corpus.find(name)
    document = OpenDocument(FoundDocument(corpus, name, entry, None, None), None, corpus.read_header(entry))
    assert document.as_exact_as("float32") is document
    told = document.as_exact_as("bfloat16")
    assert (told.info, told.trouble.split(",")[0]) == (document.info, "its numbers are float32")


def test_an_engine_that_is_quick_computes_the_text(small, store):
    quick = ctl.CostModel(ctl.PrefillCost(0.0, 1e-7), ctl.DecodeCost(60.0, 1.0))
    with Loader(small.engine, Corpus(small.engine, store), costs=quick, settings=EXACT) as loader:
        answer = loader.ask(list(small.tokens), small.engine.tokenize("It was plain"))
    found = {(decision.action, decision.level) for decision in answer.decisions}
    assert ("recompute", None) in found
    assert found <= {("recompute", None), ("fetch", 5)}  # one chunk may try the link
    assert all("given up: " in miss for miss in answer.misses)  # and be given up
    assert answer.error == 0.0


def test_without_exact_no_lossless_level_is_loaded(small, store):
    with Loader(small.engine, Corpus(small.engine, store), costs=SLOW) as loader:
        answer = loader.ask(list(small.tokens), small.engine.tokenize("It was plain"), deadline_s=30.0)
    assert max(decision.level for decision in answer.decisions) < 5


@pytest.mark.parametrize("bound", [{"quality_floor": 1}, {"quality_ceiling": 3}])
def test_exact_goes_with_no_bound_on_quality(bound):
    with pytest.raises(ArgumentError, match="leave out the floor and the ceiling"):
        LoadSettings(exact=True, **bound)


@pytest.fixture
def folder(store, tmp_path):
    with_files = FolderStore(tmp_path)
    with_files.put_many((key, store.get(key)) for key in store.keys(""))
    with_files.close()
    return f"file://{tmp_path}"


def test_the_command_asks_for_it(run, small, folder, demo_model, monkeypatch):
    monkeypatch.setattr(loaders, "measure_costs", lambda *_: SLOW)
    names = list(small.tokens)
    words = ("--question", "It was plain", "--model", demo_model, "--store", folder, "--repair", "none", "--tokens", 5)
    code, out, err = run("ask", "--docs", *names, "lossy", *words, "--exact", "--json")
    assert code == 0, err
    told = json.loads(out)
    levels = {decision["document"]: decision["level"] for decision in told["decisions"]}
    assert levels == {names[0]: 5, names[1]: 5, "lossy": None}
    assert told["measured_error"] == 0
    assert told["misses"] == ["lossy: it has no lossless level; encode it with --lossless"]
    cache = exact_prompt(small, [*names, "lossy"], {"lossy": small.tokens[names[0]][:300]})
    question = small.engine.tokenize("It was plain")
    logits = small.engine.forward(small.engine.past_key_values(cache), question, cache.tokens, logits=1)
    assert told["tokens"][0] == int(logits[-1].argmax())
    assert run("ask", "--docs", *names, *words, "--exact", "--floor", 2)[0] == 2


def test_the_plan_tells_it_alike(run, small, folder, demo_model, tmp_path):
    names = list(small.tokens)
    words = ("--machine", "h100", "--shape", "llama-3.1-8b")
    assert run("plan", "--context", "8k", *words, "--exact")[0] == 2
    code, out, err = run(
        "plan", "--docs", *names, "lossy", "--model", demo_model, "--store", folder, "--exact", "--link", "1gbit,1ms",
        "--deadline", 60, "--json",
    )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    assert {each["name"] for each in told["alternatives"] if each["name"].startswith("level")} == {"level 5 (lossless)"}
    code, out, err = run(
        "plan", "--docs", names[0], "--model", demo_model, "--store", folder, "--exact", "--link", "1gbit,1ms",
        "--dtype", "bfloat16", "--json",
    )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    trouble = "its numbers are float32, this engine computes bfloat16: encode it with --dtype bfloat16 --lossless"
    assert told["notes"] == [f"{names[0]}: {trouble}"]
    assert {chunk["action"] for chunk in told["chunks"]} == {"recompute"}
