"""Documents of which anchors alone are stored, and such that tokens were dropped of, in loads and commands."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from kvwire.codec import encode
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, MismatchError, StorageError
from kvwire.reuse import (
    Anchors,
    LinkedPrompt,
    LinkLayout,
    SoftTokens,
    anchors,
    compute_cached,
    compute_piece,
    link_documents,
    stored_tokens,
)
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore
from kvwire.transport.testing import serving
from kvwire.types import KVCache

from ..engines.families import config_of, make_model, query, tokens

LAYOUT = anchors(40, 8)
QUESTION = "And the lamp was"


def soft_of(small, name=LAYOUT.name, count=8, seed=1):
    """Soft tokens as training would leave them: embeddings of some words."""
    table = small.engine.model.get_input_embeddings().weight
    rows = table[torch.randint(0, len(table), (count,), generator=torch.Generator().manual_seed(seed))].detach()
    return SoftTokens(rows, name, small.engine.meta.model_id, small.engine.meta.model_revision)


def engine_with(small, soft):
    """The same model with hooks of its own."""
    meta = small.engine.meta
    engine = TransformersEngine(copy.deepcopy(small.engine.model), small.engine.tokenizer, model_id=meta.model_id,
                                revision=meta.model_revision, tokenizer_id=meta.tokenizer_digest)  # fmt: skip
    engine.use_soft_tokens(soft)
    return engine


@pytest.fixture(scope="module")
def soft_engine(small):
    return engine_with(small, soft_of(small))


@pytest.fixture(scope="module")
def blobs(small, soft_engine):
    """Everything that encoding wrote."""
    corpus = Corpus(soft_engine, MemoryStore(), coding=Coding(layout=LAYOUT, lossless=True))
    for _ in corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]):
        pass
    return {key: corpus.catalog.store.get(key) for key in corpus.catalog.store.keys("")}


@pytest.fixture
def corpus(soft_engine, blobs):
    store = MemoryStore()
    for key, data in blobs.items():
        store.put(key, data)
    return Corpus(soft_engine, store, coding=Coding(layout=LAYOUT, lossless=True))


@pytest.fixture(scope="module")
def names(small):
    return list(small.tokens)[:2]


def asked(small, engine, corpus, names, *, texts=None, **settings):
    with Loader(engine, corpus, costs=small.costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask(names, small.engine.tokenize(QUESTION), texts=texts)


def wanted_of(small, engine, names, layout=LAYOUT, system=()):
    """The library's own way: caches computed and pruned, linked, and the question run on them."""
    question = small.engine.tokenize(QUESTION)
    prompt = layout.lay_out([small.tokens[name] for name in names], question, system)
    linked = link_documents(engine, [compute_cached(engine, layout, small.tokens[name]) for name in names], prompt)
    return engine.forward(engine.own_past(linked.cache), question, prompt.question_start, logits=1)


def read_of(small, engine, corpus, names, system=()):
    """What caches as they are read without a load give, linked by the library."""
    question = small.engine.tokenize(QUESTION)
    prompt = LAYOUT.lay_out([small.tokens[name] for name in names], question, system)
    linked = link_documents(engine, [corpus.decode(name) for name in names], prompt)
    return engine.forward(engine.own_past(linked.cache), question, prompt.question_start, logits=1)


def damage(corpus, name, chunk):
    """Bytes of a chunk, at all levels, are others than were written."""
    entry = corpus.find(name)
    info, data = corpus.read_header(entry), bytearray(corpus.catalog.store.get(entry.blob_key))
    for segment in info.segments[chunk]:
        data[segment.offset] ^= 0xFF
    corpus.catalog.store.delete(entry.blob_key)
    corpus.catalog.store.put(entry.blob_key, bytes(data))


def test_stored_anchors_are_those_of_the_library_bit_for_bit(small, soft_engine, corpus, names):
    assert corpus.profile().error_to_kl is not None
    for name in names:
        found, wanted = corpus.decode(name, "lossless"), compute_cached(soft_engine, LAYOUT, small.tokens[name])
        assert (
            found.token_ids
            == wanted.token_ids
            == stored_tokens(LAYOUT, small.tokens[name], soft_engine.vocabulary_size)
        )
        for ours, theirs in zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(found.kept, wanted.kept, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("settings", [{"layout": LAYOUT}, {}, {"layout": LAYOUT, "system": (5, 6, 7)}])
def test_a_load_reads_anchors(small, soft_engine, corpus, names, settings):
    """With the layout named, without, and behind a system text."""
    answer = asked(small, soft_engine, corpus, names, quality_floor=7, repair="none", **settings)
    system = settings.get("system", ())
    wanted = wanted_of(small, soft_engine, names, system=system)
    read = read_of(small, soft_engine, corpus, names, system)
    assert mean_kl(read, answer.logits[None]) < 1e-6  # shapes round differently
    assert mean_kl(wanted, answer.logits[None]) < 5e-4  # the finest level is expected to have 2e-4
    assert {each.action for each in answer.decisions} == {"fetch"}
    coarse = asked(small, soft_engine, corpus, names, quality_ceiling=0, repair="none", **settings)
    assert mean_kl(wanted, answer.logits[None]) < mean_kl(wanted, coarse.logits[None]) < 0.5
    assert coarse.bytes < answer.bytes


@pytest.mark.parametrize("settings", [{"layout": LAYOUT}, {}])
@pytest.mark.parametrize("given", [False, True], ids=["stored", "given"])
def test_lost_documents_keep_their_anchors_alone(small, soft_engine, corpus, names, settings, given):
    """What is computed from the text is what was stored: never more rows than the blob held."""
    for name in names:
        corpus.catalog.store.delete(corpus.find(name).blob_key)
    texts = None
    if given:
        texts = {name: stored_tokens(LAYOUT, small.tokens[name], soft_engine.vocabulary_size) for name in names}
    answer = asked(small, soft_engine, corpus, names, texts=texts, repair="none", **settings)
    assert {each.action for each in answer.decisions} == {"recompute"}
    assert mean_kl(wanted_of(small, soft_engine, names), answer.logits[None]) < 1e-6  # shapes round differently
    kept = [int(mask[0].sum()) for mask in answer.prompt.cache.kept]
    assert kept == [8 * sum(-(-len(small.tokens[name]) // 40) for name in names)] * len(kept)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_lost_chunk_is_computed_in_the_middle_of_what_anchors_stand_for(small, soft_engine, corpus, names, chunk):
    """A chunk of the blob begins and ends within chunks of the layout."""
    decoded, span = corpus.decode(names[1]), corpus.read_header(corpus.find(names[1])).chunk_span(chunk)
    damage(corpus, names[1], chunk)
    answer = asked(small, soft_engine, corpus, names, quality_floor=7, repair="none")
    assert [each.action for each in answer.decisions if each.chunk.document == 1].count("recompute") == 1
    start = answer.prompt.offset(1)
    expected = LinkedPrompt([start, decoded.tokens], decoded.meta, cache=soft_engine.allocate(start + decoded.tokens))
    expected.write(1, 0, decoded)
    compute_piece(soft_engine, LAYOUT, expected, 1, decoded.token_ids, span)
    ours, theirs = answer.prompt.document(1), expected.document(1)
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert float((mine - other).abs().max()) < 1e-4
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        assert torch.equal(mine, other)
    assert mean_kl(wanted_of(small, soft_engine, names), answer.logits[None]) < 5e-4


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_lost_chunk_is_computed_where_layers_see_a_window(small, family):
    """Anchors before it are seen at their true distance."""
    engine, layout = TransformersEngine(make_model(config_of(family)), model_id=family, revision=family), anchors(6, 2)
    rows = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    engine.use_soft_tokens(SoftTokens(rows, layout.name, family, family))
    corpus = Corpus(engine, MemoryStore(), coding=Coding(layout=layout, lossless=True, chunk_tokens=16))
    list(corpus.encode([Document("a", tuple(tokens(40))), Document("b", tuple(tokens(30, 1)))]))
    found, costs = (
        [],
        replace(small.costs, prefill=small.costs.prefill.scaled(1e3)),
    )  # nothing is computed that can come
    for lost in (False, True):
        if lost:
            damage(corpus, "b", 1)
        with Loader(engine, corpus, costs=costs, settings=LoadSettings(quality_floor=7, repair="none")) as loader:
            found.append(loader.ask(["a", "b"], query()))
    assert [[each.action for each in answer.decisions].count("recompute") for answer in found] == [0, 1]
    assert mean_kl(found[0].logits[None], found[1].logits[None]) < 1e-6


def test_without_the_soft_tokens_a_lost_chunk_is_refused(small, corpus, names):
    damage(corpus, names[0], 1)
    with pytest.raises(StorageError, match=r"name the soft tokens .*\(--soft-tokens\)"):
        asked(small, small.engine, corpus, names, quality_floor=7, repair="none")


def test_anchors_are_not_computed_anew_behind_other_documents(small, soft_engine, corpus, names):
    """They would see anchors alone, and lose what they stand for."""
    with pytest.raises(MismatchError, match="stand for tokens that are not there any more"):
        asked(small, soft_engine, corpus, names, quality_floor=7, repair=0.2)
    for layout in (LAYOUT, None):
        settings = {"layout": layout, "quality_floor": 7}
        answer = asked(small, soft_engine, corpus, names, repair="auto", repair_floor=0.2, **settings)
        (told,) = [each for each in answer.misses if "links were not repaired" in each]
        assert "stand for tokens" in told
        read = read_of(small, soft_engine, corpus, names)
        assert mean_kl(read, answer.logits[None]) < 1e-6  # shapes round differently
        for settled in ({"repair_floor": 0.0}, {"repair_floor": 0.2, "repair": "none"}):
            answer = asked(small, soft_engine, corpus, names, **settings, **settled)
            assert not any("repaired" in each for each in answer.misses)


@pytest.mark.parametrize("method", ["kvwire", "cachegen"])
def test_a_profile_gives_way_to_twice_as_many_anchors_alone(small, soft_engine, method):
    """Not to as many tokens that are not stored: profiles would take turns."""
    ids = [token for text in small.tokens.values() for token in text]
    some, less, more = (
        [Document(f"{length} {at}", tuple(ids[at * length : (at + 1) * length])) for at in range(count)]
        for length, count in ((100, 4), (160, 2), (240, 4))
    )
    coding = Coding(layout=LAYOUT, method=method)
    corpus, digests, noted = Corpus(soft_engine, MemoryStore(), coding=coding), [], []
    for documents in (some, less, some, less, more, some):
        list(corpus.encode(documents))
        digests.append(corpus.profile().digest)
        noted.append(corpus.profile().notes["tokens"])
    assert digests == [digests[0]] * 4 + [digests[4]] * 2
    assert digests[4] != digests[0]
    assert noted[0::4] == [4 * 3 * 8, 4 * 6 * 8]


def test_few_anchors_of_much_text_make_no_profile(small):
    """What says nothing of a model is counted in tokens that are stored."""
    layout = anchors(100, 1)
    corpus = Corpus(engine_with(small, soft_of(small, layout.name, 1)), MemoryStore(), coding=Coding(layout=layout))
    ids = tuple(next(iter(small.tokens.values())))
    list(corpus.encode([Document("short", ids[:80]), Document("long", ids)]))
    assert len(ids) > 200
    assert corpus.profile() is None
    assert int(corpus.decode("short").kept[0].sum()) == small.engine.meta.layers[0].kv_heads


def test_anchored_and_whole_documents_stand_side_by_side(small, soft_engine, corpus, names):
    """Neither is taken for the other: not by name, and not by text."""
    documents = [Document(name, tuple(small.tokens[name])) for name in names]
    assert [each.skipped for each in corpus.encode(documents)] == [True, True]
    store = corpus.catalog.store
    whole = Corpus(small.engine, store, tenant="whole")
    first = list(whole.encode(documents))
    assert [each.skipped for each in first] == [False, False]
    assert all(
        each.entry.token_digest != corpus.find(name).token_digest for each, name in zip(first, names, strict=True)
    )
    with pytest.raises(MismatchError, match="other soft tokens"):
        list(Corpus(small.engine, store).encode(documents))
    answer = asked(small, small.engine, whole, names, quality_floor=7, repair="none")
    assert answer.prompt.cache.kept is None
    with pytest.raises(MismatchError, match=r"does not hold the anchors|encode it with that layout"):
        asked(small, soft_engine, whole, names, layout=LAYOUT)
    other = Corpus(soft_engine, store, coding=Coding(layout=anchors(60, 8)))
    assert [each.skipped for each in other.encode(documents)] == [False, False]
    assert len(other.text(other.find(names[0]))) == anchors(60, 8).cache_length(len(small.tokens[names[0]]))


def test_pruned_documents_of_unknown_making_are_not_computed_anew(small, soft_engine, names):
    """Their text alone does not say which rows there were: a lost chunk ends the load."""
    corpus = small.corpus()
    cache = small.engine.prefill([small.tokens[names[0]]])[0]
    masks = [torch.arange(cache.tokens).remainder(3).ne(0).expand(spec.kv_heads, -1) for spec in cache.meta.layers]
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    saved = corpus.encoder()
    document = Document("pruned", tuple(small.tokens[names[0]]))
    blob = encode(pruned, small.profile, lossless=True)
    saved.write(document, blob, corpus.catalog.blobs.reader().read_header(blob), small.profile)
    sound = asked(small, small.engine, corpus, ["pruned"], quality_floor=7)
    assert {each.action for each in sound.decisions} == {"fetch"}
    assert int(sound.prompt.cache.kept[0][0].sum()) == int(masks[0][0].sum())
    damage(corpus, "pruned", 1)
    with pytest.raises(StorageError, match="pruned in a way that its text does not tell: encode it again"):
        asked(small, small.engine, corpus, ["pruned"], quality_floor=7)


def test_settings_that_no_reader_could_understand_are_refused(small, soft_engine):
    with pytest.raises(ArgumentError, match="encode with soft tokens as anchors"):
        Coding(layout=LinkLayout("by ids", anchors=Anchors(4, (5, 6))))
    with pytest.raises(ArgumentError, match=r"give the file of them \(--soft-tokens\)"):
        list(Corpus(small.engine, MemoryStore(), coding=Coding(layout=LAYOUT)).encode([Document("a", (1, 2, 3))]))


@pytest.fixture
def written(small, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, words in small.texts.items():
        (texts / f"{name}.txt").write_text(words)
    soft = tmp_path / "anchors.safetensors"
    soft.write_bytes(soft_of(small).to_bytes())
    return texts, soft


def test_anchors_on_the_command_line_over_http(small, soft_engine, demo_model, run, tmp_path, written, names):
    """Encode, serve, ask: the answer is that of caches that the library pruned; plan, inspect and report read them."""
    texts, soft = written
    store = f"file://{tmp_path / 'store'}"
    code, _, err = run("encode", texts, "--model", demo_model, "--store", store, "--soft-tokens", soft, "--lossless")
    assert code == 0, err
    code, out, _ = run("encode", texts, "--model", demo_model, "--store", store, "--links", "anchors:40/8",
                       "--soft-tokens", soft, "--lossless")  # fmt: skip
    assert (code, out.count("had it already")) == (0, len(small.texts))
    code, out, err = run("inspect", names[0], "--store", store)
    assert code == 0, err
    assert "computed with 8 soft tokens" in out
    code, out, err = run("plan", "--docs", *names, "--model", demo_model, "--store", store, "--link", "50mbit")
    assert code == 0, err
    page = tmp_path / "report.html"
    code, _, err = run("report", "--store", store, "--out", page)
    assert code == 0, err
    assert page.stat().st_size > 1000
    wanted = wanted_of(small, soft_engine, names)
    with serving(FolderStore(tmp_path / "store")) as url:
        ask = ("ask", "--docs", *names, "--question", QUESTION, "--model", demo_model, "--store", url, "--json",
               "--floor", 7, "--repair", "none")  # fmt: skip
        for more in ((), ("--soft-tokens", soft), ("--links", "anchors:40/8", "--soft-tokens", soft)):
            code, out, err = run(*ask, *more)
            assert code == 0, err
            assert json.loads(out)["tokens"][0] == int(wanted[-1].argmax())
        code, _, err = run(*ask, "--links", "anchors:60/8", "--soft-tokens", soft)
        assert code != 0
        assert "encode" in err
