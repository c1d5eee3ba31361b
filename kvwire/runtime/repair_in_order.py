"""Rows of a load's prompt computed document by document, while later documents are fetched and decoded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.reuse.repair.repairing import BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvwire.reuse import Repaired, RepairInput, Selector


class RepairInOrder:
    """What jobs of a load have computed of the rows that its selector chose.

    A job sees nothing of the documents behind its own, which may be half decoded by then. Each row sees all that stands
    before it as it stays, so that jobs in the prompt's order come to what all rows at once would.

    Attributes:
        share: Of the prompt's rows, those that were chosen.
        rows: int64, those that are computed, ascending.
        seconds: That computing them took.
        select_s: That choosing all of them took.
    """

    def __init__(self, given: RepairInput, selector: Selector, share: float, count: int) -> None:
        """Choose the rows."""
        started = time.perf_counter()
        self._given, self._chosen = given, selector.choose(given, count).rows
        self.select_s, self.seconds, self.share = time.perf_counter() - started, 0.0, share
        self.rows = self._chosen[:0]

    @property
    def left(self) -> int:
        """How many of the rows are not computed yet."""
        return len(self._chosen) - len(self.rows)

    def run(self, stop_at: int, is_gone: Callable[[], bool]) -> int:
        """Compute the rows before a place of the prompt, but for those that were."""
        began, given, before = time.perf_counter(), self._given, len(self.rows)
        mine = self._chosen[(self._chosen < stop_at) & ~torch.isin(self._chosen, self.rows)]
        seen, ids = given.cache.slice(0, stop_at), given.token_ids[:stop_at]
        for start in range(0, len(mine), BLOCK_ROWS):
            if is_gone():
                break
            block = given.engine.update_rows(seen, ids, mine[start : start + BLOCK_ROWS])
            self.rows = torch.cat((self.rows, block)).sort().values
        self.seconds += time.perf_counter() - began
        return len(self.rows) - before

    def computed(self) -> Tensor:
        """Tell which rows are done, as ``repair_prompt`` wants it of those that were restored."""
        return self.rows

    def joined(self, after: Repaired | None, selector: Selector, share: float) -> Repaired | None:
        """What jobs and the closing have computed together."""
        from kvwire.reuse import Repaired

        given = self._given
        layers, asked = len(given.cache.meta.layers), len(given.question)
        if after is None:
            after = Repaired(
                self.rows[:0], selector.name, selector.cost(given.cache.tokens, 0, asked, layers), 0.0, 0.0
            )
        rows = torch.cat((self.rows, after.rows)).sort().values
        if not len(rows):
            return None
        is_cut = after.is_cut or (share < self.share and len(rows) < len(self._chosen))
        return replace(
            after, rows=rows, cost=selector.cost(given.cache.tokens, len(rows), asked, layers),
            select_s=after.select_s + self.select_s, compute_s=after.compute_s + self.seconds,
            is_cut=is_cut, kept=0, beside=len(self.rows),
        )  # fmt: skip
