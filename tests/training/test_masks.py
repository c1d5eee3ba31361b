"""What training shows a model is what a load shows it: one layout, one mask, the same logits."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwire.reuse import (
    PLAIN,
    Anchors,
    LinkLayout,
    SoftTokens,
    anchors,
    compute_cached,
    link_documents,
    soft_links,
    wrappers,
)
from kvwire.reuse.compress import passes
from kvwire.training import Sample, TrainableModel, Turn, batch_of, linked, plain
from kvwire.training.samples import IGNORED

from ..engines.families import engine_of, error_between

TOKENS = st.lists(st.integers(0, 95), min_size=1, max_size=7).map(tuple)
SOFT = st.lists(st.integers(-4, 95), max_size=3).map(tuple)
SAMPLES = st.builds(
    Sample,
    st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
    st.lists(st.builds(Turn, TOKENS, TOKENS), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(0, 95), max_size=3).map(tuple),
)
LAYOUTS = st.builds(
    LinkLayout, st.just("any"), SOFT, SOFT, SOFT, st.integers(0, 3).map(lambda k: ((-1, -2, 9)[:k],) * 4 if k else ()),
    SOFT, SOFT, st.none() | st.builds(Anchors, st.integers(1, 4), st.sampled_from([(-1,), (-1, -2), (-3, 5, -1)])),
)  # fmt: skip


@given(st.lists(SAMPLES, min_size=1, max_size=3), LAYOUTS)
def test_a_batch_shows_what_the_layout_shows(samples, layout):
    batch = batch_of([linked(sample, layout) for sample in samples])
    for row, sample in enumerate(samples):
        question = sample.turns[0].question
        prompt = layout.lay_out(sample.passages, question, sample.system, sample.rest[len(question) :])
        length = prompt.tokens
        assert tuple(batch.token_ids[row, :length].tolist()) == prompt.token_ids
        assert torch.equal(batch.visible[row, :length, :length], prompt.visible())
        assert not batch.visible[row, :length, length:].any()
        assert torch.equal(batch.visible[row, length:], torch.eye(batch.visible.shape[1], dtype=torch.bool)[length:])


@given(SAMPLES, LAYOUTS)
def test_the_mask_is_what_a_load_has_its_tokens_see(sample, layout):
    """Naive: what is there when a load runs each token, pass by pass, row by row."""
    sequence = linked(sample, layout)
    length = len(sequence.token_ids)
    prompt = layout.lay_out(sample.passages, sample.rest, sample.system)
    kept, seen = torch.ones(length, dtype=torch.bool), torch.zeros(length, length, dtype=torch.bool)
    for document in prompt.documents:
        stored = layout.cache_stored(document.tokens)
        for first, last in passes(layout, document.tokens):
            for row in range(document.start + first, document.start + last):
                seen[row, document.start : document.start + first] = kept[document.start : document.start + first]
                seen[row, document.start + first : row + 1] = True
            if stored is not None:  # a pass is over: what is not stored is gone
                kept[document.start + first : document.start + last] = stored[first:last]
    for row in prompt.positions().tolist():
        seen[row, : row + 1] = kept[: row + 1]
    assert torch.equal(sequence.visible, seen)


@given(SAMPLES, LAYOUTS)
def test_answers_are_learnt_by_the_rows_before_them_and_nothing_else(sample, layout):
    (targets,) = batch_of([linked(sample, layout)]).targets
    answers = [token for turn in sample.turns for token in turn.answer]
    assert targets[targets != IGNORED].tolist() == answers
    (exact,) = batch_of([plain(sample)]).targets
    assert exact[exact != IGNORED].tolist() == answers


ALL = replace(soft_links(1, 3), name="all", before=(60,), after=(61,), opening=(62,), anchors=Anchors(3, (-1, 63)))


def test_without_passages_a_sample_is_read_causally():
    sequence = linked(Sample((), (Turn((1, 2), (3,)),), (4,)), soft_links(2))
    assert sequence.token_ids == (4, 1, 2, 3)
    assert torch.equal(sequence.visible, torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-neox", "glm"])
@pytest.mark.parametrize(
    "layout", [PLAIN, soft_links(2, 3), wrappers(2, 1), anchors(2, 1), ALL], ids=lambda each: each.name
)
def test_training_tells_what_a_load_tells(family, layout):
    """Caches of documents, linked as loads link them, lead to the logits of the training pass."""
    engine = engine_of(family)
    sample = Sample(((5, 6, 7, 8), (9,), (10, 11, 12)), (Turn((13, 14), (15, 16)),), (17,) * (family != "glm"))
    model = TrainableModel(engine, layout, is_frozen=layout is not PLAIN)
    with closing(model), torch.no_grad():
        batch = batch_of([linked(sample, layout), linked(Sample(((1,),), (Turn((2,), (3,)),)), layout)])
        ours = model.logits(batch, batch.targets != IGNORED)[:2]
    try:
        named = "links:1/3" if layout is ALL else layout.name, engine.meta.model_id, engine.meta.model_revision
        engine.use_soft_tokens(SoftTokens(model.soft.detach(), *named) if layout.soft_tokens else None)
        prompt = layout.lay_out(sample.passages, (13, 14, 15), sample.system)
        caches = [compute_cached(engine, layout, ids) for ids in sample.passages]
        cache = link_documents(engine, caches, prompt).cache
        theirs = engine.forward(engine.own_past(cache), (13, 14, 15), prompt.question_start)[-2:]
    finally:
        engine.use_soft_tokens(None)
    assert error_between(ours, theirs) < 1e-5
