"""What decoders write into: made, checked, and cleared of what pruning left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.codec.format.metadata_json import shapes_of
from kvwire.errors import ArgumentError, KvwireError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.format.container import Header
    from kvwire.types import BlobInfo, PagedKVCache


def without(tensor: Tensor, gone: Tensor) -> Tensor:
    """Zero some entries in place; all zero bits are 0 in float8, which cannot be filled."""
    (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).masked_fill_(gone, 0)
    return tensor


def chunk_of(out: PagedKVCache, tokens: int) -> KVCache:
    """An empty cache of so many tokens for what will go into pages."""
    pairs: list[list[Tensor]] = [[], []]
    for spec, *tensors in zip(out.meta.layers, out.keys, out.values, strict=True):
        for made, dim, tensor in zip(pairs, (spec.key_dim, spec.value_dim), tensors, strict=True):
            shape = (spec.kv_heads, 0 if spec.kind == "none" else tokens, dim)
            made.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
    return KVCache(pairs[0], pairs[1], out.meta)


def check_out(out: KVCache | PagedKVCache, info: BlobInfo) -> None:
    """Raise ArgumentError where an output does not take the blob's cache."""
    if shapes_of(out.meta.layers) != shapes_of(info.meta.layers) or out.tokens != info.tokens:
        msg = f"the output has another layout than the blob, or room for {out.tokens} and not {info.tokens} tokens"
        raise ArgumentError(msg)


def empty_for(head: Header, device: str | torch.device, dtype: torch.dtype, offset: int | None) -> KVCache:
    """A cache of zeros for a blob's; raises KvwireError where there is no room."""
    info, keys, values = head.info, [], []
    try:
        for spec in info.meta.layers:
            tokens = 0 if spec.kind == "none" else info.tokens
            keys.append(torch.zeros(spec.kv_heads, tokens, spec.key_dim, dtype=dtype, device=device))
            values.append(torch.zeros(spec.kv_heads, tokens, spec.value_dim, dtype=dtype, device=device))
    except (RuntimeError, MemoryError) as error:
        msg = f"no room for the decoded cache of {info.tokens} tokens on {device} ({error}); decode it elsewhere"
        raise KvwireError(msg) from error
    meta = replace(info.meta, dtype=str(dtype).removeprefix("torch."))
    meta = meta if offset is None else replace(meta, positions="on", offset=offset)
    return KVCache(keys, values, meta, info.token_ids, head.kept)
