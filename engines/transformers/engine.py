"""Any Hugging Face decoder with rotary positions, as kvwire sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.codec import Statistics, Vocabulary, positions_on
from kvwire.engines.base import Engine
from kvwire.engines.transformers.capture import QueryRecorder, recording
from kvwire.engines.transformers.fitting import kept_by_all, turn_alike
from kvwire.engines.transformers.masks import attention_mask
from kvwire.engines.transformers.plain import filled, tensors_of
from kvwire.engines.transformers.registration import learn_layout, window_of
from kvwire.engines.transformers.text import ATLAS_CONTEXT, look_up, prefix_states
from kvwire.engines.transformers.tokenizer_limits import no_panics
from kvwire.engines.transformers.waiting import held, referring
from kvwire.errors import ArgumentError, MismatchError, NotFoundError
from kvwire.reuse import checked_rows
from kvwire.types import CacheMeta, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvwire.engines.transformers.waiting import Ready
    from kvwire.reuse import Narrowing
    from kvwire.types import Side

_SIDES: tuple[Side, ...] = ("key", "value")
BATCH_TOKENS = 4096
"""Tokens of one prefill batch, padding included: enough to keep a CPU busy without holding many documents at once."""


class TransformersEngine(Engine):
    """Runs one model: documents to caches, caches and a question to the first token.

    Attributes:
        model: A decoder whose keys are rotary, on one device; its layout is learnt and tested here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        model_id: str = "",
        revision: str = "",
        tokenizer_id: str = "",
        model_config_digest: str = "",
    ) -> None:
        """Learn the layout.

        Args:
            model: A decoder whose keys are rotary, on one device.
            tokenizer: The model's; None where texts come as token ids.
            model_id: The model's name, for its caches.
            revision: Tells versions of the weights apart, for its caches.
            tokenizer_id: Digest of the tokenizer, for its caches.
            model_config_digest: SHA-256 of its config.json, for its record in a store.

        Raises:
            ArgumentError: The model is spread over several devices.
            RopeRegimeError: The model's keys cannot be moved, so its caches cannot be kept.
            MismatchError: The model's caches cannot be kept for another reason.
        """
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            msg = "the model is spread over several devices; load it onto one"
            raise ArgumentError(msg)
        torch.nn.Module.eval(model)
        self.model = model
        self._tokenizer = tokenizer
        self._model_config_digest = model_config_digest
        layers, ropes = learn_layout(model)
        dtype = str(model.dtype).removeprefix("torch.")
        self._meta = CacheMeta(model_id, revision, tokenizer_id, dtype, layers, ropes)

    @property
    def meta(self) -> CacheMeta:
        """What its caches say of themselves."""
        return self._meta

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's config.json; empty where the model did not come from a folder."""
        return self._model_config_digest

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the caches."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 to this, exclusive."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def end_tokens(self) -> frozenset[int]:
        """End-of-text tokens of the generation settings."""
        ends = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        return frozenset({ends} if isinstance(ends, int) else ends or ())

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self.model.device)

    @property
    def window(self) -> int:
        """Most tokens that a prompt may hold.

        Where the rotary frequencies change at some length (dynamic, longrope) it ends there: caches from before and
        after do not fit together.
        """
        limits = [regime.max_positions for regime in self.meta.ropes if regime.max_positions is not None]
        return min([window_of(self.model), *limits])

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder holds a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            NotFoundError: The model's folder has none.
        """
        if self._tokenizer is None:
            msg = (
                "the model's folder holds no tokenizer; put tokenizer.json beside the weights, "
                "or call the library with token ids, which need none"
            )
            raise NotFoundError(msg)
        return self._tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Read a text, without special tokens: documents are linked, so they carry no BOS.

        Args:
            text: Of any length.

        Returns:
            Its token ids.

        Raises:
            NotFoundError: There is no tokenizer.
            CorruptError: The tokenizer's rules fail on this text.
        """
        with no_panics():
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids.

        Args:
            token_ids: Of the model's vocabulary.

        Returns:
            The text.

        Raises:
            NotFoundError: There is no tokenizer.
            CorruptError: The tokenizer's rules fail on these tokens.
        """
        with no_panics():
            return str(self.tokenizer.decode(list(token_ids)))

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
            self._check_ids(ids)
        order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
        caches: list[KVCache | None] = [None] * len(documents)
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) + 1) * len(documents[index]) > batch_tokens:
                self._prefill_batch(documents, batch, caches)
                batch = []
            batch.append(index)
        if batch:
            self._prefill_batch(documents, batch, caches)
        return [cache for cache in caches if cache is not None]

    def _prefill_batch(
        self, documents: Sequence[Sequence[int]], batch: list[int], caches: list[KVCache | None]
    ) -> None:
        longest = max(len(documents[index]) for index in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, index in enumerate(batch):
            ids[row, : len(documents[index])] = torch.tensor(documents[index])
        past = DynamicCache()  # without the configuration, so that sliding layers keep every token
        self.model(input_ids=ids.to(self.device), past_key_values=past, use_cache=True, logits_to_keep=1)
        for row, index in enumerate(batch):
            tokens = len(documents[index])
            pairs = [(keys[row, :, :tokens], values[row, :, :tokens]) for keys, values in tensors_of(past)]
            if len(batch) > 1:  # a view would keep the whole batch alive
                pairs = [(keys.clone(), values.clone()) for keys, values in pairs]
            caches[index] = self._cache(pairs, documents[index], 0)

    def _cache(self, pairs: list[tuple[Tensor, Tensor]], token_ids: Sequence[int], offset: int) -> KVCache:
        meta = replace(self.meta, offset=offset)
        return KVCache.from_tensors([key for key, _ in pairs], [value for _, value in pairs], meta, token_ids)

    @torch.no_grad()
    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Recompute tokens from text on top of the cache before them.

        Attention sees the prefix and the new tokens, so this equals a prefill of both.

        Args:
            prefix: Positions on, ending where the new tokens begin; None where there is nothing before them.
            token_ids: The new tokens.
            offset: Position of the first new token where ``prefix`` is None.

        Returns:
            The cache of the new tokens alone.
        """
        start = offset if prefix is None else prefix.meta.offset + prefix.tokens
        self._check_ids(token_ids, start)
        past = filled(() if prefix is None else self._pairs(prefix))
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)[None]
        self.model(input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1)
        new = slice(-len(token_ids), None)
        pairs = [(keys[0, :, new].clone(), values[0, :, new].clone()) for keys, values in tensors_of(past)]
        return self._cache(pairs, token_ids, start)

    @torch.no_grad()
    def statistics(
        self, documents: Sequence[Sequence[int]], *, tokens: bool = True, sensitivity: bool = True
    ) -> Statistics | None:
        """Query covariances over some documents, the value metric and sensitivity of each layer, gradients, features.

        Args:
            documents: Token ids of each.
            tokens: False leaves the features out, which take a pass over the vocabulary.
            sensitivity: False leaves out what errors do to answers: the sensitivity of layers to noise, which takes two
                short passes for each layer and each of a few documents, and gradients, which take two passes over some
                24 pieces of the documents and are missing where the model cannot backpropagate. And which of them
                weighs errors best, see ``choose_weighting``.

        Returns:
            The statistics; None without documents, and where nothing is known. Metrics are None where the model's
            attention cannot be watched.
        """
        from kvwire.engines.calibration import gather_gradients, measure_sensitivity
        from kvwire.engines.weighting import choose_weighting

        for ids in documents:
            self._check_ids(ids)
        if not documents:
            return None
        recorder = QueryRecorder(self.meta, self.model)
        with recording(recorder, self.model):
            for ids in documents:
                past = DynamicCache()
                batch = torch.tensor([list(ids)], device=self.device)
                self.model(input_ids=batch, past_key_values=past, use_cache=True, logits_to_keep=1)
                recorder.record_cache(tensors_of(past))
        gathered = gather_gradients(self, documents, recorder.builder) if sensitivity else 0
        if not (recorder.modules or gathered or tokens):
            return None
        found = recorder.statistics(self._vocabulary(documents) if tokens else None)
        if not sensitivity:
            return found
        found = replace(found, sensitivity=measure_sensitivity(self, documents, found))
        return replace(found, weighting=choose_weighting(self, documents, found))

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
        self._check_ids(token_ids, start)
        pairs = backpropagated(self.model, self._pairs(cache), token_ids, start, seed)
        return replace(cache, keys=[keys[0] for keys, _ in pairs], values=[values[0] for _, values in pairs])

    def _vocabulary(self, documents: Sequence[Sequence[int]]) -> Vocabulary:
        longest = max(documents, key=len)
        start = max(0, (len(longest) - ATLAS_CONTEXT) // 2)
        room = min(ATLAS_CONTEXT, self.window - 1)
        (context,) = self.prefill([longest[start : start + room]])
        return look_up(self.model, self.meta, context, [token for ids in documents for token in ids])

    def prefix_states(self, token_ids: Sequence[int], layers: int) -> Tensor:
        """What the model's first layers, which alone are run, make of a document.

        What a profile that was fitted with a head start predicts from; see ``prefix_layers`` of ``fit_profile``.

        Args:
            token_ids: The document's.
            layers: How many layers to run.

        Returns:
            Float32 ``[tokens, (layers + 1) * hidden_size]``: the hidden states before the layers and after each.
        """
        self._check_ids(token_ids)
        return prefix_states(self.model, token_ids, layers)

    def head_start(self, token_ids: Sequence[int], layers: int) -> Tensor:
        """Old name of ``prefix_states``, for one more version."""
        return self.prefix_states(token_ids, layers)

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
        kept = kept_by_all(cache)
        placed = replace(cache, keys=self._here(cache, "key"), values=self._here(cache, "value"))
        if cache.meta.positions == "off":
            placed = positions_on(placed, cache.meta.offset)
        pairs = zip(placed.keys, placed.values, strict=True)
        dtype = self.model.dtype
        if kept is None:
            return [(key[None].to(dtype), value[None].to(dtype)) for key, value in pairs], None
        at = kept.to(self.device)
        return [(key[None, :, at].to(dtype), value[None, :, at].to(dtype)) for key, value in pairs], kept

    def _here(self, cache: KVCache, side: Side) -> list[Tensor]:
        """A cache's keys or values where the model runs, as it wants them; what is still to be rotated as it is."""
        tensors = cache.keys if side == "key" else cache.values
        dtypes = [None if spec.rotary(side) else self.model.dtype for spec in cache.meta.layers]
        return [tensor.to(self.device, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]

    def check_fits(self, cache: KVCache) -> None:
        """Refuse a cache of another model.

        Args:
            cache: The cache to look at.

        Raises:
            MismatchError: It comes from another model, or its text was read by another tokenizer.
        """
        theirs, ours = cache.meta, self.meta
        shapes = [(s.kv_heads, s.key_dim, s.value_dim) for s in theirs.layers]
        same = shapes == [(s.kv_heads, s.key_dim, s.value_dim) for s in ours.layers] and turn_alike(theirs, ours)
        digests = (theirs.tokenizer_digest, ours.tokenizer_digest)
        if all(digests) and digests[0] != digests[1]:
            msg = (
                "the cache's text was read by another tokenizer than this engine's; encode the documents with this one"
            )
            raise MismatchError(msg)
        if not same or (theirs.model_revision and ours.model_revision and theirs.model_revision != ours.model_revision):
            msg = (
                f"the cache was computed by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), "
                f"this engine runs {ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); "
                "encode the documents with this model"
            )
            raise MismatchError(msg)

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
        self._check_ids(token_ids, start)
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)[None]
        out = self.model(
            input_ids=ids,
            position_ids=positions,
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
        self.check_fits(cache)
        start = cache.meta.offset + cache.tokens
        ready = cache.meta.positions == "on" and cache.kept is None
        tensors = [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]
        if not ready or any(t.device != self.device or t.dtype != self.model.dtype for t in tensors):
            msg = "only a cache with positions, unpruned, of the model's dtype and on its device can be run unready"
            raise ArgumentError(msg)
        pairs = [(keys[None], values[None]) for keys, values in zip(cache.keys, cache.values, strict=True)]
        past = referring(pairs, self.model)
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
        self._check_ids(token_ids)
        if visible.shape != (len(token_ids), len(token_ids)):
            msg = f"a mask for {len(token_ids)} tokens has that many rows and columns, got {tuple(visible.shape)}"
            raise ArgumentError(msg)
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = self.attention_mask(visible.to(self.device))
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)
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
        from kvwire.engines.transformers.rows import update_rows

        self._check_own(cache)
        chosen = checked_rows(rows, cache.tokens, len(token_ids))
        self._check_ids(token_ids)
        return update_rows(self.model, cache, torch.tensor(list(token_ids))[chosen], chosen, narrow)

    @torch.no_grad()
    def attention_received(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> Tensor:
        """How much attention tokens behind a prompt pay to it; see ``RowsEngine.attention_received``.

        Args:
            cache: The prompt's, positions on and from 0; it is not changed.
            token_ids: What follows it, such as the question.
            layers: Numbers of the layers to look at; empty for all.

        Returns:
            Float32 ``[tokens]``.

        Raises:
            MismatchError: The cache is of another model, or its attention is not to be seen.
        """
        from kvwire.engines.transformers.attention import attention_received

        self._check_ids(token_ids, cache.tokens)
        tensors = self.tensors_for(cache)
        return attention_received(self.model, self.meta, tensors, cache.tokens, token_ids, layers)

    def _check_own(self, cache: KVCache) -> None:
        """Refuse what cannot be written in place."""
        self.check_fits(cache)
        tensors = [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]
        at_home = all(tensor.device == self.device and tensor.dtype == self.dtype for tensor in tensors)
        if not at_home or cache.meta.positions == "off" or cache.meta.offset:
            msg = (
                "rows are computed only in a prompt's cache at positions from 0, of the engine's dtype and on its "
                "device, such as LinkedPrompt makes in Engine.allocate"
            )
            raise ArgumentError(msg)

    def _check_ids(self, token_ids: Sequence[int], start: int = 0) -> None:
        if not len(token_ids):
            msg = "a document without tokens has no cache; leave it out"
            raise ArgumentError(msg)
        if start + len(token_ids) > self.window:
            msg = (
                f"{start + len(token_ids)} tokens do not fit the model's window of {self.window}; "
                "split the document or name fewer documents"
            )
            raise ArgumentError(msg)
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary_size:
            msg = f"token ids must lie in 0 to {self.vocabulary_size - 1}; were they made by this model's tokenizer?"
            raise ArgumentError(msg)
