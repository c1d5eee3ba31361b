"""Where the question looks, times how far what it sees there moves, measured as the rows are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvwire.reuse.repair.selectors.attention import Attention
from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, highest
from kvwire.reuse.repair.selectors.cacheblend import CacheBlend, deviation

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairInput


@dataclass(frozen=True)
class Blend:
    """Question attention (as ProphetKV) and deviation at a check layer (as CacheBlend), each where the other is blind.

    Attention over a blind cache does not see a row that matters only once it has seen the documents before it; a
    deviation sees that row, but many that are not asked for as well. Half of the rows are those with the highest
    attention, the other half those with the highest product.

    Attributes:
        attention: The first factor.
        check_layer: Number of the layer at which rows are dropped; all run so far.
        alone: Share of the rows that attention chooses alone.
    """

    attention: Attention = field(default_factory=lambda: Attention(fading=0.0))
    check_layer: int = 2
    alone: float = 0.5
    name: str = "blend"
    needs: frozenset[Need] = frozenset({"caches", "question", "rows"})

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        tokens, first = given.cache.tokens, given.documents[0]
        if count >= tokens:
            return Chosen(torch.arange(tokens))
        rows = torch.arange(first, tokens)
        if count in {0, len(rows)}:
            return Chosen(rows[:count])
        seen = self.attention.scores(given)
        check = min(self.check_layer, len(given.cache.meta.layers) - 1)
        return Chosen(rows, _ByBoth(check, count, seen, given.documents, self.alone))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        blended = CacheBlend(check_layer=self.check_layer).cost(tokens, rows, question, layers)
        looked = self.attention.cost(tokens, 0, question, layers)
        return RepairCost(blended.token_layers + looked.token_layers, blended.pairs + looked.pairs)


class _ByBoth:
    """Keeps the rows that are seen most, and those whose attention times deviation is highest."""

    writes_all = True

    def __init__(self, check: int, count: int, seen: Tensor, documents: tuple[int, ...], alone: float) -> None:
        self._check, self._count, self._seen, self._documents = check, count, seen, documents
        self._alone = alone

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """See ``Narrowing``."""
        if layer != self._check or not fresh[0].numel():
            return None
        moved = torch.zeros(len(self._seen))
        moved[rows] = deviation(stale, fresh).cpu()
        kept = torch.zeros(len(self._seen), dtype=torch.bool)
        kept[highest(self._seen, int(self._alone * self._count), self._documents)] = True
        scores = (self._seen * moved).masked_fill(kept, -torch.inf)
        kept[highest(scores, self._count - int(kept.sum()), self._documents)] = True
        return kept[rows].nonzero()[:, 0]
