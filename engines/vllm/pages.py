"""Pages of a layer as vLLM hands them out: a view ``[blocks, heads, block_tokens, key_dim + value_dim]``.

The view is logical: its six physical orders differ in strides alone. On a processor the inside of a block is packed by
vLLM's own kernel, so that only that kernel may write it; where an element then lies is learnt by writing numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]

_RANK = 4
_DIGIT = 7  # bits of a number that every float dtype of a cache holds exactly
_MOST_ELEMENTS = 1 << 28  # of a block
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NULL_BLOCK = 0
"""vLLM keeps this block for padding and gives it to no request."""


class Pages(Protocol):
    """All layers' pages of one worker."""

    @property
    def views(self) -> Sequence[Tensor]:
        """Of each layer, ``[blocks, heads, block_tokens, key_dim + value_dim]``."""
        ...

    @property
    def key_dims(self) -> Sequence[int]:
        """Of each layer."""
        ...

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens of one layer.

        Args:
            layer: Number of the layer.
            slots: Int64 ``[tokens]``: block times block_tokens plus place in the block.
            keys: ``[heads, tokens, key_dim]``, of any float dtype.
            values: ``[heads, tokens, value_dim]``.
        """
        ...

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy tokens of one layer: keys ``[heads, tokens, key_dim]`` and values ``[heads, tokens, value_dim]``."""
        ...


@dataclass(frozen=True, eq=False)
class StridedPages:
    """Pages whose blocks hold their elements where the view says, in any order of strides.

    Attributes:
        views: Of each layer, ``[blocks, heads, block_tokens, key_dim + value_dim]``, keys first.
        key_dims: Of each layer.
    """

    views: Sequence[Tensor]
    key_dims: Sequence[int]

    def __post_init__(self) -> None:
        """Refuse what are no pages."""
        check_views(self.views, self.key_dims)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens of one layer, see ``Pages``."""
        view = self.views[layer]
        both = torch.cat((keys, values), -1).transpose(0, 1).to(view.device, view.dtype)
        slots = slots.to(view.device)
        view[slots // view.shape[2], :, slots % view.shape[2]] = both

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy tokens of one layer, see ``Pages``."""
        view, dim = self.views[layer], self.key_dims[layer]
        slots = slots.to(view.device)
        both = view[slots // view.shape[2], :, slots % view.shape[2]].transpose(0, 1)
        return both[..., :dim], both[..., dim:]


@dataclass(eq=False)
class PackedPages:
    """Pages whose blocks' insides are packed by the kernel that reads them: written by that kernel alone.

    Attributes:
        views: As of ``StridedPages``; each block of a view is one run of memory.
        key_dims: Of each layer.
        kernel: ``kernel(view, slots, keys, values)`` writes tokens; keys are ``[tokens, heads, key_dim]``.
    """

    views: Sequence[Tensor]
    key_dims: Sequence[int]
    kernel: Write
    _orders: dict[tuple[torch.Size, torch.dtype, int], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Learn where elements lie; refuse what are no pages."""
        check_views(self.views, self.key_dims)
        if any(not view[0].is_contiguous() for view in self.views):
            raise MismatchError("a packed block must be one run of memory: kvwire does not know this layout of vLLM's")
        for view, dim in zip(self.views, self.key_dims, strict=True):
            if (key := (view.shape[1:], view.dtype, dim)) not in self._orders:
                self._orders[key] = learn_order(view, dim, self.kernel)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens of one layer, see ``Pages``."""
        view = self.views[layer]
        turned = [side.transpose(0, 1).to(view.dtype).contiguous() for side in (keys, values)]
        self.kernel(view, slots, *turned)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy tokens of one layer, see ``Pages``."""
        view, dim = self.views[layer], self.key_dims[layer]
        order = self._orders[view.shape[1:], view.dtype, dim]
        blocks, at = torch.unique(slots // view.shape[2], return_inverse=True)
        plain = view[blocks].flatten(1)[:, order].view(-1, *view.shape[1:])
        both = plain[at, :, slots % view.shape[2]].transpose(0, 1)
        return both[..., :dim], both[..., dim:]


def check_views(views: Sequence[Tensor], key_dims: Sequence[int]) -> None:
    """Refuse what are no pages."""
    if not views or len(views) != len(key_dims):
        raise MismatchError(f"{len(views)} layers of pages for {len(key_dims)} layers of a cache")
    for layer, (view, dim) in enumerate(zip(views, key_dims, strict=True)):
        if view.ndim != _RANK or not 0 < dim < view.shape[3] or view.dtype not in DTYPES:
            raise MismatchError(
                f"layer {layer}: pages are [blocks, heads, block_tokens, key_dim + value_dim] of float32, bfloat16 or "
                f"float16, got {tuple(view.shape)} of {view.dtype} with keys of {dim}: kvwire does not know this layout"
            )


def slots_of(blocks: Sequence[int], block_tokens: int, start: int, stop: int) -> Tensor:
    """Where tokens of a request lie.

    Args:
        blocks: The request's blocks, from its first token on.
        block_tokens: Tokens of a block.
        start: First token.
        stop: Behind the last token.

    Returns:
        Int64 ``[stop - start]``: block times block_tokens plus place in the block.

    Raises:
        ArgumentError: The blocks hold fewer tokens.
    """
    if not 0 <= start <= stop <= len(blocks) * block_tokens:
        raise ArgumentError(f"tokens {start} to {stop} do not lie in {len(blocks)} blocks of {block_tokens}")
    at = torch.arange(start, stop)
    return torch.tensor(list(blocks), dtype=torch.int64)[at // block_tokens] * block_tokens + at % block_tokens


def learn_order(view: Tensor, key_dim: int, kernel: Write) -> Tensor:
    """Learn where a kernel puts the elements of a block, by having it write numbers into the null block.

    Args:
        view: ``[blocks, heads, block_tokens, key_dim + value_dim]``; the null block is zeros afterwards.
        key_dim: Of the layer.
        kernel: See ``PackedPages``.

    Returns:
        Int64 ``[elements of a block]``: for element ``[head, place, dim]`` of the logical block, counted in that order,
        its place in the block's memory.

    Raises:
        MismatchError: The kernel does not put every element in a place of its own.
    """
    heads, tokens, width = view.shape[1:]
    count = heads * tokens * width
    if count > _MOST_ELEMENTS:
        msg = f"a block of {count} elements is more than kvwire can learn the layout of; use shorter blocks"
        raise MismatchError(msg)
    numbers = torch.arange(count).view(heads, tokens, width).transpose(0, 1)
    slots, found = torch.arange(tokens) + NULL_BLOCK * tokens, torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(count - 1, 1).bit_length(), _DIGIT):
        digit = ((numbers >> shift) & ((1 << _DIGIT) - 1)).to(view.dtype)
        kernel(view, slots, digit[..., :key_dim].contiguous(), digit[..., key_dim:].contiguous())
        found += view[NULL_BLOCK].flatten().to(torch.int64) << shift
    view[NULL_BLOCK].zero_()
    order = torch.full((count,), -1, dtype=torch.int64)
    order[found.clamp(0, count - 1)] = torch.arange(count)
    if int(order.min()) < 0 or int(found.min()) < 0 or int(found.max()) >= count:
        raise MismatchError(
            "vLLM's writer does not put every number of a block in a place of its own: kvwire does not know this layout"
        )
    return order


def probe(pages: Pages) -> None:
    """Write numbers into the null block of every layer, read them back and compare; zeros are left there.

    Args:
        pages: All layers'.

    Raises:
        MismatchError: Something else came back, or a neighbouring block was written to.
    """
    for layer, (view, dim) in enumerate(zip(pages.views, pages.key_dims, strict=True)):
        heads, tokens, width = view.shape[1:]
        numbers = (torch.arange(heads * tokens * width) * 37 % 127 - 63).view(heads, tokens, width)
        slots = torch.arange(tokens) + NULL_BLOCK * tokens
        beside = view[1:2].clone()
        pages.write(layer, slots, numbers[..., :dim].to(view.dtype), numbers[..., dim:].to(view.dtype))
        back = torch.cat(pages.read(layer, slots), -1).cpu()
        is_alone = torch.equal(view[1:2], beside)
        view[NULL_BLOCK].zero_()
        if not (torch.equal(back, numbers.to(view.dtype)) and is_alone):
            raise MismatchError(
                f"layer {layer}: what was written into vLLM's pages is not what is read from them; kvwire does not "
                "know this layout of vLLM's, and loads nothing into it"
            )
