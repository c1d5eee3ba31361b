"""Documents computed behind a neutral prefix, which is dropped: a document that has begun when its text does.

A document alone has its first tokens see nothing, which they never do behind others. Behind some tokens that tell of no
other document, its own last ones, it moves less when it is linked. Its cache still depends on the document alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.types import KVCache


def neutral_tokens(token_ids: Sequence[int], count: int, window: int) -> tuple[int, ...]:
    """The neutral prefix of a document: its own last tokens."""
    count = min(count, len(token_ids), window - len(token_ids))
    return tuple(token_ids[len(token_ids) - count :]) if count > 0 else ()


def compute_behind(
    engine: Engine, neutral: Sequence[int], token_ids: Sequence[int], before: KVCache | None = None
) -> KVCache:
    """Compute tokens of a document behind its neutral prefix."""
    return engine.extend(behind(engine, neutral, before) if neutral else before, token_ids)


def behind(engine: Engine, neutral: Sequence[int], before: KVCache | None = None) -> KVCache:
    """What tokens of a document see that is computed behind its neutral prefix."""
    (prefix,) = engine.prefill([neutral])
    return prefix if before is None else link([prefix, before])
