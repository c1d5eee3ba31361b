"""Link rows inside a prompt's cache, against one pass over the whole prompt, and a pass behind all documents."""

import functools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvwire.engines.transformers import TransformersEngine, generate_inputs
from kvwire.engines.transformers.plain import filled
from kvwire.errors import ArgumentError
from kvwire.reuse import (
    PLAIN,
    LinkedPrompt,
    LinkLayout,
    block_attention,
    compute_links,
    link,
    link_documents,
    moved,
    turborag,
)

from ..engines.families import SLIDES, cache_error, config_of, engine_of, error_between, query, tokens
from .test_schema import masks_of

FIVE = ("llama", "qwen3", "gpt-neox", "glm", "gemma3")
EXACT = 1e-6
TOLERANCE = 1e-5
"""Of models whose weights are six times as large as models are begun with, as elsewhere here."""
TEXTS = tokens(9, 1), tokens(1, 2), tokens(14, 3)
SYSTEM = tokens(5, 4)


@functools.cache
def begun(family):
    """A model as its own library begins it."""
    torch.manual_seed(0)
    return TransformersEngine(AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval())


def layout_of(count, *, markers=True):
    """As KVLink has it, with ids of a tiny vocabulary."""
    links = tuple(tuple(range(20 + 5 * i, 20 + 5 * i + count)) for i in range(6)) if count else ()
    return LinkLayout(f"links of {count}", opening=(90,) * markers, links=links, closing=(91,) * markers)


def answered(engine, caches, prompt):
    """Logits of the question behind linked documents."""
    linked = link_documents(engine, caches, prompt)
    return engine.forward(engine.own_past(linked.cache), query(), prompt.question_start)


def in_one_pass(engine, prompt, kept=None):
    """The reference: everything in its place, in one pass under a mask."""
    return engine.masked_forward(prompt.token_ids, prompt.visible(kept))[-len(query()) :]


@torch.no_grad()
def appended(engine, caches, prompt, kept=None):
    """The naive twin: documents' caches, and all other tokens behind them at their true positions, masked by these."""
    rows = prompt.positions()
    ids = torch.tensor(prompt.token_ids)[rows]
    cached = torch.cat([torch.arange(each.start, each.stop) for each in prompt.documents])
    pairs = []
    for layer in range(len(caches[0].keys)):
        parts = [place(cache, start, layer) for cache, start in zip(caches, prompt.starts, strict=True)]
        pairs.append(tuple(torch.cat(side, 1)[None] for side in zip(*parts, strict=True)))
    position = torch.cat([cached, rows])
    there = prompt.visible(kept)[rows][:, position]
    visible = torch.cat([torch.zeros(len(cached), len(position), dtype=torch.bool), there])
    masks = masks_of(engine, visible, position)
    cut = {name: mask[..., len(cached) :, :] for name, mask in masks.items()} if isinstance(masks, dict) else None
    out = engine.model(
        input_ids=ids[None],
        position_ids=rows[None],
        attention_mask=masks[..., len(cached) :, :] if cut is None else cut,
        past_key_values=filled(pairs),
    )
    return out.logits[0, -len(query()) :]


def place(cache, start, layer):
    there = moved(cache, start)
    return there.keys[layer], there.values[layer]


@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "bare"])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("family", FIVE)
def test_links_equal_one_pass(family, count, system):
    prompt = layout_of(count).lay_out(TEXTS, query(), system)
    plain = PLAIN.lay_out(TEXTS, query())
    for engine, tolerance, seen in ((begun(family), EXACT, 1e-3), (engine_of(family), TOLERANCE, 1e-2)):
        caches = engine.prefill(TEXTS)
        found = answered(engine, caches, prompt)
        assert error_between(found, in_one_pass(engine, prompt)) <= tolerance
        assert error_between(found, appended(engine, caches, prompt)) <= tolerance
        assert error_between(found, in_one_pass(engine, plain)) > seen


@pytest.mark.parametrize("family", FIVE)
@pytest.mark.parametrize("layout", [turborag([92], [93, 94]), block_attention([95, 90])], ids=lambda each: each.name)
def test_tokens_inside_caches_and_prefixes_equal_one_pass(family, layout):
    engine = begun(family)
    prompt = layout.lay_out(TEXTS, query(), SYSTEM)
    caches = engine.prefill([layout.cache_tokens(text) for text in TEXTS])
    assert error_between(answered(engine, caches, prompt), in_one_pass(engine, prompt)) <= EXACT


@pytest.mark.parametrize("family", FIVE)
def test_nothing_between_documents_is_plain_linking_bit_for_bit(family):
    engine = engine_of(family)
    caches = engine.prefill(TEXTS)
    found = link_documents(engine, caches, PLAIN.lay_out(TEXTS, query())).cache
    wanted = link(caches)
    assert found.kept is None
    for ours, theirs in zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("family", [each for each in FIVE if each not in SLIDES])
def test_pruned_documents_equal_one_pass(family, count):
    engine = begun(family)
    prompt = layout_of(count).lay_out(TEXTS, query(), SYSTEM)
    kept = [torch.arange(len(text)) % 3 != 1 for text in TEXTS]
    whole = engine.prefill(TEXTS)
    shapes = [(spec.kv_heads, -1) for spec in engine.meta.layers]
    pruned = [
        replace(cache, kept=tuple(mask.expand(shape) for shape in shapes))
        for cache, mask in zip(whole, kept, strict=True)
    ]
    found = answered(engine, pruned, prompt)
    assert error_between(found, in_one_pass(engine, prompt, kept)) <= EXACT
    assert error_between(found, appended(engine, whole, prompt, kept)) <= EXACT
    assert error_between(found, in_one_pass(engine, prompt)) > 1e-3


@torch.no_grad()
def test_transformers_generates_behind_links():
    engine = engine_of("llama")
    prompt = layout_of(2).lay_out(TEXTS, query(), SYSTEM)
    linked = link_documents(engine, engine.prefill(TEXTS), prompt)
    inputs = generate_inputs(engine, linked, query())
    out = engine.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert int(out[0, -1]) == int(in_one_pass(engine, prompt)[-1].argmax())


def test_a_document_that_comes_later_does_not_change_earlier_links():
    engine, layout = engine_of("llama"), layout_of(2)
    caches = engine.prefill(TEXTS)
    prompt = layout.lay_out(TEXTS, query())
    (other,) = engine.prefill([tokens(14, 9)])
    first = link_documents(engine, caches, prompt).cache
    second = link_documents(engine, [*caches[:2], other], prompt).cache
    stop = prompt.starts[2]
    for ours, theirs in zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True):
        assert torch.equal(ours[:, :stop], theirs[:, :stop])
        assert not torch.equal(ours[:, stop:], theirs[:, stop:])


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (turborag([92], [93]), "compute them from LinkLayout"),
        (LinkLayout("kvlink", opening=(128254,)), "token ids must lie in 0 to 95"),
    ],
)
def test_caches_of_other_lengths_and_tokens_beyond_the_vocabulary_are_refused(layout, words):
    engine = engine_of("llama")
    with pytest.raises(ArgumentError, match=words):
        link_documents(engine, engine.prefill(TEXTS), layout.lay_out(TEXTS, query()))


@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "bare"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", FIVE)
def test_rows_computed_document_by_document_equal_all_at_once(family, count, system):
    """Documents behind those that are there hold garbage until it is their turn."""
    engine, layout = engine_of(family), layout_of(count, markers=count != 1)
    caches, prompt = engine.prefill(TEXTS), layout.lay_out(TEXTS, query(), system)
    wanted = link_documents(engine, caches, prompt).cache
    room = engine.allocate(prompt.question_start)
    for tensor in (*room.keys, *room.values):
        tensor.fill_(torch.nan)
    linked, at, rows = LinkedPrompt(prompt.lengths, engine.meta, cache=room, starts=prompt.starts), 0, 0
    for index, cache in enumerate(caches):
        linked.write(index, 0, cache)
        stop = prompt.starts[index + 1] if index + 1 < len(caches) else None
        rows += compute_links(engine, linked, prompt, at, stop)
        at = stop
    assert rows == len(prompt.front_rows()[0])
    assert cache_error(linked.cache, wanted) < TOLERANCE
    assert compute_links(engine, linked, prompt, prompt.question_start) == 0
