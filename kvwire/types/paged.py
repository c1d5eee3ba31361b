"""A KV cache in pages, as in serving engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError
from kvwire.types.cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types.cache import CacheMeta, Side

_BLOCKS = 5
_PAGES = 4


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """A document's place in an engine's paged cache (PagedAttention, arXiv 2309.06180).

    Attributes:
        keys: Of each layer, ``[pages, page_tokens, kv_heads, key_dim]``: views of the engine's own tensors, any
            strides, any float dtype; empty for layers without a cache.
        values: Likewise with value_dim.
        page_table: Int32 ``[n]``, on the tensors' device: entry i is the page of the prompt's tokens from ``i *
            page_tokens`` on.
        tokens: Length of the document.
        meta: Metadata of any cache of the model.
        start: Position of the document's first token in the prompt.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    page_table: torch.Tensor
    tokens: int
    meta: CacheMeta
    start: int = 0

    def __post_init__(self) -> None:
        """Raise ArgumentError if shapes disagree or the table lacks a needed page."""
        shapes = [
            (tensor.shape[2:], (spec.kv_heads, dim))
            for tensors, dims in self._sides()
            for tensor, spec, dim in zip(tensors, self.meta.layers, dims, strict=False)
            if spec.kind != "none"
        ]
        counted = len(self.keys) == len(self.values) == len(self.meta.layers)
        if not counted or any(tuple(have) != want for have, want in shapes) or len(self._page_shapes()) != 1:
            msg = "pages must be [pages, page_tokens, kv_heads, dim] for each layer, all of the same number and length"
            raise ArgumentError(msg)
        needed = -(-(self.start + self.tokens) // self.page_tokens)
        table = self.page_table
        if self.start < 0 or self.tokens < 1 or table.dtype != torch.int32 or table.ndim != 1 or len(table) < needed:
            msg = f"the page table must be int32 with at least {needed} entries for tokens {self.start} and on"
            raise ArgumentError(msg)
        places = {tensor.device for tensor in (*self.keys, *self.values) if tensor.numel()}
        if places != {table.device}:
            raise ArgumentError(
                f"the page table lies on {table.device}, the pages on {', '.join(map(str, places))}; keep them together"
            )
        if int(table[:needed].min()) < 0 or int(table[:needed].max()) >= self._page_shapes().pop()[0]:
            raise ArgumentError("the page table names pages that do not exist")

    @classmethod
    def from_blocks(
        cls,
        blocks: Sequence[torch.Tensor],
        page_table: torch.Tensor,
        tokens: int,
        meta: CacheMeta,
        start: int = 0,
    ) -> PagedKVCache:
        """Construct from one tensor per layer.

        Args:
            blocks: ``[pages, 2, page_tokens, kv_heads, dim]`` for each layer, keys first.
            page_table: Int32 ``[n]``: pages of the prompt's tokens.
            tokens: Length of the document.
            meta: Metadata of any cache of the model.
            start: Position of the document's first token in the prompt.

        Returns:
            The document's place.
        """
        if any(block.ndim != _BLOCKS or block.shape[1] != 2 for block in blocks):  # noqa: PLR2004 - keys and values
            raise ArgumentError("blocks must be [pages, 2, page_tokens, kv_heads, dim], keys first")
        return cls([b[:, 0] for b in blocks], [b[:, 1] for b in blocks], page_table, tokens, meta, start)

    def _sides(self) -> tuple[tuple[list[torch.Tensor], list[int]], tuple[list[torch.Tensor], list[int]]]:
        """Tensors and dimensions of keys, and of values."""
        layers = self.meta.layers
        return (self.keys, [spec.key_dim for spec in layers]), (self.values, [spec.value_dim for spec in layers])

    def _page_shapes(self) -> set[tuple[int, int]]:
        return {
            (tensor.shape[0], tensor.shape[1]) if tensor.ndim == _PAGES else (0, 0)
            for tensors in (self.keys, self.values)
            for tensor, spec in zip(tensors, self.meta.layers, strict=False)
            if spec.kind != "none"
        }

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._page_shapes().pop()[1]

    def write(self, first: int, piece: KVCache) -> None:
        """Copy a piece of the document into the pages, from token ``first`` on; positions are the caller's.

        Args:
            first: First token of the piece.
            piece: Its cache.
        """
        stop = first + piece.tokens
        if not 0 <= first <= stop <= self.tokens:
            raise ArgumentError(f"tokens {first} to {stop} do not lie in a document of {self.tokens}")
        sides: tuple[tuple[Side, list[torch.Tensor]], ...] = (("key", piece.keys), ("value", piece.values))
        for side, tensors in sides:
            for layer, tensor in enumerate(tensors):
                if tensor.numel():
                    self.put(side, layer, first, tensor)

    def put(self, side: Side, layer: int, first: int, tensor: torch.Tensor) -> None:
        """Copy keys or values ``[kv_heads, tokens, dim]`` of one layer into the document from token ``first`` on.

        Args:
            side: Keys or values.
            layer: Number of the layer.
            first: Token of the document at which it begins.
            tensor: ``[kv_heads, tokens, dim]``.
        """
        pages = (self.keys if side == "key" else self.values)[layer]
        pages[self._where(first, first + tensor.shape[1])] = tensor.transpose(0, 1).to(pages.device, pages.dtype)

    def take(self, side: Side, layer: int, first: int, stop: int) -> torch.Tensor:
        """Copy some tokens' keys or values of a layer.

        Args:
            side: Keys or values.
            layer: Number of the layer.
            first: First token.
            stop: One after the last token.

        Returns:
            ``[kv_heads, tokens, dim]``.
        """
        return (self.keys if side == "key" else self.values)[layer][self._where(first, stop)].transpose(0, 1)

    def read(self) -> KVCache:
        """The document's cache, contiguous ``[kv_heads, tokens, dim]`` for each layer; a copy."""
        pages, inside = self._where(0, self.tokens)
        keys, values = (
            [
                tensor[pages, inside].transpose(0, 1)
                if spec.kind != "none"
                else tensor.new_zeros(spec.kv_heads, 0, dim)
                for tensor, spec, dim in zip(tensors, self.meta.layers, dims, strict=True)
            ]
            for tensors, dims in self._sides()
        )
        return KVCache(list(keys), list(values), self.meta)

    def _where(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of each of the document's tokens."""
        at = torch.arange(self.start + first, self.start + stop, device=self.page_table.device)
        return self.page_table[at // self.page_tokens].long(), at % self.page_tokens
