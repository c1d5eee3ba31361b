"""What the rivals share: caches as matrices, numbers of a few bits in bytes, and bfloat16 bytes.

A rival's stream holds all that its decoder needs beyond the model's layout and the number of tokens, which both sides
know; kvwire's blobs carry those too, and the token ids. So the omission favours the rivals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


def pack(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Numbers below ``2 ** bits``, 1 to 8 bits each, lowest bit first; the last byte is filled with zeros."""
    if bits == 8:
        return codes.tobytes()
    planes = (codes.reshape(-1, 1) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes, bitorder="little").tobytes()


def unpack(data: bytes, bits: int, count: int) -> NDArray[np.uint8]:
    """The inverse of ``pack``: ``count`` numbers."""
    if bits == 8:
        return np.frombuffer(data, np.uint8, count)
    planes = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=count * bits).reshape(count, bits)
    return (planes << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def packed_bytes(bits: int, count: int) -> int:
    """Length of what ``pack`` makes of ``count`` numbers."""
    return -(-bits * count // 8)


def to_bfloat16(values: Tensor) -> bytes:
    """Any tensor as bfloat16, rounded to nearest, in its own order."""
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def from_bfloat16(data: bytes, shape: Sequence[int]) -> Tensor:
    """float32 of ``shape``; the inverse."""
    return torch.from_numpy(np.frombuffer(data, np.int16).copy()).view(torch.bfloat16).reshape(tuple(shape)).float()


def to_half(values: Tensor) -> bytes:
    """Scales and the like as float16, kept finite."""
    limit = torch.finfo(torch.float16).max
    return values.clamp(-limit, limit).to(torch.float16).contiguous().numpy().tobytes()


def from_half(data: bytes, shape: Sequence[int]) -> Tensor:
    """float32 of ``shape``; the inverse."""
    return torch.from_numpy(np.frombuffer(data, np.float16).copy()).reshape(tuple(shape)).float()


def as_matrix(tensors: Sequence[Tensor]) -> Tensor:
    """All layers' ``[heads, tokens, dim]`` as float32 ``[tokens, layers x heads x dim]``."""
    parts = [t.detach().to("cpu", torch.float32).permute(1, 0, 2).flatten(1) for t in tensors if t.numel()]
    return torch.cat(parts, 1)


def from_matrix(matrix: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse; ``like`` gives each layer's shape."""
    out, start = [], 0
    for tensor in like:
        heads, tokens, dim = tensor.shape
        if not tensor.numel():
            out.append(tensor)
            continue
        part = matrix[:, start : start + heads * dim]
        out.append(part.reshape(tokens, heads, dim).permute(1, 0, 2).contiguous())
        start += heads * dim
    return out


def rebuilt(cache: KVCache, keys: list[Tensor], values: list[Tensor]) -> KVCache:
    """A float32 cache in the place of another."""
    return KVCache(keys, values, replace(cache.meta, dtype="float32"), cache.token_ids)
