"""CacheGen as released (arXiv 2310.07240, its artefact and LMCache), sized honestly: the codec to compare with.

For each chunk of tokens and each layer's keys or values: every token is scaled by its largest magnitude over all
channels and rounded to ``2 M + 1`` symbols, ``M = bins // 2 - 1``. A cumulative distribution for each (layer, channel)
of the chunk is stored as int16 ``[2 L, C, 33]``, and each (layer, channel) is arithmetic-coded on its own, at most 256
tokens to a stream. Keys keep their rotary positions. The released code has neither the anchors nor the deltas of the
paper.

The size of the codes is the exact ideal code length under the stored integer distribution, each stream rounded up to
bytes; a test holds it against constriction's coder. Real coders need a little more, and the pickle around it all is not
counted either: both omissions favour CacheGen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire import KVCache

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

CDF_ENTRIES = 33
"""Entries of a stored distribution: 32 symbols, however many the bins need, and the upper end."""
CDF_BITS = 16
STREAM_TOKENS = 256
"""Most tokens to a stream."""
LENGTH_BYTES = 4
"""A stream's length is an int32."""
SCALE_BYTES = 2
"""A token's scale is a float16, the dtype of the caches that it was released for."""
_FEW_LAYERS = 10

# (layers from the start, bins) in order, the last entry for all that follow: keys, values.
_ARTEFACT = {
    1: (((20, 16), (None, 12)), ((2, 16), (None, 12))),
    2: (((10, 32), (None, 16)), ((2, 32), (None, 16))),
    3: (((None, 32),), ((None, 32),)),
}


@dataclass(frozen=True)
class Sizes:
    """Bytes of an encoded cache, part by part."""

    codes: int = 0
    distributions: int = 0
    scales: int = 0
    lengths: int = 0

    @property
    def total(self) -> int:
        """Everything that a reader must fetch."""
        return self.codes + self.distributions + self.scales + self.lengths

    def __add__(self, other: Sizes) -> Sizes:
        """Sum, part by part."""
        return Sizes(
            self.codes + other.codes,
            self.distributions + other.distributions,
            self.scales + other.scales,
            self.lengths + other.lengths,
        )


def bins_of(layers: int, level: int | None = None) -> tuple[list[int], list[int]]:
    """Bins of each layer's keys and values.

    level: 1, 2 or 3 of the artefact (coarse, default, fine); None for LMCache's rule, which is level 2 but gives models
    of fewer than 10 layers 32 bins everywhere.
    """
    if level is None:
        level = 3 if layers < _FEW_LAYERS else 2
    rules = _ARTEFACT[level]
    keys, values = ([_bins_at(layer, rule) for layer in range(layers)] for rule in rules)
    return keys, values


def _bins_at(layer: int, rule: tuple[tuple[int | None, int], ...]) -> int:
    return next(bins for until, bins in rule if until is None or layer < until)


def quantise(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Symbols 0 to 2 M and the float16 scale of each token; values: float32 ``[tokens, channels]``.

    A token of zeros would divide by zero in the released code; here its scale counts as 1.
    """
    most = bins // 2 - 1
    scale = values.abs().amax(dim=-1, keepdim=True).to(torch.float16)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    symbols = torch.round(values * (most / safe) + most).clamp(0, 2 * most)
    return symbols.to(torch.uint8), scale


def dequantise(symbols: Tensor, scale: Tensor, bins: int) -> Tensor:
    """The inverse, float32 ``[tokens, channels]``."""
    most = bins // 2 - 1
    return (symbols.float() - most) * (scale.float() / most)


def distributions(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Integer frequencies of each channel, ``[channels, 32]``, as differences of the stored int16 distribution.

    symbols: ``[tokens, channels]``. The cumulative share times 2^16 - 32, rounded, plus the entry's index: no symbol is
    ever impossible, and a channel's frequencies add up to 2^16.
    """
    tokens, channels = symbols.shape
    flat = symbols.astype(np.int64) + np.arange(channels) * (CDF_ENTRIES - 1)
    counts = np.bincount(flat.ravel(), minlength=channels * (CDF_ENTRIES - 1)).reshape(channels, -1)
    cumulative = np.concatenate([np.zeros((channels, 1)), np.cumsum(counts, axis=1) / tokens], axis=1)
    stored = np.rint(cumulative * (2**CDF_BITS - (CDF_ENTRIES - 1))).astype(np.int64) + np.arange(CDF_ENTRIES)
    return np.diff(stored, axis=1)


def code_bits(symbols: NDArray[np.uint8], frequencies: NDArray[np.int64]) -> NDArray[np.float64]:
    """Ideal code length in bits of each channel's stream; symbols ``[tokens, channels]``, frequencies as above."""
    cost = CDF_BITS - np.log2(frequencies)
    return cost[np.arange(symbols.shape[1])[None, :], symbols].sum(axis=0)


def encode_size_and_reconstruct(cache: KVCache, chunk_tokens: int, level: int | None = None) -> tuple[int, KVCache]:
    """Bytes that CacheGen needs for a cache, everything counted, and the cache that its decoder would return.

    cache: positions on, as an engine makes it. chunk_tokens: tokens that share distributions (LMCache: 256).
    level: see ``bins_of``. The reconstruction is float32.
    """
    sizes, decoded = encode_parts(cache, chunk_tokens, level)
    return sizes.total, decoded


def encode_parts(cache: KVCache, chunk_tokens: int, level: int | None = None) -> tuple[Sizes, KVCache]:
    """``encode_size_and_reconstruct`` with the bytes told apart."""
    key_bins, value_bins = bins_of(len(cache.keys), level)
    sizes, keys, values = Sizes(), [], []
    for layer, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
        key_size, new_key = _encode_side(key, chunk_tokens, key_bins[layer])
        value_size, new_value = _encode_side(value, chunk_tokens, value_bins[layer])
        sizes += key_size + value_size
        keys.append(new_key)
        values.append(new_value)
    meta = replace(cache.meta, dtype="float32")
    return sizes, KVCache(keys, values, meta, cache.token_ids)


def _encode_side(tensor: Tensor, chunk_tokens: int, bins: int) -> tuple[Sizes, Tensor]:
    heads, tokens, dim = tensor.shape
    flat = tensor.detach().to("cpu", torch.float32).permute(1, 0, 2).reshape(tokens, heads * dim)
    sizes, parts = Sizes(), []
    for start in range(0, tokens, chunk_tokens):
        symbols, scale = quantise(flat[start : start + chunk_tokens], bins)
        sizes += chunk_size(symbols.numpy())
        parts.append(dequantise(symbols, scale, bins))
    return sizes, torch.cat(parts).reshape(tokens, heads, dim).permute(1, 0, 2).contiguous()


def chunk_size(symbols: NDArray[np.uint8]) -> Sizes:
    """Bytes of one chunk of one layer's keys or values; symbols: ``[tokens, channels]``."""
    tokens, channels = symbols.shape
    frequencies = distributions(symbols)
    streams = [symbols[start : start + STREAM_TOKENS] for start in range(0, tokens, STREAM_TOKENS)]
    codes = sum(int(np.ceil(code_bits(stream, frequencies) / 8 - 1e-9).sum()) for stream in streams)
    return Sizes(
        codes, channels * CDF_ENTRIES * CDF_BITS // 8, tokens * SCALE_BYTES, len(streams) * channels * LENGTH_BYTES
    )
