"""The CacheGen that kvwire is compared with: its published arithmetic, and its sizes against a real coder."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch

import kvwire

constriction = pytest.importorskip("constriction")

_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "cachegen.py"
_SPEC = util.spec_from_file_location("benchmark_cachegen", _PATH)
cachegen = util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = cachegen
_SPEC.loader.exec_module(cachegen)


def _cache(tokens=512, layers=3, heads=2, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(heads, tokens, dim, generator=generator) for _ in range(layers)]
    values = [torch.randn(heads, tokens, dim, generator=generator) * 3 for _ in range(layers)]
    return kvwire.KVCache.from_tensors(keys, values)


@pytest.mark.parametrize(("bins", "symbols"), [(32, 31), (16, 15), (12, 11)])
def test_bins_give_the_published_number_of_symbols(bins, symbols):
    values = torch.linspace(-1, 1, 4096).reshape(1, -1)
    quantised, scale = cachegen.quantise(values, bins)
    assert sorted(set(quantised.flatten().tolist())) == list(range(symbols))
    assert scale.dtype == torch.float16


def test_bins_of_the_release_and_of_the_artefact():
    assert cachegen.bins_of(12) == ([32] * 10 + [16] * 2, [32] * 2 + [16] * 10)
    assert cachegen.bins_of(6) == ([32] * 6, [32] * 6)
    assert cachegen.bins_of(32, 2) == ([32] * 10 + [16] * 22, [32] * 2 + [16] * 30)
    assert cachegen.bins_of(32, 1) == ([16] * 20 + [12] * 12, [16] * 2 + [12] * 30)
    assert cachegen.bins_of(4, 3) == ([32] * 4, [32] * 4)


@pytest.mark.parametrize(("chunk_tokens", "streams"), [(256, 1), (1024, 4)])
def test_side_information_is_what_the_format_implies(chunk_tokens, streams):
    cache = _cache(tokens=chunk_tokens)
    sizes, _ = cachegen.encode_parts(cache, chunk_tokens)
    channels, elements = 32, 2 * 3 * 32 * chunk_tokens
    assert 8 * sizes.distributions / elements == pytest.approx(16 * 33 / chunk_tokens)
    assert 8 * sizes.scales / elements == pytest.approx(16 / channels)
    assert 8 * sizes.lengths / elements == pytest.approx(32 * streams / chunk_tokens)
    assert sizes.total == cachegen.encode_size_and_reconstruct(cache, chunk_tokens)[0]


@pytest.mark.parametrize("level", [None, 1, 2, 3])
def test_round_trip_errs_by_half_a_step_at_most(level):
    cache = _cache()
    _, decoded = cachegen.encode_size_and_reconstruct(cache, 256, level)
    bins = cachegen.bins_of(3, level)
    for side, tensors, out in ((0, cache.keys, decoded.keys), (1, cache.values, decoded.values)):
        for layer, tensor in enumerate(tensors):
            most = bins[side][layer] // 2 - 1
            scale = tensor.abs().amax(dim=(0, 2), keepdim=True)
            assert ((out[layer] - tensor).abs() <= scale * (0.5 / most + 2e-3)).all()


def test_a_token_of_zeros_stays_zero():
    cache = kvwire.KVCache.from_tensors([torch.zeros(2, 8, 4)], [torch.zeros(2, 8, 4)])
    _, decoded = cachegen.encode_size_and_reconstruct(cache, 256)
    assert not decoded.keys[0].any()


def test_frequencies_allow_every_symbol_and_add_up():
    symbols = np.random.default_rng(0).integers(0, 31, (100, 7), dtype=np.uint8)
    frequencies = cachegen.distributions(symbols)
    assert frequencies.shape == (7, 32)
    assert (frequencies >= 1).all()
    assert (frequencies.sum(axis=1) == 2**16).all()


def _laplacian_symbols(tokens, channels, seed=0):
    values = torch.from_numpy(np.random.default_rng(seed).laplace(size=(tokens, channels)).astype(np.float32))
    return cachegen.quantise(values, 32)[0].numpy()


def test_code_length_matches_a_real_coder():
    symbols = _laplacian_symbols(256, 64)
    frequencies = cachegen.distributions(symbols)
    encoder = constriction.stream.queue.RangeEncoder()
    for channel in range(64):
        model = constriction.stream.model.Categorical(frequencies[channel].astype(np.float64), perfect=False)
        encoder.encode(symbols[:, channel].astype(np.int32), model)
    real = encoder.num_bits()
    ideal = float(cachegen.code_bits(symbols, frequencies).sum())
    assert ideal - 64 <= real <= 1.002 * ideal + 64


def test_no_real_coder_is_smaller_than_the_counted_bytes():
    symbols = _laplacian_symbols(256, 32, seed=1)
    frequencies = cachegen.distributions(symbols)
    counted = cachegen.chunk_size(symbols).codes
    real = 0
    for channel in range(32):
        model = constriction.stream.model.Categorical(frequencies[channel].astype(np.float64), perfect=False)
        encoder = constriction.stream.queue.RangeEncoder()
        encoder.encode(symbols[:, channel].astype(np.int32), model)
        real += 4 * len(encoder.get_compressed())
    assert counted <= real <= counted + 8 * 32
