"""CacheBlend (arXiv 2405.16444): rows whose keys and values differ most from the cached ones in an early layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, highest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairInput

Sides = Literal["keys", "values", "both"]


@dataclass(frozen=True)
class CacheBlend:
    """All rows run through the first layers; those that deviate most at the check layer go on.

    Attributes:
        check_layer: Number of the layer at which rows are dropped; layer 0 of an exact cache never deviates.
        sides: What is compared; ``both`` adds the two, each relative to what is cached.
        writes_all: Whether the check layer keeps the fresh keys and values of all rows, as in the paper, or of the
            chosen ones alone.
        steps: Multiples of the wanted count that are left after the check layer and those behind it, such as (1.5,
            1.25): the paper's gradual filter. Empty: one step.
    """

    check_layer: int = 1
    sides: Sides = "both"
    writes_all: bool = True
    steps: tuple[float, ...] = ()
    name: str = "cacheblend"
    needs: frozenset[Need] = frozenset({"caches", "rows"})

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        tokens = given.cache.tokens
        if count >= tokens:
            return Chosen(torch.arange(tokens))
        rows = torch.arange(given.documents[0], tokens)  # nothing stands before the first document
        if count in {0, len(rows)}:
            return Chosen(rows[:count])
        counts = [max(count, int(step * count)) for step in self.steps] + [count]
        check = min(self.check_layer, len(given.cache.meta.layers) - 1)
        return Chosen(rows, _ByDeviation(check, counts, self.sides, given.documents, writes_all=self.writes_all))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``; the paper's own filter is counted as one step."""
        del question
        first = min(self.check_layer + 1, layers)
        token_layers = first * tokens + (layers - first) * rows
        return RepairCost(float(token_layers), float(first * tokens * tokens / 2 + (layers - first) * rows * tokens))


class _ByDeviation:
    """Drops the rows that deviate least, from the check layer on."""

    def __init__(
        self, check: int, counts: Sequence[int], sides: Sides, documents: tuple[int, ...], *, writes_all: bool
    ) -> None:
        self._check, self._counts, self._sides, self._documents = check, list(counts), sides, documents
        self.writes_all = writes_all

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """See ``Narrowing``."""
        if not self._check <= layer < self._check + len(self._counts) or not fresh[0].numel():
            return None
        count = self._counts[layer - self._check]
        scores = torch.full((sum(self._documents),), -torch.inf)
        scores[rows] = deviation(stale, fresh, self._sides).cpu()
        kept = torch.zeros(len(scores), dtype=torch.bool)
        kept[highest(scores, count, self._documents)] = True
        return kept[rows].nonzero()[:, 0]


def deviation(stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], sides: Sides = "both") -> Tensor:
    """How far rows have moved."""
    chosen = {"keys": (0,), "values": (1,), "both": (0, 1)}[sides]
    total = torch.zeros(fresh[0].shape[1], device=fresh[0].device)
    for side in chosen:
        old, new = stale[side].float(), fresh[side].float()
        if new.numel():
            total += (new - old).square().sum((0, 2)) / old.square().sum((0, 2)).mean().clamp_min(1e-30)
    return total
