"""CacheGen as released, decoded on the device: the streams of ``cachegen_fast``, one thread to a stream.

As in the released kernels, a thread walks one (layer, channel) of at most 256 tokens, and finds each symbol by binary
search in the stored int16 distribution. Where there was a choice it favours CacheGen: the coder moves at most one
16-bit word a symbol, without a loop; no division (the search compares products, as the encoder makes them);
dequantising happens in the same kernel, so that symbols never travel; neighbouring threads hold neighbouring channels,
so that what they write lies together. Symbols and tensors equal those of ``cachegen_fast``, bit for bit.

Encoding runs on the processor with the kernels of ``cachegen_fast``, untimed.
"""
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0917

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cachegen_kernels
import numpy as np
import torch
import triton
import triton.language as tl
from cachegen import CDF_ENTRIES, STREAM_TOKENS, bins_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import KVCache

BLOCK = 64
"""Streams of a program: two warps of one thread each."""
WARPS = 2


@dataclass(frozen=True, eq=False)
class Streams:
    """Encoded planes of one shape ``[heads, tokens, dim]``, on any device.

    words: uint16 bits as int16. starts: int64 ``[planes, parts, heads, dim]``, each stream's first word. stored: int16
    ``[planes, parts, heads, dim, 33]``. scales: float16 ``[planes, tokens]``. most: float32 ``[planes]``, M. lengths:
    int32, as ``starts``; what travels instead of them.
    """

    words: Tensor
    lengths: Tensor
    starts: Tensor
    stored: Tensor
    scales: Tensor
    most: Tensor

    @property
    def wire(self) -> tuple[Tensor, ...]:
        """What a reader fetches."""
        return self.words, self.lengths, self.stored, self.scales

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.wire)

    @property
    def planes(self) -> int:
        """Layers' keys or values."""
        return len(self.most)

    def output(self) -> Tensor:
        """Room for what they decode to: bfloat16 ``[planes, heads, tokens, dim]``."""
        planes, _, heads, dim = self.lengths.shape
        return torch.empty(planes, heads, self.scales.shape[1], dim, dtype=torch.bfloat16, device=self.words.device)

    def on(self, wire: Sequence[Tensor]) -> Streams:
        """The same streams with ``wire`` as it arrived on a device; streams' starts are summed up there."""
        words, lengths, stored, scales = wire
        ends = lengths.flatten().cumsum(0, dtype=torch.int64)
        starts = (ends - lengths.flatten()).reshape(lengths.shape)
        return Streams(words, lengths, starts, stored, scales, self.most.to(words.device))

    def to(self, device: torch.device) -> Streams:
        """The same streams on a device."""
        return self.on([tensor.to(device) for tensor in self.wire])


def encode(cache: KVCache) -> list[Streams]:
    """A cache's planes by shape, on the host: chunks of 256 tokens, LMCache's choice of bins."""
    keys, values = bins_of(len(cache.keys))
    planes = [pair for side in ((cache.keys, keys), (cache.values, values)) for pair in zip(*side, strict=True)]
    shapes = dict.fromkeys(tuple(tensor.shape) for tensor, _ in planes)
    return [_encode([pair for pair in planes if tuple(pair[0].shape) == shape]) for shape in shapes]


def _encode(planes: Sequence[tuple[Tensor, int]]) -> Streams:
    heads, tokens, dim = planes[0][0].shape
    parts = -(-tokens // STREAM_TOKENS)
    lengths = np.empty((len(planes), parts, heads, dim), np.int32)
    stored = np.empty((*lengths.shape, CDF_ENTRIES), np.int16)
    scales = np.empty((len(planes), tokens), np.float16)
    words = np.empty((*lengths.shape[1:], cachegen_kernels.ROOM), np.uint16)
    payload = []
    for i, (tensor, bins) in enumerate(planes):
        bits = tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
        largest = np.empty(tokens, np.uint16)
        cachegen_kernels.largest(bits, largest)
        scales[i] = (largest.astype(np.uint32) << 16).view(np.float32).astype(np.float16)
        safe = np.where(scales[i] == 0, np.float16(1), scales[i]).astype(np.float32)
        most = bins // 2 - 1
        cachegen_kernels.encode_plane(bits, safe, most, STREAM_TOKENS, False, stored[i], lengths[i], words)
        payload.append(_joined(lengths[i], words))
    arrays = (np.concatenate(payload).view(np.int16), lengths, lengths.astype(np.int64), stored, scales)
    most_of = torch.tensor([bins // 2 - 1 for _, bins in planes], dtype=torch.float32)
    found = Streams(*map(torch.from_numpy, arrays), most_of)
    return found.on(found.wire)


def _joined(lengths: np.ndarray, words: np.ndarray) -> np.ndarray:
    """The words of a plane's streams, one stream after the other."""
    flat = lengths.reshape(-1)
    ends = np.cumsum(flat, dtype=np.int64)
    out = np.empty(int(ends[-1]), np.uint16)
    cachegen_kernels.join(flat, ends - flat, words.reshape(-1, cachegen_kernels.ROOM), out)
    return out


def decode(streams: Streams, out: Tensor) -> Tensor:
    """Decode into ``out``, bfloat16 ``[planes, heads, tokens, dim]`` on the streams' device."""
    planes, heads, tokens, dim = out.shape
    factors = streams.scales.float() / streams.most[:, None]
    grid = (planes * streams.lengths.shape[1] * heads, triton.cdiv(dim, BLOCK))
    decode_streams[grid](
        streams.words,
        len(streams.words) - 1,
        streams.starts,
        streams.stored,
        factors,
        streams.most,
        out.view(torch.int16),
        streams.lengths.shape[1],
        heads,
        tokens,
        dim,
        STREAM=STREAM_TOKENS,
        ENTRIES=CDF_ENTRIES,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


@triton.jit
def _bound(stored, symbol):
    """Where a symbol begins, 0 to 65535; what is past the last one wraps to 0."""
    return tl.load(stored + symbol).to(tl.uint32) & 65535


@triton.jit
def decode_streams(
    words,
    last,
    starts,
    stored,
    factors,
    most,
    out,
    parts,
    heads,
    tokens,
    dim,
    STREAM: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode and dequantise ``BLOCK`` channels of one head, part and plane.

    words: int16, uint16 bits; last: index of the last one, which repeats. starts: int64. stored: int16. factors:
    float32 ``[planes, tokens]``, scale / M. most: float32 ``[planes]``. out: int16, bfloat16 bits.
    """
    head = tl.program_id(0) % heads
    part = (tl.program_id(0) // heads) % parts
    plane = tl.program_id(0) // (heads * parts)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < dim
    kept = tl.minimum(channel, dim - 1)
    stream = ((plane * parts + part) * heads + head).to(tl.int64) * dim + kept
    at = tl.load(starts + stream)
    table = stored + stream * ENTRIES
    middle = tl.load(most + plane)
    first = part * STREAM
    target = out + ((plane * heads + head).to(tl.int64) * tokens + first) * dim + channel
    high = tl.load(words + tl.minimum(at, last)).to(tl.uint32) & 65535
    low = tl.load(words + tl.minimum(at + 1, last)).to(tl.uint32) & 65535
    code = (high << 16) | low
    width = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    at += 2
    for t in range(tl.minimum(tokens - first, STREAM)):
        # A refill may or may not need it: its latency hides behind the search.
        word = tl.load(words + tl.minimum(at, last)).to(tl.uint32) & 65535
        symbol = tl.zeros([BLOCK], tl.int32)
        for bit in tl.static_range(5):
            tried = symbol + (16 >> bit)
            symbol = tl.where(tl.umulhi(width, _bound(table, tried) << 16) <= code, tried, symbol)
        below = tl.umulhi(width, _bound(table, symbol) << 16)
        bound = _bound(table, symbol + 1)
        above = tl.where(bound == 0, width, tl.umulhi(width, bound << 16))
        code -= below
        width = above - below
        short = width < 65536
        code = tl.where(short, (code << 16) | word, code)
        width = tl.where(short, width << 16, width)
        at += short.to(tl.int64)
        value = (symbol.to(tl.float32) - middle) * tl.load(factors + plane * tokens + first + t)
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) >> 16
        tl.store(target + t * dim, bits.to(tl.int16), mask=live)
