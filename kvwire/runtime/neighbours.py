"""How far documents move behind each other, measured while they are encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.reuse import measure_deviation
from kvwire.runtime.opening import opened
from kvwire.types import BlockDeviation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

BLOCK = 16
"""Tokens that share a byte; a byte for each token chooses no better (see benchmarks/reuse.py)."""
NEIGHBOURS, NEIGHBOUR_TOKENS = 2, 128
"""Documents that stand before the one that is measured, in turn, and tokens of each."""


class Neighbours:
    """Beginnings of a corpus's documents, to stand before others."""

    def __init__(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        """Keep the texts; each is computed once, when it is first needed."""
        self._engine = engine
        self._texts = list(dict.fromkeys(tuple(text[:NEIGHBOUR_TOKENS]) for text in texts))[: NEIGHBOURS + 1]
        self._caches: dict[tuple[int, ...], KVCache] = {}

    def measure(self, cache: KVCache, token_ids: Sequence[int]) -> BlockDeviation:
        """Put neighbours before a document and see how far its keys and values move.

        What would stand beyond the model's window is taken not to move: little does, so far into a document.
        """
        own = tuple(token_ids[:NEIGHBOUR_TOKENS])
        others = [text for text in self._texts if text != own][:NEIGHBOURS] or [tuple(token_ids[-NEIGHBOUR_TOKENS:])]
        found = torch.zeros(-(-cache.tokens // BLOCK) * BLOCK)
        for text in others:
            window = self._engine.window - len(self._engine.opening_tokens)
            seen = max(1, min(cache.tokens, window - len(text)))
            before = self._cache(text[: window - seen])
            moved = measure_deviation(self._engine, cache.slice(0, seen), token_ids[:seen], before)
            found[:seen] += moved / len(others)
        found[cache.tokens :] = found[cache.tokens - 1]
        return BlockDeviation.of(found.view(-1, BLOCK).mean(1).tolist(), BLOCK)

    def _cache(self, text: tuple[int, ...]) -> KVCache:
        if text not in self._caches:
            (self._caches[text],) = self._engine.prefill([opened(self._engine, text)])
        return self._caches[text]
