"""Any Hugging Face decoder with rotary positions, as kvwire sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.engines.transformers.fitting import check_fits, gaps_of, tensors_for
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
"""Tokens of one prefill batch, padding included: enough to keep a CPU busy without holding many documents at once."""


class TransformersEngine(ExtendsTogether):
    """Runs one model: documents to caches, caches and a question to the first token."""

    @torch.no_grad()
    def prefill(self, documents: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS) -> list[KVCache]:
        """Caches of independent documents, each at positions from 0.

        Batches are padded on the right, where causal attention never looks.

        Args:
            documents: Token ids of each.
            batch_tokens: Most tokens of a batch, padding included; a longer document has a batch of its own.

        Returns:
            Their caches, in the order given.

        Raises:
            ArgumentError: A document is without tokens or longer than the model's window.
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
            prefix: Positions on, ending where the new tokens begin; what was pruned of it, in all layers and heads
                alike, is not seen. None where there is nothing before them.
            token_ids: The new tokens.
            offset: Position of the first new token where ``prefix`` is None.

        Returns:
            The cache of the new tokens alone.
        """
        start = offset if prefix is None else prefix.meta.offset + prefix.tokens
        self.check_ids(token_ids, start)
        past = filled(()) if prefix is None else self._past(prefix)
        ids = torch.tensor([list(token_ids)], device=self.device)
        at = torch.arange(start, start + len(token_ids), device=self.device)[None]
        mask = past_mask(past, len(token_ids) + (0 if prefix is None else prefix.tokens))
        self.model(
            input_ids=ids, position_ids=at, attention_mask=mask, past_key_values=past, use_cache=True, logits_to_keep=1
        )
        new = slice(-len(token_ids), None)
        pairs = [(keys[0, :, new].clone(), values[0, :, new].clone()) for keys, values in tensors_of(past)]
        return self._cache(pairs, token_ids, start)

    @property
    def can_repair(self) -> bool:
        """Whether rows inside a prompt can be computed: as far as the model's attention takes masks."""
        return True

    @property
    def can_look(self) -> bool:
        """Whether attention can be seen: as far as the model computes it in the usual way."""
        return True

    @property
    def can_join(self) -> bool:
        """Whether several caches may be extended in one pass, as ``check_together`` finds out."""
        return True

    @property
    def can_stop(self) -> bool:
        """Whether a pass can be stopped: before any layer, where these are to be found and hooks on them are heeded."""
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            return False  # compiled code runs past hooks that come later
        try:
            return bool(layers_of(self.model))
        except MismatchError:
            return False

    def stoppable(self, stop: threading.Event) -> AbstractContextManager[None]:
        """Have passes in this context end before the next layer once an event is set; see ``Engine.stoppable``.

        Args:
            stop: The event.

        Returns:
            The context.
        """
        from kvwire.engines.transformers.stopping import stoppable  # what is only fetched needs no pass

        return stoppable(layers_of(self.model) if self.can_stop else (), stop)

    @torch.no_grad()
    def statistics(
        self, documents: Sequence[Sequence[int]], *, tokens: bool = True, sensitivity: bool = True
    ) -> Statistics | None:
        """Query covariances, the value metric of each layer, gradients of some documents, and features of tokens.

        It takes about as long as a prefill of 11 documents of 1,024 tokens: a few are looked at, spread over all.

        Args:
            documents: Token ids of each.
            tokens: False leaves out the features, which tell what each token caches behind a text.
            sensitivity: False leaves out gradients, which tell what errors do to answers. They take a prefill of 6
                pieces of the documents and a short way back, and are missing where the model cannot backpropagate.

        Returns:
            The statistics; None without documents, and where nothing is known. Metrics are None where the model's
            attention cannot be watched.
        """
        from kvwire.engines.transformers.observing import observed_statistics

        for ids in documents:
            self.check_ids(ids)
        if not documents:
            return None
        return observed_statistics(self, documents, tokens=tokens, sensitivity=sensitivity)

    def cache_gradients(self, cache: KVCache, token_ids: Sequence[int], *, seed: int = 0) -> KVCache:
        """Backpropagate from tokens that are drawn behind some to the cache before them; see ``GradientEngine``.

        Args:
            cache: What stands before the tokens, positions on, not pruned.
            token_ids: What follows.
            seed: Of the draw.

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
        """What the model's first layers, which alone are run, make of a document.

        What a profile that was fitted with a head start predicts from; see ``prefix_layers`` of ``fit_profile``.

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

        Positions are put on where they are off. Sliding layers keep what their window can still see. A pruned cache
        whose layers and heads all keep the same tokens becomes that much shorter: the tokens stay at their positions,
        so pass ``position_ids``.

        Args:
            cache: Of this model.

        Returns:
            The transformers cache.

        Raises:
            MismatchError: The cache is of another model, or it is pruned otherwise.
        """
        return filled(self._pairs(cache), self.model.config)

    def own_past(self, cache: KVCache) -> DynamicCache:
        """``past_key_values`` for ``forward`` alone, which knows of gaps where layers see a window.

        Args:
            cache: Of this model.

        Returns:
            The transformers cache; with gaps, it holds them, and only ``forward`` hides them. Where it can, it refers
            to the cache's own tensors, which must stay as they are.

        Raises:
            MismatchError: The cache is of another model, or layers or heads hold different tokens.
        """
        return self._referring(cache) or self._past(cache, self.model.config)

    def growing_past(self, cache: KVCache, room: KVCache) -> DynamicCache:
        """``own_past`` that grows into memory which was set aside, see ``Engine.growing_past``.

        Where layers see a window, models are spread over several devices, or a cache is pruned, it is ``own_past``.

        Args:
            cache: Of this model.
            room: A longer cache, of which ``cache`` is the beginning.

        Returns:
            The transformers cache.

        Raises:
            MismatchError: See ``own_past``.
        """
        return self._referring(cache, room) or self.own_past(cache)

    def rows_of(self, past: DynamicCache, token_ids: Sequence[int], start: int) -> KVCache | None:
        """The last rows that a past holds; None where a layer that sees a window has let some go.

        Args:
            past: What the tokens were run on.
            token_ids: The last tokens that it holds.
            start: Position of the first of them.

        Returns:
            Their cache.
        """
        pairs, total = tensors_of(past), start + len(token_ids)
        if past_mask(past, total) is not None or any(keys.numel() and keys.shape[2] != total for keys, _ in pairs):
            return None
        rows = [(keys[0, :, start:], values[0, :, start:]) for keys, values in pairs]
        return self._cache(rows, token_ids, start)

    def _past(self, cache: KVCache, config: PreTrainedConfig | None = None) -> DynamicCache:
        """A cache that is ``filled``; it holds its gaps where layers see a window, which counts every position."""
        if (gaps := gaps_of(cache)) is None:
            return filled(self._pairs(cache), config)
        return with_gaps(filled(self._pairs(replace(cache, kept=None)), config), gaps.to(self.device))

    def _referring(self, cache: KVCache, room: KVCache | None = None) -> DynamicCache | None:
        """A past that is the cache's own tensors; None where the model would take another form of them."""
        self.check_fits(cache)
        if self.devices.layers or not runs_as_it_is(cache, self.device, self.dtype):
            return None
        return referring(cache, self.model, room)

    def _pairs(self, cache: KVCache) -> list[tuple[Tensor, Tensor]]:
        return self.tensors_for(cache)[0]

    def tensors_for(self, cache: KVCache) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """A cache's tensors as the model takes them.

        Args:
            cache: Of this model.

        Returns:
            Keys and values ``[1, kv_heads, tokens, dim]`` of every layer, and the positions of their tokens, int64;
            None for the positions where nothing was pruned.

        Raises:
            MismatchError: See ``past_key_values``.
        """
        self.check_fits(cache)
        return tensors_for(cache, self.model.dtype, self.devices)

    def check_fits(self, cache: KVCache) -> None:
        """Refuse a cache of another model.

        Args:
            cache: The cache to look at.

        Raises:
            MismatchError: It comes from another model, or its text was read by another tokenizer.
        """
        check_fits(cache.meta, self.meta)

    @torch.no_grad()
    def forward(self, past: DynamicCache | None, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:
        """Run tokens at positions ``start``, ``start + 1``, ... on top of ``past``, which grows by them.

        Args:
            past: What comes before them; None where there is nothing.
            token_ids: The tokens to run.
            start: Position of the first.
            logits: How many of the last tokens to return logits for, 0 for all.

        Returns:
            Logits ``[tokens, vocabulary]``.
        """
        self.check_ids(token_ids, start)
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)[None]
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
        """``forward`` on a cache that is still being decoded, each layer as soon as its part is there.

        Call ``Pending.wait`` before using what is returned: only it tells whether all was sound. Models with layers
        that see a window wait for the whole cache.

        Args:
            cache: At its positions, not pruned, of the model's dtype and on its device; its tensors become the past's.
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
        """One pass over a whole prompt at positions 0, 1, ... under a mask.

        The reference that linked reuse is measured against.

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
        """The cache of one document whose tokens see less than all before them; see ``Engine.prefill_masked``."""
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
        """A mask as this model takes it: 4-D, and one for each kind of layer in hybrids.

        Sliding layers see less: keys are taken to end with the queries.

        Args:
            visible: Bool ``[queries, keys]``: row r sees column c.

        Returns:
            One mask, or masks by kind of layer.

        Raises:
            MismatchError: A 4-D mask cannot say what the model's layers need.
        """
        return attention_mask(self.model, self.meta, visible)

    @torch.no_grad()
    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Compute some tokens of a prompt anew, in the prompt's cache; see ``RowsEngine.update_rows``.

        Args:
            cache: The prompt's.
            token_ids: Tokens of the whole prompt.
            rows: int64 ``[n]``, positions of the rows in ascending order.
            narrow: Drops rows on the way; None drops none.

        Returns:
            The rows that were computed to the end.

        Raises:
            ArgumentError: The cache is not the model's own memory, or the rows do not lie in it.
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
        """What tokens behind a prompt see of it; see ``RowsEngine.look``.

        Args:
            cache: The prompt's, positions on and from 0; it is not changed.
            token_ids: What follows it, such as the question.
            layers: Numbers of the layers to look at; empty for all.

        Returns:
            By token of the prompt.

        Raises:
            MismatchError: The cache is of another model, or its attention is not to be seen.
        """
        from kvwire.engines.transformers.attention import look

        self.check_ids(token_ids, cache.tokens)
        self.devices.check_single()
        return look(self.model, self.meta, self.tensors_for(cache), cache.tokens, token_ids, layers)
