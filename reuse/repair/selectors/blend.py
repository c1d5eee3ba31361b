"""Attention of the question times deviation, measured while rows are computed."""

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
    """Question attention (as ProphetKV) and deviation at a check layer (as CacheBlend), each for what the other misses.

    Attention over a linked cache misses rows that matter only once they have seen earlier documents; deviation finds
    them, but many irrelevant ones, too. Half of the rows are those with the highest attention, half those with the
    highest product.

    Attributes:
        attention: The first factor.
        check_layer: The layer that drops rows; all rows run up to it.
        alone: Share of the rows chosen by attention only.
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
        attention = self.attention.scores(given)
        check = min(self.check_layer, len(given.cache.meta.layers) - 1)
        return Chosen(rows, _ByBoth(check, count, attention, given.documents, self.alone))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        blended = CacheBlend(check_layer=self.check_layer).cost(tokens, rows, question, layers)
        attending = self.attention.cost(tokens, 0, question, layers)
        return RepairCost(blended.token_layers + attending.token_layers, blended.pairs + attending.pairs)


class _ByBoth:
    """Keeps the rows with the highest attention, and those with the highest product."""

    writes_all = True

    def __init__(self, check: int, count: int, attention: Tensor, documents: tuple[int, ...], alone: float) -> None:
        self._check, self._count, self._attention, self._documents = check, count, attention, documents
        self._alone = alone

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """See ``Narrowing``."""
        if layer != self._check or not fresh[0].numel():
            return None
        deviations = torch.zeros(len(self._attention))
        deviations[rows] = deviation(stale, fresh).cpu()
        chosen = torch.zeros(len(self._attention), dtype=torch.bool)
        chosen[highest(self._attention, int(self._alone * self._count), self._documents)] = True
        scores = (self._attention * deviations).masked_fill(chosen, -torch.inf)
        chosen[highest(scores, self._count - int(chosen.sum()), self._documents)] = True
        return chosen[rows].nonzero()[:, 0]
