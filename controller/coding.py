"""What coding leaves of a load's quality, and when, level by level."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .chunk_table import RECOMPUTING, VALID
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from .chunk_table import ChunkTable
    from .costs import DecodeCost
    from .settings import Goal


def coding_options(
    table: ChunkTable, goal: Goal, decode: DecodeCost, bandwidth: float, lead_s: float
) -> list[tuple[float, float]]:
    """When all chunks could be at a level, and what error they had then."""
    tokens, held, state, level = (table.look(name) for name in ("tokens", "held", "state", "valid_level"))
    valid = (state >= VALID[0]) & (state <= VALID[-1])
    text = (state == RECOMPUTING) | (valid & (level < 0))
    fetched = np.flatnonzero(valid & (level >= 0))
    sizes = np.stack([np.frombuffer(row, np.int64) for row in table.sizes])
    errors = np.stack([np.frombuffer(row, np.float64) for row in table.errors])
    reached = np.where(text, table.look("exact_error"), inf)  # nothing that is valid becomes worse
    reached[fetched] = errors[level[fetched], fetched]
    out = []
    finest = len(sizes) - 1
    floor = min(goal.floor, finest)
    for at in range(floor, 1 + (finest if goal.ceiling is None else min(goal.ceiling, finest))):
        more = np.where(text | (valid & (level >= at)), 0, np.maximum(sizes[at] - held, 0))
        size, begun = float(more.sum()), int(np.count_nonzero(more))
        decode_s = decode.apart(begun, float(tokens[more > 0].sum()), size)
        error = float((np.minimum(errors[at], reached) * tokens).sum()) / max(1, int(tokens.sum()))
        out.append((lead_s * (size > 0) + max(size / max(bandwidth, SLOWEST), decode_s), error))
    return out


def finest_bytes(table: ChunkTable, goal: Goal) -> int:
    """Bytes of all chunks as finely as a goal allows, whatever of them is there."""
    finest = len(table.sizes) - 1
    return sum(table.sizes[finest if goal.ceiling is None else min(goal.ceiling, finest)])
