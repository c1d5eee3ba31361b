"""The naive twin of the timeline: each candidate is played through event by event; for tests, and as the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.forecast import decode_s, first_levels
from kvwire.controller.snapshot import RECOMPUTE, SLOWEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller.snapshot import Flags, Ints, PlanRequest


def fetch_order(request: PlanRequest, levels: Ints) -> list[int]:
    """Order the chunks that a level can be fetched of."""
    chunks = request.chunks
    columns = [column for column in range(chunks.count - 1, -1, -1) if levels[column] != RECOMPUTE]
    forced = [column for column in columns if not chunks.can_text[column]]
    return forced + [column for column in columns if chunks.can_text[column]]


def splits(request: PlanRequest, levels: Ints) -> Iterator[int]:
    """Count the chunks that may be fetched."""
    order = fetch_order(request, levels)
    forced = sum(not request.chunks.can_text[column] for column in order)
    yield from range(forced, len(order) + 1)


def finish_naive(
    request: PlanRequest, target: int, levels: Ints, split: int, bandwidth: float, *, coarse: Flags | None = None
) -> float:
    """Play a plan through: the first ``split`` chunks of the fetch order are fetched, the others recomputed."""
    chunks = request.chunks
    order = fetch_order(request, levels)
    tail = order[:split]
    first = levels if coarse is None else first_levels(request, levels, coarse)
    sizes = chunks.bytes_at(first)
    arrivals, link = _arrivals(request, [int(sizes[column]) for column in tail], tail, bandwidth)
    now, late = _recomputations(request, levels, order, tail)
    for wire, work in [*_raising(request, target, bandwidth), *_finer(request, tail, first, levels, bandwidth)]:
        link += wire
        arrivals.append((link, work))
    documents = {int(chunks.document[column]) for column in tail}
    heads = {int(d): float(s) for d, s in zip(chunks.document, chunks.prefix_s, strict=True) if int(d) in documents}
    now += request.committed.prefill_s + sum(heads.values())
    committed = request.committed
    if request.workers == 1:
        waiting = [(link, late)] if late else []
        end = _play(now + committed.decode_s, sorted([*arrivals, *waiting]))
    else:
        end = max(_play(committed.decode_s, arrivals), max(now, link) + late if late else now)
    return end + request.costs.closing_s(request.prompt_tokens)


def _arrivals(
    request: PlanRequest, sizes: list[int], tail: list[int], bandwidth: float
) -> tuple[list[tuple[float, float]], float]:
    """``(arrival, work)`` in the order of the link, and when the link has delivered all of it."""
    committed, at = request.committed, request.lead_s
    arrivals = []
    for left, work in zip(committed.wire, committed.work_s, strict=True):
        at += float(left) / max(bandwidth, SLOWEST)
        arrivals.append((at, float(work)))
    at += committed.ahead_bytes / max(bandwidth, SLOWEST)
    at = max(at, request.ttfb_s) if tail else at
    for column, size in zip(tail, sizes, strict=True):
        at += size / max(bandwidth, SLOWEST)
        arrivals.append((at, _decode_s(request, int(request.chunks.tokens[column]), size)))
    return arrivals, at


def _decode_s(request: PlanRequest, tokens: int, size: int) -> float:
    return float(decode_s(request, np.array([tokens]), np.array([size]))[0])


def _raising(request: PlanRequest, target: int, bandwidth: float) -> list[tuple[float, float]]:
    """``(seconds on the link, decode)`` of each chunk that is raised."""
    some, out = request.refinable, []
    if some is None:
        return []
    for column in range(len(some.level)):
        level, to = int(some.level[column]), min(target, int(some.top[column]))
        if to > level:
            size = int(some.sizes[to, column])
            wire = (size - int(some.sizes[level, column])) / max(bandwidth, SLOWEST)
            out.append((wire, _decode_s(request, int(some.tokens[column]), size)))
    return out


def _finer(
    request: PlanRequest, tail: list[int], first: Ints, levels: Ints, bandwidth: float
) -> Iterator[tuple[float, float]]:
    """As ``_raising``, of each chunk that is fetched at a first level and then at a finer one."""
    chunks = request.chunks
    sizes, finest = chunks.bytes_at(first), chunks.bytes_at(levels)
    for column in tail:
        if finest[column] > sizes[column]:
            size = int(finest[column])
            wire = (size - int(sizes[column])) / max(bandwidth, SLOWEST)
            yield wire, _decode_s(request, int(chunks.tokens[column]), size)


def _recomputations(request: PlanRequest, levels: Ints, order: list[int], tail: list[int]) -> tuple[float, float]:
    """Seconds of compute that are possible now, and that wait for the link."""
    chunks = request.chunks
    seconds = request.prefill_s
    free = [column for column in tail if chunks.can_text[column]]
    now = late = 0.0
    for column in set(range(chunks.count)) - set(tail):
        earlier = [c for c in order if c < column and chunks.document[c] == chunks.document[column]]
        waits = levels[column] == RECOMPUTE and earlier and free and column >= min(free)
        if waits:
            late += float(seconds[column])
        else:
            now += float(seconds[column])
    return now, late


def _play(now: float, arrivals: list[tuple[float, float]]) -> float:
    """When one worker is done with ``now`` seconds of work at hand and work that arrives."""
    clock, backlog = 0.0, now
    for at, work in arrivals:
        done = min(backlog, max(0.0, at - clock))
        backlog += work - done
        clock = max(clock, at)
    return clock + backlog
