"""Repair of a linked prompt: choose rows and recompute them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError
from kvwire.reuse.repair.selectors import SELECTORS
from kvwire.reuse.repair.selectors.base import RepairCost, rows_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvwire.reuse.repair.selectors.base import Chosen, RepairInput, Selector


BLOCK_ROWS = 1024
"""Rows between two checks of ``stop``."""


@dataclass(frozen=True, eq=False)
class Repaired:
    """The recomputed rows, and their cost.

    Attributes:
        rows: int64, positions of the rows in ascending order.
        selector: Name of the selector.
        cost: Choosing included, without the question's pass.
        select_s: Seconds spent choosing; selectors that drop rows between layers count in ``compute_s``.
        compute_s: Seconds spent computing.
        is_cut: Whether it stopped before all chosen rows were computed.
        kept: Number of rows restored from an earlier repair.
        beside: Number of rows computed while later documents were fetched.
        is_plain: Whether only these rows changed, in all layers.
    """

    rows: Tensor
    selector: str
    cost: RepairCost
    select_s: float
    compute_s: float
    is_cut: bool = False
    kept: int = 0
    beside: int = 0
    is_plain: bool = True


def selector_of(name: str) -> Selector:
    """Look up a selector.

    Args:
        name: One of ``SELECTORS``.

    Returns:
        The selector.

    Raises:
        ArgumentError: There is none of that name.
    """
    if name not in SELECTORS:
        raise ArgumentError(f"there is no selector {name!r}; choose one of {', '.join(SELECTORS)}")
    return SELECTORS[name]


def repair_prompt(
    given: RepairInput,
    selector: Selector,
    share: float,
    stop: Callable[[], bool] | None = None,
    restore: Callable[[], Tensor] | None = None,
) -> Repaired:
    """Recompute a share of a linked prompt's rows in its cache.

    With a share of 1 the prompt's cache becomes that of a prefill, with 0 not a bit changes. The first document changes
    only with a share of 1.

    Args:
        given: The prompt; its cache is written to.
        selector: Chooses the rows.
        share: Of all documents' tokens, from 0 to 1.
        stop: Called between blocks of rows, front to back; true ends the repair, and the rows so far count. A selector
            that drops rows between layers computes all rows in one block.
        restore: Writes rows of an earlier repair of these documents into the cache, after the selector has looked at
            the cache without them, and returns their positions; they are not recomputed. Not called for selectors that
            drop rows between layers.

    Returns:
        What was repaired.

    Raises:
        ArgumentError: The share is out of range, or the selector lacks an input.
        MismatchError: The engine's model cannot run rows.
    """
    count = rows_for(share, given.documents)
    if not count and selector.name != "all":
        return Repaired(torch.zeros(0, dtype=torch.int64), selector.name, RepairCost(0.0, 0.0), 0.0, 0.0)
    started = time.perf_counter()
    chosen = selector.choose(given, count)
    selected = time.perf_counter()
    restored = restore() if restore and not chosen.narrow else chosen.rows[:0]
    if len(restored):
        chosen = replace(chosen, rows=chosen.rows[~torch.isin(chosen.rows, restored)])
    rows = chosen.rows
    if len(rows):
        rows = _in_blocks(given, rows, stop) if stop and not chosen.narrow else _at_once(given, chosen)
    done = time.perf_counter()
    layers = len(given.cache.meta.layers)
    cost = selector.cost(given.cache.tokens, len(rows), len(given.question), layers)
    is_cut = chosen.narrow is None and len(rows) < len(chosen.rows)
    is_plain = chosen.narrow is None
    seconds = selected - started, done - selected
    return Repaired(rows, selector.name, cost, *seconds, is_cut, len(restored), is_plain=is_plain)


def _at_once(given: RepairInput, chosen: Chosen) -> Tensor:
    return given.engine.update_rows(given.cache, given.token_ids, chosen.rows, chosen.narrow)


def _in_blocks(given: RepairInput, rows: Tensor, stop: Callable[[], bool]) -> Tensor:
    done: list[Tensor] = []
    for start in range(0, len(rows), BLOCK_ROWS):
        if stop():
            break
        block = rows[start : start + BLOCK_ROWS]
        done.append(given.engine.update_rows(given.cache, given.token_ids, block))
    return torch.cat(done) if done else rows[:0]
