"""Rows of documents that are computed anew beside link rows, against one pass over the whole prompt."""

import random

import pytest
import torch

from kvwire.engines.transformers.plain import filled
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import PLAIN, link_documents, repair_laid_out, repair_prompt, selector_of
from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, RepairInput

from ..engines.families import engine_of, error_between, query, tokens
from .test_link_rows import FIVE, SYSTEM, TOLERANCE, layout_of
from .test_schema import masks_of

TEXTS = tokens(9, 1), tokens(6, 2), tokens(14, 3)


class These:
    """Rows that a test names."""

    name, needs = "these", frozenset()

    def __init__(self, rows):
        self.rows = torch.tensor(rows)

    def choose(self, *_):
        return Chosen(self.rows)

    def cost(self, _, rows, *__):
        return RepairCost(float(rows), 0.0)


def repaired(engine, layout, selector, share, system=SYSTEM, **more):
    prompt = layout.lay_out(TEXTS, query(), system)
    texts = [layout.cache_tokens(text) for text in TEXTS]
    linked = link_documents(engine, engine.prefill(texts), prompt)
    before = linked.cache.slice(0, linked.cache.tokens)
    before = [each.clone() for each in (*before.keys, *before.values)]
    done = repair_laid_out(engine, linked, prompt, texts, query(), selector, share, **more)
    logits = engine.forward(engine.own_past(linked.cache), query(), prompt.question_start)
    return prompt, linked, before, done, logits


@torch.no_grad()
def in_one_pass(engine, prompt, rows):
    """The naive twin: one masked pass over documents as they are alone and, behind them, all that is computed."""
    alone = torch.cat([torch.arange(each.start, each.stop) for each in prompt.documents])
    owner = torch.cat([torch.full((each.tokens,), each.document) for each in prompt.documents])
    rows = torch.as_tensor(rows)
    anew = torch.cat([prompt.positions(), rows]).sort().values
    position = torch.cat([alone, anew])
    is_anew = torch.arange(len(position)) >= len(alone)
    owner = torch.cat([owner, torch.full((len(anew),), -1)])
    there = is_anew | ~torch.isin(position, rows)
    visible = position <= position[:, None]
    visible &= torch.where(is_anew[:, None], there, ~is_anew & (owner == owner[:, None]))
    out = engine.model(
        input_ids=torch.tensor(prompt.token_ids)[position][None],
        position_ids=position[None],
        attention_mask=masks_of(engine, visible, position),
        past_key_values=filled(()),
    )
    return out.logits[0, -len(query()) :]


@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "bare"])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("family", FIVE)
def test_any_rows_beside_links_equal_one_pass(family, count, system):
    engine, layout = engine_of(family), layout_of(count, markers=count != 1)
    draw = random.Random(f"{family} {count} {system}")
    places = layout.lay_out(TEXTS, query(), system)
    own = [row for each in places.documents for row in range(each.start, each.stop)]
    for size in (1, 5, len(own) - 1):
        rows = sorted(draw.sample(own, size))
        prompt, _, _, done, logits = repaired(engine, layout, These(rows), 0.5, system)
        assert done.rows.tolist() == rows
        assert error_between(logits, in_one_pass(engine, prompt, rows)) < TOLERANCE


@pytest.mark.parametrize("family", FIVE)
def test_all_rows_equal_a_causal_pass_over_the_prompt(family):
    engine = engine_of(family)
    prompt, _, _, done, logits = repaired(engine, layout_of(2), selector_of("all"), 1.0)
    assert len(done.rows) == sum(map(len, TEXTS))
    assert error_between(logits, engine.forward(None, prompt.token_ids, 0)[-len(query()) :]) < TOLERANCE


def test_no_rows_leave_all_bits():
    _, linked, before, done, _ = repaired(engine_of("llama"), layout_of(2), selector_of("attention"), 0.0)
    assert not len(done.rows)
    for ours, theirs in zip((*linked.cache.keys, *linked.cache.values), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["attention", "first", "random", "deviation"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.8])
def test_selectors_choose_rows_of_documents_alone(name, share):
    engine = engine_of("llama")
    total = sum(map(len, TEXTS))
    moved = torch.rand(total, generator=torch.Generator().manual_seed(3))
    prompt, _, _, done, logits = repaired(engine, layout_of(3), selector_of(name), share, deviation=moved)
    computed = set(prompt.positions().tolist())
    assert len(done.rows) == -int(-share * total // 1)
    assert not computed & set(done.rows.tolist())
    assert error_between(logits, in_one_pass(engine, prompt, done.rows)) < TOLERANCE


def test_without_links_it_is_the_repair_of_plain_prompts_bit_for_bit():
    engine = engine_of("llama")
    _, linked, _, done, _ = repaired(engine, PLAIN, selector_of("attention"), 0.3, ())
    prompt = PLAIN.lay_out(TEXTS, query())
    plain = link_documents(engine, engine.prefill(TEXTS), prompt).cache
    ids = tuple(token for text in TEXTS for token in text)
    given = RepairInput(engine, plain, ids, tuple(map(len, TEXTS)), tuple(query()))
    theirs = repair_prompt(given, selector_of("attention"), 0.3)
    assert done.rows.tolist() == theirs.rows.tolist()
    assert done.cost == theirs.cost
    for mine, other in zip((*linked.cache.keys, *linked.cache.values), (*plain.keys, *plain.values), strict=True):
        assert torch.equal(mine, other)


def test_link_rows_before_the_first_row_stay_and_those_behind_it_change():
    engine, layout = engine_of("llama"), layout_of(2)
    places = layout.lay_out(TEXTS, query(), SYSTEM)
    row = places.starts[2]
    prompt, linked, before, _, _ = repaired(engine, layout, These([row]), 0.5)
    keys, was = linked.cache.keys[-1], before[len(linked.cache.keys) - 1]
    assert torch.equal(keys[:, :row], was[:, :row])
    last = prompt.question_start - 1
    assert not torch.equal(keys[:, last], was[:, last])


def test_what_cannot_be_repaired_beside_links():
    engine = engine_of("llama")
    for name in ("cacheblend", "lmcache", "blend"):
        with pytest.raises(MismatchError, match="drops rows from layer to layer"):
            repaired(engine, layout_of(2), selector_of(name), 0.3)
    for share in (-0.1, 1.1):
        with pytest.raises(ArgumentError, match="share of rows"):
            repaired(engine, layout_of(2), selector_of("first"), share)
    prompt = layout_of(2).lay_out(TEXTS, query())
    linked = link_documents(engine, engine.prefill(TEXTS), prompt)
    with pytest.raises(ArgumentError, match="are repaired with their texts"):
        repair_laid_out(engine, linked, prompt, TEXTS[:2], query(), selector_of("first"), 0.3)
