"""What a tokenizer puts in front of whole texts, a BOS: documents are computed behind it, and prompts begin with it.

A model that was trained behind a BOS gathers attention there, and a document computed without one has its own first
tokens take that part. Behind a BOS, which is dropped, it stands in prompts that begin with one as it was computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """Whether a text begins with opening tokens of its own."""
    return bool(opening) and tuple(token_ids[: len(opening)]) == tuple(opening)


def opening_of(engine: Engine, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that a document is computed behind, and that are dropped from its cache."""
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
    """Compute documents, each alone behind the opening tokens."""
    openings = [opening_of(engine, ids) for ids in documents]
    caches = engine.prefill(
        [(*opening, *ids) if opening else ids for opening, ids in zip(openings, documents, strict=True)]
    )
    return [
        cache.slice(len(opening), cache.tokens) if opening else cache
        for opening, cache in zip(openings, caches, strict=True)
    ]


def states_of(engine: Engine, token_ids: Sequence[int], layers: int, opening: Sequence[int] | None = None) -> Tensor:
    """``Engine.prefix_states`` of a document, computed behind the opening tokens."""
    opening = opening_of(engine, token_ids) if opening is None else opening
    if not opening:
        return engine.prefix_states(token_ids, layers)
    return engine.prefix_states([*opening, *token_ids], layers)[len(opening) :]


def opened(engine: Engine, token_ids: Sequence[int]) -> tuple[int, ...]:
    """A prompt's text with the opening tokens in front, which are never there twice."""
    opening = engine.opening_tokens
    return tuple(token_ids) if tuple(token_ids[: len(opening)]) == opening else (*opening, *token_ids)


def link_opened(engine: Engine, caches: Sequence[KVCache], head: Sequence[int] = ()) -> KVCache:
    """Link documents behind the opening tokens."""
    from kvwire.reuse import link

    head = head or engine.opening_tokens
    front = engine.prefill([head]) if head else []
    linked = link([*front, *caches])
    if not front and caches[0].meta.offset and caches[0].token_ids:
        (first,) = engine.prefill([caches[0].token_ids[:1]])  # it was computed behind something, and begins this prompt
        for whole, token in zip((*linked.keys, *linked.values), (*first.keys, *first.values), strict=True):
            whole[:, :1] = token
    return linked


def lacks_opening(engine: Engine, info: BlobInfo, token_ids: Sequence[int] | None) -> bool:
    """Whether a blob was computed without the opening tokens that its document would be computed behind now."""
    if info.opening or info.soft_tokens or not engine.opening_tokens:
        return False
    return token_ids is None or bool(opening_of(engine, token_ids))
