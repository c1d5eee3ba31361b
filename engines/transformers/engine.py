"""The engine for Hugging Face decoders with rotary positions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.engines.transformers.fitting import check_fits, gaps_of, holes_differ, tensors_for
from kvwire.engines.transformers.holes import masking, with_holes
from kvwire.engines.transformers.masks import attention_mask
from kvwire.engines.transformers.plain import (
    batches_of,
    filled,
    past_mask,
    prefill_batch,
    referring,
    runs_as_it_is,
    tensors_of,
    with_gaps,
)
from kvwire.engines.transformers.text import layers_of, prefix_states
from kvwire.engines.transformers.together import ExtendsTogether
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import checked_rows

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedConfig

    from kvwire.codec import Statistics
    from kvwire.engines.transformers.waiting import Ready
    from kvwire.reuse import AttentionSummary, Narrowing
    from kvwire.types import KVCache

BATCH_TOKENS = 4096
"""Tokens per prefill batch, padding included: enough to keep a CPU busy without holding many documents at once."""


class TransformersEngine(ExtendsTogether):
    """Runs one model: documents to caches, caches and a question to the first token."""

    @torch.no_grad()
    def prefill(self, documents: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS) -> list[KVCache]:
        """Compute the caches of independent documents, each at positions from 0.

        Batches are padded on the right, where causal attention never looks.

        Args:
            documents: Token ids of each.
            batch_tokens: Limit of a batch, padding included; a longer document has a batch of its own.

        Returns:
            Their caches, in the order given.

        Raises:
            ArgumentError: A document is empty or longer than the model's window.
        """
        for ids in documents:
            self.check_ids(ids)
        caches: dict[int, KVCache] = {}
        for batch in batches_of([len(ids) for ids in documents], batch_tokens):
            pairs = prefill_batch(self.model, self.device, [documents[index] for index in batch])
            caches |= {index: self._cache(each, documents[index], 0) for index, each in zip(batch, pairs, strict=True)}
        return [caches[index] for index in range(len(documents))]

    @torch.no_grad()
    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Recompute tokens from text on top of the cache before them, as a prefill of both would.

        Args:
            prefix: The cache before them, positions on; pruned tokens are masked. None: nothing precedes them.
            token_ids: The new tokens.
            offset: Position of the first new token if ``prefix`` is None.

        Returns:
            The cache of the new tokens alone.
        """
        start = offset if prefix is None else prefix.meta.offset + prefix.tokens
        self.check_ids(token_ids, start)
        past = filled(()) if prefix is None else self._past(prefix)
        ids = torch.tensor([list(token_ids)], device=self.device)
        at = torch.arange(start, start + len(token_ids), device=self.device)[None]
        mask = past_mask(past, len(token_ids) + (0 if prefix is None else prefix.tokens))
        with self._masking(past, len(token_ids)):
            self.model(
                input_ids=ids, position_ids=at, attention_mask=mask, past_key_values=past, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
        new = slice(-len(token_ids), None)
        pairs = [(keys[0, :, new].clone(), values[0, :, new].clone()) for keys, values in tensors_of(past)]
        return self._cache(pairs, token_ids, start)

    @property
    def can_repair(self) -> bool:
        """True; ``update_rows`` raises if the model's attention takes no masks."""
        return True

    @property
    def can_look(self) -> bool:
        """True; ``look`` raises if the model's attention is not a standard one."""
        return True

    @property
    def can_join(self) -> bool:
        """True; ``check_together`` decides."""
        return True

    @property
    def can_stop(self) -> bool:
        """Whether the model's layers are found and run their hooks, so that a pass can stop before any layer."""
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            return False  # compiled code ignores hooks registered later
        try:
            return bool(layers_of(self.model))
        except MismatchError:
            return False

    def stoppable(self, stop: threading.Event) -> AbstractContextManager[None]:
        """Let passes in this context end before the next layer once an event is set; see ``Engine.stoppable``.

        Args:
            stop: The event.

        Returns:
            The context.
        """
        from kvwire.engines.transformers.stopping import stoppable  # not needed to fetch only

        return stoppable(layers_of(self.model) if self.can_stop else (), stop)

    @torch.no_grad()
    def statistics(
        self, documents: Sequence[Sequence[int]], *, tokens: bool = True, sensitivity: bool = True
    ) -> Statistics | None:
        """Query covariances, the value metric of each layer, gradients of some documents, and features of tokens.

        It takes about as long as a prefill of 11 documents of 1,024 tokens: a few are sampled, spread over all.

        Args:
            documents: Token ids of each.
            tokens: Whether to compute token features, from which a profile predicts each token's cache.
            sensitivity: Whether to compute gradients, which weigh errors by their effect on answers. They take a
                prefill and a short backward pass of 6 pieces; missing if the model cannot backpropagate.

        Returns:
            The statistics; None without documents. Metrics are None if the model's attention cannot be recorded.
        """
        from kvwire.engines.transformers.observing import observed_statistics

        for ids in documents:
            self.check_ids(ids)
        if not documents:
            return None
        return observed_statistics(self, documents, tokens=tokens, sensitivity=sensitivity)

    def cache_gradients(self, cache: KVCache, token_ids: Sequence[int], *, seed: int = 0) -> KVCache:
        """Backpropagate from tokens sampled after some to the cache before them; see ``GradientEngine``.

        Args:
            cache: Cache before the tokens, positions on, not pruned.
            token_ids: The tokens after it.
            seed: Seed of the samples.

        Returns:
            The gradients, in the cache's shape and at its positions.

        Raises:
            ArgumentError: The model cannot backpropagate.
        """
        from kvwire.engines.transformers.backward import backpropagated

        start = cache.meta.offset + cache.tokens
        self.check_ids(token_ids, start)
        pairs = backpropagated(self.model, self._pairs(cache), token_ids, start, seed)
        keys, values = ([tensor[0].to(self.device) for tensor in side] for side in zip(*pairs, strict=True))
        return replace(cache, keys=keys, values=values)

    def prefix_states(self, token_ids: Sequence[int], layers: int) -> Tensor:
        """Run only the model's first layers over a document.

        A profile with prefix layers predicts from the result; see ``prefix_layers`` of ``fit_profile``.

        Args:
            token_ids: The document's.
            layers: How many layers to run.

        Returns:
            Float32 ``[tokens, (layers + 1) * hidden_size]``: the hidden states before the layers and after each.
        """
        self.check_ids(token_ids)
        return prefix_states(self.model, token_ids, layers)

    def past_key_values(self, cache: KVCache) -> DynamicCache:
        """A transformers cache for ``model(input_ids=..., past_key_values=...)``.

        Keys without rotation are rotated. Sliding layers store their window. If all layers and heads of a pruned cache
        store the same tokens, it becomes shorter, but the tokens keep their positions, so pass ``position_ids``.

        Args:
            cache: Of this model.

        Returns:
            The transformers cache.

        Raises:
            MismatchError: The cache is of another model, or it is pruned in another way.
        """
        return filled(self._pairs(cache), self.model.config)

    def own_past(self, cache: KVCache) -> DynamicCache:
        """``past_key_values`` only for ``forward``, which supports all pruned caches.

        Args:
            cache: Of this model.

        Returns:
            The transformers cache; gaps stay in it, and only ``forward`` masks them. If possible, it shares the cache's
            tensors, which must not change.

        Raises:
            MismatchError: The cache is of another model, or layers or heads hold different tokens, and the model is
                compiled, or its attention takes no masks.
        """
        return self._referring(cache) or self._past(cache, self.model.config)

    def growing_past(self, cache: KVCache, room: KVCache) -> DynamicCache:
        """``own_past`` that grows into reserved memory, see ``Engine.growing_past``.

        With sliding windows, several devices, or a pruned cache, it is plain ``own_past``.

        Args:
            cache: Of this model.
            room: A longer cache that begins with ``cache``.

        Returns:
            The transformers cache.

        Raises:
            MismatchError: See ``own_past``.
        """
        return self._referring(cache, room) or self.own_past(cache)

    def rows_of(self, past: DynamicCache, token_ids: Sequence[int], start: int) -> KVCache | None:
        """The last rows of a past; None if a sliding-window layer has dropped some.

        Args:
            past: The past of the tokens.
            token_ids: Its last tokens.
            start: Position of the first of them.

        Returns:
            Their cache.
        """
        pairs, total = tensors_of(past), start + len(token_ids)
        if past_mask(past, total) is not None or any(keys.numel() and keys.shape[2] != total for keys, _ in pairs):
            return None
        rows = [(keys[0, :, start:], values[0, :, start:]) for keys, values in pairs]
        return self._cache(rows, token_ids, start)

    def _masking(self, past: DynamicCache | None, tokens: int) -> AbstractContextManager[None]:
        """Masks for passes over a past whose layers and heads store different tokens."""
        kept = getattr(past, "kept_by_layer", None)
        return nullcontext() if past is None or kept is None else masking(self.model, self.meta, kept, past, tokens)

    def _past(self, cache: KVCache, config: PreTrainedConfig | None = None) -> DynamicCache:
        """A ``filled`` cache; gaps stay in it if layers have windows, which count all positions, or if they differ."""
        gaps = gaps_of(cache)
        if gaps is None and holes_differ(cache):
            return with_holes(filled(self._pairs(replace(cache, kept=None))), cache, self.model)
        if gaps is None:
            return filled(self._pairs(cache), config)
        return with_gaps(filled(self._pairs(replace(cache, kept=None)), config), gaps.to(self.device))

    def _referring(self, cache: KVCache, room: KVCache | None = None) -> DynamicCache | None:
        """A past that shares the cache's tensors; None if the model needs them converted."""
        self.check_fits(cache)
        if self.devices.layers or not runs_as_it_is(cache, self.device, self.dtype):
            return None
        return referring(cache, self.model, room)

    def _pairs(self, cache: KVCache) -> list[tuple[Tensor, Tensor]]:
        return self.tensors_for(cache)[0]

    def tensors_for(self, cache: KVCache) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """A cache's tensors in the model's form.

        Args:
            cache: Of this model.

        Returns:
            Keys and values ``[1, kv_heads, tokens, dim]`` of every layer, and the positions of their tokens, int64;
            None for the positions if nothing was pruned.

        Raises:
            MismatchError: See ``past_key_values``.
        """
        self.check_fits(cache)
        return tensors_for(cache, self.model.dtype, self.devices)

    def check_fits(self, cache: KVCache) -> None:
        """Refuse a cache of another model.

        Args:
            cache: The cache to check.

        Raises:
            MismatchError: It comes from another model, or another tokenizer read its text.
        """
        check_fits(cache.meta, self.meta)

    @torch.no_grad()
    def forward(self, past: DynamicCache | None, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:
        """Run tokens at positions ``start``, ``start + 1``, ... on top of ``past``, which grows by them.

        Args:
            past: Cache before them; None if there is none.
            token_ids: The tokens to run.
            start: Position of the first.
            logits: How many of the last tokens to return logits for, 0 for all.

        Returns:
            Logits ``[tokens, vocabulary]``.
        """
        self.check_ids(token_ids, start)
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)[None]
        with self._masking(past, len(token_ids)):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=past_mask(past, start + len(token_ids)),
                past_key_values=past if past is not None else DynamicCache(config=self.model.config),
                use_cache=True,
                logits_to_keep=logits,
            )
        return out.logits[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward_when_ready(
        self, cache: KVCache, layers: Sequence[Ready], token_ids: Sequence[int], *, logits: int = 0
    ) -> tuple[Tensor, DynamicCache]:
        """Run ``forward`` on a cache that is still being decoded, each layer as soon as its part is there.

        Call ``Pending.wait`` before using the result: only then is damage detected. Models with sliding-window layers
        wait for the whole cache.

        Args:
            cache: At its positions, not pruned, of the model's dtype and on its device; the past takes over its
                tensors.
            layers: ``Pending.layers``.
            token_ids: The tokens to run.
            logits: How many of the last tokens to return logits for, 0 for all.

        Returns:
            Logits ``[tokens, vocabulary]``, and the past.

        Raises:
            ArgumentError: The cache is not as described.
            MismatchError: The cache is of another model.
        """
        from kvwire.engines.transformers.waiting import check_runs_unready, held

        self.check_fits(cache)
        start = cache.meta.offset + cache.tokens
        check_runs_unready(cache, self.device, self.dtype)
        past = None if self.devices.layers else referring(cache, self.model)
        if past is None:
            for layer in layers:
                layer.hold()
            past = self.past_key_values(cache)
        with held(self.model, layers):
            return self.forward(past, token_ids, start, logits=logits), past

    @torch.no_grad()
    def masked_forward(self, token_ids: Sequence[int], visible: Tensor) -> Tensor:
        """Run a whole prompt in one pass at positions 0, 1, ... under a mask.

        The reference for linked reuse.

        Args:
            token_ids: The prompt's.
            visible: Bool ``[tokens, tokens]``: row r sees column c.

        Returns:
            Logits of all tokens, ``[tokens, vocabulary]``.

        Raises:
            ArgumentError: The mask is not of the prompt's size.
            MismatchError: See ``attention_mask``.
        """
        return self._masked(token_ids, visible, DynamicCache(), 0)

    @torch.no_grad()
    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache:
        """Compute one document's cache under an attention mask; see ``Engine.prefill_masked``."""
        self._masked(token_ids, visible, past := DynamicCache(), 1)
        return self._cache([(keys[0], values[0]) for keys, values in tensors_of(past)], token_ids, 0)

    def _masked(self, token_ids: Sequence[int], visible: Tensor, past: DynamicCache, logits: int) -> Tensor:
        self.check_ids(token_ids)
        if visible.shape != (len(token_ids), len(token_ids)):
            msg = f"a mask for {len(token_ids)} tokens has that many rows and columns, got {tuple(visible.shape)}"
            raise ArgumentError(msg)
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = self.attention_mask(visible.to(self.device))
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True, logits_to_keep=logits
        )
        return out.logits[0]  # type: ignore[no-any-return]

    def attention_mask(self, visible: Tensor) -> Tensor | dict[str, Tensor]:
        """Convert a mask to this model's form: 4-D, and one for each kind of layer in hybrids.

        Sliding layers get a narrower one; the last key is the last query's own.

        Args:
            visible: Bool ``[queries, keys]``: row r sees column c.

        Returns:
            One mask, or masks by kind of layer.

        Raises:
            MismatchError: A 4-D mask cannot express the model's layers.
        """
        return attention_mask(self.model, self.meta, visible)

    @torch.no_grad()
    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Recompute some tokens of a prompt in its cache; see ``RowsEngine.update_rows``.

        Args:
            cache: The prompt's.
            token_ids: Tokens of the whole prompt.
            rows: int64 ``[n]``, positions of the rows in ascending order.
            narrow: Drops rows between layers; None drops none.

        Returns:
            The rows computed in all layers.

        Raises:
            ArgumentError: The cache is not the model's own memory, or the rows lie outside it.
            MismatchError: The cache is of another model, or the model's attention takes no masks.
        """
        from kvwire.engines.transformers.rows import check_own, update_rows

        self.check_fits(cache)
        check_own(cache, self.devices, self.dtype)
        chosen = checked_rows(rows, cache.tokens, len(token_ids))
        self.check_ids(token_ids)
        return update_rows(self.model, cache, torch.tensor(list(token_ids))[chosen], chosen, narrow)

    @torch.no_grad()
    def look(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> AttentionSummary:
        """Measure attention of tokens after a prompt to it; see ``RowsEngine.look``.

        Args:
            cache: The prompt's, positions on and from 0; not changed.
            token_ids: Tokens after it, such as the question.
            layers: Layers to look at; empty for all.

        Returns:
            Numbers by token of the prompt.

        Raises:
            MismatchError: The cache is of another model, or its attention weights are not accessible.
        """
        from kvwire.engines.transformers.attention import look

        self.check_ids(token_ids, cache.tokens)
        self.devices.check_single()
        args = cache.tokens, token_ids, layers
        if not holes_differ(cache):
            return look(self.model, self.meta, self.tensors_for(cache), *args)
        past = self._past(cache)
        with self._masking(past, len(token_ids)):
            return look(self.model, self.meta, (tensors_of(past), None), *args, cache.kept or ())
