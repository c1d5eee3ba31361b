"""CacheGen as released, as fast as a CPU runs it: the rival of speed comparisons, real bytes out and tensors back.

The arithmetic is that of ``cachegen.py``; a private stream for each (layer, side, channel) and 256 tokens, coded under
the distribution stored for its chunk. ``cachegen_kernels.py`` says what makes it fast. Work is spread over numba's
threads by (chunk, head) of one layer's keys or values at a time.

Blob: header, ``int32`` words of each stream, ``int16`` distributions ``[planes, chunks, channels, 33]``, ``float16``
scales ``[planes, tokens]``, ``uint16`` words. A plane is one layer's keys or values, keys first, layer by layer.
It reads its own blobs and trusts them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cachegen_kernels as kernels
import numpy as np
import torch
from cachegen import CDF_ENTRIES, STREAM_TOKENS, bins_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire import KVCache

_HEADER = struct.Struct("<HHIHHIBB14x")
"""planes, heads, tokens, dim, reserved, chunk tokens, artefact level or 0, coder."""


@dataclass(frozen=True)
class Layout:
    """Shape of a cache whose layers are all alike, and how it was cut.

    level: of the artefact, 0 for LMCache's rule. bitwise: torchac's coder instead of the fast one.
    """

    planes: int
    heads: int
    tokens: int
    dim: int
    chunk_tokens: int
    level: int
    bitwise: bool

    @property
    def chunks(self) -> int:
        """Groups of tokens that share distributions."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def parts(self) -> int:
        """Groups of tokens that share a stream."""
        return -(-self.tokens // STREAM_TOKENS)

    @property
    def most(self) -> list[int]:
        """M of each plane."""
        keys, values = bins_of(self.planes // 2, self.level or None)
        return [bins // 2 - 1 for pair in zip(keys, values, strict=True) for bins in pair]


@dataclass(frozen=True, eq=False)
class Parts:
    """The arrays of a blob, all but the words."""

    lengths: NDArray[np.int32]
    stored: NDArray[np.int16]
    scales: NDArray[np.float16]

    @classmethod
    def empty(cls, layout: Layout) -> Parts:
        """Arrays to fill."""
        planes, heads, dim = layout.planes, layout.heads, layout.dim
        return cls(
            np.empty((planes, layout.parts, heads, dim), np.int32),
            np.empty((planes, layout.chunks, heads, dim, CDF_ENTRIES), np.int16),
            np.empty((planes, layout.tokens), np.float16),
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """First word of each stream, shaped as ``lengths``."""
        ends = np.cumsum(self.lengths.reshape(-1), dtype=np.int64).reshape(self.lengths.shape)
        return ends - self.lengths


def encode(
    cache: KVCache, chunk_tokens: int = STREAM_TOKENS, level: int | None = None, *, bitwise: bool = False
) -> bytes:
    """A cache of bfloat16 (others are rounded to it first), all layers alike, as bytes.

    chunk_tokens: a multiple of 256. level: see ``cachegen.bins_of``. bitwise: code as torchac does.
    """
    assert chunk_tokens % STREAM_TOKENS == 0, "a chunk holds whole streams"
    planes = [_bits(tensor) for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair]
    heads, tokens, dim = planes[0].shape
    assert all(plane.shape == planes[0].shape for plane in planes), "all layers must be alike"
    layout = Layout(len(planes), heads, tokens, dim, chunk_tokens, level or 0, bitwise)
    parts = Parts.empty(layout)
    words = np.empty((*parts.lengths.shape[1:], kernels.ROOM), np.uint16)
    payload = []
    for i, (plane, most) in enumerate(zip(planes, layout.most, strict=True)):
        parts.scales[i] = _scales(plane)
        safe = _safe(parts.scales[i])
        kernels.encode_plane(plane, safe, most, chunk_tokens, bitwise, parts.stored[i], parts.lengths[i], words)
        payload.append(_joined(parts.lengths[i], words))
    header = _HEADER.pack(len(planes), heads, tokens, dim, 0, chunk_tokens, layout.level, bitwise)
    return b"".join([header, *map(_bytes, (parts.lengths, parts.stored, parts.scales, *payload))])


def _joined(lengths: NDArray[np.int32], words: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The words of a plane's streams, one stream after the other."""
    flat = lengths.reshape(-1)
    ends = np.cumsum(flat, dtype=np.int64)
    payload = np.empty(int(ends[-1]), np.uint16)
    kernels.join(flat, ends - flat, words.reshape(-1, kernels.ROOM), payload)
    return payload


def _bytes(array: NDArray[Any]) -> memoryview:
    """An array's bytes, not copied."""
    return array.reshape(-1).view(np.uint8).data


def decode(blob: bytes) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values, each layer bfloat16 ``[heads, tokens, dim]``."""
    layout, parts, payload = parse(blob)
    starts = parts.starts
    scales = parts.scales.astype(np.float32)
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, most in enumerate(layout.most):
        out = torch.empty(layout.heads, layout.tokens, layout.dim, dtype=torch.bfloat16)
        kernels.decode_plane(
            payload, starts[i], parts.stored[i], scales[i], most, layout.chunk_tokens, layout.bitwise, _bits(out)
        )
        sides[i % 2].append(out)
    return sides


def parse(blob: bytes) -> tuple[Layout, Parts, NDArray[np.uint16]]:
    """Layout, arrays and words of a blob, without copying."""
    planes, heads, tokens, dim, _, chunk_tokens, level, bitwise = _HEADER.unpack_from(blob)
    layout = Layout(planes, heads, tokens, dim, chunk_tokens, level, bool(bitwise))
    at, found = _HEADER.size, list[Any]()
    like = Parts.empty(layout)
    for array in (like.lengths, like.stored, like.scales):
        found.append(np.frombuffer(blob, array.dtype, array.size, at).reshape(array.shape))
        at += array.nbytes
    return layout, Parts(*found), np.frombuffer(blob, np.uint16, offset=at)


def _bits(tensor: Tensor) -> NDArray[np.uint16]:
    """A tensor's bfloat16 bits; shares memory where it is bfloat16 and contiguous."""
    bits: NDArray[np.int16] = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return bits.view(np.uint16)


def _scales(plane: NDArray[np.uint16]) -> NDArray[np.float16]:
    largest = np.empty(plane.shape[1], np.uint16)
    kernels.largest(plane, largest)
    return (largest.astype(np.uint32) << 16).view(np.float32).astype(np.float16)


def _safe(scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """A token of zeros counts as of scale 1."""
    return np.where(scales == 0, np.float16(1), scales).astype(np.float32)
