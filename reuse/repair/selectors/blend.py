"""Attention of the question times deviation, measured while rows are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvwire.reuse.repair.selectors.attention import Attention
from kvwire.reuse.repair.selectors.base import RepairCost, Selector, highest
from kvwire.reuse.repair.selectors.cacheblend import CacheBlend, DropAt, narrowed

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Chosen, Need, RepairInput


@dataclass(frozen=True)
class Blend(Selector):
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

        def drop_at(check: int) -> DropAt:
            attention = self.attention.scores(given)

            def best(rows: Tensor, deviations: Tensor) -> Tensor:
                alone = highest(attention, int(self.alone * count), given.documents)
                products = torch.zeros(len(attention))
                products[rows] = attention[rows] * deviations
                products[alone] = -torch.inf
                return torch.cat([alone, highest(products, count - len(alone), given.documents)])

            return DropAt(check, best)

        return narrowed(given, count, self.check_layer, drop_at)

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        blended = CacheBlend(check_layer=self.check_layer).cost(tokens, rows, question, layers)
        attending = self.attention.cost(tokens, 0, question, layers)
        return RepairCost(blended.token_layers + attending.token_layers, blended.pairs + attending.pairs)
