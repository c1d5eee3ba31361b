"""Which entries a pruned cache still holds, as bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import zstandard

from kvwire.codec.format.metadata_json import decompress
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from kvwire.types import LayerSpec

Kept: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""For each layer a bool ``[kv_heads, tokens]``, None where it holds everything."""


_MOST_PACKED = 256
"""Bytes that a byte of the frame may stand for: more would let a short file claim much memory."""


def pack_kept(kept: Kept, layers: tuple[LayerSpec, ...], tokens: int) -> bytes:
    """Pack which entries a cache holds: bits of all layers with a cache, each from a byte on."""
    parts = [
        np.packbits(np.ones(spec.kv_heads * tokens, bool) if mask is None else mask.cpu().numpy(), axis=None)
        for spec, mask in zip(layers, kept, strict=True)
        if spec.kind != "none"
    ]
    raw = b"".join(part.tobytes() for part in parts)
    packed = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)
    return packed if len(packed) < len(raw) <= _MOST_PACKED * len(packed) else raw


def kept_sizes(data: bytes, layers: tuple[LayerSpec, ...], tokens: int) -> list[int]:
    """Count the bytes of each layer's bits."""
    sizes = [0 if spec.kind == "none" else -(-spec.kv_heads * tokens // 8) for spec in layers]
    if not len(data) <= sum(sizes) <= _MOST_PACKED * len(data):
        msg = "the blob's list of kept entries does not fit its layout; fetch it again"
        raise CorruptError(msg)
    return sizes


def unpack_kept(data: bytes, layers: tuple[LayerSpec, ...], tokens: int) -> Kept:
    """Read ``pack_kept``."""
    sizes = kept_sizes(data, layers, tokens)
    raw = data if len(data) == sum(sizes) else decompress(data, sum(sizes), "list of kept entries")
    out: list[torch.Tensor | None] = []
    at = 0
    for spec, size in zip(layers, sizes, strict=True):
        bits = np.unpackbits(np.frombuffer(raw, np.uint8, size, at), count=spec.kv_heads * tokens if size else 0)
        mask = torch.from_numpy(bits.view(bool)).reshape(spec.kv_heads, tokens if size else 0)
        out.append(None if bool(mask.all()) else mask)
        at += size
    return tuple(out)
