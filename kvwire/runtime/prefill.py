"""How documents are computed: after a BOS, after neutral text, and measured behind other documents.

Models trained with a BOS gather attention there; in a document computed without one, its own first tokens take that
part. Computed after a BOS, which is then dropped, it fits prompts that begin with one. After some further text of any
content, its rows are closer to those in a prompt, while its cache still depends on the document alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from kvwire.errors import ArgumentError
from kvwire.reuse import link, measure_deviation
from kvwire.types import BlockDeviation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.engines.base import Engine
    from kvwire.types import BlobInfo, KVCache


WITHOUT = (
    "encoded without the BOS that its tokenizer puts in front of whole texts, and linked less exactly for it: encode "
    "it again"
)


TWICE = (
    "begins with a BOS of its own, behind the prompt's: the answer is a little off; encode the text without, by "
    "engine.tokenize or add_special_tokens=False"
)


def begins_with(token_ids: Sequence[int], opening: Sequence[int]) -> bool:
    """Whether a text begins with its own opening tokens."""
    return bool(opening) and tuple(token_ids[: len(opening)]) == tuple(opening)


def opening_of(engine: Engine, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens before a document when it is computed, dropped from its cache."""
    opening = engine.opening_tokens
    if (
        not opening
        or not token_ids
        or tuple(token_ids[: len(opening)]) == opening
        or len(opening) + len(token_ids) > engine.window
    ):
        return ()
    is_soft = min(token_ids) < 0 or max(token_ids) >= engine.vocabulary_size
    return () if is_soft else opening


def prefill_documents(engine: Engine, documents: Sequence[Sequence[int]]) -> list[KVCache]:
    """Compute documents, each alone after the opening tokens."""
    openings = [opening_of(engine, ids) for ids in documents]
    caches = engine.prefill(
        [(*opening, *ids) if opening else ids for opening, ids in zip(openings, documents, strict=True)]
    )
    return [
        cache.slice(len(opening), cache.tokens) if opening else cache
        for opening, cache in zip(openings, caches, strict=True)
    ]


def states_of(engine: Engine, token_ids: Sequence[int], layers: int, opening: Sequence[int] | None = None) -> Tensor:
    """``Engine.prefix_states`` of a document, computed after the opening tokens."""
    opening = opening_of(engine, token_ids) if opening is None else opening
    if not opening:
        return engine.prefix_states(token_ids, layers)
    return engine.prefix_states([*opening, *token_ids], layers)[len(opening) :]


def opened(engine: Engine, token_ids: Sequence[int]) -> tuple[int, ...]:
    """A prompt's text with the opening tokens in front, once."""
    opening = engine.opening_tokens
    return tuple(token_ids) if tuple(token_ids[: len(opening)]) == opening else (*opening, *token_ids)


def link_opened(engine: Engine, caches: Sequence[KVCache], head: Sequence[int] = ()) -> KVCache:
    """Link documents after the opening tokens."""
    head = head or engine.opening_tokens
    front = engine.prefill([head]) if head else []
    linked = link([*front, *caches])
    if not front and caches[0].meta.offset and caches[0].token_ids:
        (first,) = engine.prefill([caches[0].token_ids[:1]])  # it had a prefix, and begins this prompt
        for whole, token in zip((*linked.keys, *linked.values), (*first.keys, *first.values), strict=True):
            whole[:, :1] = token
    return linked


def lacks_opening(engine: Engine, info: BlobInfo, token_ids: Sequence[int] | None) -> bool:
    """Whether a blob was computed without the opening tokens that its document would get now."""
    if info.opening or info.soft_tokens or not engine.opening_tokens:
        return False
    return token_ids is None or bool(opening_of(engine, token_ids))


NEUTRAL_TEXT = """\
The fox and the well
One evening a fox fell into a well and could not get out. A goat came by, looked down and asked whether the \
water was good. "It is the best in the country," said the fox, "come and taste it." The goat, who was thirsty, \
jumped in without thinking. Then the fox climbed on her back, sprang out and ran away. "Next time," he called, \
"look first how you will come out, before you go in."

"""
_texts: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
"""The neutral text in an engine's tokens."""
_computed: WeakKeyDictionary[Any, tuple[tuple[int, ...], KVCache]] = WeakKeyDictionary()
"""An engine's last neutral prefix: all documents but the longest share one."""


def neutral_prefix(engine: Engine, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """A document's prefix: opening tokens such as BOS, then at most ``count`` of the neutral text."""
    opening = opening_of(engine, token_ids)
    if not count or not token_ids or max(token_ids) >= engine.vocabulary_size:
        return opening
    if not engine.has_tokenizer:
        msg = "a neutral prefix is a text, and this model has no tokenizer: encode without, --neutral-prefix 0"
        raise ArgumentError(msg)
    text = _texts.get(engine)
    if text is None:
        text = _texts[engine] = tuple(engine.tokenize(NEUTRAL_TEXT))
    if count > len(text):
        raise ArgumentError(f"the neutral text has {len(text)} tokens here: --neutral-prefix takes so many at most")
    count = min(count, engine.window - len(opening) - len(token_ids))
    return (*opening, *text[len(text) - count :]) if count > 0 else opening


def compute_documents(engine: Engine, documents: Sequence[Sequence[int]], count: int) -> list[KVCache]:
    """Compute documents, each alone after its neutral prefix."""
    return [compute_behind(engine, neutral_prefix(engine, ids, count), ids) for ids in documents]


def compute_behind(
    engine: Engine, neutral: Sequence[int], token_ids: Sequence[int], before: KVCache | None = None
) -> KVCache:
    """Compute tokens of a document after its neutral prefix and its earlier tokens."""
    return engine.extend(behind(engine, neutral, before, more=len(token_ids)), token_ids)


def behind(engine: Engine, neutral: Sequence[int], before: KVCache | None = None, *, more: int = 0) -> KVCache | None:
    """The prefix of ``more`` tokens: neutral prefix and earlier tokens; if the window is short, the prefix's end."""
    kept = len(engine.opening_tokens) if tuple(neutral[: len(engine.opening_tokens)]) == engine.opening_tokens else 0
    room = engine.window - more - (before.tokens if before else 0)
    neutral = (*neutral[:kept], *neutral[kept + max(0, len(neutral) - room) :])
    if not neutral:
        return before
    known = _computed.get(engine)
    if known is None or known[0] != tuple(neutral):
        (prefix,) = engine.prefill([neutral])
        known = _computed[engine] = (tuple(neutral), prefix)
    return known[1] if before is None else link([known[1], before])


BLOCK = 16
"""Tokens per byte of deviations; a byte for each token chooses no better (see benchmarks/reuse.py)."""
NEIGHBOURS, NEIGHBOUR_TOKENS = 2, 128
"""Number of documents put before a measured one, in turn, and tokens of each."""


class Neighbours:
    """Beginnings of a corpus's documents, to put before others."""

    def __init__(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        """Keep the texts; each is computed once, when first needed."""
        self._engine = engine
        self._texts = list(dict.fromkeys(tuple(text[:NEIGHBOUR_TOKENS]) for text in texts))[: NEIGHBOURS + 1]
        self._caches: dict[tuple[int, ...], KVCache] = {}

    def measure(self, cache: KVCache, token_ids: Sequence[int]) -> BlockDeviation:
        """Put neighbours before a document and measure how much its keys and values change.

        Tokens that would exceed the model's window count as unchanged: so far into a document little changes.
        """
        own = tuple(token_ids[:NEIGHBOUR_TOKENS])
        others = [text for text in self._texts if text != own][:NEIGHBOURS] or [tuple(token_ids[-NEIGHBOUR_TOKENS:])]
        found = torch.zeros(-(-cache.tokens // BLOCK) * BLOCK)
        for text in others:
            window = self._engine.window - len(self._engine.opening_tokens)
            seen = max(1, min(cache.tokens, window - len(text)))
            before = self._cache(text[: window - seen])
            deviations = measure_deviation(self._engine, cache.slice(0, seen), token_ids[:seen], before)
            found[:seen] += deviations / len(others)
        found[cache.tokens :] = found[cache.tokens - 1]
        return BlockDeviation.of(found.view(-1, BLOCK).mean(1).tolist(), BLOCK)

    def _cache(self, text: tuple[int, ...]) -> KVCache:
        if text not in self._caches:
            (self._caches[text],) = self._engine.prefill([opened(self._engine, text)])
        return self._caches[text]
