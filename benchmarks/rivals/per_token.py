"""Plain integer caches: every token of every head divided by its largest magnitude, 8 or 4 bits, then zstd 19."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard
from rivals.layout import from_half, pack, rebuilt, to_half, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire import KVCache

LEVEL = 19


def roundtrip(cache: KVCache, bits: int) -> tuple[bytes, KVCache]:
    """The stream and what it decodes to, float32. bits: 4 or 8."""
    raw, sides = [], []
    for tensors in (cache.keys, cache.values):
        encoded = [encode(tensor, bits) for tensor in tensors]
        raw += encoded
        sides.append([decode(data, tuple(t.shape), bits) for data, t in zip(encoded, tensors, strict=True)])
    return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(raw)), rebuilt(cache, *sides)


def encode(tensor: Tensor, bits: int) -> bytes:
    """One layer's keys or values ``[heads, tokens, dim]``: float16 scales, then codes; before zstd.

    A code is ``round(x / scale * M) + M`` with ``M = 2 ** (bits - 1) - 1``, scale being the head's largest magnitude.
    """
    most = 2 ** (bits - 1) - 1
    values = tensor.detach().to("cpu", torch.float32)
    stored = to_half(values.abs().amax(-1))
    scale = from_half(stored, (*values.shape[:2], 1))
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.round(values / safe * most).clamp(-most, most) + most
    return stored + pack(codes.numpy().astype(np.uint8).ravel(), bits)


def decode(data: bytes, shape: tuple[int, ...], bits: int) -> Tensor:
    """The inverse, float32 ``shape``."""
    heads, tokens, dim = shape
    most = 2 ** (bits - 1) - 1
    scale = from_half(data[: 2 * heads * tokens], (heads, tokens, 1))
    codes = unpack(data[2 * heads * tokens :], bits, heads * tokens * dim)
    return (torch.from_numpy(codes.astype(np.float32)).reshape(shape) - most) * (scale / most)
