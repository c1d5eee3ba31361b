"""What generate_inputs makes, against masked passes without a cache and against generate on one filled by hand."""

import copy
import gc

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies
from packaging.version import Version

from kvwire import generate_inputs
from kvwire.codec import positions_off
from kvwire.engines.transformers import TransformersEngine
from kvwire.engines.transformers.devices import Devices
from kvwire.engines.transformers.fitting import tensors_for
from kvwire.errors import ArgumentError, MismatchError, NotFoundError
from kvwire.reuse import LinkedPrompt, block_mask, link

from ..reuse.test_pruned import pruned_alike
from .families import (
    FAMILIES,
    VOCABULARY,
    WINDOW,
    config_of,
    documents,
    engine_of,
    make_model,
    query,
    tokens,
    without_attention,
)

NEW = 5
if Version(transformers.__version__) < Version("5.3"):
    pytest.skip("generate takes questions alone from transformers 5.3 on", allow_module_level=True)
PLAIN = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
SCORES = {"return_dict_in_generate": True, "output_scores": True}
HYBRIDS = ("llama", "qwen3", "mistral", "gemma3", "gpt-oss", "deepseek-v3")
"""Full, windows in all layers, windows in some, eager attention, a latent cache."""
TEXTS = ([tokens(9, 5)], [tokens(14, 6), tokens(7, 7)], documents())
QUESTIONS = (tokens(3, 21), tokens(8, 22), tokens(5, 23))
TOLERANCE = 3e-5  # of the largest score


@pytest.fixture(autouse=True, scope="module")
def models_are_left_as_they_were():
    """The hooks go with the caches."""
    yield
    gc.collect()
    for family in HYBRIDS:
        assert not engine_of(family).model._forward_pre_hooks


def linked(engine, texts=None):
    return link(engine.prefill(texts or documents()))


def masked_greedy(engine, texts, question, count=NEW):
    """Tokens and scores of greedy decoding, each by one masked pass over everything so far."""
    ids, lengths, scores = [token for text in texts for token in text] + question, [len(text) for text in texts], []
    for _ in range(count):
        scores.append(engine.masked_forward(ids, block_mask(lengths, len(ids) - sum(lengths)))[-1])
        ids.append(int(scores[-1].argmax()))
    return ids[-count:], torch.stack(scores)


def check_equals_masked(engine, texts, questions, **options):
    inputs = generate_inputs(engine, [linked(engine, each) for each in texts], list(questions), **options)
    out = engine.model.generate(**inputs, **PLAIN, **SCORES)
    for row, (text, question) in enumerate(zip(texts, questions, strict=True)):
        wanted, scores = masked_greedy(engine, text, question)
        assert out.sequences[row, inputs["input_ids"].shape[1] :].tolist() == wanted
        ours = torch.stack([score[row] for score in out.scores])
        assert float((ours - scores).abs().max() / scores.abs().max()) < TOLERANCE


def by_hand(engine, texts, question, rows=1, **options):
    """Plain generate on the same linked cache: whole prompt, repeated by hand. Question and answer."""
    ids = torch.tensor([[token for text in texts for token in text]])
    whole = torch.cat((ids, torch.tensor([question])), 1)
    past = engine.past_key_values(linked(engine, texts))
    past.batch_repeat_interleave(rows)
    options = PLAIN | options
    out = engine.model.generate(whole, attention_mask=torch.ones_like(whole), past_key_values=past, **options)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize(
    ("family", "rooms"),
    [(family, (None, None)) for family in FAMILIES] + [(family, (80, 60)) for family in HYBRIDS],
)
def test_one_prompt_and_unequal_ones_equal_masked_passes(family, rooms):
    check_equals_masked(engine_of(family), [documents()], [query()], max_cache_len=rooms[0])
    check_equals_masked(engine_of(family), TEXTS, QUESTIONS, max_cache_len=rooms[1])


@given(
    rows=strategies.lists(
        strategies.tuples(
            strategies.lists(strategies.integers(1, 14), min_size=1, max_size=3), strategies.integers(1, 7)
        ),
        min_size=1,
        max_size=4,
    ),
    is_static=strategies.booleans(),
)
@settings(max_examples=12)
def test_any_batch_equals_masked_passes(rows, is_static):
    texts = [[tokens(count, 10 * row + at) for at, count in enumerate(counts)] for row, (counts, _) in enumerate(rows)]
    questions = [tokens(count, 100 + row) for row, (_, count) in enumerate(rows)]
    options = {"max_cache_len": 56} if is_static else {}
    check_equals_masked(engine_of("gemma3"), texts, questions, **options)


@pytest.mark.parametrize("room", [None, 80], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (3, {"num_beams": 3, "num_return_sequences": 2}),
        (1, {"do_sample": True, "top_k": 20}),
        (4, {"do_sample": True, "num_return_sequences": 4}),
    ],
    ids=["beams", "sampling", "sequences"],
)
def test_beams_and_samples_equal_plain_generate(family, rows, options, room):
    engine, model = engine_of(family), engine_of(family).model
    torch.manual_seed(3)
    wanted = by_hand(engine, documents(), query(), rows, **options)
    torch.manual_seed(3)
    inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=room)
    assert torch.equal(model.generate(**inputs, **PLAIN | options), wanted)


@pytest.mark.parametrize("family", HYBRIDS)
def test_beams_of_a_batch_equal_those_of_each_prompt(family):
    engine = engine_of(family)
    inputs = generate_inputs(engine, [linked(engine, texts) for texts in TEXTS], list(QUESTIONS))
    out = engine.model.generate(**inputs, **PLAIN, num_beams=3)[:, inputs["input_ids"].shape[1] :]
    for row, (texts, question) in enumerate(zip(TEXTS, QUESTIONS, strict=True)):
        alone = by_hand(engine, texts, question, 3, num_beams=3)[0, len(question) :]
        assert torch.equal(out[row], alone)


def test_penalties_see_documents_where_their_ids_are_given():
    engine = engine_of("qwen3")
    flat = [[token for text in texts for token in text] for texts in TEXTS]
    prompts, penalty = [linked(engine, texts) for texts in TEXTS], {"repetition_penalty": 1.5}
    inputs = generate_inputs(engine, prompts, list(QUESTIONS), document_ids=flat)
    width = inputs["input_ids"].shape[1]
    assert width == inputs["attention_mask"].shape[1]
    for row, (text, question) in enumerate(zip(flat, QUESTIONS, strict=True)):
        assert inputs["input_ids"][row].tolist()[-len(text + question) :] == text + question
    assert engine.model.generate(**inputs, **PLAIN).shape == (3, width + NEW)
    for texts, ids, prompt, question in zip(TEXTS, flat, prompts, QUESTIONS, strict=True):
        alone = generate_inputs(engine, prompt, question, document_ids=[ids])  # padding would be penalised, too
        out = engine.model.generate(**alone, **PLAIN, **penalty)[:, len(ids) :]
        assert torch.equal(out, by_hand(engine, texts, question, **penalty))
    with pytest.raises(ArgumentError, match="document_ids must hold"):
        generate_inputs(engine, prompts, list(QUESTIONS), document_ids=[ids[:-1] for ids in flat])


def test_what_is_returned():
    engine = engine_of("llama")
    inputs = generate_inputs(engine, [linked(engine, texts) for texts in TEXTS], list(QUESTIONS))
    assert set(inputs) == {"input_ids", "attention_mask", "past_key_values"}
    assert inputs["input_ids"].tolist() == [question[-3:] for question in QUESTIONS]
    lengths = [sum(map(len, texts)) + len(question) for texts, question in zip(TEXTS, QUESTIONS, strict=True)]
    assert inputs["attention_mask"].sum(1).tolist() == lengths
    assert bool((inputs["attention_mask"].diff(dim=1) >= 0).all())  # padding stands on the left
    assert inputs["past_key_values"].get_seq_length() == inputs["attention_mask"].shape[1] - 3


def test_questions_come_in_many_forms():
    engine = engine_of("llama")
    prompt = linked(engine)
    room = LinkedPrompt([prompt.tokens], engine.meta, cache=engine.allocate(prompt.tokens))
    room.write(0, 0, positions_off(prompt))
    padded = torch.tensor([[*QUESTIONS[0], 0, 0], QUESTIONS[2]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    wanted = [masked_greedy(engine, documents(), question)[0] for question in (QUESTIONS[0], QUESTIONS[2])]
    for prompts, questions, options in (
        (prompt, [QUESTIONS[0], QUESTIONS[2]], {}),
        (room, padded, {"attention_mask": mask}),
        ([prompt, room], padded.flip(1), {"attention_mask": mask.flip(1)}),
    ):
        if questions is not padded and torch.is_tensor(questions):
            wanted = [masked_greedy(engine, documents(), each)[0] for each in (QUESTIONS[0][::-1], QUESTIONS[2][::-1])]
        inputs = generate_inputs(engine, prompts, questions, **options)
        out = engine.model.generate(**inputs, **PLAIN)
        assert out[:, inputs["input_ids"].shape[1] :].tolist() == wanted
    for question in (torch.tensor(QUESTIONS[0]), np.array(QUESTIONS[0]), [torch.tensor(QUESTIONS[0])]):
        assert generate_inputs(engine, prompt, question)["input_ids"].tolist() == [QUESTIONS[0]]
    with pytest.raises(NotFoundError, match="tokenizer"):
        generate_inputs(engine, prompt, "a text")


def test_bfloat16_equals_plain_generate_on_the_same_cache():
    model = make_model(config_of("gemma3")).to(torch.bfloat16)
    engine = TransformersEngine(model)
    inputs = generate_inputs(engine, linked(engine), query())
    assert inputs["past_key_values"].layers[0].keys.dtype == torch.bfloat16
    assert torch.equal(model.generate(**inputs, **PLAIN), by_hand(engine, documents(), query()))
    inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=64)
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    wanted = engine.forward(engine.past_key_values(linked(engine)), query(), inputs["attention_mask"].shape[1] - 6)
    assert float((logits - wanted).float().norm() / wanted.float().norm()) < 0.02


def test_pruned_prompts_stand_at_their_positions():
    engine = engine_of("llama")
    (cache,) = engine.prefill([tokens(29)])
    pruned = pruned_alike(cache, [0, 3, 4, 17, 28])
    past = engine.past_key_values(pruned)
    scores = [engine.forward(past, query(), 29)[-1]]
    while len(scores) < NEW:
        scores.append(engine.forward(past, [int(scores[-1].argmax())], 34 + len(scores))[-1])
    inputs = generate_inputs(engine, [pruned, cache], [query(), query()[:4]])
    assert inputs["position_ids"].shape == inputs["input_ids"].shape
    out = engine.model.generate(**inputs, **PLAIN, **SCORES)
    ours = torch.stack([score[0] for score in out.scores])
    assert float((ours - torch.stack(scores)).abs().max() / ours.abs().max()) < TOLERANCE
    whole = masked_greedy(engine, [tokens(29)], query()[:4])[0]
    assert out.sequences[1, 4:].tolist() == whole


def test_compiled_models_take_static_caches():
    """Without inductor, which would need a compiler: what counts is that nothing breaks the graph."""
    model = make_model(config_of("gemma3"))
    engine = TransformersEngine(model)
    wanted = by_hand(engine, documents(), query())
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=64)
    assert torch.equal(model.generate(**inputs, **PLAIN), wanted)
    del model.forward
    model.compile(backend="eager")  # the hook is compiled, too, and looks no more
    inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=64)
    assert torch.equal(model.generate(**inputs, **PLAIN), wanted)
    torch._dynamo.reset()


def test_generate_leaves_prompts_as_they_were():
    engine = engine_of("llama")
    prompt = LinkedPrompt([39], engine.meta, cache=engine.allocate(39))
    prompt.write(0, 0, linked(engine))
    before = [tensor.clone() for tensor in (*prompt.cache.keys, *prompt.cache.values)]
    for room in (None, 64):
        for _ in range(2):
            inputs = generate_inputs(engine, prompt, query(), max_cache_len=room)
            out = engine.model.generate(**inputs, **PLAIN)
            assert out[0, 6:].tolist() == masked_greedy(engine, documents(), query())[0]
    after = (*prompt.cache.keys, *prompt.cache.values)
    assert all(torch.equal(ours, old) for ours, old in zip(after, before, strict=True))


def test_copies_serve_as_well():
    engine = engine_of("gemma3")
    inputs = generate_inputs(engine, linked(engine), query())
    again = copy.deepcopy(inputs)
    wanted = by_hand(engine, documents(), query())
    assert torch.equal(engine.model.generate(**inputs, **PLAIN), wanted)
    assert torch.equal(engine.model.generate(**again, **PLAIN), wanted)


def test_the_hook_goes_with_the_last_cache():
    model = make_model(config_of("llama"))
    engine = TransformersEngine(model)
    kept = [generate_inputs(engine, linked(engine), query()) for _ in range(2)]
    kept.append(copy.deepcopy(kept[0]))
    for left in (2, 1):
        assert len(model._forward_pre_hooks) == 1
        kept.pop(0)
        assert len(kept) == left
    assert model.generate(**kept[0], **PLAIN).shape == (1, 6 + NEW)
    kept.clear()
    assert not model._forward_pre_hooks


def test_a_chat_goes_on_where_it_ended():
    engine = engine_of("llama")
    inputs = generate_inputs(engine, linked(engine), query())
    first = engine.model.generate(**inputs, **PLAIN)
    said = first[0, 6:].tolist()
    more = torch.cat((first[:, -1:], torch.tensor([QUESTIONS[0]])), 1)  # the last token was not run yet
    mask = torch.ones(1, 39 + 6 + NEW + 3, dtype=torch.long)
    out = engine.model.generate(more, attention_mask=mask, past_key_values=inputs["past_key_values"], **PLAIN)
    assert out[0, 4:].tolist() == masked_greedy(engine, documents(), query() + said + QUESTIONS[0])[0]


@pytest.mark.parametrize("question", [query(), query()[:1]], ids=["long", "short"])
@pytest.mark.parametrize("room", [None, 80], ids=["dynamic", "static"])
def test_inputs_serve_one_call(question, room):
    engine = engine_of("llama")
    inputs = generate_inputs(engine, linked(engine), question, max_cache_len=room)
    engine.model.generate(**inputs, **PLAIN)
    with pytest.raises(ArgumentError, match="make new ones"):
        engine.model.generate(**inputs, **PLAIN)


ONES = torch.ones(1, 60, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": ONES[:, :6]}, "must bring the question's 6 tokens"),
        ({"attention_mask": None}, "must bring the question's 6 tokens"),
        ({"attention_mask": ONES[:, :39]}, "must cover 45 tokens"),
        ({"attention_mask": ONES}, "must cover 45 tokens"),
        ({"attention_mask": torch.cat((0 * ONES[:, :5], ONES[:, :40]), 1)}, "must cover 45 tokens"),
        ({"input_ids": torch.tensor([query()[:5]])}, "must bring the question's 6 tokens"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
    ],
    ids=["question's mask", "no mask", "documents' mask", "long mask", "holes", "other question", "chunks"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_does_not_fit_the_cache_is_refused(family, change, reason):
    engine = engine_of(family)
    for room in (None, 80):
        inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=room)
        with pytest.raises(ArgumentError, match=reason):
            engine.model.generate(**inputs | change, **PLAIN)


def test_rows_that_do_not_fit_the_cache_are_refused():
    engine = engine_of("llama")

    def inputs():
        return generate_inputs(engine, [linked(engine, texts) for texts in TEXTS], list(QUESTIONS))

    used = inputs()
    engine.model.generate(**used, **PLAIN)
    whole = inputs() | {"attention_mask": torch.ones_like(used["attention_mask"])}
    two = {name: each if name == "past_key_values" else each[:2] for name, each in inputs().items()}
    for ours, options, reason in (
        (whole, {}, "must cover 44 tokens"),
        (two, {}, "3 prompts, the model was given 2"),
        (used, {"num_beams": 2}, "holds 3 rows, the model was given 6"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            engine.model.generate(**ours, **PLAIN, **options)
    ours = inputs()
    del ours["attention_mask"]
    with pytest.raises(ArgumentError, match="position_ids must follow"):
        engine.model(**ours)


def test_another_model_is_refused():
    engine = engine_of("llama")
    other = make_model(config_of("llama"), 5)
    with pytest.raises(MismatchError, match="engine that made it"):
        other.generate(**generate_inputs(engine, linked(engine), query()), **PLAIN)
    stranger = TransformersEngine(other)
    theirs = generate_inputs(stranger, linked(stranger), query())
    with pytest.raises(MismatchError, match="another model"):
        other.generate(**generate_inputs(engine, linked(engine), query()), **PLAIN)
    assert torch.equal(other.generate(**theirs, **PLAIN), by_hand(stranger, documents(), query()))
    with pytest.raises(MismatchError, match="encode the documents with this model"):
        generate_inputs(engine_of("qwen3"), linked(engine), query())


def test_what_makes_no_batch_is_refused():
    engine = engine_of("llama")
    prompt = linked(engine)
    mask = torch.ones(1, 6, dtype=torch.long)
    for prompts, questions, options, reason in (
        ([prompt], [query(), query()], {}, "1 prompts and 2 questions"),
        ([prompt] * 3, query(), {}, "3 prompts and 1 questions"),
        ([], [], {}, "0 prompts"),
        (prompt, [query(), []], {}, "at least one token"),
        (prompt, [], {}, "0 questions"),
        (prompt, [VOCABULARY], {}, "token ids must lie"),
        (prompt, tokens(WINDOW - 38), {}, "window"),
        (prompt, query(), {"attention_mask": mask}, "shape of a tensor"),
        (prompt, torch.tensor([query()]), {"attention_mask": mask[:, :5]}, "shape of a tensor"),
        (prompt, torch.tensor([query()]), {"attention_mask": 0 * mask}, "at least one token"),
        (prompt, query(), {"max_cache_len": 45}, "leaves no room"),
        (prompt.slice(15, 39), query(), {}, "begins at position 0"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            generate_inputs(engine, prompts, questions, **options)


def test_answers_end_where_a_cache_or_its_frequencies_end():
    engine = engine_of("llama")
    inputs = generate_inputs(engine, linked(engine), query(), max_cache_len=47)
    with pytest.raises(ArgumentError, match="larger max_cache_len"):
        engine.model.generate(**inputs, **PLAIN)
    engine = engine_of("phi3-longrope")
    inputs = generate_inputs(engine, linked(engine), query())
    with pytest.raises(ArgumentError, match="frequencies change"):
        engine.model.generate(**inputs, **PLAIN | {"max_new_tokens": 30})


def test_layers_without_a_cache_are_passed_over():
    check_equals_masked(TransformersEngine(without_attention(make_model(config_of("llama")), (1,))), TEXTS, QUESTIONS)


def test_the_models_own_passes_are_left_alone():
    engine = engine_of("llama")
    generate_inputs(engine, linked(engine), query())
    whole = torch.tensor([[token for text in documents() for token in text] + query()])
    before = engine.model.generate(whole, attention_mask=torch.ones_like(whole), **PLAIN)
    fresh = make_model(config_of("llama"))
    assert torch.equal(before, fresh.generate(whole, attention_mask=torch.ones_like(whole), **PLAIN))


def test_each_layer_goes_to_its_device():
    """On a machine with one device, the other is torch's without memory: shapes alone are computed there."""
    engine = engine_of("llama")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    cache = linked(engine)
    for each in (cache, positions_off(cache), pruned_alike(cache, [3])):
        pairs, _ = tensors_for(each, torch.float32, Devices(cpu, (cpu, meta, cpu)))
        assert [keys.device for keys, _ in pairs] == [values.device for _, values in pairs] == [cpu, meta, cpu]
    with pytest.raises(MismatchError, match="spread over devices"):
        Devices(cpu, (cpu, meta, cpu)).check_single()
    Devices(cpu).check_single()


def test_a_spread_model_shows_where_its_layers_compute():
    model = make_model(config_of("llama"))
    meta = torch.device("meta")
    for part in (model.model.layers[2], model.model.norm, model.lm_head):
        part.to(meta)
        part.register_forward_pre_hook(moved_to(meta), with_kwargs=True)
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.2": "meta"}
    assert Devices.of(model) == Devices(torch.device("cpu"), (torch.device("cpu"), torch.device("cpu"), meta))


def moved_to(device):
    def there(value):
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value.to(device) if torch.is_tensor(value) else value

    return lambda _module, inputs, named: (there(inputs), {name: there(value) for name, value in named.items()})
