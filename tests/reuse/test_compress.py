"""Documents of which anchors alone are stored, against one masked pass; and tokens that are dropped by surprisal."""

import random

import pytest
import torch

from kvwire.codec import decode, encode, inspect
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import MismatchError
from kvwire.reuse import (
    Anchors,
    LinkedPrompt,
    LinkLayout,
    SoftTokens,
    anchors,
    compress,  # whose bounds tests set
    compute_cached,
    compute_piece,
    compute_stored,
    link_documents,
    own_tokens,
    stored_tokens,
)

from ..engines.families import SLIDES, cache_error, config_of, engine_of, error_between, make_model, query, tokens
from ..front.tiny_engine import TinyEngine

TEXTS = tokens(9, 1), tokens(1, 2), tokens(14, 3)
TOLERANCE = 1e-5
LAYOUTS = (
    LinkLayout("anchors", anchors=Anchors(4, (70, 71))),
    LinkLayout("all", (60,), (61,), (62,), ((63,), (64,), (65,)), (66,), (), Anchors(3, (72,))),
)
ANCHORED = ("llama", "qwen3", "gpt-neox", "glm", *SLIDES)


def test_of_an_anchored_document_anchors_alone_are_stored():
    engine, layout = engine_of("llama"), LAYOUTS[0]
    cache = compute_cached(engine, layout, TEXTS[2])
    assert cache.tokens == 14 + 4 * 2
    assert cache.kept is not None
    assert [int(mask.sum()) for mask in cache.kept] == [8 * spec.kv_heads for spec in cache.meta.layers]
    gone = ~cache.kept[0][0]
    assert not cache.keys[0][:, gone].any()
    whole = encode(engine.prefill([layout.cache_tokens(TEXTS[2])])[0], levels=0, lossless=True)
    blob = encode(cache, levels=0, lossless=True)
    assert inspect(blob).file_bytes < inspect(whole).file_bytes
    back = decode(blob, "lossless", offset=0)
    assert back.kept is not None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back.kept, cache.kept, strict=True))
    assert cache_error(back, cache) == 0


def found_and_wanted(engine, layout, prompt):
    """Logits of the question behind anchored documents, and of one masked pass."""
    linked = link_documents(engine, [compute_cached(engine, layout, text) for text in TEXTS], prompt)
    found = engine.forward(engine.own_past(linked.cache), query(), prompt.question_start)
    return found, engine.masked_forward(prompt.token_ids, prompt.visible())[-len(query()) :]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
@pytest.mark.parametrize("family", ANCHORED)
def test_anchored_documents_equal_one_masked_pass(family, layout):
    engine = engine_of(family)
    prompt = layout.lay_out(TEXTS, query(), tokens(3, 7))
    found, wanted = found_and_wanted(engine, layout, prompt)
    assert error_between(found, wanted) < TOLERANCE
    everything = [torch.ones(each.tokens, dtype=torch.bool) for each in prompt.documents]
    unpruned = engine.masked_forward(prompt.token_ids, prompt.visible(everything))[-len(query()) :]
    assert error_between(found, unpruned) > 1e-3


def test_anchors_may_be_soft_tokens():
    engine = TransformersEngine(make_model(config_of("llama")), model_id="llama", revision="llama")
    engine.use_soft_tokens(SoftTokens(torch.randn(2, 48), "anchors:4/2", "llama", "llama"))
    layout = anchors(4, 2)
    assert error_between(*found_and_wanted(engine, layout, layout.lay_out(TEXTS, query()))) < TOLERANCE


def some_layout(draw):
    """Tokens before and behind, and anchors of any number behind chunks of any length."""
    before, after, count = draw.randint(0, 2), draw.randint(0, 2), draw.randint(1, 3)
    tokens = Anchors(draw.randint(1, 6), tuple(range(60, 60 + count)))
    return LinkLayout("some", tuple(range(70, 70 + before)), tuple(range(80, 80 + after)), anchors=tokens)


def same(cache, other):
    assert [mask.tolist() for mask in cache.kept] == [mask.tolist() for mask in other.kept]
    return cache_error(cache, other) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", *SLIDES])
@pytest.mark.parametrize("seed", range(12))
def test_passes_compute_what_a_mask_does(monkeypatch, family, seed):
    """Naive: one pass under the mask. A document is run pass by pass where it is long, and any span of it anew."""
    draw, engine = random.Random(seed), engine_of(family)
    layout = some_layout(draw)
    ids = layout.cache_tokens(tokens(draw.randint(1, 40), seed))
    wanted = compute_stored(engine, layout, ids)
    monkeypatch.setattr(compress, "_MASKED_TOKENS", 0)
    found = compute_stored(engine, layout, ids)
    assert found.token_ids == wanted.token_ids
    assert found.meta == wanted.meta
    assert same(found, wanted)
    start = draw.randrange(len(ids))
    stop = draw.randint(start + 1, len(ids))
    prompt = LinkedPrompt([5, len(ids)], engine.meta, cache=engine.allocate(5 + len(ids)))
    prompt.write(1, 0, wanted)
    expected = link_of(engine, tokens(5), wanted)
    for side in (prompt.cache.keys, prompt.cache.values):
        for each in side:
            each[:, :5] = each[:, 5 + start : 5 + stop] = 1e3
    compute_piece(engine, layout, prompt, 1, ids, (start, stop))
    assert same(prompt.document(1), expected)


def link_of(engine, text, cache):
    """A document behind another one's text."""
    prompt = LinkedPrompt([len(text), cache.tokens], engine.meta, cache=engine.allocate(len(text) + cache.tokens))
    prompt.write(1, 0, cache)
    return prompt.document(1)


@pytest.mark.parametrize("family", ["llama", *SLIDES])
def test_a_piece_may_see_what_stands_before_its_document(family):
    engine, layout = engine_of(family), LAYOUTS[0]
    ids = layout.cache_tokens(TEXTS[2])
    prompt = LinkedPrompt([9, len(ids)], engine.meta, cache=engine.allocate(9 + len(ids)))
    prompt.write(0, 0, engine.prefill([TEXTS[0]])[0])
    compute_piece(engine, layout, prompt, 1, ids, (0, len(ids)), behind=True)
    visible = torch.ones(9 + len(ids), 9 + len(ids), dtype=torch.bool).tril()
    visible[9:, 9:] = layout.cache_visible(len(ids))
    wanted = engine.prefill_masked((*TEXTS[0], *ids), visible).slice(9, 9 + len(ids))
    stored = layout.cache_stored(len(ids))
    for ours, theirs in zip((*prompt.document(1).keys, *prompt.document(1).values), (*wanted.keys, *wanted.values),
                            strict=True):  # fmt: skip
        assert error_between(ours[:, stored], theirs[:, stored]) < TOLERANCE
        assert not ours[:, ~stored].any()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_gaps_in_what_a_window_sees_are_no_plain_cache(family):
    engine = engine_of(family)
    cache = compute_cached(engine, LAYOUTS[0], TEXTS[2])
    with pytest.raises(MismatchError, match=r"layers of the model have windows.* own_past"):
        engine.past_key_values(cache)


@pytest.mark.parametrize("seed", range(20))
def test_own_tokens_are_found_among_anchors(seed):
    draw = random.Random(seed)
    layout, own = some_layout(draw), tuple(draw.randrange(50) for _ in range(draw.randint(1, 40)))
    stored = stored_tokens(layout, own, 100)
    assert stored == layout.cache_tokens(own)
    assert own_tokens(layout, stored, 100) == own
    assert stored_tokens(layout, stored, 100) == stored
    soft = anchors(draw.randint(1, 6), 2)
    assert min(soft.cache_tokens(own)) == -2
    assert {100, 101} <= set(stored_tokens(soft, own, 100))
    assert own_tokens(soft, stored_tokens(soft, own, 100), 100) == own
    assert own_tokens(soft, own, 100) == own


def test_without_anchors_a_document_is_computed_as_ever_and_without_masks_no_anchors():
    engine, layout = engine_of("llama"), LinkLayout("markers", (60,), (61,))
    found = compute_cached(engine, layout, TEXTS[0])
    assert found.kept is None
    assert cache_error(found, engine.prefill([(60, *TEXTS[0], 61)])[0]) == 0
    with pytest.raises(MismatchError, match="encode without anchors"):
        compute_cached(TinyEngine(), LinkLayout("anchors", anchors=Anchors(4, (5,))), [1, 2, 3])
