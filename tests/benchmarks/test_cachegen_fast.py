"""The fast CacheGen that speeds are compared with: the same numbers and sizes as the readable one, from real bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

import kvwire

_FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, _FOLDER)
import cachegen  # noqa: E402
import cachegen_fast  # noqa: E402
import cachegen_kernels as kernels  # noqa: E402

sys.path.remove(_FOLDER)


def _cache(tokens, layers=2, heads=2, dim=16, seed=0):
    generator = np.random.default_rng(seed)

    def tensor(size):
        return torch.from_numpy(generator.laplace(size=(heads, tokens, dim)) * size).to(torch.bfloat16)

    keys, values = [tensor(1.0) for _ in range(layers)], [tensor(30.0) for _ in range(layers)]
    keys[0][:, tokens // 2] = 0
    return kvwire.KVCache.from_tensors(keys, values)


@pytest.mark.parametrize("bitwise", [False, True], ids=["fast", "as torchac"])
@pytest.mark.parametrize("tokens", [1, 63, 256, 257, 1000])
@pytest.mark.parametrize(("chunk_tokens", "level"), [(256, None), (512, 1)])
def test_decodes_to_what_the_readable_cachegen_reconstructs(tokens, chunk_tokens, level, bitwise):
    cache = _cache(tokens)
    _, wanted = cachegen.encode_parts(cache, chunk_tokens, level)
    keys, values = cachegen_fast.decode(cachegen_fast.encode(cache, chunk_tokens, level, bitwise=bitwise))
    for found, expected in zip(keys + values, wanted.keys + wanted.values, strict=True):
        assert found.dtype == torch.bfloat16
        assert found.shape == expected.shape
        assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("bitwise", [False, True], ids=["fast", "as torchac"])
@pytest.mark.parametrize("chunk_tokens", [256, 1024])
def test_bytes_are_the_ideal_ones_and_less_than_three_a_stream(chunk_tokens, bitwise):
    cache = _cache(1024, dim=64)
    sizes, _ = cachegen.encode_parts(cache, chunk_tokens)
    blob = cachegen_fast.encode(cache, chunk_tokens, bitwise=bitwise)
    _, parts, payload = cachegen_fast.parse(blob)
    assert parts.lengths.nbytes == sizes.lengths
    assert parts.stored.nbytes == sizes.distributions
    assert parts.scales.nbytes == sizes.scales
    assert sizes.codes - parts.lengths.size <= payload.nbytes <= 1.001 * sizes.codes + 3 * parts.lengths.size
    assert abs(len(blob) - sizes.total) <= 0.01 * sizes.total + 3 * parts.lengths.size


@pytest.mark.parametrize("bitwise", [False, True], ids=["fast", "as torchac"])
def test_stored_distributions_are_those_of_the_readable_cachegen(bitwise):
    cache = _cache(300)
    _, parts, _ = cachegen_fast.parse(cachegen_fast.encode(cache, bitwise=bitwise))
    for layer, value in enumerate(cache.values):
        flat = value.float().permute(1, 0, 2).reshape(300, -1)
        for chunk in range(2):
            symbols, _ = cachegen.quantise(flat[256 * chunk : 256 * chunk + 256], 32)
            stored = parts.stored[2 * layer + 1, chunk].reshape(-1, 33).astype(np.uint16)
            widths = np.diff(stored.astype(np.int64), axis=1) % 65536
            assert np.array_equal(widths, cachegen.distributions(symbols.numpy()) % 65536)


def _streams(symbols):
    """Packed distributions of these symbols, as the coders take them."""
    dim = symbols.shape[1]
    packed = np.empty(dim * kernels.SYMBOLS, np.uint32)
    kernels._distribute(symbols, np.empty((dim, 33), np.int16), packed)
    return packed, np.empty(dim, np.int32), np.empty((dim, kernels.ROOM), np.uint16)


@pytest.mark.parametrize("coder", ["lockstep", "bitwise"])
@pytest.mark.parametrize("kind", ["constant", "rare", "uniform", "one token"])
def test_symbols_survive_whatever_their_distribution(kind, coder):
    """``rare``: the coders meet symbols of frequency 1, which narrow the range most and carry furthest."""
    draw = np.random.default_rng(3)
    tokens = 1 if kind == "one token" else 256
    symbols = draw.integers(0, 31, (tokens, 40)).astype(np.uint8)
    counted = symbols
    if kind == "constant":
        symbols = counted = np.full_like(symbols, 30)
    if kind == "rare":
        symbols[symbols == 7] = 8
        counted = np.full_like(symbols, 7)  # every other symbol keeps the least frequency
    packed, lengths, words = _streams(counted)
    encode = kernels._encode_lockstep if coder == "lockstep" else kernels.encode_bitwise
    decode = kernels._decode_lockstep if coder == "lockstep" else kernels.decode_bitwise
    encode(symbols, packed, lengths, words)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    payload = np.concatenate([row[:length] for row, length in zip(words, lengths, strict=True)])
    found = np.empty_like(symbols)
    decode(payload, starts, packed, found)
    assert np.array_equal(found, symbols)
    if kind == "rare":
        assert lengths.mean() > kernels.STREAM_TOKENS - 2, "a word for each symbol"


def test_threads_change_nothing():
    cache = _cache(600)
    before = numba.get_num_threads()
    blobs = []
    for threads in {1, numba.config.NUMBA_NUM_THREADS}:
        numba.set_num_threads(threads)
        blobs.append(cachegen_fast.encode(cache))
        keys, _ = cachegen_fast.decode(blobs[-1])
        assert torch.equal(keys[0], cachegen_fast.decode(blobs[0])[0][0])
    numba.set_num_threads(before)
    assert len(set(blobs)) == 1


def test_layers_that_differ_are_refused():
    cache = _cache(64)
    odd = replace(cache, keys=[cache.keys[0], cache.keys[1][:, :, :8]])
    with pytest.raises(AssertionError, match="alike"):
        cachegen_fast.encode(odd)
