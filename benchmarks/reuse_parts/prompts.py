"""Prompts of documents that follow each other in a book, and how far a repaired cache is from a full prefill."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from measure import windows
from transformers import DynamicCache

from kvwire import link

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvwire import KVCache, TransformersEngine

DOCUMENTS, LENGTH = 6, 128
TOKENS = DOCUMENTS * LENGTH
QUESTION, JUDGED = 16, 32
"""Tokens that follow the documents: the first are the question, the divergence is that of those behind it."""
BATCH = 8
"""Caches that are judged in one pass."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt: documents linked blindly, and what a prefill of all of them says.

    Attributes:
        text: Token ids of all documents.
        question: Token ids behind them.
        linked: The documents' caches, one after the other.
        alone: The same, each as it is stored.
        log_p: Float64 ``[JUDGED, vocabulary]``, what the full prefill expects.
        follows: Token ids behind the documents, the question among them.
        seconds: Of the full prefill, of linking and of the question's pass.
    """

    text: tuple[int, ...]
    question: tuple[int, ...]
    linked: KVCache
    alone: list[KVCache]
    log_p: torch.Tensor
    follows: list[int]
    seconds: dict[str, float]


def draw(engine: TransformersEngine, books: Sequence[Path], number: int, seed: int) -> Prompt:
    """Prompt ``number``: books take turns."""
    path = books[number % len(books)]
    (ids,) = windows(engine, path, 1, TOKENS + QUESTION + JUDGED, seed + number)
    text, question = ids[:TOKENS], ids[TOKENS : TOKENS + QUESTION]
    alone = engine.prefill([text[start : start + LENGTH] for start in range(0, TOKENS, LENGTH)])
    began = time.perf_counter()
    linked = link(alone)
    at = time.perf_counter()
    engine.forward(engine.past_key_values(linked), question, TOKENS, logits=1)
    asked = time.perf_counter()
    (full,) = engine.prefill([text])
    seconds = {"prefill": time.perf_counter() - asked, "link": at - began, "question": asked - at}
    follows = ids[TOKENS:-1]
    log_p = expected(engine, [full], follows)[0]
    return Prompt(tuple(text), tuple(question), linked, alone, log_p, follows, seconds)


def copy(cache: KVCache) -> KVCache:
    """One that may be written to."""
    return replace(cache, keys=[key.clone() for key in cache.keys], values=[value.clone() for value in cache.values])


@torch.no_grad()
def expected(engine: TransformersEngine, caches: Sequence[KVCache], follows: Sequence[int]) -> torch.Tensor:
    """Float64 log-probabilities ``[caches, JUDGED, vocabulary]`` of the tokens behind the question."""
    layers = range(len(caches[0].keys))
    pairs = [(torch.stack([c.keys[i] for c in caches]), torch.stack([c.values[i] for c in caches])) for i in layers]
    ids = torch.tensor([list(follows)] * len(caches))
    positions = torch.arange(TOKENS, TOKENS + len(follows)).expand(len(caches), -1)
    past = DynamicCache(ddp_cache_data=pairs)
    out = engine.model(
        input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=JUDGED
    )
    return torch.log_softmax(out.logits.double(), -1)


class Judge:
    """Divergences from a prompt's full prefill, in batches. Attributes: kl: what was measured, by name."""

    def __init__(self, engine: TransformersEngine, prompt: Prompt) -> None:
        """Nothing is judged yet."""
        self._engine, self._prompt = engine, prompt
        self._waiting: list[tuple[tuple[str, float], KVCache]] = []
        self.kl: dict[tuple[str, float], float] = {}

    def add(self, way: str, share: float, cache: KVCache) -> None:
        """Judge a cache, now or with later ones; it must stay as it is."""
        self._waiting.append(((way, share), cache))
        if len(self._waiting) == BATCH:
            self.finish()

    def finish(self) -> None:
        """Judge those that wait."""
        if not self._waiting:
            return
        names, caches = zip(*self._waiting, strict=True)
        log_p = self._prompt.log_p
        log_q = expected(self._engine, caches, self._prompt.follows)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)
        self.kl |= dict(zip(names, divergence.tolist(), strict=True))
        self._waiting.clear()
