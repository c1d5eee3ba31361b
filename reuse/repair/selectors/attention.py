"""Rows that the question attends to, in the linked cache (as ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError
from kvwire.reuse.repair.selectors.base import BLOCK, Chosen, RepairCost, Selector, computed, highest

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairInput


_NEAR = 4.0
"""At a document's beginning, this many rows have about the same weight."""


@dataclass(frozen=True)
class Attention(Selector):
    """The rows that contribute most to the question's output: attention times the value's norm.

    The maximum over heads counts (``AttentionSummary.influence``): few heads find what a question is about, most attend
    evenly. Rows near their document's beginning weigh more: the fewer of its own document's tokens a row saw, the more
    context it lacks. A coarse cache suffices to choose (benchmarks/reuse.py), so this can run on a prompt's base level.

    Attributes:
        layers: Layers to look at; empty for all.
        fading: Row i of its document has weight ``(i + 4) ** -fading``; 0: equal weights.
        block: Neighbouring tokens chosen together.
    """

    layers: tuple[int, ...] = ()
    fading: float = 0.5
    block: int = BLOCK
    name: str = "attention"
    needs: frozenset[Need] = frozenset({"caches", "question"})

    def scores(self, given: RepairInput) -> Tensor:
        """How much each token matters to the question."""
        if not given.question:
            raise ArgumentError(f"the selector {self.name} looks where the question looks; give it a question")
        attention = given.seen
        if attention is None or self.layers:
            attention = given.engine.look(given.cache, given.question, layers=self.layers)
        within = torch.cat([torch.arange(length) for length in given.documents])
        return attention.influence * (within + _NEAR) ** -self.fading

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        return Chosen(highest(self.scores(given), count, given.documents, self.block))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``; choosing is one pass of the question."""
        repaired = computed(rows, tokens, layers)
        return RepairCost(repaired.token_layers + layers * question, repaired.pairs + layers * question * tokens)
