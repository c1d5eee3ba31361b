"""Rows whose keys and values change most behind other documents, as measured when encoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.reuse.repair.selectors.attention import Attention
from kvwire.reuse.repair.selectors.base import BLOCK, Chosen, Selector, highest

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairCost, RepairInput


@dataclass(frozen=True)
class Deviation(Selector):
    """The rows with the greatest stored deviation; it can start before any byte of a cache is there.

    Attributes:
        block: Neighbouring tokens chosen together.
    """

    block: int = BLOCK
    name: str = "deviation"
    needs: frozenset[Need] = frozenset({"deviation"})

    def scores(self, given: RepairInput) -> Tensor:
        """Stored deviations."""
        if given.deviation is None:
            raise ArgumentError(
                f"the selector {self.name} needs deviations measured at encode time, which these blobs lack; encode "
                "with deviations, or choose the selector attention"
            )
        return given.deviation

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        return Chosen(highest(self.scores(given), count, given.documents, self.block))


@dataclass(frozen=True)
class Product(Selector):
    """Attention of the question, times the root of the stored deviation: a distance, not its square.

    Attributes:
        attention: The first factor.
        deviation: The second factor.
        block: Neighbouring tokens chosen together.
    """

    attention: Attention = field(default_factory=lambda: Attention(fading=0.0))
    deviation: Deviation = field(default_factory=Deviation)
    block: int = BLOCK
    name: str = "product"
    needs: frozenset[Need] = frozenset({"caches", "question", "deviation"})

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        deviations = self.deviation.scores(given)
        scores = self.attention.scores(given) * deviations.sqrt()
        return Chosen(highest(scores, count, given.documents, self.block))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        return self.attention.cost(tokens, rows, question, layers)
