"""Finishing times of every split of a prompt, in one pass.

The link delivers in order: requests in flight, then chunks that must be fetched, then the others from the back of the
prompt. Compute is one resource that never idles while a decode or a recomputation may run, so it ends at the largest,
over all instants at which work becomes possible, of that instant plus all work that becomes possible then or later.
Instants are called slots: slot 0 is now, every other one is an arrival; their order is that of the link.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.types import ChunkId

    from .request import OpenChunk, PlanRequest


@dataclass
class Slots:
    """Slots in link order: when each begins, the compute that becomes possible with it, and its decode.

    link_end: when the link has delivered all slots.
    """

    times: list[float]
    work: list[float]
    ready: list[float]
    link_end: float

    def append(self, wire_s: float, ready_s: float, work_s: float) -> int:
        """Add an arrival ``wire_s`` after the one before it; returns its slot."""
        self.link_end += wire_s
        self.times.append(self.link_end)
        self.work.append(work_s)
        self.ready.append(ready_s)
        return len(self.times) - 1


class _Ends:
    """When compute ends by each slot, kept up to date while work moves; cheap for slots near the first."""

    def __init__(self, slots: Slots) -> None:
        self._now_work = slots.work[0]
        self._ends = [0.0] * len(slots.times)  # instant plus all work then or later
        self._tops = [0.0] * (len(slots.times) + 1)  # the largest of these from a slot on
        self._rest_work = 0.0
        for slot in range(len(slots.times) - 1, 0, -1):
            self._rest_work += slots.work[slot]
            self._ends[slot] = slots.times[slot] + self._rest_work
            self._tops[slot] = max(self._ends[slot], self._tops[slot + 1])

    def shift(self, slot: int, work_s: float) -> None:
        """Add work to a slot, or take it away, below 0."""
        if not slot:
            self._now_work += work_s
            return
        self._rest_work += work_s
        for at in range(slot, 0, -1):
            self._ends[at] += work_s
            self._tops[at] = max(self._ends[at], self._tops[at + 1])

    @property
    def latest(self) -> float:
        """When compute ends."""
        return max(self._now_work + self._rest_work, self._tops[1])


def front_costs(request: PlanRequest) -> list[float]:
    """Seconds of compute of each open chunk as part of a front that is recomputed; passes merge neighbours."""
    costs, run = [], 0
    prefill = request.costs.prefill
    for index, item in enumerate(request.open_chunks):
        before = request.open_chunks[index - 1] if index else None
        run = run + 1 if before is not None and _continues(before, item) else 0
        base = 0.0 if run % request.merge_chunks else prefill.base_s
        costs.append(base + prefill.marginal(item.tokens, item.context))
    return costs


def _continues(before: OpenChunk, item: OpenChunk) -> bool:
    same = before.chunk.document == item.chunk.document and before.chunk.chunk + 1 == item.chunk.chunk
    return same and before.can_recompute and item.can_recompute


class Anchors:
    """From which slot on a chunk can be recomputed: the last arrival that it builds on, among the fixed slots."""

    def __init__(self) -> None:
        """Know of no arrival yet."""
        self._slots: dict[int, dict[int, int]] = {}
        self._sorted: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, chunk: ChunkId, slot: int) -> None:
        """Note the slot of a chunk's arrival."""
        self._slots.setdefault(chunk.document, {})[chunk.chunk] = slot
        self._sorted.pop(chunk.document, None)

    def of(self, chunk: ChunkId) -> int:
        """The slot; 0 where nothing has to arrive first."""
        if chunk.document not in self._sorted:
            slots = sorted(self._slots.get(chunk.document, {}).items())
            latest = list(accumulate((slot for _, slot in slots), max))
            self._sorted[chunk.document] = ([number for number, _ in slots], latest)
        numbers, latest = self._sorted[chunk.document]
        before = bisect_left(numbers, chunk.chunk)
        return latest[before - 1] if before else 0


def fixed_slots(request: PlanRequest, target: int) -> tuple[Slots, Anchors, dict[int, int]]:
    """Slots that no split changes: now, requests in flight and chunks that must be fetched.

    Returns also what can be recomputed when, and the slots of the chunks that must be fetched, by their index.
    """
    slots, anchors, forced = Slots([0.0], [request.busy_s], [0.0], request.lead_s), Anchors(), {}
    for flight in request.in_flight:
        wire_s = request.remaining_s(flight)
        anchors.add(flight.chunk, slots.append(wire_s, *request.decode_s(flight.tokens, flight.size)))
    for index in range(len(request.open_chunks) - 1, -1, -1):
        item = request.open_chunks[index]
        if not item.can_recompute:
            forced[index] = add_fetch(request, slots, item, item.level_for(target))
            anchors.add(item.chunk, forced[index])
    return slots, anchors, forced


def add_fetch(request: PlanRequest, slots: Slots, item: OpenChunk, level: int | None) -> int:
    """Add the arrival of a chunk at a level (None: the best); returns its slot."""
    size = item.fetch_bytes[-1 if level is None else level]
    return slots.append(request.wire_s(size), *request.decode_s(item.tokens, size))


class Sweep:
    """Finishing time, without linking and question, of recomputing the first m open chunks, for every m."""

    def __init__(self, request: PlanRequest, target: int, front: list[float]) -> None:
        """Begin with all chunks recomputed that can be; ``front`` is ``front_costs(request)``."""
        self._request, self._target, self._front = request, target, front
        slots, anchors, _ = fixed_slots(request, target)
        self._base = [anchors.of(item.chunk) for item in request.open_chunks]
        for item, slot, cost in zip(request.open_chunks, self._base, front, strict=True):
            if item.can_recompute:
                slots.work[slot] += cost
        self._fixed = _Ends(slots)
        self._link_end = slots.link_end
        self._latest_ready = max(time + ready for time, ready in zip(slots.times, slots.ready, strict=True))
        self._tail_work = 0.0  # of the slots of chunks fetched from the back
        self._tail_end = 0.0
        self._document = -1
        self._waiting: list[tuple[int, float]] = []  # recomputations of this document that no fetch precedes yet
        self._behind = 0.0  # recomputations of this document that wait for the last slot

    def best(self) -> tuple[float, int]:
        """Soonest finish and its m; the larger m among equals, for it fetches less."""
        best_end, best_m = self._end(), len(self._front)
        for index in range(len(self._front) - 1, -1, -1):
            if self._request.open_chunks[index].can_recompute:
                self._leave_front(index)
                if self._end() < best_end:
                    best_end, best_m = self._end(), index
        return best_end, best_m

    def _end(self) -> float:
        return max(self._fixed.latest + self._tail_work, self._tail_end, self._latest_ready)

    def _leave_front(self, index: int) -> None:
        item, slot = self._request.open_chunks[index], self._base[index]
        if item.chunk.document != self._document:
            self._document, self._waiting, self._behind = item.chunk.document, [], 0.0
        self._fixed.shift(slot, -self._front[index])
        level = item.level_for(self._target)
        if level is None:
            cost = self._request.costs.prefill.seconds(item.tokens, item.context)
            self._fixed.shift(slot, cost)
            self._waiting.append((slot, cost))
        else:
            self._fetch(item, item.fetch_bytes[level])

    def _fetch(self, item: OpenChunk, size: int) -> None:
        moved = 0.0
        for slot, cost in self._waiting:
            self._fixed.shift(slot, -cost)
            moved += cost
        self._waiting = []
        self._behind += moved
        ready, work = self._request.decode_s(item.tokens, size)
        self._link_end += self._request.wire_s(size)
        self._latest_ready = max(self._latest_ready, self._link_end + ready)
        # What moves here from the fixed slots, and this decode, still come after every earlier arrival.
        self._tail_work += work + moved
        self._tail_end = max(self._tail_end + work + moved, self._link_end + work + self._behind)
