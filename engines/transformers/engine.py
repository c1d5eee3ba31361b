"""Any Hugging Face decoder with rotary positions, as kvwire sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvwire.codec import Statistics, positions_on
from kvwire.engines.transformers.capture import QueryRecorder, captures, recording
from kvwire.engines.transformers.identity import model_revision, tokenizer_digest
from kvwire.engines.transformers.registration import learn_layout
from kvwire.errors import ArgumentError, MismatchError, NotFoundError
from kvwire.types import CacheMeta, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4096
"""Tokens of one prefill batch, padding included: enough to keep a CPU busy without holding many documents at once."""


class TransformersEngine:
    """Runs one model: documents to caches, caches and a question to the first token.

    model: a decoder whose keys are rotary; its layout is learnt and tested here. meta: what its caches say of themselves.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        model_id: str = "",
        revision: str = "",
        tokenizer_id: str = "",
    ) -> None:
        """Learn the layout; raises RopeRegimeError or MismatchError where the model's caches cannot be kept."""
        self.model = model.eval()
        self._tokenizer = tokenizer
        layers, ropes = learn_layout(model)
        dtype = str(model.dtype).removeprefix("torch.")
        self.meta = CacheMeta(model_id, revision, tokenizer_id, dtype, layers, ropes)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self.model.device)

    @property
    def window(self) -> int:
        """Most tokens that a prompt may hold."""
        config = self.model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", 1 << 30))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; raises NotFoundError where its folder has none."""
        if self._tokenizer is None:
            msg = (
                "the model's folder holds no tokenizer; put tokenizer.json beside the weights, "
                "or call the library with token ids, which need none"
            )
            raise NotFoundError(msg)
        return self._tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens: documents are linked, so they carry no BOS."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(list(token_ids)))

    @torch.no_grad()
    def prefill(self, documents: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS) -> list[KVCache]:
        """Caches of independent documents, each at positions from 0, in the order given.

        Batches are padded on the right, where causal attention never looks. Raises ArgumentError on a document without
        tokens or longer than the model's window.
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

    def _prefill_batch(self, documents: Sequence[Sequence[int]], batch: list[int], caches: list[KVCache | None]) -> None:
        longest = max(len(documents[index]) for index in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, index in enumerate(batch):
            ids[row, : len(documents[index])] = torch.tensor(documents[index])
        past = DynamicCache()  # without the configuration, so that sliding layers keep every token
        self.model(input_ids=ids.to(self.device), past_key_values=past, use_cache=True, logits_to_keep=1)
        for row, index in enumerate(batch):
            tokens = len(documents[index])
            copy = len(batch) > 1  # a view would keep the whole batch alive
            keys = [_view(layer.keys[row, :, :tokens], copy=copy) for layer in past.layers]
            values = [_view(layer.values[row, :, :tokens], copy=copy) for layer in past.layers]
            caches[index] = KVCache.from_tensors(keys, values, self.meta, documents[index])

    @torch.no_grad()
    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Recompute tokens from text on top of the cache before them; returns the cache of the new tokens alone.

        prefix: positions on, ending where the new tokens begin; None where there is nothing before them, and then they
        stand at ``offset``. Attention sees the prefix and the new tokens, so this equals a prefill of both.
        """
        start = offset if prefix is None else prefix.meta.offset + prefix.tokens
        self._check_ids(token_ids, start)
        past = DynamicCache() if prefix is None else DynamicCache(self._pairs(prefix))
        before = 0 if prefix is None else prefix.tokens
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)[None]
        self.model(input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1)
        keys = [layer.keys[0, :, before:] for layer in past.layers]
        values = [layer.values[0, :, before:] for layer in past.layers]
        return KVCache.from_tensors(keys, values, replace(self.meta, offset=start), token_ids)

    @torch.no_grad()
    def statistics(self, documents: Sequence[Sequence[int]]) -> Statistics | None:
        """Query energies over some documents, and the value metric of each layer.

        Returns None where the model's attention cannot be watched; ``fit_profile`` then goes without weights.
        """
        if not captures(self.model):
            return None
        recorder = QueryRecorder(self.meta)
        with recording(recorder):
            for ids in documents:
                self._check_ids(ids)
                tokens = torch.tensor([list(ids)], device=self.device)
                self.model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
        return recorder.statistics()

    def past_key_values(self, cache: KVCache) -> DynamicCache:
        """A transformers cache for ``model(input_ids=..., past_key_values=...)``; positions are put on where they are off.

        Sliding layers keep what their window can still see. Raises MismatchError on a cache of another model.
        """
        return DynamicCache(self._pairs(cache), config=self.model.config)

    def _pairs(self, cache: KVCache) -> list[tuple[Tensor, Tensor]]:
        self.check_fits(cache)
        placed = positions_on(cache, cache.meta.offset) if cache.meta.positions == "off" else cache
        dtype = self.model.dtype
        return [
            (key[None].to(self.device, dtype), value[None].to(self.device, dtype))
            for key, value in zip(placed.keys, placed.values, strict=True)
        ]

    def check_fits(self, cache: KVCache) -> None:
        """Raise MismatchError where a cache comes from another model."""
        theirs, ours = cache.meta, self.meta
        shapes = [(s.kv_heads, s.key_dim, s.value_dim) for s in theirs.layers]
        same = shapes == [(s.kv_heads, s.key_dim, s.value_dim) for s in ours.layers]
        if not same or (theirs.model_revision and ours.model_revision and theirs.model_revision != ours.model_revision):
            msg = (
                f"the cache was computed by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), this engine runs "
                f"{ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); encode the documents with this model"
            )
            raise MismatchError(msg)

    @torch.no_grad()
    def forward(self, past: DynamicCache | None, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:
        """Run tokens at positions ``start``, ``start + 1``, ... on top of ``past``, which grows by them.

        logits: how many of the last tokens to return logits for, 0 for all. Returns ``[tokens, vocabulary]``.
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
    def masked_forward(self, token_ids: Sequence[int], visible: Tensor) -> Tensor:
        """One pass over a whole prompt at positions 0, 1, ... where row r sees column c if ``visible[r, c]``; logits of all tokens.

        visible: bool ``[tokens, tokens]``. The reference that linked reuse is measured against.
        """
        self._check_ids(token_ids)
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = self.attention_mask(visible.to(self.device))
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)
        return out.logits[0]  # type: ignore[no-any-return]

    def attention_mask(self, visible: Tensor) -> Tensor | dict[str, Tensor]:
        """A bool ``[queries, keys]`` as this model takes masks: 4-D, additive for eager, one for each kind of layer in hybrids.

        Sliding layers see less: keys are taken to end with the queries.
        """
        kinds = {spec.kind for spec in self.meta.layers}
        windows = {spec.window for spec in self.meta.layers if spec.window}
        full = self._mask_format(visible)
        if kinds == {"full"}:
            return full
        queries, keys = visible.shape
        distance = torch.arange(keys - queries, keys, device=visible.device)[:, None] - torch.arange(keys, device=visible.device)
        sliding = self._mask_format(visible & (distance < min(windows)))
        named = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None)
        return {"full_attention": full, "sliding_attention": sliding} if named and "full" in kinds else sliding

    def _mask_format(self, visible: Tensor) -> Tensor:
        if captures(self.model):
            return visible[None, None]
        hidden = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
        return hidden.masked_fill_(~visible, torch.finfo(self.model.dtype).min)[None, None]

    def generate(self, past: DynamicCache, first: int, start: int, tokens: int) -> list[int]:
        """Greedy continuation: ``first`` at position ``start``, then up to ``tokens - 1`` more; stops at the end-of-text token."""
        ends = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        stops = {ends} if isinstance(ends, int) else set(ends or ())
        out = [first]
        while len(out) < tokens and out[-1] not in stops and start + len(out) < self.window:
            logits = self.forward(past, [out[-1]], start + len(out) - 1, logits=1)
            out.append(int(logits[-1].argmax()))
        return out

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
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocabulary:
            msg = f"token ids must lie in 0 to {vocabulary - 1}; were they made by this model's tokenizer?"
            raise ArgumentError(msg)


def _view(tensor: Tensor, *, copy: bool) -> Tensor:
    return tensor.clone() if copy else tensor


def open_engine(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> TransformersEngine:
    """Open a model folder (config.json and weights as Hugging Face saves them; a tokenizer where text is to be read).

    dtype None: as the weights are stored. Nothing is ever downloaded. Raises NotFoundError where the folder holds no
    model, RopeRegimeError where its keys cannot be moved.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        msg = f"{folder} holds no model: config.json is missing; name a folder saved by save_pretrained"
        raise NotFoundError(msg)
    options: dict[str, Any] = {"dtype": dtype or "auto", "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options)
    except ValueError:  # some models have no sdpa path
        model = _load(folder, options)
    except OSError as error:
        msg = f"{folder} holds no weights that transformers can read ({error}); name a complete model folder"
        raise NotFoundError(msg) from error
    return TransformersEngine(
        model.to(device),  # type: ignore[arg-type]
        _tokenizer(folder),
        model_id=folder.resolve().name,
        revision=model_revision(folder),
        tokenizer_id=tokenizer_digest(folder),
    )


def _load(folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(folder, **options)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        msg = f"{folder} cannot be opened as a causal language model ({error})"
        raise NotFoundError(msg) from error


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not tokenizer_digest(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        msg = f"{folder}'s tokenizer cannot be read ({error}); copy the tokenizer's files again"
        raise NotFoundError(msg) from error
