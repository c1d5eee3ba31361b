"""How much may begin at once, when a load must be done with what, and how long the link is waited for."""

from __future__ import annotations

from functools import partial
from math import exp2, inf, log
from typing import TYPE_CHECKING

from kvwire.controller.chunk_table import PLANNED
from kvwire.controller.coding import coding_options, finest_bytes
from kvwire.controller.costs import busiest
from kvwire.controller.lanes import OVERDUE
from kvwire.controller.policies.base import SLOWEST, RepairRule
from kvwire.controller.resources import Resources

if TYPE_CHECKING:
    from kvwire.controller.costs import CostModel
    from kvwire.controller.estimates import Estimates
    from kvwire.controller.lanes import Job
    from kvwire.controller.load import Load, Place
    from kvwire.controller.policies.base import Policy
    from kvwire.controller.repair import RepairOption
    from kvwire.controller.settings import ControllerSettings
    from kvwire.types import ChunkId

_LONG_PASS = 10.0  # a pass of that many times its fixed cost may end: going on would save less than a tenth of it
_SHORT_PASS = 6.0  # shorter ones are mostly fixed cost
_PASSES = 8  # at least so many passes before a deadline
_SLOWEST_PASS = 5.0  # times what is expected: a pass that takes as long still ends before a deadline
_PROBES = 8  # fetches that are open while the link is known by a guess alone
_FEWEST_OPEN = 2
SPARE = 16  # fetches are opened when one of so many is over, not for each alone
_SPLIT = 1.1  # what cutting a long recomputation into passes adds at most
_STOPS = 1 / 16  # of what a pass takes, until it has stopped: engines stop between layers, a GPU some later
_DOUBT = 1.6  # estimates that may be wrong by less are relied on
_UNBEGUN = 2.0  # times the reserve that plans keep while there are chunks that nothing was begun for
_STEADY = 0.5  # share of the reserve that is kept whatever happens
_UNSTEADY = 0.1  # relative error of predictions, half of which takes all of the reserve
_SEVERAL = 2.0  # times the reserve where several loads are under way

_HALF_LIVES_S = (0.2, 1.0)
"""The short one hears of a rush at once, the long one remembers it."""
_FEWEST = 1e-3  # loads a second


class Demand:
    """Loads that came in, as averages that fade; of loads to come it expects what those were."""

    def __init__(self) -> None:
        """Start without loads."""
        self._averages = [_Average(half_life_s) for half_life_s in _HALF_LIVES_S]

    def add(self, floor_s: float, now: float) -> None:
        """Take in a load."""
        for average in self._averages:
            average.add(floor_s, now)

    def limit_s(self, floor_s: float, came: float, now: float, *, least_s: float, left_s: float) -> float:
        """Work out how long a load may take so that as many others as lately find their time.

        What floors take of the time, loads leave of theirs: the queue then stays short where it could not be worked
        off. And a queue grows by no more than what is spare for each load.
        """
        others = [average.without(floor_s, came, now) for average in self._averages]
        loads, busy = max(rate for rate, _ in others), max(share for _, share in others)
        if loads <= _FEWEST:
            return inf
        spare = max(0.0, 1 - busy)
        return max(least_s, min(least_s + spare / loads, spare * left_s))


class _Average:
    def __init__(self, half_life_s: float) -> None:
        self._half_life_s, self._at = half_life_s, -inf
        self._loads = self._floors_s = 0.0

    def add(self, floor_s: float, now: float) -> None:
        fade = exp2((self._at - now) / self._half_life_s)
        self._loads, self._floors_s, self._at = fade * self._loads + 1, fade * self._floors_s + floor_s, now

    def without(self, floor_s: float, came: float, now: float) -> tuple[float, float]:
        """Loads a second and the share of the time that their floors take, one of them left out."""
        fade, own = exp2((self._at - now) / self._half_life_s), exp2((came - now) / self._half_life_s)
        per_s = log(2) / self._half_life_s
        return (fade * self._loads - own) * per_s, max(0.0, fade * self._floors_s - own * floor_s) * per_s


class Limits(Resources):
    """What all loads share, and how much of it may be taken."""

    def __init__(
        self, estimates: Estimates, settings: ControllerSettings, policy: Policy, loads: dict[int, Load]
    ) -> None:
        """Start idle."""
        super().__init__(estimates, settings, loads)
        self._policy = policy
        self._demand = Demand()
        self._now = -inf
        self._known_cuts: dict[int, tuple[float, float]] | None = None
        self._floors: tuple[Job, tuple[int, int] | None] | None = None  # of a pass, what ``_at_floor`` found

    def _rank(self, load: Load) -> tuple[bool, float, int]:
        """Whether a load is late anyway, when it is due, and its number; less goes first."""
        if load.due == inf:
            # Before anything is known of it nobody can tell, and those who are due go first.
            due = inf if load.first_s is None else load.asked_at + self._settings.stretch * load.first_s
            return False, due, load.number
        finish = load.planned_at + load.plan.finish_s - load.spare_s - load.hidden_s if load.plan else -inf
        return max(finish, self._now) > load.due, load.due, load.number

    # When a load must be done with what.

    def _cut(self, load: Load) -> float:
        """Instant at which a load is handed over as it is, so that the first token is in time."""
        return self._cuts()[load.number][0] if len(self._loads) > 1 else self._own_cut(load)

    def _own_cut(self, load: Load) -> float:
        return load.due - self._reserve_s - self._closing_s(load)

    @property
    def _reserve_s(self) -> float:
        """Seconds of a deadline that are left unused: more where closings may meet, or the engine was slow lately."""
        is_calm = len(self._loads) == 1 and not self.lanes.was_interrupted(self._now)
        return self._steady_reserve_s * (1 if is_calm else _SEVERAL)

    @property
    def _steady_reserve_s(self) -> float:
        """What one load alone leaves unused: half of the setting where computing takes just what is expected."""
        off = max(self._estimates.prefill.spread, self._estimates.decode.spread)
        return self._settings.reserve_s * min(1.0, _STEADY + off / _UNSTEADY)

    def _closing_s(self, load: Load) -> float:
        """Seconds to keep for a load's closing, as most take: many times that where a pass had to be stopped lately."""
        seconds = self.costs_of(load).closing_s(load.prompt_tokens)
        if self.lanes.was_interrupted(self._now):
            return seconds * _SLOWEST_PASS
        return seconds + min(self._estimates.closing.unsure_s, seconds)

    def _cuts(self) -> dict[int, tuple[float, float]]:
        """For each load its cut, and the instant by which it must be done with the link.

        Worked out from the last one due to the first: closings take turns, so the earlier ones leave room for the later
        ones, and so do fetches, for what the later ones need at their floor. Who is late anyway is left room by nobody.
        """
        if self._known_cuts is not None:
            return self._known_cuts
        self._known_cuts = cuts = {}
        closing = link = inf
        for load in sorted(self._loads.values(), key=self._rank, reverse=True):
            own = self._own_cut(load)
            if self._rank(load)[0] or load.due == inf:
                cuts[load.number] = own, inf
                continue
            closing_s = load.due - self._reserve_s - own
            closing = min(own, closing - closing_s)
            cuts[load.number] = closing, min(closing, link)
            link = min(closing, link) - load.floor_s
        return cuts

    def _left_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a plan may take: until the load is due, and so that later ones are in time at their floor."""
        closing_s = costs.closing_s(load.prompt_tokens)
        # What is not valid makes a load late, what could become finer does not.
        reserve_s = self._steady_reserve_s * _UNBEGUN if load.table.counts[PLANNED] else self._reserve_s
        own_s = load.due - now - reserve_s
        own_s -= max(0.0, self._closing_s(load) - closing_s)
        if len(self._loads) > 1:
            own_s = min(own_s, min(self._cuts()[load.number]) - now + closing_s)
        if load.came is not None:
            least_s = self._queue_s(load, now) + load.floor_s + closing_s
            floor_s, came = load.asked_floor_s, load.came
            own_s = min(own_s, self._demand.limit_s(floor_s, came, now, least_s=least_s, left_s=own_s))
        return own_s - self._beside_s(load)

    def _queue_s(self, load: Load, now: float) -> float:
        """Seconds of work that goes before a load's open chunks."""
        rank, low = self._rank(load), max(self.link.bandwidth_low, SLOWEST)
        ahead = sum(other.plan_bytes for other in self._loads.values() if self._rank(other) < rank)
        lanes_s = max(self.lanes.left_s("prefill", now), self.lanes.left_s("decode", now))
        return max(self.link.lead_s(now) + (self.link.open_bytes + ahead) / low, lanes_s)

    def _floors_s(self, load: Load, now: float) -> float:
        """Seconds to a load's first token where it and all that goes first are fetched at their floors."""
        rank = self._rank(load)
        first = [each for each in self._loads.values() if each is load or self._rank(each) < rank]
        open_s = self.link.lead_s(now) + self.link.open_bytes / max(self.link.bandwidth_low, SLOWEST)
        closings_s = sum(self.costs_of(each).closing_s(each.prompt_tokens) for each in first)
        fetched_s = open_s + sum(each.floor_s for each in first) + self.costs_of(load).closing_s(load.prompt_tokens)
        return max(fetched_s, self.lanes.left_s("prefill", now) + closings_s)

    def _beside_s(self, load: Load) -> float:
        """Seconds by which fetches of other loads, which share the link with a load's last ones, may hold these up."""
        others = any(other.waiting or other.refine for other in self._loads.values() if other is not load)
        return 2 * self.link.ttfb_s + self._settings.horizon_s if others else 0.0

    # What of the closing is spent on repair.

    def _choose_repair(self, load: Load, now: float) -> None:
        """Weigh repaired rows against finer bytes, by what both take of the time that is left."""
        option = load.repair
        if option is None or not load.is_known or load.in_order.share is not None:
            return
        share, costs = option.least, self.costs_among_many(load)
        if isinstance(self._policy, RepairRule):
            share = self._ruled_share(self._policy, option, load, costs)
        elif option.most > option.least and load.goal.objective == "quality" and load.due < inf:
            left_s = self._left_s(load, costs, now) - self.lanes.left_s("prefill", now)
            coding = coding_options(load.table, load.goal, costs.decode, self.link.bandwidth_low, self.link.lead_s(now))
            share = option.best(left_s, partial(load.closing_s, costs), coding)
        if share != load.repair_share:
            load.repair_share = share
            self._known_cuts = None

    def _ruled_share(self, rule: RepairRule, option: RepairOption, load: Load, costs: CostModel) -> float:
        """What a policy with a rule of its own makes of a load, unless a share was asked for."""
        if option.most <= option.least:
            return option.least
        load_s = finest_bytes(load.table, load.goal) / max(self.link.bandwidth, SLOWEST)
        return max(option.least, rule.repair_share(load_s, costs.prefill.seconds(load.prompt_tokens, 0)))

    def _settle_repair(self, load: Load, now: float) -> None:
        """Repair more where time is left over, less where it has run out."""
        option = load.repair
        if option is None or load.due == inf or option.most <= option.least or isinstance(self._policy, RepairRule):
            return
        alone = len(self._loads) == 1 and load.goal.objective == "quality"
        left_s = min(self._left_s(load, self.costs_of(load), now), self._until_others_s(load, now))
        left_s -= self.lanes.left_s("prefill", now)
        closing_s = partial(load.closing_s, self.costs_of(load))
        # What was planned may use up the reserve, for who waits for a cut never hears of it before it is over.
        kept = option.most_within(left_s + self._steady_reserve_s, closing_s, load.repair_share)
        more = alone and load.in_order.share is None  # rows that were computed did not see those
        load.repair_share = max(kept, option.most_within(left_s, closing_s, option.most)) if more else kept

    def _until_others_s(self, load: Load, now: float) -> float:
        """Seconds that a closing may take so that every other load still gets its chunks decoded before its cut."""
        others = [other for other in self._loads.values() if other is not load and other.due < inf]
        if any(self._rank(other)[0] for other in others):
            return 0.0  # whoever is late waits no longer than it must
        cuts = [self._cut(other) for other in others]
        if not cuts:
            return inf
        decoding_s = 0.0
        if self._settings.workers == 1:
            for other in self._loads.values():
                count, tokens, size = other.table.arrived() if other is not load else (0, 0, 0)
                decoding_s += self.costs_among_many(other).decode.seconds(tokens, size) if count else 0.0
            decoding_s += sum(fetch.decode_s for fetch in self.link.fetches.values())
        return min(cuts) - now - decoding_s

    # How much may begin at once.

    @property
    def can_fetch(self) -> bool:
        """Whether fetches that a plan names are worth opening: one at a time on a link with few, several with many."""
        for load in self._loads.values():
            if load.waiting or load.refine:
                return self._window_open(spare=SPARE)
        return False

    def _window_open(self, *, spare: int = 0) -> bool:
        """Whether another fetch may be opened: enough to keep the link busy, little enough to decide late."""
        fetches, most = len(self.link.fetches), self._most_open()
        if fetches >= (most - most // spare if spare else most):
            return False
        # Last, since it takes longest to find out.
        return fetches < _FEWEST_OPEN or self.link.open_bytes < self._window(spare=spare)[1]

    def _most_open(self) -> int:
        """Fetches that may be open at once."""
        most = self._settings.max_in_flight
        return min(most, _PROBES) if self._estimates.bandwidth.is_guess else most

    def _window(self, *, spare: int = 0) -> tuple[int, float]:
        """Requests and bytes below which another fetch may be opened, see ``_window_open``."""
        most, link = self._most_open(), self.link
        horizon = (2 * link.ttfb_s + self._settings.horizon_s) * link.bandwidth_low
        return (most - most // spare, horizon * (1 - 1 / spare)) if spare else (most, horizon)

    def _fits_window(self, window: tuple[int, float]) -> bool:
        """Whether less than a window is open; one to come in and one behind it may always be."""
        fetches = len(self.link.fetches)
        return fetches < window[0] and (fetches < _FEWEST_OPEN or self.link.open_bytes < window[1])

    def opens_at(self, now: float) -> float:
        """Instant at which so little is open that what a plan names may be asked for; infinite where nothing waits.

        Requests side by side end together. Whoever only hears of their ends leaves the link idle for a round trip.
        """
        link, (most, size) = self.link, self._window(spare=SPARE)
        if not _FEWEST_OPEN <= len(link.fetches) < most or link.stalled:
            return inf
        if not any(load.waiting or load.refine for load in self._loads.values()):
            return inf
        return now + link.lead_s(now) + max(0.0, link.open_bytes - size) / max(link.bandwidth, SLOWEST)

    def _pass_limit_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a pass may take: half of what is to be recomputed, so that the meeting point can still move.

        And a share of the time until the deadline, so that an engine that has become slow is noticed in time.
        """
        base_s = costs.prefill.base_s
        if not self._policy.preemptible:
            return inf
        if load.due < inf and load.can_fetch_instead and not self.link.stalled:
            left_s = max(0.0, self._cut(load) - now)
            usual_s = max(_LONG_PASS * base_s, min(self._settings.max_pass_s, left_s / _PASSES))
            limit_s = min(usual_s, max(_SHORT_PASS * base_s, left_s / _SLOWEST_PASS))
            # With one worker all decoding waits for a pass, and until one has stopped much of it has come together.
            is_able = self._settings.interrupts and self._settings.workers > 1
            if is_able and len(self._loads) == 1 and self.lanes.slowness(now) == 1:
                saved_s = (self._saved_by(load, load.floor_left_s) - now) / (OVERDUE + _STOPS * _SLOWEST_PASS)
                limit_s = max(limit_s, min(self._settings.max_pass_s, saved_s))
            return limit_s
        if load.repair and load.repair.weighs_text and load.can_fetch_instead:
            return _LONG_PASS * base_s  # others that come in meanwhile need the engine more
        if load.compute_s < 2 * _LONG_PASS * base_s:
            return inf
        return max(_LONG_PASS * base_s, min(self._settings.max_pass_s, load.compute_s / 2))

    # Stopping a pass that turns out to be slow.

    def _saved_by(self, load: Load, floors_s: float) -> float:
        """Instant until which a load is still in time by fetching at the quality floor, however slow the engine is.

        Decoding that is under way goes on meanwhile and is not counted.
        """
        low = self.link.bandwidth_low
        if low <= SLOWEST:
            return -inf
        return self._slow_cut(load) - floors_s - self.link.ttfb_s - self.link.open_bytes / low

    def _slow_cut(self, load: Load) -> float:
        """A load's cut, were its closing as slow as a pass may turn out to be."""
        if self.lanes.was_interrupted(self._now):
            return self._cut(load)  # it counts on that already
        slowest_s = _SLOWEST_PASS * self.costs_of(load).closing_s(load.prompt_tokens)
        return self._cut(load) - max(0.0, slowest_s - self._closing_s(load))

    def _floors_of(self, load: Load, job: Job) -> float | None:
        """Seconds that fetching the chunks of a pass at the quality floor takes; None where one cannot be."""
        if self._floors is None or self._floors[0] is not job:
            self._floors = job, self._at_floor(load, job)  # the same while it runs, and asked for at every event
        found = self._floors[1]
        if found is None:
            return None
        (tokens, size), cost = found, self.costs_of(load).decode
        decode_s = cost.apart(len(job.chunks), tokens, size)
        return size / max(self.link.bandwidth_low, SLOWEST) + decode_s

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
        job = self.lanes.running("prefill") if self._settings.interrupts else None
        if job is None or job.kind != "recompute" or self.lanes.is_interrupted:
            return inf
        load = self._loads.get(job.load)
        if load is None:
            return now
        floors_s = self._floors_of(load, job) if load.due < inf and self._policy.preemptible else None
        if floors_s is None or self.link.stalled:
            return inf
        saved_by = self._saved_by(load, load.floor_left_s + floors_s)
        for other in self._loads.values():
            if other is not load and other.due < inf and other.is_ready and not self._rank(other)[0]:
                saved_by = min(saved_by, self._slow_cut(other))
        at = max(job.overdue_at, saved_by - _STOPS * _SLOWEST_PASS * job.expected_s)
        return at if at + floors_s <= self._cut(load) else inf

    def _pass_chunks(self, load: Load, costs: CostModel, now: float) -> float:
        """Chunks of a pass that the deadline keeps short; infinite where it does not."""
        if load.due == inf or not self._policy.preemptible:
            return inf
        base_s = costs.prefill.base_s
        limit_s = self._pass_limit_s(load, costs, now)
        chunk_s = costs.prefill.token_s * load.prompt_tokens / max(len(load.table), 1)
        return max(1.0, (limit_s - base_s) // chunk_s) if chunk_s > 0 and limit_s < inf else inf

    def _until_closing_s(self, load: Load, now: float) -> float:
        """Seconds until the first cut of another load that goes first: not every engine can stop a pass."""
        if len(self._loads) == 1:
            return inf
        rank = self._rank(load)
        others = [other for other in self._loads.values() if other is not load and not self._rank(other)[0]]
        first = [other for other in others if other.due < inf and (self._rank(other) < rank or other.is_ready)]
        cuts = [self._cut(other) for other in first]
        return min((cut - now for cut in cuts if cut > now), default=inf)

    def _heard_s(self, now: float) -> float:
        """Seconds that a pass may take while the first bytes, which tell more than any prior, are waited for.

        It is no longer than they have been waited for, so that what is computed in vain is at most as much again.
        """
        listening = self._estimates.bandwidth.is_guess and self.link.fetches and self._policy.preemptible
        return self.link.waited_s(now) if listening else inf

    def _sure_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a pass may be expected to take while costs or link are hardly known.

        Not every engine can stop a pass, and even if it takes longer than expected it should not be what ends last.
        """
        slow_s = inf
        if self.lanes.was_interrupted(now) and load.due < inf:
            slow_s = (self._cut(load) - now) / _SLOWEST_PASS
        if not self._policy.preemptible or load.plan is None or not (load.plan_bytes or self.link.fetches):
            return slow_s
        bandwidth, doubt = self._estimates.bandwidth, self._estimates.prefill.high
        ends = load.planned_at + load.plan.finish_s - costs.closing_s(load.prompt_tokens)
        if load.goal.objective != "earliest" and load.plan.in_time:
            ends = self._cut(load)  # that the link may be faster than expected makes nothing late
        else:
            doubt = max(doubt, bandwidth.high / max(bandwidth.value, 1.0))
        return min(slow_s, inf if doubt <= _DOUBT else (ends - now) / doubt)

    def _decode_s(self, load: Load, places: list[Place]) -> float:
        """Seconds that decoding a batch should not exceed: a standard deviation more than expected."""
        table = load.table
        chunks = [
            (table.tokens[doc.start + chunk], doc.size(chunk, table.level[doc.start + chunk])) for doc, chunk in places
        ]
        seconds = self.costs_of(load).decode.seconds(*busiest(chunks, self._settings.decode_threads))
        return seconds * (1 + min(self._estimates.decode.spread, 1.0))

    # How long the link is waited for.

    def progress(self, size: int, started: float, ended: float, chunk: ChunkId | None) -> bool:
        """Take in bytes that came."""
        guessed = self._estimates.bandwidth.is_guess
        self.link.progress(size, started, ended, chunk)
        if not guessed:
            return False
        undecided = [load for load in self._loads.values() if load.table.counts[PLANNED]]
        for load in undecided:
            load.is_stale = True  # the first bytes tell more than what the plan rests on
        return bool(undecided)

    def watch(self, now: float) -> None:
        """Notice that the link is silent."""
        self._now = now
        self.link.watch(now, self._stalls_at(now))

    def _stalls_at(self, now: float) -> float:
        """Instant after which silence is not waited out, or at which to look again.

        That is the stall time, or sooner the latest instant at which recomputing alone still saves a deadline.
        """
        quiet = self.link.quiet_from
        if quiet == inf:
            return inf
        stalls = self.link.stalls_at
        if now < quiet:
            return min(quiet, stalls)
        late_s = _UNBEGUN * self._steady_reserve_s  # what plans keep for chunks that are not begun covers it
        starts = (self._latest_start(load, now) for load in self._loads.values() if load.due < inf)
        return min([stalls, *(max(start, quiet) for start in starts if start > now - late_s)])

    def _latest_start(self, load: Load, now: float) -> float:
        """Instant at which text alone must begin to be in time; -inf where it cannot be without the link."""
        cost, seconds = self.costs_of(load).prefill, self.lanes.left_s("prefill", now)
        open_ = load.table.unbegun()
        if open_ is None or not load.is_known:
            return -inf
        documents, tokens, pairs = open_
        seconds += cost.base_s * documents + cost.token_s * tokens + cost.pair_s * pairs
        return self._cut(load) - seconds * _SPLIT * min(self._estimates.prefill.high, _DOUBT)
