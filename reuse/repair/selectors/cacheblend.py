"""CacheBlend (arXiv 2405.16444): rows whose keys and values differ most from the cached ones in an early layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, Selector, highest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Need, RepairInput

Sides = Literal["keys", "values", "both"]


@dataclass(frozen=True)
class CacheBlend(Selector):
    """Run all rows through the first layers; those that deviate most at the check layer go on.

    Attributes:
        check_layer: The layer that drops rows; layer 0 of an exact cache never deviates.
        sides: Keys, values or ``both``, which adds them, each relative to the cached one.
        writes_all: Whether the check layer stores new keys and values of all rows, as in the paper, or of the chosen
            ones.
    """

    check_layer: int = 1
    sides: Sides = "both"
    writes_all: bool = True
    name: str = "cacheblend"
    needs: frozenset[Need] = frozenset({"caches", "rows"})

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""

        def best(rows: Tensor, deviations: Tensor) -> Tensor:
            scores = torch.full((sum(given.documents),), -torch.inf)
            scores[rows] = deviations
            return highest(scores, count, given.documents)

        return narrowed(
            given, count, self.check_layer, lambda check: DropAt(check, best, self.sides, writes_all=self.writes_all)
        )

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``."""
        del question
        first = min(self.check_layer + 1, layers)
        token_layers = first * tokens + (layers - first) * rows
        return RepairCost(float(token_layers), float(first * tokens * tokens / 2 + (layers - first) * rows * tokens))


@dataclass(frozen=True)
class DropAt:
    """Drops rows at layer ``check``. best: which positions go on, given all rows' and by how much each deviates."""

    check: int
    best: Callable[[Tensor, Tensor], Tensor]
    sides: Sides = "both"
    writes_all: bool = True

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """See ``Narrowing``."""
        if layer != self.check or not fresh[0].numel():
            return None
        return torch.isin(rows, self.best(rows, deviation(stale, fresh, self.sides).cpu())).nonzero()[:, 0]


def narrowed(given: RepairInput, count: int, check_layer: int, narrow: Callable[[int], DropAt]) -> Chosen:
    """All rows up to a layer and ``count`` from there on; right away where these are all, or none."""
    tokens = given.cache.tokens
    if count >= tokens:
        return Chosen(torch.arange(tokens))
    rows = torch.arange(given.documents[0], tokens)  # nothing precedes the first document
    if count in {0, len(rows)}:
        return Chosen(rows[:count])
    return Chosen(rows, narrow(min(check_layer, len(given.cache.meta.layers) - 1)))


def deviation(stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], sides: Sides = "both") -> Tensor:
    """Relative squared distance of new rows from cached ones."""
    chosen = {"keys": (0,), "values": (1,), "both": (0, 1)}[sides]
    total = torch.zeros(fresh[0].shape[1], device=fresh[0].device)
    for side in chosen:
        old, new = stale[side].float(), fresh[side].float()
        if new.numel():
            total += (new - old).square().sum((0, 2)) / old.square().sum((0, 2)).mean().clamp_min(1e-30)
    return total
