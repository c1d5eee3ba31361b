"""How long a forward pass may be, and when one that turns out to be slow is stopped."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from .estimators import MOST_KNOWN
from .snapshot import SLOWEST
from .state import SLOWEST_PASS
from .workers import NOTICED

if TYPE_CHECKING:
    from .costs import CostModel
    from .load import Load
    from .state import State
    from .workers import Job

_SHORT_PASS = 6.0  # a pass of that many times its fixed cost may end; shorter ones are mostly fixed cost
_STOPS_S = SLOWEST_PASS / 16  # of what a pass takes, until it has stopped: engines stop between layers


def pass_limit_s(state: State, load: Load, costs: CostModel) -> float:
    """Seconds that a pass may take: half of what is to be recomputed, so that the meeting point can still move.

    Before a deadline as many passes fit into the time left as make an engine known: a slow one is noticed in time.
    """
    settings, base_s, seconds = state.settings, costs.prefill.base_s, load.compute_s / 2
    if not state.policy.preemptible:
        return inf
    free_s = max(_SHORT_PASS * base_s, min(settings.max_pass_s, seconds)) if seconds > _SHORT_PASS * base_s else inf
    hurries = load.hurries and len(state.loads) == 1 and state.workers.slowness(state.now) == 1
    if load.due == inf or not load.can_fetch_instead or state.link.stalled:
        if load.repair and load.repair.weighs_text and load.can_fetch_instead:
            return _SHORT_PASS * base_s  # others that come in meanwhile need the engine more
        return free_s
    left_s = max(0.0, state.handover_at(load) - state.now)
    if hurries:
        return max(_SHORT_PASS * base_s, left_s) if left_s else free_s
    limit_s = max(_SHORT_PASS * base_s, min(settings.max_pass_s, left_s / MOST_KNOWN))
    # Other loads wait for a pass, and with one worker all decoding: until one has stopped much has come together.
    alone = settings.workers > 1 and len(state.loads) == 1
    if settings.interrupts and alone and not state.workers.was_interrupted(state.now):
        saved_s = (_saved_by(state, load, load.floor_left_s) - state.now) / (NOTICED + _STOPS_S)
        limit_s = max(limit_s, min(settings.max_pass_s, saved_s))
    return limit_s


def pass_chunks(state: State, load: Load, costs: CostModel) -> float:
    """Chunks of a pass that the deadline keeps short; infinite where it does not."""
    if load.due == inf or not state.policy.preemptible:
        return inf
    limit_s = pass_limit_s(state, load, costs)
    chunk_s = costs.prefill.token_s * load.prompt_tokens / max(len(load.table), 1)
    return max(1.0, (limit_s - costs.prefill.base_s) // chunk_s) if chunk_s > 0 and limit_s < inf else inf


def interrupts_at(state: State) -> float:
    """Instant at which the forward pass that runs is to be stopped unless it has ended; infinite where it is not.

    One that is overdue is waited for until the last instant at which fetching what it computes saves the deadline,
    or at which another load's closing must begin. One that no load waits for is stopped at once.
    """
    workers, job = state.workers, state.workers.running("prefill")
    if not state.settings.interrupts or job is None or job.kind != "recompute" or workers.is_interrupted:
        return inf
    load = state.loads.get(job.load)
    if load is None:
        return state.now
    floors_s = _floors_s(state, load, job) if load.due < inf and state.policy.preemptible else inf
    if floors_s == inf or state.link.stalled:
        return inf
    saved_by = _saved_by(state, load, load.floor_left_s + floors_s)
    for other in state.loads.values():
        if other is not load and other.due < inf and other.is_ready and not state.is_late(other):
            saved_by = min(saved_by, _slow_handover_at(state, other))
    at = max(job.overdue_at, saved_by - _STOPS_S * job.expected_s)
    return at if at + floors_s <= state.handover_at(load) else inf


def _saved_by(state: State, load: Load, floors_s: float) -> float:
    """Instant until which a load is still in time by fetching at the quality floor, however slow the engine is."""
    low = state.link.bandwidth_low
    if low <= SLOWEST:
        return -inf
    return _slow_handover_at(state, load) - floors_s - state.link.ttfb_s - state.link.open_bytes / low


def _slow_handover_at(state: State, load: Load) -> float:
    """A load's hand-over, were its closing as slow as a pass may turn out to be."""
    if state.workers.was_interrupted(state.now):
        return state.handover_at(load)  # it counts on that already
    slowest_s = SLOWEST_PASS * state.costs_of(load).closing_s(load.prompt_tokens)
    return state.handover_at(load) - max(0.0, slowest_s - state.closing_s(load))


def _floors_s(state: State, load: Load, job: Job) -> float:
    """Seconds that fetching the chunks of a pass at the quality floor takes; infinite where one cannot be."""
    table, start = load.table, load.doc(job.document).start
    tokens = size = 0
    for chunk in job.chunks:
        at = start + chunk.chunk
        level = table.lowest(at, load.goal.floor)
        if level < 0 or table.top[at] < level:
            return inf
        tokens, size = tokens + table.tokens[at], size + table.sizes[level][at]
    decode_s = state.costs_of(load).decode.apart(len(job.chunks), tokens, size)
    return size / max(state.link.bandwidth_low, SLOWEST) + decode_s
