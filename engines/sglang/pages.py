"""Layout of keys and values in pages of SGLang's host pool, as a flat tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.adapters import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.types import KVCache

# Order of layers (0), tokens (1), heads (2) and elements (3) in a page of each layout: keys, then values.
ORDERS = {
    "layer_first": (0, 1, 2, 3),
    "page_first": (1, 0, 2, 3),
    "page_first_direct": (0, 1, 2, 3),
    "page_head": (2, 1, 0, 3),
}


class HostPool(Protocol):
    """What kvwire needs of SGLang's ``HostKVCache``."""

    layout: str
    dtype: torch.dtype
    page_size: int
    layer_num: int
    head_num: int
    head_dim: int

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        """Write a page at the slot of its first token."""
        ...


def check_pool(pool: HostPool, layers: int, heads: int, dim: int, tokens: int) -> None:
    """Refuse a pool whose pages do not match the model's chunks."""
    names = ("page_size", "layer_num", "head_num", "head_dim")
    have = [getattr(pool, name, None) for name in names]
    value_dim = getattr(pool, "v_head_dim", dim)
    if have != [tokens, layers, heads, dim] or value_dim != dim or pool.dtype not in DTYPES:
        shape = ", ".join(f"{name} {value}" for name, value in zip(names, have, strict=True))
        raise MismatchError(
            f"SGLang's pages have {shape} of {pool.dtype}, the store's {tokens}, {layers}, {heads} and {dim}, of "
            "float32, bfloat16 or float16: serve the store's model, and give SGLang's --page-size as chunk_tokens (an "
            "index of that length must be there: kvwire store index)"
        )
    if pool.layout not in ORDERS:
        raise MismatchError(f"kvwire does not know SGLang's layout {pool.layout!r}; take one of {', '.join(ORDERS)}")


def flat_page(cache: KVCache, heads: slice, layout: str, tokens: int) -> Tensor:
    """A page as a flat tensor for SGLang's pool."""
    if cache.tokens != tokens:
        raise ArgumentError(f"a chunk of {cache.tokens} tokens for a page of {tokens}")
    order = ORDERS[layout]
    sides = [torch.stack([tensor[heads].transpose(0, 1) for tensor in side]) for side in (cache.keys, cache.values)]
    return torch.stack([side.permute(order) for side in sides]).flatten()
