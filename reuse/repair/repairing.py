"""Repairing a linked prompt: choose rows, compute them anew."""

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
"""Rows between which a repair can be stopped."""


@dataclass(frozen=True, eq=False)
class Repaired:
    """What was computed anew, and what that took.

    Attributes:
        rows: int64, positions of the rows in ascending order.
        selector: Name of what chose them.
        cost: Choosing included, the question's own pass left out.
        select_s: Seconds that choosing took; where rows are dropped on the way it is part of ``compute_s``.
        compute_s: Seconds that computing took.
        is_cut: Whether it was stopped before all rows that were chosen were computed.
        kept: How many rows an earlier repair had computed.
        beside: How many rows were computed while later documents were fetched.
        is_plain: Whether nothing but these rows changed, in any layer.
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
    """A selector by its name.

    Args:
        name: One of ``SELECTORS``.

    Returns:
        The selector.

    Raises:
        ArgumentError: There is none of that name.
    """
    if name not in SELECTORS:
        msg = f"there is no selector {name!r}; choose one of {', '.join(SELECTORS)}"
        raise ArgumentError(msg)
    return SELECTORS[name]


def repair_prompt(
    given: RepairInput,
    selector: Selector,
    share: float,
    stop: Callable[[], bool] | None = None,
    restore: Callable[[], Tensor] | None = None,
) -> Repaired:
    """Compute a share of a linked prompt's rows anew, in its cache.

    With a share of 1 the prompt's cache becomes that of a prefill; with 0 not a bit changes. The first document never
    changes but with a share of 1.

    Args:
        given: The prompt; its cache is written to.
        selector: Chooses the rows.
        share: Of all documents' tokens, from 0 to 1.
        stop: Asked between blocks of rows, front to back, whether to leave the rest as it is: any beginning of the rows
            is a repair. A selector that drops rows on the way computes all of them at once.
        restore: Writes rows into the cache that an earlier repair of these documents computed, once the selector has
            looked at the cache without them, and tells which they are: chosen or not, they are not computed again. Not
            called for selectors that drop rows on the way.

    Returns:
        What was done.

    Raises:
        ArgumentError: The share is out of range, or the selector lacks something that it needs.
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
