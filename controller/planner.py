"""The planner: which chunks to recompute, which to fetch and how finely.

Compute works from the front of the prompt while the link delivers from the back, and they meet where both end soonest
(Cake, arXiv 2410.03065). Quality grows with the level; a recomputation counts as the finest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.types import Decision

from ._sweep import Sweep, add_fetch, fixed_slots, front_costs
from .request import Plan

if TYPE_CHECKING:
    from .request import OpenChunk, PlanRequest


@dataclass(frozen=True)
class Choice:
    """A uniform target level, the number m of open chunks at the front that are recomputed, and when that ends.

    finish_s: seconds from now to the first token.
    """

    target: int
    front: int
    finish_s: float


def plan(request: PlanRequest) -> Plan:
    """Decide for every open chunk; pure, and linear in chunks times levels.

    With a deadline: the highest level at which the best split is in time; what is left of the time then lifts chunks
    by one level, in prompt order. Where no level is in time, or without a deadline: the soonest finish at the quality
    floor or above it.
    """
    front = front_costs(request)
    closing_s = request.costs.closing_s(request.prompt_tokens)
    best: Choice | None = None
    for target in reversed(targets(request)):
        end, split = Sweep(request, target, front).best()
        choice = Choice(target, split, end + closing_s)
        if request.deadline_s is not None and choice.finish_s <= request.deadline_s:
            return _Timeline(request, choice, front).plan(lift_until=request.deadline_s - closing_s)
        if best is None or choice.finish_s < best.finish_s:
            best = choice
    return _Timeline(request, best or Choice(0, 0, 0.0), front).plan(lift_until=-inf)


def targets(request: PlanRequest) -> range:
    """Uniform levels to consider, lowest first; never empty."""
    finest = max((item.finest for item in request.open_chunks), default=0)
    return range(request.quality_floor, max(finest, request.quality_floor) + 1)


class _Timeline:
    """One split in detail, so that chunks can be lifted by a level and decisions be written down."""

    def __init__(self, request: PlanRequest, choice: Choice, front: list[float]) -> None:
        self._request, self._choice, self._front = request, choice, front
        self._levels: dict[int, int] = {}  # of the open chunks that are fetched, by index
        self._lifted: set[int] = set()
        slots, anchors, self._slot_of = fixed_slots(request, choice.target)
        late: list[int] = []  # chunks behind the front that nothing can be fetched for
        first_fetched: dict[int, int] = {}
        for index in range(len(request.open_chunks) - 1, -1, -1):
            item = request.open_chunks[index]
            level = item.level_for(choice.target)
            if not item.can_recompute:
                self._levels[index] = len(item.fetch_bytes) - 1 if level is None else level
            elif index < choice.front:
                slots.work[anchors.of(item.chunk)] += front[index]
            elif level is None:
                late.append(index)
            else:
                self._levels[index] = level
                self._slot_of[index] = add_fetch(request, slots, item, level)
                first_fetched[item.chunk.document] = index
        for index in late:
            item = request.open_chunks[index]
            before = first_fetched.get(item.chunk.document, index)
            slot = self._slot_of[before] if before < index else anchors.of(item.chunk)
            slots.work[slot] += request.costs.prefill.seconds(item.tokens, item.context)
        times = np.array(slots.times)
        self._ends = times + np.cumsum(np.array(slots.work)[::-1])[::-1]  # [slots]: see _sweep
        self._ready = times + np.array(slots.ready)  # [slots]

    def plan(self, lift_until: float) -> Plan:
        """Lift chunks while compute ends by ``lift_until`` seconds, then write the plan down."""
        for index in sorted(self._levels):
            self._lift(index, lift_until)
        request = self._request
        items = request.open_chunks
        closing_s = request.costs.closing_s(request.prompt_tokens)
        finish_s = max(float(self._ends.max()), float(self._ready.max())) + closing_s
        # Each slot after those in flight is one fetch, in the order of the link.
        order = sorted(self._levels, key=lambda index: self._slot_of[index])
        return Plan(
            decisions=tuple(self._decision(index, item) for index, item in enumerate(items)),
            fetch_order=tuple(items[index].chunk for index in order),
            finish_s=finish_s,
            fetch_bytes=sum(items[index].fetch_bytes[level] for index, level in self._levels.items()),
            level=self._choice.target if items else None,
            front=self._choice.front,
            in_time=request.deadline_s is None or self._choice.finish_s <= request.deadline_s,
        )

    def _lift(self, index: int, limit: float) -> None:
        item, slot, level = self._request.open_chunks[index], self._slot_of[index], self._levels[index]
        if level + 1 >= len(item.fetch_bytes) or self._ends[0] > limit:
            return
        small, large = item.fetch_bytes[level], item.fetch_bytes[level + 1]
        wire_s = self._request.wire_s(large) - self._request.wire_s(small)
        ready, work = self._request.decode_s(item.tokens, large)
        ready_before, work_before = self._request.decode_s(item.tokens, small)
        ends, readies = self._ends.copy(), self._ready.copy()
        ends[slot:] += wire_s
        ends[: slot + 1] += work - work_before
        readies[slot:] += wire_s
        readies[slot] += ready - ready_before
        if max(float(ends.max()), float(readies.max())) <= limit:
            self._ends, self._ready = ends, readies
            self._levels[index] = level + 1
            self._lifted.add(index)

    def _decision(self, index: int, item: OpenChunk) -> Decision:
        level = self._levels.get(index)
        if level is None:
            blind = item.level_for(self._choice.target) is None
            return Decision(item.chunk, "recompute", None, "nothing to fetch" if blind else "sooner than a fetch")
        reason = "lifted: time is left" if index in self._lifted else "fits" if item.can_recompute else "no text"
        return Decision(item.chunk, "fetch", level, reason)
