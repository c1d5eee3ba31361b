"""The planner's naive twin: every split is played through event by event. For tests, and as the rule's plain words."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.types import ChunkId

from .planner import Choice, targets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import PlanRequest


@dataclass
class _Job:
    """One recomputation: what it costs and which arrivals it builds on."""

    chunk: ChunkId
    seconds: float
    needs: set[ChunkId]


def plan_naive(request: PlanRequest) -> Choice:
    """The choice that ``plan`` makes before it lifts chunks, found by trying all; quadratic and slow.

    With a deadline: the highest target with a split in time, and the soonest split there. Otherwise the soonest of all.
    """
    best: Choice | None = None
    for target in reversed(targets(request)):
        splits = range(len(request.open_chunks), -1, -1)
        choices = [Choice(target, split, _uniform(request, target, split)) for split in splits]
        soonest = min(choices, key=lambda choice: choice.finish_s)
        if request.deadline_s is not None and soonest.finish_s <= request.deadline_s:
            return soonest
        if best is None or soonest.finish_s < best.finish_s:
            best = soonest
    return best or Choice(0, 0, 0.0)


def _uniform(request: PlanRequest, target: int, split: int) -> float:
    levels: dict[ChunkId, int] = {}
    for index, item in enumerate(request.open_chunks):
        level = item.level_for(target)
        if not item.can_recompute:
            levels[item.chunk] = len(item.fetch_bytes) - 1 if level is None else level
        elif index >= split and level is not None:
            levels[item.chunk] = level
    return finish_naive(request, split, levels)


def finish_naive(request: PlanRequest, front: int, levels: Mapping[ChunkId, int]) -> float:
    """Seconds from now to the first token, by playing a plan through event by event.

    front: number of open chunks at the front whose recomputation may share passes. levels: of the chunks that are
    fetched; the other open chunks are recomputed.
    """
    arrivals = _arrivals(request, levels)
    jobs = _jobs(request, front, levels)
    here: set[ChunkId] = set()
    clock, last_ready = request.busy_s, 0.0
    awaited = {chunk for chunk, *_ in arrivals}
    queue = deque(arrivals)
    while queue or jobs:
        # Whatever has arrived is decoded first; otherwise the next recomputation that can run, runs.
        job = next((job for job in jobs if not (job.needs & awaited) - here), None)
        if queue and (queue[0][1] <= clock or job is None):
            chunk, at, ready_s, work_s = queue.popleft()
            clock = max(clock, at) + work_s
            last_ready = max(last_ready, at + ready_s)
            here.add(chunk)
        elif job is not None:
            clock += job.seconds
            jobs.remove(job)
    return max(clock, last_ready) + request.costs.closing_s(request.prompt_tokens)


def _arrivals(request: PlanRequest, levels: Mapping[ChunkId, int]) -> list[tuple[ChunkId, float, float, float]]:
    """``(chunk, arrival, decode, decode charged)``, in seconds and in link order."""
    at, arrivals = request.lead_s, []
    for flight in request.in_flight:
        at += request.remaining_s(flight)
        arrivals.append((flight.chunk, at, *request.decode_s(flight.tokens, flight.size)))
    must = [item for item in request.open_chunks if not item.can_recompute]
    free = [item for item in request.open_chunks if item.can_recompute and item.chunk in levels]
    for item in [*reversed(must), *reversed(free)]:
        size = item.fetch_bytes[levels[item.chunk]]
        at += request.wire_s(size)
        arrivals.append((item.chunk, at, *request.decode_s(item.tokens, size)))
    return arrivals


def _jobs(request: PlanRequest, front: int, levels: Mapping[ChunkId, int]) -> list[_Job]:
    """Recomputations in prompt order; passes of the front merge neighbours."""
    jobs, run = [], 0
    chunks = [flight.chunk for flight in request.in_flight] + [item.chunk for item in request.open_chunks]
    for index, item in enumerate(request.open_chunks):
        before = request.open_chunks[index - 1] if index else None
        both = before is not None and before.can_recompute and item.can_recompute
        next_to = before is not None and ChunkId(before.chunk.document, before.chunk.chunk + 1) == item.chunk
        run = run + 1 if both and next_to else 0
        if item.chunk in levels:
            continue
        merged = index < front and run % request.merge_chunks != 0
        price = request.costs.prefill.marginal if merged else request.costs.prefill.seconds
        needs = {chunk for chunk in chunks if chunk.document == item.chunk.document and chunk.chunk < item.chunk.chunk}
        jobs.append(_Job(item.chunk, price(item.tokens, item.context), needs))
    return jobs
