"""Rows that the question attends to, over the cache as it was linked (as ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.reuse.repair.selectors.base import BLOCK, Chosen, RepairCost, computed, highest, none_needed

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairInput


_NEAR = 4.0
"""Rows that count about alike at a document's beginning."""


@dataclass(frozen=True)
class Attention:
    """The rows that the question takes most from: the attention that it pays times the size of what it gets for that.

    One head that looks at a row in a layer is enough (``AttentionSummary.influence``): few heads find what a question
    is about, most others look at all rows alike. Rows near their document's beginning count more: the fewer of its own
    document's tokens a row sees, the more of what it should see is missing. A coarse cache suffices to choose
    (benchmarks/reuse.py), so this can run on a prompt's base level.

    Attributes:
        layers: Numbers of the layers to look at; empty for all.
        fading: Row i of its document counts ``(i + 4) ** -fading``; 0: all alike.
        block: Neighbouring tokens that are chosen together.
    """

    layers: tuple[int, ...] = ()
    fading: float = 0.5
    block: int = BLOCK
    name: str = "attention"
    needs: frozenset[Need] = frozenset({"caches", "question"})

    def scores(self, given: RepairInput) -> Tensor:
        """How much each token matters to the question."""
        error = none_needed(given, "question", self.name)
        if error:
            raise error
        seen = given.seen
        if seen is None or self.layers:
            seen = given.engine.look(given.cache, given.question, layers=self.layers)
        within = torch.cat([torch.arange(length) for length in given.documents])
        return seen.influence * (within + _NEAR) ** -self.fading

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        return Chosen(highest(self.scores(given), count, given.documents, self.block))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``; choosing is one pass of the question."""
        repaired = computed(rows, tokens, layers)
        return RepairCost(repaired.token_layers + layers * question, repaired.pairs + layers * question * tokens)
