"""Policies that look no further: one level of everything, plain caches, text alone, and CacheBlend's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from ..forecast import decode_s, wire_s
from ..snapshot import RECOMPUTE, SLOWEST, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..snapshot import Ints, PlanRequest


def sequential_plan(request: PlanRequest, levels: Ints, order: Sequence[int], reason: str) -> Plan:
    """Write down a plan of these levels."""
    chunks, committed = request.chunks, request.committed
    sizes = chunks.bytes_at(levels)
    bandwidth = max(request.bandwidth, SLOWEST)
    link = request.lead_s + (float(committed.wire.sum()) + committed.ahead_bytes) / bandwidth
    fetched = np.flatnonzero(sizes)
    link += float(wire_s(sizes, bandwidth).sum())
    work = decode_s(request, chunks.tokens, sizes)
    decoding = committed.decode_s + float(committed.work_s.sum() + work.sum())
    computing = committed.prefill_s + float(np.sum(request.prefill_s[levels == RECOMPUTE])) if chunks.count else 0.0
    compute = decoding + computing if request.workers == 1 else max(decoding, computing)
    finish_s = max(link if len(fetched) else 0.0, compute) + request.costs.closing_s(request.prompt_tokens)
    tokens = max(int(chunks.tokens.sum()), 1)
    return Plan(
        levels=levels,
        order=order,
        finish_s=finish_s,
        error=float((chunks.tokens * chunks.errors_at(levels)).sum()) / tokens,
        bytes=int(sizes.sum()),
        in_time=request.left_s is None or finish_s <= request.left_s,
        reason=reason,
    )


@dataclass(frozen=True)
class Fixed:
    """Fetches ``level`` of everything, or the finest that a document has where it has fewer.

    Attributes:
        level: That is fetched.
        preemptible: See ``Policy.preemptible``.
    """

    level: int
    preemptible: bool = False

    def __post_init__(self) -> None:
        """Refuse a level that cannot be."""
        if self.level < 0:
            raise ArgumentError(f"a level is 0 or more, got {self.level}")

    @property
    def name(self) -> str:
        """For tables."""
        return f"level-{self.level}"

    def plan(self, request: PlanRequest) -> Plan:
        """Fetch whatever can be."""
        levels = request.chunks.level_for(self.level)
        return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), f"always level {self.level}")


@dataclass(frozen=True)
class Raw(Fixed):
    """Fetches level 0 of documents whose only level is the cache itself, see ``simulator.sizes.raw_of``.

    Attributes:
        level: The only one.
    """

    level: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        return "raw"


@dataclass(frozen=True)
class TextOnly:
    """Recomputes each document in one pass.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "text"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Recompute whatever can be."""
        levels = np.where(request.chunks.can_text, RECOMPUTE, request.chunks.top)
        return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), "always text")


@dataclass(frozen=True)
class CacheBlend:
    """Fetches everything as finely as it may be, and has rows computed anew whatever deadline there is.

    The paper computes a layer's rows while the next layer loads, so that the share at which both take as long is free.
    Blobs are read by chunks, not by layers: here rows are computed once all chunks are there, and nothing is hidden.
    What this shows is the rule, not the paper's times.

    Attributes:
        least: Share of the rows below which it does not go; 0.15 is enough on all of the paper's data sets.
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    least: float = 0.15
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
