"""K = 0 linking: caches of independent documents, one after the other, in one prompt.

Every document keeps the keys and values that it got alone, its keys moved to where the document now stands; the query
runs last and attends to all of them. That is KVLink without link tokens (arXiv 2502.16002, section 2.2), and the
inference of Block-Attention and TurboRAG: equal to one pass over the prompt with a block-diagonal mask on documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.codec import positions_on, shift_keys
from kvwire.errors import ArgumentError, MismatchError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import CacheMeta


class LinkedPrompt:
    """One cache for a whole prompt, written in place by whoever has a piece of it.

    tokens: length of each document, in prompt order. meta: of any cache of the model that will run the query. Tensors
    are ``[kv_heads, sum(tokens), dim]`` for each layer; nothing is copied when the pieces are all there.
    """

    def __init__(
        self, tokens: Sequence[int], meta: CacheMeta, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        """Reserve the room; raises ArgumentError where there is nothing to link."""
        if not tokens or min(tokens) < 1:
            msg = "a linked prompt needs documents of at least one token each"
            raise ArgumentError(msg)
        self.tokens = tuple(tokens)
        total = sum(tokens)
        shapes = [(spec, 0 if spec.kind == "none" else total) for spec in meta.layers]
        keys = [torch.zeros(s.kv_heads, n, s.key_dim, dtype=dtype, device=device) for s, n in shapes]
        values = [torch.zeros(s.kv_heads, n, s.value_dim, dtype=dtype, device=device) for s, n in shapes]
        placed = replace(meta, positions="on", offset=0, token_digest="", dtype=str(dtype).removeprefix("torch."))
        self.cache = KVCache(keys, values, placed)

    def offset(self, document: int) -> int:
        """Position of a document's first token."""
        return sum(self.tokens[:document])

    def document(self, document: int) -> KVCache:
        """A document's part of the prompt, as views that may be written to."""
        start = self.offset(document)
        return self.cache.slice(start, start + self.tokens[document])

    def write(self, document: int, start: int, piece: KVCache) -> None:
        """Write tokens ``start``, ``start + 1``, ... of a document, moving keys from where ``piece`` stands to where they belong."""
        part = self.document(document).slice(start, start + piece.tokens)
        placed = moved(piece, part.meta.offset)
        for ours, theirs in zip((*part.keys, *part.values), (*placed.keys, *placed.values), strict=True):
            ours.copy_(theirs)


def moved(cache: KVCache, offset: int) -> KVCache:
    """A cache with its first token at ``offset``; the very same tensors where it stands there already."""
    if cache.meta.positions == "off":
        return positions_on(cache, offset)
    distance = offset - cache.meta.offset
    if not distance:
        return cache
    keys = []
    for spec, key in zip(cache.meta.layers, cache.keys, strict=True):
        keys.append(key if spec.rope is None or not key.numel() else shift_keys(key, cache.meta.ropes[spec.rope], distance))
    return KVCache(keys, list(cache.values), replace(cache.meta, offset=offset), cache.token_ids)


def link(caches: Sequence[KVCache]) -> KVCache:
    """Link documents' caches into one prompt cache at positions 0, 1, ...: shift and concatenate.

    Raises MismatchError where they come from different models, RopeRegimeError where the prompt gets too long to move.
    """
    if not caches:
        msg = "nothing to link: name at least one document"
        raise ArgumentError(msg)
    first = caches[0].meta
    if any(cache.meta.config_digest() != first.config_digest() for cache in caches):
        msg = "caches of different models or layouts cannot be linked; encode all documents with one model"
        raise MismatchError(msg)
    placed, at = [], 0
    for cache in caches:
        placed.append(moved(cache, at))
        at += cache.tokens
    keys = [torch.cat(parts, 1) for parts in zip(*(cache.keys for cache in placed), strict=True)]
    values = [torch.cat(parts, 1) for parts in zip(*(cache.values for cache in placed), strict=True)]
    known = [cache.token_ids for cache in placed]
    ids = None if any(part is None for part in known) else [token for part in known if part is not None for token in part]
    return KVCache.from_tensors(keys, values, replace(first, positions="on", offset=0), ids)


def block_mask(documents: Sequence[int], query: int) -> torch.Tensor:
    """What K = 0 linking lets each token see: bool ``[tokens, tokens]``; documents see themselves, the query sees everything, all causally."""
    total = sum(documents) + query
    owner = torch.repeat_interleave(torch.arange(len(documents) + 1), torch.tensor([*documents, query]))
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    return causal & ((owner[:, None] == owner[None, :]) | (owner[:, None] == len(documents)))
