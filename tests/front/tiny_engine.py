"""A decoder of two layers in plain torch, as an engine of kvwire: no transformers, no tokenizer, no statistics."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvwire.codec import rotate, rotation
from kvwire.engines.base import Engine
from kvwire.errors import ArgumentError, MismatchError
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime

HEADS, DIM, WIDTH, LAYERS, VOCABULARY = 2, 8, 16, 2, 50


class TinyEngine(Engine):
    """Two layers of attention and a small feed-forward network, with rotary keys."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

        self._table = weights(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self._layers = [
            {name: weights(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
            | {"up": weights(WIDTH, 64), "down": weights(64, WIDTH)}
            for _ in range(LAYERS)
        ]
        rope = RopeRegime(tuple(10.0 ** (-2 * i / DIM) for i in range(DIM // 2)))
        specs = tuple(LayerSpec(HEADS, DIM, DIM, rope=0) for _ in range(LAYERS))
        self._meta = CacheMeta("tiny", "1" * 64, "", "float32", specs, (rope,))
        self.passes = 0

    @property
    def meta(self) -> CacheMeta:
        return self._meta

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def window(self) -> int:
        return 2048

    @property
    def vocabulary_size(self) -> int:
        return VOCABULARY

    def prefill(self, documents):
        return [self.extend(None, ids) for ids in documents]

    def extend(self, prefix, token_ids, *, offset=0):
        start = offset if prefix is None else prefix.meta.offset + prefix.tokens
        past = [] if prefix is None else self.past_key_values(prefix)
        self._run(past, token_ids, start)
        keys = [key[:, -len(token_ids) :] for key, _ in past]
        values = [value[:, -len(token_ids) :] for _, value in past]
        return KVCache.from_tensors(keys, values, replace(self._meta, offset=start), token_ids)

    def past_key_values(self, cache):
        if cache.kept or not cache.meta.shares_config(self._meta):
            msg = "a cache of another model, or a pruned one"
            raise MismatchError(msg)
        return list(zip(cache.keys, cache.values, strict=True))

    def forward(self, past, token_ids, start, *, logits=0):
        hidden = self._run([] if past is None else past, token_ids, start)
        return hidden[-logits:] @ self._table.T

    def watch(self, layer, query):
        """For who wants to see a layer's queries, ``[heads, tokens, dim]``."""

    def _run(self, past, token_ids, start):
        """Hidden states of new tokens on top of ``past``, a list of a layer's keys and values that is written to."""
        if not len(token_ids) or start + len(token_ids) > self.window:
            msg = "no tokens, or more than the window"
            raise ArgumentError(msg)
        self.passes += 1
        hidden = self._table[torch.tensor(list(token_ids))]
        turned = rotation(self._meta.ropes[0], start, len(token_ids))
        for layer, weights in enumerate(self._layers):
            normed = torch.nn.functional.rms_norm(hidden, (WIDTH,))
            query, key, value = ((normed @ weights[name]).view(-1, HEADS, DIM).transpose(0, 1) for name in "qkv")
            query, key = rotate(query, self._meta.ropes[0], *turned), rotate(key, self._meta.ropes[0], *turned)
            self.watch(layer, query)
            if layer < len(past):
                key, value = torch.cat([past[layer][0], key], 1), torch.cat([past[layer][1], value], 1)
                past[layer] = key, value
            else:
                past.append((key, value))
            seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
            hidden = hidden + mixed.transpose(0, 1).reshape(-1, WIDTH) @ weights["o"]
            normed = torch.nn.functional.rms_norm(hidden, (WIDTH,))
            hidden = hidden + torch.relu(normed @ weights["up"]) @ weights["down"]
        return hidden
