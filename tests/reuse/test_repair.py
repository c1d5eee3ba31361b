"""Rows computed anew: exact against whole prefills and against one masked pass, for every family."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.engines.transformers.masks import attention_mask
from kvwire.engines.transformers.plain import filled, tensors_of
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import SELECTORS, RepairInput, link, repair_prompt, rows_for, selector_of
from kvwire.types import KVCache

from ..engines.families import FAMILIES, LENGTHS, cache_error, documents, engine_of, error_between, query, tokens

TOLERANCE = 1e-5
SEEN = 1e-3
TOTAL = sum(LENGTHS)
TEXT = [token for ids in documents() for token in ids]
SPARSE = torch.tensor([1, 16, 17, 20, 25, 27, 33, TOTAL - 1])


def linked_of(engine):
    return link(engine.prefill(documents()))


def cloned(cache):
    return replace(cache, keys=[key.clone() for key in cache.keys], values=[value.clone() for value in cache.values])


def tensors(cache):
    return [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(theirs), strict=True))


def part(cache, rows):
    return replace(
        cache,
        keys=[key[:, rows] if key.numel() else key for key in cache.keys],
        values=[value[:, rows] if value.numel() else value for value in cache.values],
    )


def in_one_pass(engine, rows):
    """The naive twin: one masked pass over the documents as they are alone and, behind them, the rows once more."""
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    positions = torch.cat((torch.arange(TOTAL), rows))
    fresh = torch.arange(TOTAL + len(rows)) >= TOTAL
    replaced = torch.isin(torch.arange(TOTAL), rows)
    visible = positions[None] <= positions[:, None]
    alone = ~fresh[:, None] & ~fresh[None] & (owner[positions][:, None] == owner[positions][None])
    anew = fresh[:, None] & (fresh[None] | ~torch.cat((replaced, torch.ones(len(rows), dtype=torch.bool)))[None])
    windows = {spec.window for spec in engine.meta.layers if spec.kind != "none"}
    distance = positions[:, None] - positions[None]
    past = filled(())
    ids = torch.tensor([[*TEXT, *(TEXT[row] for row in rows)]])
    masks = {window: visible & (alone | anew) & (window is None or distance < window) for window in windows}
    plain = replace(engine.meta, layers=tuple(replace(spec, window=None) for spec in engine.meta.layers))
    made = {window: attention_mask(engine.model, plain, mask) for window, mask in masks.items()}
    given_mask = made[None] if windows == {None} else next(iter(made.values()))
    if len(windows) > 1:
        sliding = next(window for window in windows if window is not None)
        given_mask = {"full_attention": made[None], "sliding_attention": made[sliding]}
    engine.model(input_ids=ids, position_ids=positions[None], attention_mask=given_mask, past_key_values=past)
    pairs = tensors_of(past)
    wanted = linked_of(engine)
    for layer, (keys, values) in enumerate(pairs[: len(wanted.keys)]):
        if wanted.keys[layer].numel():
            wanted.keys[layer][:, rows] = keys[0, :, TOTAL:]
            wanted.values[layer][:, rows] = values[0, :, TOTAL:]
    return wanted


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_equal_one_masked_pass(family):
    engine = engine_of(family)
    linked = linked_of(engine)
    before = cloned(linked)
    engine.update_rows(linked, TEXT, SPARSE)
    assert cache_error(linked, in_one_pass(engine, SPARSE)) < TOLERANCE
    rest = torch.tensor([row for row in range(TOTAL) if row not in SPARSE.tolist()])
    assert same_bits(part(linked, rest), part(before, rest))
    assert cache_error(part(linked, SPARSE[2:]), part(before, SPARSE[2:])) > SEEN


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_are_a_prefill_of_the_whole_prompt(family):
    engine = engine_of(family)
    linked = linked_of(engine)
    (whole,) = engine.prefill([TEXT])
    engine.update_rows(linked, TEXT, torch.arange(TOTAL).flip(0))
    assert cache_error(linked, whole) < TOLERANCE
    logits = engine.forward(engine.past_key_values(linked), query(), TOTAL)
    assert error_between(logits, engine.forward(None, TEXT + query(), 0)[TOTAL:]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "minicpm3", "smollm3", "glm"])
def test_double_precision_is_exact(family):
    engine = engine_of(family)
    double = type(engine)(__import__("copy").deepcopy(engine.model).double(), model_id=family)
    linked = linked_of(double)
    (whole,) = double.prefill([TEXT])
    double.update_rows(linked, TEXT, torch.arange(TOTAL))
    assert cache_error(linked, whole) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_document_order_equals_at_once(family):
    engine = engine_of(family)
    at_once, in_order = linked_of(engine), linked_of(engine)
    engine.update_rows(at_once, TEXT, SPARSE)
    start = 0
    for length in LENGTHS:
        rows = SPARSE[(start <= SPARSE) & (start + length > SPARSE)]
        seen = in_order.slice(0, start + length)  # what follows is not there yet
        engine.update_rows(seen, TEXT[: start + length], rows)
        start += length
    assert cache_error(in_order, at_once) < 2 * TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_blocks_of_rows_equal_all_at_once(family, monkeypatch):
    engine = engine_of(family)
    at_once, in_blocks = linked_of(engine), linked_of(engine)
    engine.update_rows(at_once, TEXT, SPARSE)
    monkeypatch.setattr("kvwire.engines.transformers.rows._BLOCK", 3)
    engine.update_rows(in_blocks, TEXT, SPARSE)
    assert cache_error(in_blocks, at_once) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_no_earlier_row(family):
    engine = engine_of(family)
    other = [*TEXT[:30], *tokens(TOTAL - 30, 5)]
    ours, theirs = linked_of(engine), linked_of(engine)
    engine.update_rows(ours, TEXT, SPARSE)
    engine.update_rows(theirs, other, SPARSE)
    early = SPARSE[SPARSE < 30]
    assert cache_error(part(ours, early), part(theirs, early)) < 1e-6  # one pass has as many rows as the other
    assert not same_bits(part(ours, SPARSE), part(theirs, SPARSE))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layer_and_the_first_document_never_change(family):
    engine = engine_of(family)
    linked = linked_of(engine)
    before = cloned(linked)
    engine.update_rows(linked, TEXT, torch.arange(0, TOTAL, 2))
    first = part(linked, torch.arange(LENGTHS[0]))
    assert cache_error(first, part(before, torch.arange(LENGTHS[0]))) < TOLERANCE
    if linked.keys[0].numel():
        assert error_between(linked.keys[0], before.keys[0]) < TOLERANCE
        assert error_between(linked.values[0], before.values[0]) < TOLERANCE


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_any_rows_equal_one_masked_pass(data):
    engine = engine_of(data.draw(st.sampled_from(["llama", "gemma3", "deepseek-v3"])))
    rows = data.draw(st.sets(st.integers(0, TOTAL - 1), min_size=1).map(sorted))
    linked = linked_of(engine)
    with torch.no_grad():
        wanted = in_one_pass(engine, torch.tensor(rows))
    engine.update_rows(linked, TEXT, torch.tensor(rows))
    assert cache_error(linked, wanted) < TOLERANCE


def pruned(engine, masks):
    return replace(linked_of(engine), kept=tuple(masks))


def shorter(engine, cache, kept):
    """The same prompt, the pruned tokens left out."""
    meta = cache.meta
    return KVCache.from_tensors([k[:, kept] for k in cache.keys], [v[:, kept] for v in cache.values], meta, None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox", "deepseek-v3"])
def test_rows_do_not_see_what_was_pruned(family):
    engine = engine_of(family)
    hole = torch.tensor([16, 18, 19, 28])
    mask = torch.ones(TOTAL, dtype=torch.bool)
    mask[hole] = False
    cache = pruned(engine, [mask.expand(spec.kv_heads, -1).clone() for spec in engine.meta.layers])
    for tensor in tensors(cache):
        tensor[:, hole] = 77.0  # whoever looks there shows it
    clean = linked_of(engine)
    rows = torch.tensor([17, 27, 30])
    engine.update_rows(cache, TEXT, rows)
    assert bool((cache.keys[-1][:, hole] == 77.0).all())
    visible = (torch.arange(TOTAL) <= rows[:, None]) & mask
    wanted = masked_rows(engine, clean, rows, visible)
    for layer in range(len(cache.keys)):
        assert error_between(cache.keys[layer][:, rows], wanted[layer]) < TOLERANCE


@torch.no_grad()
def masked_rows(engine, cache, rows, visible):
    """Keys of rows behind a shared mask, by extending copies of the cache with the rows at its end."""
    pairs = [(key[None], value[None]) for key, value in zip(cache.keys, cache.values, strict=True)]
    past = filled(pairs)
    stale = torch.isin(torch.arange(TOTAL), rows)
    own = rows[:, None] >= rows[None]
    mask = torch.cat((visible & ~stale, own), 1)
    ids = torch.tensor([[TEXT[row] for row in rows]])
    four_d = attention_mask(engine.model, engine.meta, mask)
    engine.model(input_ids=ids, position_ids=rows[None], attention_mask=four_d, past_key_values=past)
    return [keys[0, :, TOTAL:] for keys, _ in tensors_of(past)]


def test_heads_that_keep_different_tokens_are_masked_each_for_itself():
    engine = engine_of("llama")
    generator = torch.Generator().manual_seed(4)
    masks = [torch.rand(spec.kv_heads, TOTAL, generator=generator) < 0.7 for spec in engine.meta.layers]
    rows = torch.tensor([17, 27, 30])
    cache, poisoned = pruned(engine, masks), pruned(engine, masks)
    for layer, mask in enumerate(masks):
        hidden = ~mask
        hidden[:, rows] = False
        poisoned.keys[layer][hidden] = 50.0
        poisoned.values[layer][hidden] = 50.0
    engine.update_rows(cache, TEXT, rows)
    engine.update_rows(poisoned, TEXT, rows)
    assert cache_error(part(cache, rows), part(poisoned, rows)) < 1e-6
    whole = linked_of(engine)
    engine.update_rows(whole, TEXT, rows)
    assert cache_error(part(cache, rows), part(whole, rows)) > SEEN


class Halving:
    """Drops every other row at a layer."""

    def __init__(self, layer, *, writes_all):
        self.layer, self.writes_all, self.seen = layer, writes_all, []

    def choose(self, layer, rows, stale, fresh):
        self.seen.append((layer, len(rows)))
        assert stale[0].shape == fresh[0].shape
        return torch.arange(0, len(rows), 2) if layer == self.layer else None


@pytest.mark.parametrize("writes_all", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-neox", "deepseek-v3", "qwen3", "gemma4"])
def test_dropping_rows_on_the_way(family, writes_all):
    """Rows that go on end as rows would, had the others been written by hand in the layers before."""
    engine = engine_of(family)
    cache, before = linked_of(engine), linked_of(engine)
    rows = torch.arange(LENGTHS[0], TOTAL)
    halving, hooks = Halving(1, writes_all=writes_all), hooks_of(engine.model)
    done = engine.update_rows(cache, TEXT, rows, halving)
    assert hooks_of(engine.model) == hooks
    assert torch.equal(done, rows[::2])
    layers = [number for number, spec in enumerate(engine.meta.layers) if spec.kind != "none"]
    assert [count for number, count in halving.seen if number <= 1] == [len(rows)] * 2
    assert [count for number, count in halving.seen if number > 1] == [len(rows[::2])] * (len(layers) - 2)
    whole = linked_of(engine)
    engine.update_rows(whole, TEXT, rows)
    for layer in layers:
        dropped_at = cache.keys[layer][:, rows[1::2]]
        wanted = whole if layer < 1 or (layer == 1 and writes_all) else before
        assert error_between(dropped_at, wanted.keys[layer][:, rows[1::2]]) < TOLERANCE
        if layer <= 1:
            assert error_between(cache.keys[layer][:, rows[::2]], whole.keys[layer][:, rows[::2]]) < TOLERANCE
    last = layers[-1]
    if last > 1:
        assert error_between(cache.keys[last][:, rows[::2]], before.keys[last][:, rows[::2]]) > SEEN


def hooks_of(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_received_is_a_distribution_over_the_prompt(family):
    engine = engine_of(family)
    linked = linked_of(engine)
    before = cloned(linked)
    received = engine.look(linked, query()).attention
    assert received.shape == (TOTAL,)
    assert bool((received >= 0).all())
    assert 0.02 < float(received.sum()) < 1.0
    assert same_bits(linked, before)


def test_attention_received_equals_the_models_own():
    engine = engine_of("llama")
    model = __import__("copy").deepcopy(engine.model)
    model.set_attn_implementation("eager")
    linked = linked_of(engine)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([query()]), past_key_values=engine.past_key_values(linked), output_attentions=True
        )
    weights = torch.stack([one[0].mean((0, 1))[:TOTAL] for one in out.attentions])
    assert error_between(engine.look(linked, query()).attention, weights.mean(0)) < TOLERANCE
    assert error_between(engine.look(linked, query(), layers=[1]).attention, weights[1]) < TOLERANCE


def test_influence_is_attention_times_values_by_the_strongest_head():
    """Beside the same from the model's own attention, head by head; the first layer counts for nothing."""
    engine = engine_of("llama")
    model = __import__("copy").deepcopy(engine.model)
    model.set_attn_implementation("eager")
    linked = linked_of(engine)
    past = engine.past_key_values(linked)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([query()]), past_key_values=past, output_attentions=True)
    wanted = []
    for layer, weights in enumerate(out.attentions[1:], 1):
        values = past.layers[layer].values if layer < len(past.layers) else None
        sizes = values[0].norm(dim=-1)
        taken = weights[0].mean(1) * (sizes / sizes.mean()).repeat_interleave(len(weights[0]) // len(sizes), 0)
        wanted.append(taken.amax(0)[:TOTAL])
    assert error_between(engine.look(linked, query()).influence, torch.stack(wanted).mean(0)) < TOLERANCE
    assert not engine.look(linked, query(), layers=[0]).influence.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_that_the_models_own_attention_gives(family, monkeypatch):
    """The naive twin: keys repeated for each head, all columns for every row."""
    engine = engine_of(family)
    ours, theirs = linked_of(engine), linked_of(engine)
    engine.update_rows(ours, TEXT, SPARSE)
    monkeypatch.setattr("kvwire.engines.transformers.rows.is_plain_attention", lambda _: False)
    engine.update_rows(theirs, TEXT, SPARSE)
    assert max(error_between(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True) if a.numel()) < TOLERANCE
    assert max(error_between(a, b) for a, b in zip(ours.values, theirs.values, strict=True) if a.numel()) < TOLERANCE


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_selectors_compute_what_they_are_asked_for(name, share):
    engine = engine_of("llama")
    linked = linked_of(engine)
    before = cloned(linked)
    deviation = torch.rand(TOTAL, generator=torch.Generator().manual_seed(0))
    prompt = RepairInput(engine, linked, tuple(TEXT), LENGTHS, tuple(query()), deviation)
    done = repair_prompt(prompt, selector_of(name), share)
    wanted = {"none": 0, "all": TOTAL}.get(name, rows_for(share, LENGTHS))
    assert len(done.rows) == wanted
    assert (done.cost.token_layers > 0) == (wanted > 0)
    if wanted == TOTAL:
        assert cache_error(linked, engine.prefill([TEXT])[0]) < TOLERANCE
    elif wanted == 0:
        assert same_bits(linked, before)
    else:
        assert int(done.rows[0]) >= LENGTHS[0]
        assert same_bits(part(linked, torch.arange(LENGTHS[0])), part(before, torch.arange(LENGTHS[0])))


def test_bad_requests_name_the_way_out():
    engine = engine_of("llama")
    linked = linked_of(engine)
    prompt = RepairInput(engine, linked, tuple(TEXT), LENGTHS)
    with pytest.raises(ArgumentError, match="choose one of none, all"):
        selector_of("cleverest")
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        repair_prompt(prompt, selector_of("first"), 1.5)
    with pytest.raises(ArgumentError, match="give it a question"):
        repair_prompt(prompt, selector_of("attention"), 0.1)
    with pytest.raises(ArgumentError, match="encode with deviations"):
        repair_prompt(prompt, selector_of("deviation"), 0.1)
    with pytest.raises(ArgumentError, match="not one prompt"):
        RepairInput(engine, linked, tuple(TEXT[:-1]), LENGTHS)
    for rows in (torch.tensor([TOTAL]), torch.tensor([-1]), torch.tensor([3, 3]), torch.tensor([1.0])):
        with pytest.raises(ArgumentError):
            engine.update_rows(linked, TEXT, rows)
    with pytest.raises(ArgumentError, match="ids of all of them"):
        engine.update_rows(linked, TEXT[:-1], torch.tensor([1]))
    half = replace(linked, keys=[key.half() for key in linked.keys])
    with pytest.raises(ArgumentError, match="LinkedPrompt"):
        engine.update_rows(half, TEXT, torch.tensor([1]))


def test_attention_without_masks_is_refused(monkeypatch):
    engine = engine_of("llama")
    monkeypatch.setattr(engine.model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(MismatchError, match="open the model with sdpa or eager"):
        engine.update_rows(link_without(engine), TEXT, SPARSE)


def link_without(engine):
    """Zeros in the shape of the prompt: the model cannot be run."""
    return KVCache.zeros(engine.meta, TOTAL, dtype=engine.dtype)


def test_a_repair_is_stopped_between_blocks_and_what_is_done_is_right(monkeypatch):
    engine = engine_of("llama")
    monkeypatch.setattr("kvwire.reuse.repair.repairing.BLOCK_ROWS", 3)
    linked, wanted = linked_of(engine), linked_of(engine)
    asked = iter([False, False, True])
    prompt = RepairInput(engine, linked, tuple(TEXT), LENGTHS, tuple(query()))
    done = repair_prompt(prompt, selector_of("attention"), 0.4, lambda: next(asked))
    assert done.is_cut
    assert len(done.rows) == 6
    engine.update_rows(wanted, TEXT, done.rows)
    assert cache_error(linked, wanted) < TOLERANCE
    whole = RepairInput(engine, linked_of(engine), tuple(TEXT), LENGTHS, tuple(query()))
    assert not repair_prompt(whole, selector_of("attention"), 0.4, lambda: False).is_cut
    never = RepairInput(engine, linked_of(engine), tuple(TEXT), LENGTHS, tuple(query()))
    assert not len(repair_prompt(never, selector_of("attention"), 0.4, lambda: True).rows)
