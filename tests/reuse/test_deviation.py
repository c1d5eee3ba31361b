"""How far a document moves behind another: against the definition, and what selectors make of it."""

from dataclasses import replace

import pytest
import torch

from kvwire.reuse import RepairInput, link, measure_deviation, selector_of
from kvwire.reuse.repair.selectors.attention import Attention

from ..engines.families import FAMILIES, LENGTHS, documents, engine_of, query

TEXT = tuple(token for ids in documents() for token in ids)


def by_definition(engine, neighbour, ids):
    """Prefill both in one go; compare with the two linked; token by token."""
    (whole,) = engine.prefill([[*neighbour, *ids]])
    linked = link(engine.prefill([neighbour, ids]))
    start, layers = len(neighbour), 0
    total = torch.zeros(len(ids))
    for stale_keys, stale_values, keys, values in zip(
        linked.keys, linked.values, whole.keys, whole.values, strict=True
    ):
        if not keys.numel():
            continue
        layers += 1
        for stale, fresh in ((stale_keys, keys), (stale_values, values)):
            if not fresh.numel():
                continue
            old, new = stale[:, start:].float(), fresh[:, start:].float()
            mean = sum(float(old[:, token].square().sum()) for token in range(len(ids))) / len(ids)
            total += torch.tensor([float((new - old)[:, token].square().sum()) / mean for token in range(len(ids))])
    return total / layers


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_its_definition_says(family):
    engine = engine_of(family)
    neighbour, ids = documents()[:2]
    caches = engine.prefill([neighbour, ids])
    found = measure_deviation(engine, caches[1], ids, caches[0])
    torch.testing.assert_close(found, by_definition(engine, neighbour, ids), rtol=2e-3, atol=1e-7)
    assert float(found.max()) > 1e-4


def test_where_a_cache_stands_does_not_matter():
    engine = engine_of("llama")
    neighbour, ids = engine.prefill(documents()[:2])
    at_seven = link([neighbour.slice(0, 7), ids]).slice(7, 7 + ids.tokens)
    assert at_seven.meta.offset == 7
    measured = [measure_deviation(engine, each, documents()[1], neighbour) for each in (ids, at_seven)]
    torch.testing.assert_close(*measured, rtol=1e-2, atol=1e-6)


def prompt(engine, **more):
    linked = link(engine.prefill(documents()))
    return RepairInput(engine, linked, TEXT, LENGTHS, tuple(query()), **more)


def test_attention_fades_along_each_document():
    given = prompt(engine_of("llama"))
    plain, faded = Attention(fading=0.0).scores(given), Attention(fading=0.5).scores(given)
    start = 0
    for length in LENGTHS:
        ratio = faded[start : start + length] / plain[start : start + length]
        torch.testing.assert_close(ratio, (torch.arange(length) + 4.0).rsqrt())
        start += length


def test_the_product_takes_the_root_of_what_is_stored():
    moved = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    given = prompt(engine_of("llama"), deviation=moved)
    scores = Attention(fading=0.0).scores(given) * moved.sqrt()
    scores[: LENGTHS[0]] = -1
    chosen = selector_of("product").choose(given, 5).rows
    assert chosen.tolist() == sorted(scores.topk(5).indices.tolist())
    none_moves = replace(given, deviation=torch.where(torch.arange(sum(LENGTHS)) == LENGTHS[0] + 3, 1.0, 0.0))
    assert selector_of("product").choose(none_moves, 1).rows.tolist() == [LENGTHS[0] + 3]
    assert selector_of("deviation").choose(none_moves, 1).rows.tolist() == [LENGTHS[0] + 3]
