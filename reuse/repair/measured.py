"""Deviation: how much a document's keys and values change behind another document."""

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
    """What measuring needs of an engine."""

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Compute tokens on top of the cache before them; see ``Engine.extend``."""
        ...


def measure_deviation(engine: ExtendingEngine, cache: KVCache, token_ids: Sequence[int], neighbour: KVCache) -> Tensor:
    """Compute a document behind another and compare.

    Args:
        engine: Runs the model.
        cache: The document's, computed alone; at any position.
        token_ids: Of the document.
        neighbour: Cache of the document before it, positions on and from 0.

    Returns:
        Float32 ``[tokens]`` on the processor: squared distance of a token's keys and values from those of the document
        alone, at the same position, over their mean square; mean over layers.
    """
    fresh = engine.extend(neighbour, token_ids)
    alone = moved(cache, neighbour.tokens)
    layers = range(len(fresh.keys))
    pairs = [((alone.keys[i], alone.values[i]), (fresh.keys[i], fresh.values[i])) for i in layers]
    total = [deviation(stale, new).cpu() for stale, new in pairs if new[0].numel()]
    return torch.stack(total).mean(0)
