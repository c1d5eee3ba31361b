"""Layout of a chunk's keys and values in LMCache's memory objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.adapters import DTYPES, heads_of, uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import CacheMeta, KVCache


@dataclass(frozen=True)
class ObjectLayout:
    """Layout of one worker's chunks in memory objects.

    Attributes:
        layers: Layers of the model.
        tokens: Tokens per chunk.
        heads: KV heads of the worker.
        dim: Elements of a key or a value in one head.
        cpu_block: Tokens per block of vLLM on a processor; else 0. LMCache then copies blocks as packed by vLLM's
            float32 kernel: all keys of a head, transposed, before its values.
    """

    layers: int
    tokens: int
    heads: slice
    dim: int
    cpu_block: int = 0

    @classmethod
    def of(cls, meta: CacheMeta, tokens: int, kv_rank: int, cpu_block: int = 0) -> ObjectLayout:
        """The layout of one worker."""
        heads, dim = uniform(meta)
        workers = max(1, kv_rank >> 24 & 0xFF)
        if cpu_block and tokens % cpu_block:
            raise ArgumentError(f"a chunk of {tokens} tokens has no whole number of vLLM's blocks of {cpu_block}")
        return cls(len(meta.layers), tokens, heads_of(heads, workers, kv_rank >> 16 & 0xFF), dim, cpu_block)

    @property
    def shapes(self) -> dict[tuple[int, ...], bool]:
        """Possible shapes of an object, each with whether a head's values follow its keys."""
        width = (self.heads.stop - self.heads.start) * self.dim
        fused = (self.layers, self.tokens, 2 * width)
        if self.cpu_block:
            return {fused: True}
        return {(2, self.layers, self.tokens, width): False, fused: True, (1, *fused): True}

    def check(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        """Refuse objects of another shape or dtype."""
        known = DTYPES[:1] if self.cpu_block else DTYPES
        if len(shapes) == 1 and tuple(shapes[0]) in self.shapes and dtypes[0] in known:
            return
        have = ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True)) or "nothing"
        first = next(iter(self.shapes))
        raise MismatchError(
            f"LMCache's objects hold {have}, chunks of the model in the store are {list(first)}, of "
            f"{' or '.join(map(str, known))}: serve that model, and give LMCache's chunk size as chunk_tokens (an "
            "index of that length must be there: kvwire store index)"
        )

    def write(self, target: Tensor, cache: KVCache) -> None:
        """Copy a chunk into an object."""
        if cache.tokens != self.tokens:
            raise ArgumentError(f"a chunk of {cache.tokens} tokens for an object of {self.tokens}")
        heads, dim = self.heads.stop - self.heads.start, self.dim
        if self.cpu_block:
            self._write_packed(target, cache)
            return
        if self.shapes[tuple(target.shape)]:
            rows = target.view(self.layers, self.tokens, heads, 2 * dim)
            sides = rows[..., :dim], rows[..., dim:]
        else:
            rows = target.view(2, self.layers, self.tokens, heads, dim)
            sides = rows[0], rows[1]
        for into, tensors in zip(sides, (cache.keys, cache.values), strict=True):
            for layer, tensor in enumerate(tensors):
                into[layer].copy_(tensor[self.heads].transpose(0, 1))

    def _write_packed(self, target: Tensor, cache: KVCache) -> None:
        """In blocks ``[heads, block, 2 dim]``: inside ``[dim, block]`` of keys, then ``[block, dim]`` of values."""
        heads, block = self.heads.stop - self.heads.start, self.cpu_block
        rows = target.view(self.layers, self.tokens // block, block, heads, 2 * self.dim)
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            blocks = (heads, self.tokens // block, block, self.dim)
            turned = keys[self.heads].reshape(blocks).transpose(2, 3).flatten(2)
            packed = torch.cat((turned, values[self.heads].reshape(blocks).flatten(2)), 2)
            rows[layer] = packed.view(*blocks[:3], 2 * self.dim).permute(1, 2, 0, 3)
