"""KIVI (arXiv 2402.02750): keys quantised per channel, values per token, 2 or 4 bits, in groups of 32.

Each group of 32 has its own float16 least value and float16 step (asymmetric): 2 + 32 / 32 = 3 bits for each element at
2 bits. The last tokens stay in 16 bits, as do the keys of tokens that do not fill a group. Keys keep their rotary
positions, as published. There is no entropy coding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from rivals.layout import from_bfloat16, from_half, pack, packed_bytes, rebuilt, to_bfloat16, to_half, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire import KVCache

GROUP = 32


def roundtrip(cache: KVCache, bits: int = 2, residual: int = 0) -> tuple[bytes, KVCache]:
    """The stream and what it decodes to, float32.

    bits: 2 or 4 in the paper. residual: last tokens that stay in 16 bits (the paper: 128).
    """
    stream, sides = [], []
    for side, tensors in enumerate((cache.keys, cache.values)):
        per_channel = side == 0
        encoded = [encode(tensor, bits, residual, per_channel=per_channel) for tensor in tensors]
        pairs = zip(encoded, tensors, strict=True)
        sides.append([decode(d, tuple(t.shape), bits, residual, per_channel=per_channel) for d, t in pairs])
        stream += encoded
    return b"".join(stream), rebuilt(cache, *sides)


def encode(tensor: Tensor, bits: int, residual: int, *, per_channel: bool) -> bytes:
    """One layer's keys (``per_channel``) or values ``[heads, tokens, dim]``."""
    values = tensor.detach().to("cpu", torch.float32)
    split = quantised_tokens(values.shape[1], residual, per_channel=per_channel)
    return _quantise(_grouped(values[:, :split], per_channel=per_channel), bits) + to_bfloat16(values[:, split:])


def decode(data: bytes, shape: tuple[int, ...], bits: int, residual: int, *, per_channel: bool) -> Tensor:
    """The inverse, float32 ``shape``."""
    heads, tokens, dim = shape
    split = quantised_tokens(tokens, residual, per_channel=per_channel)
    raw = 2 * heads * (tokens - split) * dim
    groups = heads * dim * split // GROUP if per_channel else split * -(-heads * dim // GROUP)
    grouped = _dequantise(data[: len(data) - raw], groups, bits)
    if per_channel:
        part = grouped.reshape(heads, dim, split).transpose(1, 2)
    else:
        padded = -(-heads * dim // GROUP) * GROUP
        part = grouped.reshape(split, padded)[:, : heads * dim].reshape(split, heads, dim).transpose(0, 1)
    return torch.cat([part, from_bfloat16(data[len(data) - raw :], (heads, tokens - split, dim))], 1).contiguous()


def quantised_tokens(tokens: int, residual: int, *, per_channel: bool) -> int:
    """How many of the first tokens are quantised."""
    before = max(0, tokens - residual)
    return before // GROUP * GROUP if per_channel else before


def _grouped(values: Tensor, *, per_channel: bool) -> Tensor:
    """``[groups, 32]``. Groups of a token's values run on from head to head, the last one repeats its last element."""
    if per_channel:
        return values.transpose(1, 2).reshape(-1, GROUP)
    flat = values.transpose(0, 1).flatten(1)
    return torch.cat([flat, flat[:, -1:].expand(-1, -flat.shape[1] % GROUP)], 1).reshape(-1, GROUP)


def _quantise(groups: Tensor, bits: int) -> bytes:
    """Least values, steps, codes; codes are taken against the stored numbers."""
    least = to_half(groups.amin(1))
    step = to_half((groups.amax(1) - groups.amin(1)) / (2**bits - 1))
    low, size = from_half(least, (-1, 1)), from_half(step, (-1, 1))
    safe = torch.where(size == 0, torch.ones_like(size), size)
    codes = torch.round((groups - low) / safe).clamp(0, 2**bits - 1)
    return least + step + pack(codes.numpy().astype(np.uint8).ravel(), bits)


def _dequantise(data: bytes, groups: int, bits: int) -> Tensor:
    """float32 ``[groups, 32]``."""
    low, size = from_half(data[: 2 * groups], (-1, 1)), from_half(data[2 * groups : 4 * groups], (-1, 1))
    codes = unpack(data[4 * groups :], bits, groups * GROUP)
    assert len(data) == 4 * groups + packed_bytes(bits, groups * GROUP), "a stream must hold what it was counted for"
    return torch.from_numpy(codes.astype(np.float32)).reshape(groups, GROUP) * size + low
