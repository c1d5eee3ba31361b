"""Passes of different loads that wait for the engine, joined into one where all of them end sooner in sum.

A pass costs a fixed part, on a GPU the reading of all weights, which several share that run as the rows of one. But
rows are padded to the longest, and all end with the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .costs import CostModel

_SOONER = 0.99  # what joining must bring the sum of ends down to: less is not worth what estimates are off
_MOST_PADDED = 32768
"""Tokens of all rows together, padding and what stands before them included: their caches lie in memory twice."""


@dataclass(frozen=True)
class WaitingPass:
    """A pass that could run now.

    Attributes:
        tokens: New ones.
        context: Tokens before them.
        seconds: That it takes alone.
        limit_s: Seconds from now by which a pass that it is part of must end.
    """

    tokens: int
    context: int
    seconds: float
    limit_s: float = inf


def joined(passes: Sequence[WaitingPass], costs: CostModel, most: int) -> list[int]:
    """Choose which passes run as one, the first among them, so that the sum of all ends becomes less.

    Those that are chosen end together; the others follow, one after the other, in their order. Each is taken in that
    makes the sum less when it is its turn.
    """
    chosen = [0]
    least = sum_of_ends(passes, chosen, costs)
    for number in range(1, len(passes)):
        if len(chosen) == most:
            break
        tried = [*chosen, number]
        rows = [passes[each] for each in tried]
        if len(rows) * sum(max(getattr(row, side) for row in rows) for side in ("tokens", "context")) > _MOST_PADDED:
            continue
        seconds = costs.joined_s([(row.tokens, row.context) for row in rows])
        if seconds > min(row.limit_s for row in rows):
            continue
        ends = sum_of_ends(passes, tried, costs)
        if ends < _SOONER * least:
            chosen, least = tried, ends
    return chosen


def sum_of_ends(passes: Sequence[WaitingPass], chosen: Sequence[int], costs: CostModel) -> float:
    """Work out when passes end, in sum."""
    rows = [passes[number] for number in chosen]
    end = rows[0].seconds if len(rows) == 1 else costs.joined_s([(row.tokens, row.context) for row in rows])
    total = end * len(rows)
    for number, each in enumerate(passes):
        if number not in chosen:
            end += each.seconds
            total += end
    return total
