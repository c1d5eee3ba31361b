"""CacheBlend's loading controller (arXiv 2405.16444, section 5.1): as many rows anew as hide behind loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .sequential import sequential_plan

if TYPE_CHECKING:
    from ..snapshot import Plan, PlanRequest

LEAST_SHARE = 0.15
"""Of the rows, which the paper finds to be enough on all of its data sets."""


@dataclass(frozen=True)
class CacheBlend:
    """Fetches everything as finely as it may be, and has rows computed anew whatever deadline there is.

    The paper computes a layer's rows while the next layer loads, so that the share at which both take as long is free.
    Blobs are read by chunks, not by layers: here rows are computed once all chunks are there, and nothing is hidden.
    What this shows is the rule, not the paper's times.

    Attributes:
        least: Share of the rows below which it does not go.
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    least: float = LEAST_SHARE
    name: str = "cacheblend"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Fetch whatever can be, at the finest level that is wanted."""
        chunks, ceiling = request.chunks, request.goal.ceiling
        levels = chunks.level_for(chunks.levels if ceiling is None else ceiling)
        return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), "all of it, and rows anew")

    def repair_share(self, load_s: float, prefill_s: float) -> float:
        """See ``RepairRule``: r with r x prefill = load, but at least ``least``."""
        return min(1.0, max(self.least, load_s / prefill_s if prefill_s > 0 else 1.0))
