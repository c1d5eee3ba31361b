"""Memory objects of LMCache: how a chunk's keys and values lie in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.chunk_shapes import DTYPES, heads_of, uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from kvwire.types import CacheMeta, KVCache


@dataclass(frozen=True)
class ObjectLayout:
    """How chunks of one worker lie in memory objects.

    Attributes:
        layers: Of the model.
        tokens: Of a chunk.
        heads: Key-value heads of the worker.
        dim: Elements of a key or a value in one head.
    """

    layers: int
    tokens: int
    heads: slice
    dim: int

    @classmethod
    def of(cls, meta: CacheMeta, tokens: int, kv_rank: int) -> ObjectLayout:
        """The layout of one worker.

        Args:
            meta: Of the model's caches.
            tokens: Of a chunk.
            kv_rank: As keys carry it: workers in the highest byte, this one's number in the next; 0 stands for all.

        Returns:
            The layout.

        Raises:
            MismatchError: The model's layers are not all alike.
            ArgumentError: The heads cannot be divided so.
        """
        heads, dim = uniform(meta)
        workers = max(1, kv_rank >> 24 & 0xFF)
        return cls(len(meta.layers), tokens, heads_of(heads, workers, kv_rank >> 16 & 0xFF), dim)

    @property
    def shapes(self) -> dict[tuple[int, ...], bool]:
        """Shapes that an object may have, each with whether a head's values stand behind its keys."""
        width = (self.heads.stop - self.heads.start) * self.dim
        fused = (self.layers, self.tokens, 2 * width)
        return {(2, self.layers, self.tokens, width): False, fused: True, (1, *fused): True}

    def check(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        """Refuse objects that hold something else.

        Args:
            shapes: Of the tensors that an object holds.
            dtypes: Of each.

        Raises:
            MismatchError: They are not those of a chunk of the model.
        """
        if len(shapes) == 1 and tuple(shapes[0]) in self.shapes and dtypes[0] in DTYPES:
            return
        have = ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True)) or "nothing"
        first = next(iter(self.shapes))
        msg = (
            f"LMCache's objects hold {have}, chunks of the model in the store are {list(first)} or fused, of float32, "
            "bfloat16 or float16: serve that model, and give LMCache's chunk size as chunk_tokens (an index of that "
            "length must be there: kvwire store index)"
        )
        raise MismatchError(msg)

    def write(self, target: Tensor, cache: KVCache) -> None:
        """Copy a chunk into an object.

        Args:
            target: The object's tensor, of one of ``shapes``.
            cache: The chunk, of all heads of the model.

        Raises:
            ArgumentError: The cache has another number of tokens.
        """
        if cache.tokens != self.tokens:
            msg = f"a chunk of {cache.tokens} tokens for an object of {self.tokens}"
            raise ArgumentError(msg)
        heads, dim = self.heads.stop - self.heads.start, self.dim
        if self.shapes[tuple(target.shape)]:
            rows = target.view(self.layers, self.tokens, heads, 2 * dim)
            sides = rows[..., :dim], rows[..., dim:]
        else:
            rows = target.view(2, self.layers, self.tokens, heads, dim)
            sides = rows[0], rows[1]
        for into, tensors in zip(sides, (cache.keys, cache.values), strict=True):
            for layer, tensor in enumerate(tensors):
                into[layer].copy_(tensor[self.heads].transpose(0, 1))


def write_reference(layout: ObjectLayout, target: Tensor, cache: KVCache) -> None:
    """What ``ObjectLayout.write`` writes, element by element.

    Args:
        layout: Of the objects.
        target: As there.
        cache: As there.
    """
    fused, dim = layout.shapes[tuple(target.shape)], layout.dim
    rows = target.view(-1, layout.layers, layout.tokens, target.shape[-1])
    for side, tensors in enumerate((cache.keys, cache.values)):
        for layer, tensor in enumerate(tensors):
            for place, head in enumerate(range(layout.heads.start, layout.heads.stop)):
                for token in range(layout.tokens):
                    for element in range(dim):
                        column = (2 * place + side) * dim + element if fused else place * dim + element
                        rows[0 if fused else side, layer, token, column] = tensor[head, token, element]
