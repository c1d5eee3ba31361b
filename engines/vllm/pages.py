"""Pages of a layer as vLLM hands them out: a view ``[blocks, heads, block_tokens, key_dim + value_dim]``.

The view is logical: its six physical orders differ in strides alone. On a processor the inside of a block is packed by
vLLM's own kernel, so that only that kernel may write it; where an element then lies is learnt by writing numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.types import CacheMeta

    Write = Callable[[Tensor, Tensor, Tensor, Tensor, "PageFormat"], None]

RANK = 4
_DIGIT, _FP8_DIGIT = 7, 3  # bits of a number that every dtype of a cache holds exactly
_OVER = 1.02  # a scale leaves a number a little off, and some writers of fp8 round towards zero
_MOST_ELEMENTS = 1 << 28  # of a block
_CLOSE = 1e-3  # to a whole number that a scale was multiplied to and divided by
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NULL_BLOCK = 0
"""vLLM keeps this block for padding, and in place of those that a sliding window has left."""


@dataclass(frozen=True, eq=False)
class PageFormat:
    """How a layer's pages hold rows."""

    # of the numbers in memory; None: the view's own. Of fp8, whose views are of bytes: e4m3 or e5m2
    dtype: torch.dtype | None = None
    given: torch.dtype | None = None  # in which vLLM's own writer takes keys and values; None: ``dtype``
    key_scale: float = 1.0  # what keys are divided by
    value_scale: float = 1.0  # what values are divided by
    order: Tensor | None = None  # which element of a value stands at each place; None: their own order

    @property
    def digit(self) -> int:
        """Bits of a number that is held exactly."""
        return _DIGIT if self.dtype is None else _FP8_DIGIT

    def scaled(self, numbers: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values that are held as these whole numbers."""
        over = 1.0 if self.dtype is None else _OVER
        return numbers[..., :key_dim] * self.key_scale * over, numbers[..., key_dim:] * self.value_scale * over

    def rows(self, keys: Tensor, values: Tensor, view: Tensor) -> Tensor:
        """Both sides, one behind the other, as a view holds them."""
        if self.order is not None:
            values = values[..., self.order.to(values.device)]
        if self.dtype is None:
            return torch.cat((keys, values), -1).to(view.device, view.dtype)
        sides = ((keys, self.key_scale), (values, self.value_scale))
        scaled = torch.cat([side.to(view.device, self.given).float() / scale for side, scale in sides], -1)
        most = torch.finfo(self.dtype).max
        return scaled.clamp(-most, most).to(self.dtype).view(view.dtype)

    def sides(self, rows: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of what a view holds."""
        if self.order is not None:
            return rows[..., :key_dim], rows[..., key_dim:][..., self.order.argsort().to(rows.device)]
        if self.dtype is None:
            return rows[..., :key_dim], rows[..., key_dim:]
        rows = rows.view(self.dtype).float()
        return rows[..., :key_dim] * self.key_scale, rows[..., key_dim:] * self.value_scale


@dataclass(frozen=True)
class BlockTable:
    """Layers that share a list of blocks in each request."""

    layers: tuple[int, ...]  # their numbers among the pages'
    block_tokens: int  # tokens of a block of that list, which may be several blocks of a view
    is_whole: bool = True  # no block of a request is left out, as those before a sliding window are


class Pages(ABC):
    """All layers' pages of one worker."""

    def __init__(self, views: Sequence[Tensor], key_dims: Sequence[int], forms: Sequence[PageFormat] = ()) -> None:
        """Refuse what are no pages.

        views: of each layer, ``[blocks, heads, block_tokens, key_dim + value_dim]``, keys first. forms: of each layer;
        empty: numbers of the views' own dtype.
        """
        self.views, self.key_dims, self.forms = views, key_dims, forms or [PageFormat()] * len(views)
        check_views(views, key_dims, self.forms)

    @abstractmethod
    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens of one layer: ``[heads, tokens, key_dim or value_dim]`` of any float dtype; see ``slots_of``."""

    @abstractmethod
    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy tokens of one layer, as ``write`` takes them."""


class StridedPages(Pages):
    """Pages whose blocks hold their elements where the view says, in any order of strides."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See ``Pages``."""
        view = self.views[layer]
        rows = self.forms[layer].rows(keys, values, view).transpose(0, 1)
        slots = slots.to(view.device)
        view[slots // view.shape[2], :, slots % view.shape[2]] = rows

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Pages``."""
        view = self.views[layer]
        slots = slots.to(view.device)
        rows = view[slots // view.shape[2], :, slots % view.shape[2]].transpose(0, 1)
        return self.forms[layer].sides(rows, self.key_dims[layer])


class PackedPages(Pages):
    """Pages whose blocks' insides are packed by the kernel that reads them: written by that kernel alone."""

    def __init__(
        self, views: Sequence[Tensor], key_dims: Sequence[int], kernel: Write, forms: Sequence[PageFormat] = ()
    ) -> None:
        """Learn where elements lie; each block of a view is one run of memory.

        kernel: ``kernel(view, slots, keys, values, form)`` writes tokens; keys are ``[tokens, heads, key_dim]``.
        """
        super().__init__(views, key_dims, forms)
        if any(not view[0].is_contiguous() for view in views):
            raise MismatchError("a packed block must be one run of memory: kvwire does not know this layout of vLLM's")
        self._kernel = kernel
        self._orders: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}
        for view, dim, form in zip(views, key_dims, self.forms, strict=True):
            if (key := (view.shape[1:], view.dtype, dim)) not in self._orders:
                self._orders[key] = learn_order(view, dim, kernel, form)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See ``Pages``."""
        view, form = self.views[layer], self.forms[layer]
        keys, values = (side.transpose(0, 1).to(form.given or view.dtype).contiguous() for side in (keys, values))
        self._kernel(view, slots, keys, values, form)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Pages``."""
        view, dim = self.views[layer], self.key_dims[layer]
        order = self._orders[view.shape[1:], view.dtype, dim]
        blocks, at = torch.unique(slots // view.shape[2], return_inverse=True)
        plain = view[blocks].flatten(1)[:, order].view(-1, *view.shape[1:])
        return self.forms[layer].sides(plain[at, :, slots % view.shape[2]].transpose(0, 1), dim)


def layers_with_rows(meta: CacheMeta) -> list[int]:
    """Numbers of the layers that have keys and values of their own."""
    return [layer for layer, spec in enumerate(meta.layers) if spec.kind != "none"]


def pairs_of_halves(count: int) -> Tensor:
    """``PageFormat.order`` of pages that keep pair by pair what caches keep in halves, first all first numbers."""
    return torch.arange(count).view(2, -1).T.flatten()


def check_views(views: Sequence[Tensor], key_dims: Sequence[int], forms: Sequence[PageFormat]) -> None:
    """Refuse what are no pages."""
    if not views or not len(views) == len(key_dims) == len(forms):
        raise MismatchError(f"{len(views)} layers of pages for {len(key_dims)} layers of a cache")
    for layer, (view, dim, form) in enumerate(zip(views, key_dims, forms, strict=True)):
        is_known = view.dtype in DTYPES if form.dtype is None else view.element_size() == form.dtype.itemsize
        if view.ndim != RANK or not 0 < dim < view.shape[3] or not is_known:
            raise MismatchError(
                f"layer {layer}: pages are [blocks, heads, block_tokens, key_dim + value_dim] of float32, bfloat16 or "
                f"float16, got {tuple(view.shape)} of {view.dtype} with keys of {dim}: kvwire does not know this layout"
            )


def slots_of(blocks: Sequence[int], block_tokens: int, start: int, stop: int) -> Tensor:
    """Where a request's tokens lie: int64 ``[stop - start]``, block times block_tokens plus place in the block.

    blocks: the request's, from its first token on.
    """
    if not 0 <= start <= stop <= len(blocks) * block_tokens:
        raise ArgumentError(f"tokens {start} to {stop} do not lie in {len(blocks)} blocks of {block_tokens}")
    at = torch.arange(start, stop)
    return torch.tensor(list(blocks), dtype=torch.int64)[at // block_tokens] * block_tokens + at % block_tokens


def learn_order(view: Tensor, key_dim: int, kernel: Write, form: PageFormat) -> Tensor:
    """Learn where a kernel puts the elements of a block, by having it write numbers into the null block.

    Gives for each element ``[head, place, dim]`` of the logical block, counted in that order, its place in the block's
    memory. The null block is zeros afterwards.
    """
    heads, tokens, width = view.shape[1:]
    count = heads * tokens * width
    if count > _MOST_ELEMENTS:
        msg = f"a block of {count} elements is more than kvwire can learn the layout of; use shorter blocks"
        raise MismatchError(msg)
    numbers = torch.arange(count).view(heads, tokens, width).transpose(0, 1)
    slots, found = torch.arange(tokens) + NULL_BLOCK * tokens, torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(count - 1, 1).bit_length(), form.digit):
        sides = form.scaled((numbers >> shift) & ((1 << form.digit) - 1), key_dim)
        keys, values = (side.to(form.given or view.dtype).contiguous() for side in sides)
        kernel(view, slots, keys, values, form)
        found += view[NULL_BLOCK].view(form.dtype or view.dtype).flatten().float().to(torch.int64) << shift
    view[NULL_BLOCK].zero_()
    order = torch.full((count,), -1, dtype=torch.int64)
    order[found.clamp(0, count - 1)] = torch.arange(count)
    if int(order.min()) < 0 or int(found.min()) < 0 or int(found.max()) >= count:
        raise MismatchError(
            "vLLM's writer does not put every number of a block in a place of its own: kvwire does not know this layout"
        )
    return order


def probe(pages: Pages) -> None:
    """Write numbers into the null block of every layer, read them back and compare; zeros are left there."""
    for layer, (view, dim) in enumerate(zip(pages.views, pages.key_dims, strict=True)):
        heads, tokens, width = view.shape[1:]
        form, most = pages.forms[layer], (1 << pages.forms[layer].digit) - 1
        numbers = (torch.arange(heads * tokens * width) * 37 % most - most // 2).view(heads, tokens, width)
        slots = torch.arange(tokens) + NULL_BLOCK * tokens
        beside = view[1:2].clone()
        pages.write(layer, slots, *(side.to(form.given or view.dtype) for side in form.scaled(numbers, dim)))
        keys, values = (side.cpu() for side in pages.read(layer, slots))
        back = torch.cat((keys / form.key_scale, values / form.value_scale), -1).float()
        is_alone = torch.equal(view[1:2], beside)
        view[NULL_BLOCK].zero_()
        if not (float((back - numbers).abs().max()) < _CLOSE and is_alone):
            raise MismatchError(
                f"layer {layer}: what was written into vLLM's pages is not what is read from them; kvwire does not "
                "know this layout of vLLM's, and loads nothing into it"
            )
