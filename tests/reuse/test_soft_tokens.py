"""Soft tokens: the file, the embedding layer that takes them, and prompts with them against one pass of the model."""

import json

import pytest
import torch
from safetensors.torch import save

from kvwire.engines.base import Engine
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, MismatchError
from kvwire.reuse import LinkLayout, SoftTokens, as_stored, link_documents, soft_links, soft_token, wrappers

from ..engines.families import VOCABULARY, cache_error, config_of, error_between, make_model, query, tokens

TEXTS = tokens(9, 1), tokens(4, 2), tokens(14, 3)
EXACT = 1e-5


def made(count=5, size=48, layout="wrappers:3+2", revision="llama", model_id="llama"):
    generator = torch.Generator().manual_seed(count)
    return SoftTokens(torch.randn(count, size, generator=generator), layout, model_id, revision)


@pytest.fixture
def engine():
    """One of its own: soft tokens change an engine."""
    return TransformersEngine(make_model(config_of("llama")), model_id="llama", revision="llama")


def from_embeddings(engine, ids, rows, visible):
    """The reference: embeddings looked up by hand, in one pass under a mask."""
    table = engine.model.get_input_embeddings().weight
    states = torch.stack([rows[-1 - token] if token < 0 else table[token] for token in ids])
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return engine.model(inputs_embeds=states[None], attention_mask=mask[None, None]).logits[0]


def test_the_file_holds_what_was_written():
    soft = made()
    found = SoftTokens.from_bytes(soft.to_bytes())
    assert torch.equal(found.embeddings, soft.embeddings)
    assert (found.layout, found.model_id, found.model_revision) == (soft.layout, "llama", "llama")
    assert found.digest == soft.digest
    assert found.link_layout == wrappers(3, 2)
    changed = SoftTokens(soft.embeddings + 1, soft.layout, "llama", "llama")
    assert len({soft.digest, changed.digest, made(layout="wrappers:2+3").digest, made(revision="x").digest}) == 4


@pytest.mark.parametrize(
    "layout", [wrappers(3, 2), soft_links(2, 4), LinkLayout("both", (-1,), (-2,), (7,), ((-3, 8),) * 4)]
)
def test_soft_tokens_equal_a_pass_over_embeddings(engine, layout):
    soft = made(8, layout="plain")
    engine.use_soft_tokens(soft)
    prompt = layout.lay_out(TEXTS, query(), tokens(3, 5))
    caches = engine.prefill([layout.cache_tokens(text) for text in TEXTS])
    linked = link_documents(engine, caches, prompt)
    found = engine.forward(engine.own_past(linked.cache), query(), prompt.question_start)
    wanted = from_embeddings(engine, prompt.token_ids, soft.embeddings, prompt.visible())[-len(query()) :]
    assert error_between(found, wanted) < EXACT
    engine.use_soft_tokens(made(8, layout="plain", revision=""))
    bare = engine.prefill([tokens(9, 1)])[0]
    engine.use_soft_tokens(None)
    assert cache_error(engine.prefill([tokens(9, 1)])[0], bare) == 0
    assert engine.soft_tokens is None


def test_ids_beyond_the_vocabulary_are_soft_tokens_too(engine):
    for wrong in (-1, VOCABULARY):
        with pytest.raises(ArgumentError, match="are the layout's soft tokens in use"):
            engine.prefill([[wrong]])
    engine.use_soft_tokens(made())
    ids = [soft_token(0), 5, soft_token(4)]
    stored = as_stored(ids, engine.vocabulary_size)
    assert stored == (VOCABULARY, 5, VOCABULARY + 4)
    assert cache_error(engine.prefill([ids])[0], engine.prefill([stored])[0]) == 0
    for wrong in (soft_token(5), VOCABULARY + 5):
        with pytest.raises(ArgumentError, match="with 5 soft tokens"):
            engine.prefill([[wrong]])


def test_gradients_flow_into_the_rows_alone(engine):
    from kvwire.engines.transformers.soft import SoftEmbedding

    rows = torch.randn(2, 48, requires_grad=True)
    engine.model.requires_grad_(requires_grad=False)
    hooks = SoftEmbedding(engine.model, rows)
    engine.model(input_ids=torch.tensor([[-1, 5, 6]])).logits.sum().backward()
    hooks.remove()
    assert rows.grad is not None
    assert float(rows.grad[0].abs().sum()) > 0
    assert float(rows.grad[1].abs().sum()) == 0
    assert engine.model.get_input_embeddings().weight.grad is None


def test_soft_tokens_of_another_model_are_refused(engine):
    with pytest.raises(MismatchError, match=r"were trained for model 'llama'.*train some for this model"):
        engine.use_soft_tokens(made(revision="another"))
    with pytest.raises(MismatchError, match="embeddings of 32"):
        engine.use_soft_tokens(made(size=32, revision=""))
    with pytest.raises(ArgumentError, match="takes 5 soft tokens, the file has 2"):
        made(2)
    with pytest.raises(MismatchError, match="were trained for model 'another'"):
        engine.use_soft_tokens(made(revision="", model_id="another"))
    gemma = TransformersEngine(make_model(config_of("gemma4")), model_id="llama")
    with pytest.raises(MismatchError, match="read token ids themselves"):
        gemma.use_soft_tokens(made(revision=""))
    with pytest.raises(MismatchError, match="takes no soft tokens"):
        Engine.use_soft_tokens(engine, made())


def test_damaged_files_are_refused():
    data = made().to_bytes()
    rows = {"embeddings": torch.ones(5, 4)}
    named = {"format": "kvwire soft tokens 1", "layout": "wrappers:3+2", "digest": "0"}
    for wrong, words in (
        (b"", "no file of soft tokens"),
        (data[: len(data) // 2], "no file of soft tokens"),
        ((1 << 60).to_bytes(8, "little") + data[8:], "no file of soft tokens"),
        (save(rows), "has no metadata"),
        (save(rows, named), "does not match its digest"),
        (save(rows | {"more": torch.ones(1)}, named), "one tensor"),
        (save({"embeddings": torch.full((5, 4), float("nan"))}, named), "NaN or infinity"),
        (save({"embeddings": torch.ones(5, 4, dtype=torch.int32)}, named), "are floats"),
        (save({"embeddings": torch.ones(2, 4)}, named), "takes 5 soft tokens, the file has 2"),
        (save(rows, named | {"layout": "nothing"}), "there is no layout"),
    ):
        with pytest.raises(CorruptError, match=words):
            SoftTokens.from_bytes(wrong)
    with pytest.raises(FormatVersionError, match="soft tokens 2"):
        SoftTokens.from_bytes(save(rows, named | {"format": "kvwire soft tokens 2"}))
    flipped = bytearray(data)
    flipped[-3] ^= 1
    with pytest.raises(CorruptError, match="does not match its digest"):
        SoftTokens.from_bytes(bytes(flipped))
    header = json.dumps({"__metadata__": [1]}).encode()
    with pytest.raises(CorruptError, match="has no metadata"):
        SoftTokens.from_bytes(len(header).to_bytes(8, "little") + header)
