"""The naive twin of the timeline: each candidate is played through event by event; for tests, and as the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.forecast import decode_s, first_levels, last_s, prefill_s, wire_s
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
    last = _last_s(request, tail[-1], int(sizes[tail[-1]])) if tail else None
    for wire, work, alone_s in [
        *_raising(request, target, bandwidth),
        *_finer(request, tail, first, levels, bandwidth),
    ]:
        link += wire
        arrivals.append((link, work))
        last = alone_s
    documents = {int(chunks.document[column]) for column in tail}
    heads = {int(d): float(s) for d, s in zip(chunks.document, chunks.prefix_s, strict=True) if int(d) in documents}
    now += request.committed.prefill_s + sum(heads.values())
    committed = request.committed
    if request.workers == 1:
        waiting = [(link, late)] if late else []
        # What comes last takes longer, since it is decoded alone.
        last = committed.last_s if last is None else last
        end = _play(now + committed.decode_s, sorted([*arrivals, *waiting])) + last
    else:
        # What comes last is decoded alone, once it is here.
        if last is None:
            at, work = arrivals[-1] if arrivals else (0.0, committed.decode_s)
            alone = at + work + committed.last_s
        else:
            alone = arrivals[-1][0] + last
        decoding = max(_play(committed.decode_s, arrivals), alone)
        end = max(decoding, max(now, link) + late if late else now)
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
    # How many may be open at once besides; a plan with a deadline counts on none.
    together = request.parallel - len(arrivals) if request.left_s is None else 0
    for column, size in zip(tail, sizes, strict=True):
        at += _wire_s(request, size, bandwidth)
        if size and together > 0:
            at -= request.ttfb_s / request.parallel
            together -= 1
        arrivals.append((at, _decode_s(request, int(request.chunks.tokens[column]), size)))
    return arrivals, at


def _wire_s(request: PlanRequest, size: int, bandwidth: float) -> float:
    return float(wire_s(request, np.array([size]), bandwidth)[0])


def _decode_s(request: PlanRequest, tokens: int, size: int) -> float:
    return float(decode_s(request, np.array([tokens]), np.array([size]))[0])


def _last_s(request: PlanRequest, column: int, size: int) -> float:
    tokens, sizes = request.chunks.tokens[[column]], np.array([size])
    return float(last_s(request, tokens, sizes, decode_s(request, tokens, sizes))[0])


def _raising(request: PlanRequest, target: int, bandwidth: float) -> list[tuple[float, float, float]]:
    """``(seconds on the link, decode, decode beyond that if it comes last)`` of each chunk that is raised."""
    some, out = request.refinable, []
    if some is None:
        return []
    for column in range(len(some.level)):
        level, to = int(some.level[column]), min(target, int(some.top[column]))
        if to > level:
            size = int(some.sizes[to, column])
            wire = _wire_s(request, size - int(some.sizes[level, column]), bandwidth)
            work = _decode_s(request, int(some.tokens[column]), size)
            alone_s = float(last_s(request, some.tokens[[column]], np.array([size]), np.array([work]))[0])
            out.append((wire, work, alone_s))
    return out


def _finer(
    request: PlanRequest, tail: list[int], first: Ints, levels: Ints, bandwidth: float
) -> Iterator[tuple[float, float, float]]:
    """As ``_raising``, of each chunk that is fetched at a first level and then at a finer one."""
    chunks = request.chunks
    sizes, finest = chunks.bytes_at(first), chunks.bytes_at(levels)
    for column in tail:
        if finest[column] > sizes[column]:
            wire = _wire_s(request, int(finest[column] - sizes[column]), bandwidth)
            size = int(finest[column])
            yield wire, _decode_s(request, int(chunks.tokens[column]), size), _last_s(request, column, size)


def _recomputations(request: PlanRequest, levels: Ints, order: list[int], tail: list[int]) -> tuple[float, float]:
    """Seconds of compute that are possible now, and that wait for the link."""
    chunks = request.chunks
    seconds = prefill_s(request)
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
