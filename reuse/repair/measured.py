"""How far a document's keys and values move once another document stands before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvwire.reuse.assemble import moved
from kvwire.reuse.repair.selectors.cacheblend import deviation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import KVCache


class ExtendingEngine(Protocol):
    """What measuring asks of an engine."""

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Compute tokens on top of the cache before them; see ``Engine.extend``."""
        ...


def measure_deviation(engine: ExtendingEngine, cache: KVCache, token_ids: Sequence[int], neighbour: KVCache) -> Tensor:
    """Compute a document behind another and compare.

    Args:
        engine: Runs the model.
        cache: The document's, computed alone; at any position.
        token_ids: Of the document.
        neighbour: What stands before it, positions on and from 0.

    Returns:
        Float32 ``[tokens]`` on the processor: the mean over layers of the squared distance of a token's keys and
        values, at the same position, over the mean square of the document's.
    """
    fresh = engine.extend(neighbour, token_ids)
    alone = moved(cache, neighbour.tokens)
    layers = range(len(fresh.keys))
    pairs = [((alone.keys[i], alone.values[i]), (fresh.keys[i], fresh.values[i])) for i in layers]
    total = [deviation(stale, new).cpu() for stale, new in pairs if new[0].numel()]
    return torch.stack(total).mean(0)
