"""Documents computed behind a neutral prefix, which is dropped: short texts that tell of no other document.

A document alone has its first tokens see nothing, which they never do behind others, and gathers attention there of its
own (a sink). Behind some other documents, whatever these say, its rows are nearer to those that it has in a prompt. Its
cache still depends on the document alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvwire.errors import ArgumentError
from kvwire.reuse import link
from kvwire.runtime.neutral_text import ALL, NEUTRAL_TEXT
from kvwire.runtime.opening import opening_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding
    from kvwire.types import KVCache

_texts: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
"""The neutral text in an engine's tokens."""
_computed: WeakKeyDictionary[Any, tuple[tuple[int, ...], KVCache]] = WeakKeyDictionary()
"""The neutral prefix that an engine computed last: all documents but the longest have the same one."""


def neutral_tokens(coding: Coding, profile: AnyProfile | None) -> int:
    """How many neutral tokens documents are computed behind: where nothing is said all, of models that have sinks."""
    if coding.neutral_prefix is not None:
        return coding.neutral_prefix
    return ALL if coding.may_be_neutral and getattr(profile, "has_sinks", False) else 0


def neutral_prefix(engine: Engine, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """What a document is computed behind: opening tokens such as BOS, then at most ``count`` of the neutral text."""
    opening = opening_of(engine, token_ids)
    if not count or not token_ids or max(token_ids) >= engine.vocabulary_size:
        return opening
    if not engine.has_tokenizer:
        if count < ALL:
            msg = "a neutral prefix is a text, and this model has no tokenizer: encode without, --neutral-prefix 0"
            raise ArgumentError(msg)
        return opening
    text = _texts.get(engine)
    if text is None:
        text = _texts[engine] = tuple(engine.tokenize(NEUTRAL_TEXT))
    count = min(count, len(text), engine.window - len(opening) - len(token_ids))
    return (*opening, *text[len(text) - count :]) if count > 0 else opening


def compute_documents(engine: Engine, documents: Sequence[Sequence[int]], count: int = ALL) -> list[KVCache]:
    """Compute documents, each alone behind its neutral prefix."""
    return [compute_behind(engine, neutral_prefix(engine, ids, count), ids) for ids in documents]


def compute_behind(
    engine: Engine, neutral: Sequence[int], token_ids: Sequence[int], before: KVCache | None = None
) -> KVCache:
    """Compute tokens of a document behind its neutral prefix, and behind what comes before them of the document."""
    return engine.extend(behind(engine, neutral, before, more=len(token_ids)), token_ids)


def behind(engine: Engine, neutral: Sequence[int], before: KVCache | None = None, *, more: int = 0) -> KVCache | None:
    """What ``more`` tokens of a document see behind its neutral prefix, of which the end alone may have room."""
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
