"""The learnt mean shift: what it learns, what it adds and where, and its file."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import positions_off, positions_on
from kvwire.codec.format.arrays import pack_arrays
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, KvwireError, MismatchError
from kvwire.reuse import LinkShift, ShiftLearner, link
from kvwire.reuse.link_shift import MAX_BYTES, stretch_bounds
from kvwire.types import SHIFT_MAGIC, KVCache

from ..engines.families import cache_error, engine_of, tokens
from .test_link import META, lengths, random_cache, seeds

GOLDEN = Path(__file__).parent / "golden" / "v1.0.kvs"


def copied(cache):
    return replace(cache, keys=[key.clone() for key in cache.keys], values=[value.clone() for value in cache.values])


def random_shift(seed, longest, meta=META):
    generator = torch.Generator().manual_seed(seed)
    bounds = stretch_bounds(longest)
    keys, values = (
        tuple(torch.randn(len(bounds) - 1, spec.kv_heads, width(spec), generator=generator) for spec in meta.layers)
        for width in (lambda spec: spec.key_dim, lambda spec: spec.value_dim)
    )
    return LinkShift(meta.config_digest(), meta.model_id, 3, bounds, keys, values)


def golden_shift():
    """Numbers that are the same on every machine."""
    bounds = stretch_bounds(6)
    keys, values = (
        tuple(
            torch.arange(5 * spec.kv_heads * width(spec)).reshape(5, spec.kv_heads, width(spec)) / 8 - layer
            for layer, spec in enumerate(META.layers)
        )
        for width in (lambda spec: spec.key_dim, lambda spec: spec.value_dim)
    )
    return LinkShift("c" * 64, "model", 7, bounds, keys, values)


def apply_naive(self, cache, lengths, stays):
    """Token by token: the position is taken off, the shift added and the position put back."""
    spans, total, start = list(stays), 0, 0
    for document, count in enumerate(lengths):
        for token in range(count):
            at = start + token
            if not document or token >= self.tokens or any(first <= at < stop for first, stop in spans):
                continue
            stretch = max(index for index, bound in enumerate(self.bounds) if bound <= token)
            off = positions_off(cache.slice(at, at + 1))
            for ours, shift in zip((*off.keys, *off.values), (*self.keys, *self.values), strict=True):
                if ours.numel():
                    ours[:, 0] += shift[stretch].to(ours.dtype)
            on = positions_on(off, at)
            for ours, theirs in zip((*cache.keys, *cache.values), (*on.keys, *on.values), strict=True):
                if ours.numel():
                    ours[:, at : at + 1] = theirs
            total += 1
        start += count
    return total


def test_stretches_grow():
    assert stretch_bounds(1) == (0, 1)
    assert stretch_bounds(5) == (0, 1, 2, 3, 4, 5)
    assert stretch_bounds(20) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert stretch_bounds(128) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    for wrong in (0, -1, 1 << 30):
        with pytest.raises(ArgumentError):
            stretch_bounds(wrong)


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 12), seeds, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=2))
def test_a_shift_is_the_same_token_by_token(counts, longest, seed, stays):
    cache = link([random_cache(count, seed + index) for index, count in enumerate(counts)])
    shift = random_shift(seed, longest)
    fast, naive = copied(cache), copied(cache)
    done = shift.apply(fast, counts, stays)
    assert done == apply_naive(shift, naive, counts, stays)
    assert cache_error(fast, naive) < 1e-5
    start = 0
    for index, count in enumerate(counts):
        spared = {at - start for first, stop in stays for at in range(first, stop)}
        same = [at for at in range(count) if not index or at >= longest or at in spared]
        for before, after in zip((*cache.keys, *cache.values), (*fast.keys, *fast.values), strict=True):
            assert torch.equal(before[:, start : start + count][:, same], after[:, start : start + count][:, same])
        done -= count - len(same)
        start += count
    assert not done


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_keep_theirs(dtype):
    cache = link([random_cache(5), random_cache(6, 1)])
    shift = random_shift(2, 9)
    wide = copied(cache)
    shift.apply(wide, [5, 6])
    typed = KVCache([k.to(dtype) for k in cache.keys], [v.to(dtype) for v in cache.values], cache.meta)
    shift.apply(typed, [5, 6])
    assert {tensor.dtype for tensor in (*typed.keys, *typed.values)} == {dtype}
    back = KVCache([k.float() for k in typed.keys], [v.float() for v in typed.values], cache.meta)
    assert cache_error(back, wide) < (1e-5 if dtype is torch.float64 else 2e-2)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen3", "gemma3", "phi", "gpt-neox", "cohere", "glm", "llama-yarn", "smollm3"]
)
def test_a_shift_of_one_prompt_undoes_what_linking_lost_there(family):
    """Of one document of four tokens behind another every token has a stretch of its own: the mean is the whole."""
    engine = engine_of(family)
    first, second = tokens(11), tokens(4, 1)
    alone = engine.prefill([first, second])
    (whole,) = engine.prefill([[*first, *second]])
    learner = ShiftLearner(engine.meta)
    learner.add(alone, whole)
    shift = learner.finish()
    shift.check_fits(engine.meta)
    assert (shift.prompts, shift.tokens) == (1, 4)
    linked = copied(link(alone))
    assert cache_error(linked, whole) > 1e-3
    assert shift.apply(linked, [11, 4]) == 4
    assert cache_error(linked, whole) < 1e-4


def test_the_mean_is_over_prompts_documents_and_stretches():
    learner = ShiftLearner(META)
    wanted = []
    for seed in (1, 10, 20):
        alone = [random_cache(count, seed + index) for index, count in enumerate((3, 6, 9))]
        prompt = link([random_cache(count, seed + 5 + index) for index, count in enumerate((3, 6, 9))])
        learner.add(alone, prompt)
        for blind, start in ((alone[1], 3), (alone[2], 9)):
            wanted.append(prompt.values[2][:, start + 4 : start + 6] - blind.values[2][:, 4:6])
    shift = learner.finish()
    assert (shift.prompts, shift.bounds) == (3, (0, 1, 2, 3, 4, 6, 8, 9))
    assert torch.allclose(shift.values[2][4], torch.cat(wanted, 1).mean(1), atol=1e-6)


def test_what_nothing_is_learnt_from_is_refused():
    learner = ShiftLearner(META)
    with pytest.raises(ArgumentError, match="at least one prompt"):
        learner.finish()
    with pytest.raises(ArgumentError, match="two documents"):
        learner.add([random_cache(3)], random_cache(3))
    with pytest.raises(ArgumentError, match="two documents"):
        learner.add([random_cache(3), random_cache(3)], random_cache(7))
    other = replace(META, model_revision="other")
    with pytest.raises(MismatchError, match="another model"):
        learner.add([random_cache(3), random_cache(3, meta=other)], random_cache(6))
    with pytest.raises(MismatchError, match="latent"):
        ShiftLearner(engine_of("deepseek-v3").meta)


def test_a_shift_fits_one_model_and_whole_prompts():
    shift = random_shift(0, 9)
    shift.check_fits(META)
    for meta in (replace(META, model_revision="other"), replace(META, layers=META.layers[:2])):
        with pytest.raises(MismatchError, match="not on this one"):
            shift.check_fits(meta)
    cache = link([random_cache(3), random_cache(4)])
    before = copied(cache)
    pruned = replace(cache, kept=(None, torch.ones(1, 7, dtype=torch.bool), None))
    for given_cache, counts in ((cache, [3, 5]), (pruned, [3, 4]), (random_cache(9).slice(2, 9), [3, 4])):
        with pytest.raises(ArgumentError, match="whole prompts"):
            shift.apply(given_cache, counts)
    assert all(map(torch.equal, cache.keys, before.keys))
    assert shift.on("cpu").apply(cache, [3, 4]) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"bounds": (0,)},
        {"bounds": (1, 2, 3, 4, 5, 6)},
        {"bounds": (0, 2, 1, 3, 4, 6)},
        {"bounds": (0, 1, 2)},
        {"prompts": 0},
        {"values": ()},
        {"keys": (torch.full((5, 2, 8), torch.nan), *golden_shift().keys[1:])},
        {"keys": (torch.zeros(5, 3, 8), *golden_shift().keys[1:])},
        {"keys": (torch.zeros(5, 8), *golden_shift().keys[1:])},
    ],
)
def test_what_is_no_shift_is_refused(wrong):
    with pytest.raises(ArgumentError):
        replace(golden_shift(), **wrong)


def test_a_file_keeps_its_name_whoever_wrote_it():
    """The golden file's arrays were compressed at another level of zstd than today's."""
    shift, data = golden_shift(), GOLDEN.read_bytes()
    assert LinkShift.of_bytes(shift.data).digest == shift.digest == golden_shift().digest
    read = LinkShift.of_bytes(data)
    assert (read.data, read.digest) == (data, hashlib.sha256(data).hexdigest())
    assert data != shift.data
    assert (read.config, read.model_id, read.prompts, read.bounds) == ("c" * 64, "model", 7, (0, 1, 2, 3, 4, 6))
    for ours, theirs in zip((*read.keys, *read.values), (*shift.keys, *shift.values), strict=True):
        assert torch.equal(ours, theirs)


def test_every_cut_and_every_changed_byte_is_noticed():
    data = GOLDEN.read_bytes()
    for stop in range(len(data)):
        with pytest.raises(KvwireError):
            LinkShift.of_bytes(data[:stop])
    with pytest.raises(CorruptError):
        LinkShift.of_bytes(data + b"\0")
    generator = np.random.default_rng(0)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= int(generator.integers(1, 256))
        with pytest.raises((CorruptError, FormatVersionError)):
            LinkShift.of_bytes(bytes(changed))


def crafted(head, arrays):
    shift = golden_shift()
    whole = {
        "bounds": list(shift.bounds), "config": shift.config, "layers": 1, "model_id": "m", "prompts": 1,
    }  # fmt: skip
    numbers = {"key 0000": np.zeros((5, 2, 8), np.float32), "value 0000": np.zeros((5, 2, 5), np.float32)}
    return pack_arrays(SHIFT_MAGIC, whole | head, numbers | arrays)


@pytest.mark.parametrize(
    ("head", "arrays"),
    [
        ({"bounds": None}, {}),
        ({"bounds": [0, 1, "2", 3, 4, 6]}, {}),
        ({"bounds": [0, 1, 2, 3, 4, 1 << 40]}, {}),
        ({"bounds": [0, 1, 2, 3, 4, True]}, {}),
        ({"config": 3}, {}),
        ({"config": "c"}, {}),
        ({"layers": 2}, {}),
        ({"layers": "1"}, {}),
        ({"prompts": 0}, {}),
        ({}, {"value 0001": np.zeros((5, 2, 5), np.float32)}),
        ({}, {"key 0000": np.zeros((5, 2, 8), np.int16)}),
        ({}, {"key 0000": np.full((5, 2, 8), np.inf, np.float32)}),
        ({}, {"key 0000": np.zeros((4, 2, 8), np.float32)}),
    ],
)
def test_a_file_that_was_made_up_is_refused(head, arrays):
    assert LinkShift.of_bytes(crafted({}, {})).stretches == 5
    with pytest.raises(CorruptError, match="check-model again"):
        LinkShift.of_bytes(crafted(head, arrays))


def test_a_file_that_is_too_long_or_of_another_kind_is_not_looked_at():
    long = type("Long", (bytes,), {"__len__": lambda _: MAX_BYTES + 1})
    for data, words in ((long(), "at most"), (b"\x89KVW\r\n\x1a\n" + bytes(100), "signature")):
        with pytest.raises(CorruptError, match=words):
            LinkShift.of_bytes(data)
