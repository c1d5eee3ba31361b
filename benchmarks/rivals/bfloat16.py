"""The lossless anchor: bfloat16, byte planes apart, zstd level 19. Its only error is the rounding to bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard
from rivals.layout import as_matrix, from_bfloat16, from_matrix, rebuilt, to_bfloat16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire import KVCache

LEVEL = 19


def roundtrip(cache: KVCache) -> tuple[bytes, KVCache]:
    """The stream and what it decodes to, float32."""
    streams, sides = [], []
    for tensors in (cache.keys, cache.values):
        streams.append(encode(tensors))
        sides.append(decode(streams[-1], tensors))
    return b"".join(streams), rebuilt(cache, *sides)


def encode(tensors: Sequence[Tensor]) -> bytes:
    """One side of a cache, all layers: low bytes of all elements, then high bytes, as one zstd frame."""
    raw = np.frombuffer(to_bfloat16(as_matrix(tensors).T), np.uint8).reshape(-1, 2)
    return zstandard.ZstdCompressor(level=LEVEL).compress(raw.T.tobytes())


def decode(stream: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse, float32; ``like`` gives the shapes."""
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(stream), np.uint8).reshape(2, -1)
    tokens = next(tensor.shape[1] for tensor in like if tensor.numel())
    return from_matrix(from_bfloat16(raw.T.tobytes(), (-1, tokens)).T, like)
