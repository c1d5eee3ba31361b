"""K = 0 linking: caches of independent documents, concatenated into one prompt.

Every document keeps the keys and values that it got alone; its keys are rotated to its place in the prompt. The query
runs last and attends to all documents. That is KVLink without link tokens (arXiv 2502.16002, section 2.2), and
inference of Block-Attention and TurboRAG: equal to one pass over the prompt with a block-diagonal mask on documents.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch

from kvwire.codec import positions_on, shift_keys
from kvwire.errors import ArgumentError, MismatchError, RopeRegimeError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import CacheMeta, Side


class LinkedPrompt:
    """One cache for a whole prompt, written in place, piece by piece.

    Attributes:
        tokens: Length of each document, in prompt order.
        starts: Position of each document's first token.
        opening: Token ids at the prompt's head, such as BOS; the caller computes and writes them (``write_opening``).
        cache: Tensors ``[kv_heads, positions, dim]`` for each layer, complete once all pieces are written.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        meta: CacheMeta,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: KVCache | None = None,
        starts: Sequence[int] | None = None,
        opening: Sequence[int] = (),
    ) -> None:
        """Allocate the prompt's cache.

        Args:
            tokens: Length of each document, in prompt order.
            meta: Of any cache of the query's model.
            dtype: Of the tensors; not needed with ``cache``.
            device: Of the tensors; not needed with ``cache``.
            cache: Memory for the whole prompt, such as ``Engine.allocate`` gives; None: allocated here.
            starts: First position of each document, ascending; other positions are pruned. None: one after the other,
                after the opening.
            opening: Token ids at the prompt's head.

        Raises:
            ArgumentError: There is nothing to link, the room is too small, or documents overlap.
            RopeRegimeError: The prompt is too long for its documents' keys to be rotated there.
        """
        if not tokens or min(tokens) < 1:
            raise ArgumentError("a linked prompt needs documents of at least one token each")
        self.tokens = tuple(tokens)
        self.opening, head = tuple(opening), len(opening)
        self.starts = tuple(accumulate(tokens[:-1], initial=head) if starts is None else starts)
        total = self._checked_end()
        if cache is not None and starts is not None:
            total = max(total, cache.tokens)  # memory after the last document is a gap, too
        _check_reach(meta, total)
        self.cache = KVCache.zeros(meta, total, dtype=dtype, device=device) if cache is None else cache
        if self.cache.tokens != total:
            raise ArgumentError(f"a prompt of {total} tokens needs as much memory, got a cache of {self.cache.tokens}")
        self._lock = threading.Lock()
        at = head
        for start, count in (*zip(self.starts, self.tokens, strict=True), (total, 0)):
            self.hide(at, start)
            at = start + count

    def _checked_end(self) -> int:
        """Position after the last document."""
        at = len(self.opening)
        if len(self.starts) != len(self.tokens):
            raise ArgumentError(f"{len(self.tokens)} documents need as many starts, got {len(self.starts)}")
        for start, count in zip(self.starts, self.tokens, strict=True):
            if start < at:
                raise ArgumentError(f"a document cannot start at position {start}: what precedes it ends at {at}")
            at = start + count
        return at

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document; the opening counts as part of the first, since no document precedes either."""
        return (len(self.opening) + self.tokens[0], *self.tokens[1:])

    def offset(self, document: int) -> int:
        """Position of a document's first token.

        Args:
            document: Its number, in prompt order from 0.

        Returns:
            The position, in tokens.

        Raises:
            ArgumentError: The prompt has no such document.
        """
        if not 0 <= document < len(self.tokens):
            msg = f"this prompt links documents 0 to {len(self.tokens) - 1}, there is no document {document}"
            raise ArgumentError(msg)
        return self.starts[document]

    def document(self, document: int) -> KVCache:
        """A document's part of the prompt, as views that may be written to.

        Args:
            document: Its number, in prompt order from 0.

        Returns:
            Tensors ``[kv_heads, tokens, dim]`` for each layer, which share memory with ``cache``.

        Raises:
            ArgumentError: The prompt has no such document.
        """
        start = self.offset(document)
        return self.cache.slice(start, start + self.tokens[document])

    def write(self, document: int, start: int, piece: KVCache) -> None:
        """Write tokens ``start``, ``start + 1``, ... of a document, rotated from the piece's positions.

        Args:
            document: Its number, in prompt order from 0.
            start: First token to write, counted from the document's first.
            piece: Cache of these tokens, at any position.

        Raises:
            ArgumentError: The piece does not fit into the document.
            MismatchError: The piece comes from a model of another layout.
        """
        whole = self.document(document)
        stop = start + piece.tokens
        if not 0 <= start <= stop <= whole.tokens:
            raise ArgumentError(f"tokens {start} to {stop} do not lie in document {document} of {whole.tokens} tokens")
        _check_alike(piece.meta, self.cache.meta)
        part = whole.slice(start, stop)
        placed = moved(piece, part.meta.offset)
        _copy(part, placed)
        if piece.kept is not None or self.cache.kept is not None:
            self.keep(document, _masks(piece), start)

    def write_opening(self, piece: KVCache) -> None:
        """Write the tokens at the prompt's head.

        Args:
            piece: Their cache, positions on and from 0.

        Raises:
            ArgumentError: It is of another length.
            MismatchError: It comes from a model of another layout.
        """
        part = self.cache.slice(0, len(self.opening))
        if piece.tokens != part.tokens or (piece.meta.positions, piece.meta.offset) != ("on", 0):
            msg = f"the head of this prompt is {part.tokens} tokens at positions from 0, got {piece.tokens}"
            raise ArgumentError(msg)
        _check_alike(piece.meta, self.cache.meta)
        _copy(part, piece)

    def keep(self, document: int, kept: Sequence[Tensor | None], start: int = 0) -> None:
        """Record which tokens of a pruned document are stored, after writing it into ``document()`` directly.

        Args:
            document: Its number, in prompt order from 0.
            kept: Like ``KVCache.kept``, for tokens ``start``, ``start + 1``, ...
            start: First token that ``kept`` covers, counted from the document's first.

        Raises:
            ArgumentError: ``kept`` does not fit the document.
        """
        room = self.tokens[document] - start if 0 <= document < len(self.tokens) else 0
        heads = [spec.kv_heads for spec in self.cache.meta.layers]
        shapes = [None if mask is None else tuple(mask.shape) for mask in kept]
        fits = (shape is None or (shape[0] == n and shape[1] <= room) for shape, n in zip(shapes, heads, strict=False))
        if start < 0 or len(kept) != len(heads) or not all(fits):
            raise ArgumentError(f"what was kept does not fit document {document} of this prompt from token {start} on")
        self._use_masks()
        first = self.offset(document) + start
        for target, source in zip(self.cache.kept or (), kept, strict=True):
            if target is not None and source is not None:
                target[:, first : first + source.shape[1]] = source

    def _use_masks(self) -> None:
        with self._lock:
            if self.cache.kept is None:
                self.cache = replace(self.cache, kept=tuple(_masks(self.cache)))

    def hide(self, start: int, stop: int) -> None:
        """Mask positions, so that no token attends to them.

        Args:
            start: The first one.
            stop: One after the last.
        """
        self._show(start, stop, seen=False)

    def show(self, start: int, stop: int) -> None:
        """Unmask positions that are written, or will be.

        Args:
            start: The first one.
            stop: One after the last.
        """
        self._show(start, stop, seen=True)

    def _show(self, start: int, stop: int, *, seen: bool) -> None:
        if start >= stop or (seen and self.cache.kept is None):
            return
        self._use_masks()
        for key, value, mask in zip(self.cache.keys, self.cache.values, self.cache.kept or (), strict=True):
            if mask is None or not mask.numel():
                continue
            mask[:, start:stop] = seen
            if not seen:
                key[:, start:stop].zero_()
                value[:, start:stop].zero_()
        if seen and all(mask is None or bool(mask.all()) for mask in self.cache.kept or ()):
            self.cache = replace(self.cache, kept=None)


def moved(cache: KVCache, offset: int) -> KVCache:
    """Rotate a cache's keys to other positions.

    Args:
        cache: At any position.
        offset: Where its first token is to stand.

    Returns:
        The cache with its first token at ``offset``; the same tensors if it is there already.

    Raises:
        RopeRegimeError: The old or new positions have other rotation frequencies.
    """
    _check_reach(cache.meta, offset + cache.tokens, offset)
    if cache.meta.positions == "off":
        return positions_on(cache, offset)
    _check_reach(cache.meta, cache.meta.offset + cache.tokens, cache.meta.offset)
    distance = offset - cache.meta.offset
    if not distance:
        return cache
    keys = [_shifted(tensor, cache.meta, layer, "key", distance) for layer, tensor in enumerate(cache.keys)]
    values = [_shifted(tensor, cache.meta, layer, "value", distance) for layer, tensor in enumerate(cache.values)]
    return replace(cache, keys=keys, values=values, meta=replace(cache.meta, offset=offset))


def link(caches: Sequence[KVCache]) -> KVCache:
    """Link documents' caches into one prompt cache at positions 0, 1, ...: rotate and concatenate.

    Args:
        caches: The documents', in prompt order.

    Returns:
        The prompt's cache.

    Raises:
        ArgumentError: There is no cache.
        MismatchError: The caches come from different models.
        RopeRegimeError: The prompt is too long for its documents' keys to be rotated there.
    """
    if not caches:
        raise ArgumentError("nothing to link: name at least one document")
    first = caches[0].meta
    if not all(cache.meta.shares_config(first) for cache in caches):
        msg = "caches of different models or layouts cannot be linked; encode all documents with one model"
        raise MismatchError(msg)
    placed, position = [], 0
    for cache in caches:
        placed.append(moved(cache, position))
        position += cache.tokens
    keys = [_joined(parts) for parts in zip(*(cache.keys for cache in placed), strict=True)]
    values = [_joined(parts) for parts in zip(*(cache.values for cache in placed), strict=True)]
    masks = None if all(cache.kept is None for cache in placed) else tuple(zip(*map(_masks, placed), strict=True))
    token_ids = [cache.token_ids for cache in placed if cache.token_ids is not None]
    ids = list(chain.from_iterable(token_ids)) if len(token_ids) == len(placed) else None
    dtype = next((str(value.dtype).removeprefix("torch.") for value in values if value.numel()), first.dtype)
    meta = replace(first, positions="on", offset=0, token_digest="", dtype=dtype)
    linked = KVCache.from_tensors(keys, values, meta, ids)
    return linked if masks is None else replace(linked, kept=tuple(torch.cat(parts, 1) for parts in masks))


def block_mask(documents: Sequence[int], query: int) -> Tensor:
    """Which tokens each token attends to in K = 0 linking.

    Documents see themselves, the query sees everything, all causally.

    Args:
        documents: Their lengths, in tokens.
        query: Length of the query, in tokens.

    Returns:
        Bool ``[tokens, tokens]``: row r sees column c.
    """
    total = sum(documents) + query
    owner = torch.repeat_interleave(torch.arange(len(documents) + 1), torch.tensor([*documents, query]))
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    return causal & ((owner[:, None] == owner[None, :]) | (owner[:, None] == len(documents)))


def _shifted(tensor: Tensor, meta: CacheMeta, layer: int, side: Side, distance: int) -> Tensor:
    """A layer's keys or values ``distance`` tokens further on; unchanged if they carry no position."""
    rotary = meta.layers[layer].rotary(side)
    if rotary is None or not tensor.numel():
        return tensor
    index, start = rotary
    return shift_keys(tensor, meta.ropes[index], distance, start)


def _copy(target: KVCache, source: KVCache) -> None:
    for old, new in zip((*target.keys, *target.values), (*source.keys, *source.values), strict=True):
        if old.numel():
            old.copy_(new)


def _masks(cache: KVCache) -> list[Tensor]:
    """Mask of each layer's stored tokens, bool ``[kv_heads, tokens]``; all true if nothing was pruned."""
    kept = cache.kept or (None,) * len(cache.keys)
    shapes = [(spec.kv_heads, cache.tokens) for spec in cache.meta.layers]
    return [
        torch.ones(shape, dtype=torch.bool, device=key.device) if mask is None else mask.to(key.device)
        for shape, mask, key in zip(shapes, kept, cache.keys, strict=True)
    ]


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate along tokens; layers without keys and values stay empty."""
    return torch.cat(parts, 1) if parts[0].numel() else parts[0]


def _check_reach(meta: CacheMeta, stop: int, start: int = 0) -> None:
    """Refuse positions ``start`` to ``stop`` if a regime changes its frequencies between them."""
    if start < 0:
        raise ArgumentError(f"a cache cannot start at position {start}; positions count from 0")
    for rope in meta.ropes:
        if rope.max_positions is not None and stop > rope.max_positions:
            raise RopeRegimeError(
                f"{stop} positions are more than {rope.max_positions}, where {rope.kind} RoPE changes its frequencies "
                "for all of them; name fewer documents or run the whole prompt as text"
            )


def _check_alike(piece: CacheMeta, prompt: CacheMeta) -> None:
    both_known = piece.model_revision and prompt.model_revision
    if (
        piece.layers != prompt.layers
        or piece.ropes != prompt.ropes
        or (both_known and both_known != piece.model_revision)
    ):
        raise MismatchError(
            f"the piece was computed by model {piece.model_id!r}, the prompt is for {prompt.model_id!r}, of another "
            "layout; encode the document with this model"
        )
