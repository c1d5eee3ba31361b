"""The ladder of CacheGen's ingredients: sizes against a real coder, decoding against the method's own, variances."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import kvwire
from kvwire.codec.entropy.range_coder import encode_rows, frequencies_of
from kvwire.codec.kinds.cachegen_coding import decode_cachegen, encode_cachegen, fit_cachegen_profile
from kvwire.codec.transform.analysis import gather


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("cachegen_steps")


@pytest.fixture
def cache():
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, 300, 16, generator=generator).cumsum(1) for _ in range(6)]
    return kvwire.KVCache.from_tensors(parts[:3], parts[3:])


def test_ideal_code_lengths_are_what_a_real_coder_needs(steps):
    values = np.random.default_rng(1).laplace(0, 6, (400, 8)).astype(np.int32)
    tables = frequencies_of(steps.counts_of(values))
    symbols = steps.symbols_of(values).astype(np.uint8)
    real = 8 * len(encode_rows([(symbols.T, tables)]))
    assert steps.coded_bits(values, tables) <= real <= steps.coded_bits(values, tables) * 1.01 + 64
    assert steps.coded_bits(np.full((1, 8), 1000, np.int32), tables) > 8 * 32


def test_plain_numbers_have_the_width_of_their_range(steps):
    assert steps.plain_bits(np.array([[-3, 4], [0, 1]], np.int32)) == 24 + 4 * 3
    assert steps.plain_bits(np.array([[5, 5]], np.int32)) == 24


def test_the_last_step_is_the_method_itself(steps, cache):
    profile = fit_cachegen_profile([cache])
    bits = steps.step_bits(cache, profile, steps.Tables(profile, [cache]))
    segments = [encode_cachegen(cache, profile, steps.DEFAULT, *span)[0] for span in ((0, 256), (256, 300))]
    assert bits[steps.OWN] == 8 * sum(map(len, segments))
    assert bits[steps.EIGHT] == 8 * 300 * 6 * 32 + 16 * 300 * 6
    assert bits[steps.OWN] < bits[steps.ONE_TABLE] < bits[steps.DELTAS] < bits[steps.EIGHT]
    widths = profile.bins(steps.DEFAULT)
    decoded = decode_cachegen(segments[0], profile, steps.DEFAULT, 256)
    for block, width, theirs in zip(profile.blocks, widths, decoded, strict=True):
        elements = gather(cache, block.side, (block.layer,), 0, 256).numpy()
        _, _, anchors, deltas = steps.split(elements, width)
        ours = np.repeat(anchors, 10, axis=0)[:256]
        ours[np.arange(256) % 10 > 0] += deltas * width
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_eight_bits_err_by_half_a_step_at_most(steps, cache):
    profile = fit_cachegen_profile([cache])
    decoded = steps.decoded_as(cache, profile, steps.eight_bit)
    for exact, other in zip([*cache.keys, *cache.values], [*decoded.keys, *decoded.values], strict=True):
        most = exact.abs().amax(dim=(0, 2), keepdim=True) / 127
        assert ((exact - other).abs() <= 0.51 * most + 1e-6).all()


def test_variance_ratios_of_walks_and_of_noise(steps, cache):
    """A walk's deltas against the token before have unit variance; those of noise have twice its own."""
    profile = fit_cachegen_profile([cache])
    walks = steps.variance_ratios(cache, profile)
    assert min(walks["values, the token before, about channels' means"]) > 5
    noise = kvwire.KVCache.from_tensors(*[[torch.randn(2, 3000, 16) for _ in range(3)] for _ in range(2)])
    for ratios in steps.variance_ratios(noise, profile).values():
        assert ratios == pytest.approx([0.5] * 3, rel=0.1)
