"""How long a forward pass may be, and when one that turns out to be slow is stopped."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from .deadlines import DOUBT, SLOWEST_PASS
from .lanes import OVERDUE
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from .costs import CostModel
    from .deadlines import Deadlines
    from .lanes import Job
    from .load import Load
    from .resources import Resources

_LONG_PASS = 10.0  # a pass of that many times its fixed cost may end: going on would save less than a tenth of it
_SHORT_PASS = 6.0  # shorter ones are mostly fixed cost
_PASSES = 8  # at least so many passes before a deadline
_STOPS = 1 / 16  # of what a pass takes, until it has stopped: engines stop between layers, a GPU some later


class PassLimits:
    """Bounds on forward passes."""

    def __init__(self, shared: Resources, deadlines: Deadlines) -> None:
        """Start idle."""
        self._shared, self._deadlines = shared, deadlines
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._policy, self._link, self._lanes = shared.policy, shared.link, shared.lanes
        self._floors: tuple[Job, tuple[int, int] | None] | None = None  # of a pass, what ``_at_floor`` found

    def limit_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a pass may take: half of what is to be recomputed, so that the meeting point can still move.

        And a share of the time until the deadline, so that an engine that has become slow is noticed in time.
        """
        base_s = costs.prefill.base_s
        if not self._policy.preemptible:
            return inf
        if load.due < inf and load.can_fetch_instead and not self._link.stalled:
            left_s = max(0.0, self._deadlines.handover_at(load) - now)
            usual_s = max(_LONG_PASS * base_s, min(self._settings.max_pass_s, left_s / _PASSES))
            limit_s = min(usual_s, max(_SHORT_PASS * base_s, left_s / SLOWEST_PASS))
            # With one worker all decoding waits for a pass, and until one has stopped much of it has come together.
            is_able = self._settings.interrupts and self._settings.workers > 1
            if is_able and len(self._loads) == 1 and self._lanes.slowness(now) == 1:
                saved_s = (self._saved_by(load, load.floor_left_s) - now) / (OVERDUE + _STOPS * SLOWEST_PASS)
                limit_s = max(limit_s, min(self._settings.max_pass_s, saved_s))
            return limit_s
        if load.repair and load.repair.weighs_text and load.can_fetch_instead:
            return _LONG_PASS * base_s  # others that come in meanwhile need the engine more
        if load.compute_s < 2 * _LONG_PASS * base_s:
            return inf
        return max(_LONG_PASS * base_s, min(self._settings.max_pass_s, load.compute_s / 2))

    def chunks(self, load: Load, costs: CostModel, now: float) -> float:
        """Chunks of a pass that the deadline keeps short; infinite where it does not."""
        if load.due == inf or not self._policy.preemptible:
            return inf
        base_s = costs.prefill.base_s
        limit_s = self.limit_s(load, costs, now)
        chunk_s = costs.prefill.token_s * load.prompt_tokens / max(len(load.table), 1)
        return max(1.0, (limit_s - base_s) // chunk_s) if chunk_s > 0 and limit_s < inf else inf

    def _saved_by(self, load: Load, floors_s: float) -> float:
        """Instant until which a load is still in time by fetching at the quality floor, however slow the engine is.

        Decoding that is under way goes on meanwhile and is not counted.
        """
        low = self._link.bandwidth_low
        if low <= SLOWEST:
            return -inf
        return self._slow_handover_at(load) - floors_s - self._link.ttfb_s - self._link.open_bytes / low

    def _slow_handover_at(self, load: Load) -> float:
        """A load's cut, were its closing as slow as a pass may turn out to be."""
        if self._lanes.was_interrupted(self._shared.now):
            return self._deadlines.handover_at(load)  # it counts on that already
        slowest_s = SLOWEST_PASS * self._shared.costs_of(load).closing_s(load.prompt_tokens)
        return self._deadlines.handover_at(load) - max(0.0, slowest_s - self._deadlines.closing_s(load))

    def _floors_of(self, load: Load, job: Job) -> float | None:
        """Seconds that fetching the chunks of a pass at the quality floor takes; None where one cannot be."""
        if self._floors is None or self._floors[0] is not job:
            self._floors = job, self._at_floor(load, job)  # the same while it runs, and asked for at every event
        found = self._floors[1]
        if found is None:
            return None
        (tokens, size), cost = found, self._shared.costs_of(load).decode
        decode_s = cost.apart(len(job.chunks), tokens, size)
        return size / max(self._link.bandwidth_low, SLOWEST) + decode_s

    def _at_floor(self, load: Load, job: Job) -> tuple[int, int] | None:
        """Tokens and bytes of the chunks of a pass at the quality floor; None where one cannot be fetched so."""
        table, floor, start = load.table, load.goal.floor, load.doc(job.document).start
        tokens = size = 0
        for chunk in job.chunks:
            at = start + chunk.chunk
            level = table.lowest(at, floor)
            if level < 0 or table.top[at] < level:
                return None
            tokens, size = tokens + table.tokens[at], size + table.sizes[level][at]
        return tokens, size

    def interrupts_at(self, now: float) -> float:
        """Instant at which the forward pass that runs is to be stopped unless it has ended; infinite where it is not.

        One that is overdue is waited for until the last instant at which fetching what it computes saves the deadline,
        or at which another load's closing must begin. One that nobody waits for is stopped at once.
        """
        job = self._lanes.running("prefill") if self._settings.interrupts else None
        if job is None or job.kind != "recompute" or self._lanes.is_interrupted:
            return inf
        load = self._loads.get(job.load)
        if load is None:
            return now
        floors_s = self._floors_of(load, job) if load.due < inf and self._policy.preemptible else None
        if floors_s is None or self._link.stalled:
            return inf
        saved_by = self._saved_by(load, load.floor_left_s + floors_s)
        for other in self._loads.values():
            if other is not load and other.due < inf and other.is_ready and not self._deadlines.rank(other)[0]:
                saved_by = min(saved_by, self._slow_handover_at(other))
        at = max(job.overdue_at, saved_by - _STOPS * SLOWEST_PASS * job.expected_s)
        return at if at + floors_s <= self._deadlines.handover_at(load) else inf

    def max_unmeasured_s(self, now: float) -> float:
        """Seconds that a pass may take while the first bytes, which tell more than any prior, are waited for.

        It is no longer than they have been waited for, so that what is computed in vain is at most as much again.
        """
        listening = self._estimates.bandwidth.is_guess and self._link.fetches and self._policy.preemptible
        return self._link.waited_s(now) if listening else inf

    def max_uncertain_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a pass may be expected to take while costs or link are hardly known.

        Not every engine can stop a pass, and even if it takes longer than expected it should not be what ends last.
        """
        slow_s = inf
        if self._lanes.was_interrupted(now) and load.due < inf:
            slow_s = (self._deadlines.handover_at(load) - now) / SLOWEST_PASS
        if not self._policy.preemptible or load.plan is None or not (load.plan_bytes or self._link.fetches):
            return slow_s
        bandwidth, doubt = self._estimates.bandwidth, self._estimates.prefill.high
        ends = load.planned_at + load.plan.finish_s - costs.closing_s(load.prompt_tokens)
        if load.goal.objective != "earliest" and load.plan.in_time:
            ends = self._deadlines.handover_at(load)  # that the link may be faster than expected makes nothing late
        else:
            doubt = max(doubt, bandwidth.high / max(bandwidth.value, 1.0))
        return min(slow_s, inf if doubt <= DOUBT else (ends - now) / doubt)
