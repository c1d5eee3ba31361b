"""Selectors that need lengths only: none, all, random, first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, Selector, computed, highest

if TYPE_CHECKING:
    from kvwire.reuse.repair.selectors.base import Need, RepairInput


@dataclass(frozen=True)
class Nothing(Selector):
    """No rows: K = 0 linking."""

    name: str = "none"
    needs: frozenset[Need] = frozenset()

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        del given, count
        return Chosen(torch.zeros(0, dtype=torch.int64))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        del tokens, rows, question, layers
        return RepairCost(0.0, 0.0)


@dataclass(frozen=True)
class Everything(Selector):
    """All rows, whatever the count: a prefill of the whole prompt."""

    name: str = "all"
    needs: frozenset[Need] = frozenset()

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        del count
        return Chosen(torch.arange(given.cache.tokens))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        del rows, question
        return computed(tokens, tokens, layers)


@dataclass(frozen=True)
class Random(Selector):
    """Random rows: the baseline that a selector has to beat."""

    name: str = "random"
    needs: frozenset[Need] = frozenset()

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        generator = torch.Generator().manual_seed(given.seed)
        scores = torch.rand(given.cache.tokens, generator=generator)
        return Chosen(highest(scores, count, given.documents))


@dataclass(frozen=True)
class First(Selector):
    """The first rows of every document but the first: EPIC's LegoLink (arXiv 2410.15332).

    Attributes:
        most: Rows per document at most; None: the count, spread evenly.
    """

    most: int | None = None
    name: str = "first"
    needs: frozenset[Need] = frozenset()

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        within = torch.cat([torch.arange(length) for length in given.documents])
        rows = highest(-within.float(), count, given.documents)
        if self.most is not None and count < given.cache.tokens:
            rows = rows[within[rows] < self.most]
        return Chosen(rows)
