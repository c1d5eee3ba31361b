"""Several caches extended in one pass, against each alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvwire.codec import positions_off
from kvwire.engines.base import Engine
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, MismatchError

from .families import FAMILIES, WINDOW, cache_error, config_of, engine_of, make_model, tokens

TOLERANCE = 1e-5
ROWS = ((21, 13), (0, 17), (7, 5), (30, 1), (3, 22))
"""Tokens before and new ones of each row; beyond the windows of sliding layers, and unequal."""


def rows(engine, lengths=ROWS, offsets=None):
    offsets = offsets or [0] * len(lengths)
    prefixes = [
        engine.extend(None, tokens(before, seed), offset=offset) if before else None
        for seed, ((before, _), offset) in enumerate(zip(lengths, offsets, strict=True))
    ]
    return prefixes, [tokens(new, 50 + seed) for seed, (_, new) in enumerate(lengths)]


def hold_equal(engine, prefixes, news, offsets):
    together = engine.extend_together(prefixes, news, offsets=offsets)
    assert len(together) == len(news)
    for cache, prefix, ids, offset in zip(together, prefixes, news, offsets, strict=True):
        alone = engine.extend(prefix, ids, offset=offset)
        assert cache_error(cache, alone) < TOLERANCE
        assert cache.meta == alone.meta
        assert cache.token_ids == alone.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_unequal_lengths_equal_rows_alone(family):
    engine = engine_of(family)
    engine.check_together()
    hold_equal(engine, *rows(engine), [0] * len(ROWS))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt-oss", "llama-dynamic", "deepseek-v3"])
def test_rows_stand_where_their_prefixes_end(family):
    engine, offsets = engine_of(family), [40, 11, 0, 90, 5]
    hold_equal(engine, *rows(engine, offsets=offsets), offsets)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_kinds_of_attention_take_padding(attention):
    model = make_model(config_of("qwen3"))
    model.set_attn_implementation(attention)
    engine = TransformersEngine(model)
    hold_equal(engine, *rows(engine), [0] * len(ROWS))


@pytest.mark.parametrize(
    ("family", "lengths"), [("llama", ((0, 4), (0, 9))), ("llama-dynamic", ((WINDOW - 2, 2), (3, 20)))]
)
def test_rows_without_any_prefix_and_a_row_that_ends_at_the_window(family, lengths):
    engine = engine_of(family)
    hold_equal(engine, *rows(engine, lengths), [0, 0])


def test_prefixes_with_positions_off_are_put_in_place_and_what_comes_out_owns_its_memory():
    engine = engine_of("llama")
    prefixes, news = rows(engine)
    off = [None if each is None else positions_off(each) for each in prefixes]
    pairs = (engine.extend_together(each, news, offsets=[0] * len(news)) for each in (off, prefixes))
    for cache, alone in zip(*pairs, strict=True):
        assert cache_error(cache, alone) < TOLERANCE
        assert cache.keys[0].untyped_storage().nbytes() == cache.keys[0].numel() * 4


def test_random_rows_equal_rows_alone():
    engine, generator = engine_of("mistral"), torch.Generator().manual_seed(5)
    for _ in range(12):
        count = int(torch.randint(1, 6, (), generator=generator))
        before = torch.randint(0, 40, (count,), generator=generator).tolist()
        new = torch.randint(1, 30, (count,), generator=generator).tolist()
        hold_equal(engine, *rows(engine, tuple(zip(before, new, strict=True))), [0] * count)


def test_bfloat16_is_held_to_its_own_roundings():
    model = make_model(config_of("llama")).to(torch.bfloat16)
    TransformersEngine(model).check_together()


def test_a_model_that_padding_changes_is_refused_once_and_for_all():
    """Its layers read the whole batch: rows change each other."""
    model = make_model(config_of("llama"))
    calls = []

    def mixed(_module, _inputs, output):
        calls.append(output.shape)
        return output + output.mean((0, 1), keepdim=True) if output.shape[0] > 1 else output

    engine = TransformersEngine(model)
    model.model.layers[0].mlp.register_forward_hook(mixed)
    with pytest.raises(MismatchError, match="padding changes"):
        engine.check_together()
    probed = len(calls)
    with pytest.raises(MismatchError, match="padding changes"):
        engine.check_together()
    assert len(calls) == probed


def test_attention_that_takes_no_masks_is_refused():
    model = make_model(config_of("llama"))
    engine = TransformersEngine(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(MismatchError):
        engine.extend_together(*rows(engine_of("llama")), offsets=[0] * len(ROWS))


def test_bad_rows_are_refused():
    engine = engine_of("llama")
    prefixes, news = rows(engine)
    with pytest.raises(ArgumentError, match="without tokens"):
        engine.extend_together(prefixes, [[], *news[1:]], offsets=[0] * len(news))
    with pytest.raises(ArgumentError, match="window"):
        engine.extend_together([None], [tokens(4)], offsets=[WINDOW - 3])
    with pytest.raises(ArgumentError, match="rows need"):
        engine.extend_together(prefixes[:1], news, offsets=[0] * len(news))
    other = replace(prefixes[0].meta, model_revision="another")
    with pytest.raises(MismatchError, match="computed by model"):
        engine.extend_together([replace(prefixes[0], meta=other), *prefixes[1:]], news, offsets=[0] * len(news))


def test_an_engine_without_it_says_so():
    class Plain(Engine):
        pass

    with pytest.raises(MismatchError, match="one by one"):
        Plain().check_together()
    with pytest.raises(MismatchError, match="one by one"):
        Plain().extend_together([None], [[1]], offsets=[0])
