"""Documents of which only the first tokens are loaded: as if they ended there."""

from __future__ import annotations

import json

import pytest
import torch

import kvwire
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import link
from kvwire.runtime.corpus import Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.types import KVCache

FETCHED = CostModel(PrefillCost(10.0, 1.0), DecodeCost(1e-5, 1e-6))
COMPUTED = CostModel(PrefillCost(1e-6, 1e-7), DecodeCost(1.0, 1e-3))
QUESTION = [5, 6, 7]


def ask(small, corpus, costs, **settings):
    with Loader(small.engine, corpus, costs=costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask(list(small.tokens), QUESTION, tokens=2)


@pytest.mark.parametrize("costs", [FETCHED, COMPUTED])
@pytest.mark.parametrize("first", [1, 64, 100, 10_000])
def test_the_prompt_is_that_of_documents_that_end_there(small, first, costs):
    corpus = small.corpus(lossless=True, chunk_tokens=64)
    answer = ask(small, corpus, costs, exact=True, first_tokens=first, repair="none")
    texts = [ids[:first] for ids in small.tokens.values()]
    wanted = link(small.engine.prefill(texts))
    assert answer.prompt.tokens == tuple(map(len, texts))
    for ours, theirs in zip(answer.prompt.cache.values, wanted.values, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=5e-5)
    for ours, theirs in zip(answer.prompt.cache.keys, wanted.keys, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=5e-5)
    past = small.engine.past_key_values(wanted)
    logits = small.engine.forward(past, QUESTION, wanted.tokens, logits=1)
    assert torch.allclose(answer.logits, logits[-1].float(), atol=1e-4)
    assert (costs is COMPUTED) in {decision.level is None for decision in answer.decisions}
    assert len(answer.decisions) == sum(-(-len(ids) // 64) for ids in texts)
    assert not answer.misses


def test_fewer_chunks_are_fetched_and_a_level_is_cut_as_it_is_decoded(small):
    corpus = small.corpus(chunk_tokens=64)
    settings = {"quality_floor": 2, "quality_ceiling": 2, "repair": "none"}
    whole = ask(small, corpus, FETCHED, **settings)
    answer = ask(small, corpus, FETCHED, first_tokens=70, **settings)
    assert answer.bytes < 0.7 * whole.bytes
    wanted = link([corpus.decode(name, 2).slice(0, 70) for name in small.tokens])
    for ours, theirs in zip(answer.prompt.cache.keys, wanted.keys, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_expected_divergence_is_of_the_tokens_that_the_prompt_has(small):
    corpus = small.corpus(chunk_tokens=64)
    entries = [corpus.find(name) for name in small.tokens]
    infos = [corpus.read_header(entry) for entry in entries]
    for entry, info in zip(entries, infos, strict=True):  # the second chunk is damaged, and so computed
        (key,) = corpus.catalog.blobs.of(entry)
        at, data = info.reads(1, 0)[0].offset, corpus.catalog.store.get(key)
        corpus.catalog.store.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    answer = ask(small, corpus, FETCHED, first_tokens=70, quality_floor=2, quality_ceiling=2, repair="none")
    assert [each.level for each in answer.decisions] == [2, None] * len(entries)
    wanted = [info.levels[2].predicted_kl * 64 / 70 for info in infos]
    assert answer.document_kl == pytest.approx(wanted)
    assert answer.expected_kl == pytest.approx(sum(wanted) / len(wanted))


@pytest.mark.parametrize("selector", ["attention", "product", "first"])
def test_what_is_cut_is_repaired_behind_a_system_text(small, selector):
    corpus = small.corpus(deviation=True)
    system = tuple(next(iter(small.tokens.values()))[-20:])
    whole = [*system, *(token for ids in small.tokens.values() for token in ids[:100])]
    with Loader(
        small.engine, corpus, costs=FETCHED,
        settings=LoadSettings(first_tokens=100, system=system, repair=1.0, selector=selector, quality_floor=4),
    ) as loader:  # fmt: skip
        answer = loader.ask(list(small.tokens), QUESTION, deadline_s=30.0)
    assert answer.repair is not None
    wanted = small.engine.forward(None, [*whole, *QUESTION], 0, logits=1)[-1]
    assert torch.allclose(answer.logits, wanted.float(), atol=1e-3)


def test_only_what_is_loaded_has_to_fit(small):
    corpus, (name, _) = small.corpus(), small.tokens
    settings = LoadSettings(first_tokens=200, repair="none")
    with Loader(small.engine, corpus, costs=FETCHED, settings=settings) as loader:
        fitting = (small.engine.window - len(QUESTION)) // 200
        assert sum(loader.ask([name] * fitting, QUESTION).prompt.tokens) == 200 * fitting
        with pytest.raises(ArgumentError, match="the model's window is"):
            loader.ask([name] * (fitting + 1), QUESTION)


def test_what_cannot_be_cut_is_refused(small):
    corpus = small.corpus()
    for settings in ({"first_tokens": 0}, {"first_tokens": 9, "keep_repairs": True}):
        with pytest.raises(ArgumentError, match="first_tokens is 1 or more"):
            LoadSettings(**settings)
    settings = LoadSettings(first_tokens=9)
    with (
        Loader(small.engine, corpus, costs=FETCHED, settings=settings) as loader,
        pytest.raises(ArgumentError, match="first_tokens"),
    ):
        loader.ask_prompt([1, 2, 3, 4])


def test_a_pruned_document_is_loaded_whole_or_not_at_all(small):
    corpus, (name, ids) = small.corpus(), next(iter(small.tokens.items()))
    cache = small.engine.prefill([ids])[0]
    masks = [torch.arange(cache.tokens).remainder(3).ne(0).expand(spec.kv_heads, -1) for spec in cache.meta.layers]
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    blob = kvwire.encode(pruned, small.profile, lossless=True)
    header = corpus.catalog.blobs.reader().read_header(blob)
    corpus.encoder().write(Document(name, tuple(ids)), blob, header, small.profile)
    with pytest.raises(MismatchError, match="is pruned, and so loaded whole"):
        ask(small, corpus, FETCHED, first_tokens=70)


def test_the_command_line_cuts_documents(run, small, demo_model, tmp_path):
    store, texts = tmp_path / "store", tmp_path / "texts"
    store.mkdir()
    texts.mkdir()
    (texts / "text.txt").write_text(next(iter(small.texts.values()))[:1500])
    place = ["--model", demo_model, "--store", store]
    code, _, err = run("encode", texts, *place, "--calibration", "quick")
    assert code == 0, err
    code, out, err = run("ask", "--docs", "text", "--question", "And", "--first", 70, *place, "--tokens", 1, "--json")
    assert code == 0, err
    assert len(json.loads(out)["decisions"]) == 1
    code, _, err = run("ask", "--prompt", texts / "text.txt", "--first", 70, *place)
    assert "goes without --first" in err
