"""When each load must be done with what, so that it and those that are due later are in time."""

from __future__ import annotations

from math import exp2, inf, log
from typing import TYPE_CHECKING

from .chunk_table import PLANNED
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from .costs import CostModel
    from .load import Load
    from .resources import Resources

SLOWEST_PASS = 5.0
"""Times what is expected: a pass that takes as long still ends before a deadline."""
DOUBT = 1.6
"""Estimates that may be wrong by less are relied on."""
_SPLIT = 1.1  # what cutting a long recomputation into passes adds at most
_RESERVE_UNSURE = 2.0  # times the reserve while chunks are not begun, loads share, or an engine was slow lately
_RESERVE_LEAST = 0.5  # share of the reserve that is kept whatever happens
_RESERVE_ERROR = 0.1  # relative error of predictions, half of which takes all of the reserve

_HALF_LIVES_S = (0.2, 1.0)
"""The short one hears of a rush at once, the long one remembers it."""
_FEWEST = 1e-3  # loads a second


class ArrivalRate:
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


class Deadlines:
    """Instants by which loads are handed over, and seconds that plans may take."""

    def __init__(self, shared: Resources) -> None:
        """Start idle."""
        self._shared = shared
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._link, self._lanes = shared.link, shared.lanes
        self.arrivals = ArrivalRate()
        self.known: dict[int, tuple[float, float]] | None = None

    def rank(self, load: Load) -> tuple[bool, float, int]:
        """Whether a load is late anyway, when it is due, and its number; less goes first."""
        if load.due == inf:
            # Before anything is known of it nobody can tell, and those who are due go first.
            due = inf if load.first_s is None else load.asked_at + self._settings.stretch * load.first_s
            return False, due, load.number
        finish = -inf
        if load.plan:
            finish = load.planned_at + load.plan.finish_s - load.optional_repair_s - load.overlapped_s
        return max(finish, self._shared.now) > load.due, load.due, load.number

    def handover_at(self, load: Load) -> float:
        """Instant at which a load is handed over as it is, so that the first token is in time."""
        return self.handovers()[load.number][0] if len(self._loads) > 1 else self._own_handover_at(load)

    def _own_handover_at(self, load: Load) -> float:
        return load.due - self.reserve_s - self.closing_s(load)

    @property
    def reserve_s(self) -> float:
        """Seconds of a deadline that are left unused: more where closings may meet, or the engine was slow lately."""
        is_calm = len(self._loads) == 1 and not self._lanes.was_interrupted(self._shared.now)
        return self.steady_reserve_s * (1 if is_calm else _RESERVE_UNSURE)

    @property
    def steady_reserve_s(self) -> float:
        """What one load alone leaves unused: half of the setting where computing takes just what is expected."""
        off = max(self._estimates.prefill.spread, self._estimates.decode.spread)
        return self._settings.reserve_s * min(1.0, _RESERVE_LEAST + off / _RESERVE_ERROR)

    @property
    def unstarted_reserve_s(self) -> float:
        """What plans leave unused while there are chunks that nothing was begun for."""
        return _RESERVE_UNSURE * self.steady_reserve_s

    def closing_s(self, load: Load) -> float:
        """Seconds to keep for a load's closing, as most take: many times that where a pass had to be stopped lately."""
        seconds = self._shared.costs_of(load).closing_s(load.prompt_tokens)
        if self._lanes.was_interrupted(self._shared.now):
            return seconds * SLOWEST_PASS
        return seconds + min(self._estimates.closing.unsure_s, seconds)

    def handovers(self) -> dict[int, tuple[float, float]]:
        """For each load its cut, and the instant by which it must be done with the link.

        Worked out from the last one due to the first: closings take turns, so the earlier ones leave room for the later
        ones, and so do fetches, for what the later ones need at their floor. Who is late anyway is left room by nobody.
        """
        if self.known is not None:
            return self.known
        self.known = cuts = {}
        closing = link = inf
        for load in sorted(self._loads.values(), key=self.rank, reverse=True):
            own = self._own_handover_at(load)
            if self.rank(load)[0] or load.due == inf:
                cuts[load.number] = own, inf
                continue
            closing_s = load.due - self.reserve_s - own
            closing = min(own, closing - closing_s)
            cuts[load.number] = closing, min(closing, link)
            link = min(closing, link) - load.floor_s
        return cuts

    def left_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a plan may take: until the load is due, and so that later ones are in time at their floor."""
        closing_s = costs.closing_s(load.prompt_tokens)
        # What is not valid makes a load late, what could become finer does not.
        reserve_s = self.unstarted_reserve_s if load.table.counts[PLANNED] else self.reserve_s
        own_s = load.due - now - reserve_s
        own_s -= max(0.0, self.closing_s(load) - closing_s)
        if len(self._loads) > 1:
            own_s = min(own_s, min(self.handovers()[load.number]) - now + closing_s)
        if load.came is not None:
            least_s = self._queue_s(load, now) + load.floor_s + closing_s
            floor_s, came = load.asked_floor_s, load.came
            own_s = min(own_s, self.arrivals.limit_s(floor_s, came, now, least_s=least_s, left_s=own_s))
        return own_s - self.contention_s(load)

    def _queue_s(self, load: Load, now: float) -> float:
        """Seconds of work that goes before a load's open chunks."""
        rank, low = self.rank(load), max(self._link.bandwidth_low, SLOWEST)
        ahead = sum(other.plan_bytes for other in self._loads.values() if self.rank(other) < rank)
        lanes_s = max(self._lanes.left_s("prefill", now), self._lanes.left_s("decode", now))
        return max(self._link.lead_s(now) + (self._link.open_bytes + ahead) / low, lanes_s)

    def floors_s(self, load: Load, now: float) -> float:
        """Seconds to a load's first token where it and all that goes first are fetched at their floors."""
        rank = self.rank(load)
        first = [each for each in self._loads.values() if each is load or self.rank(each) < rank]
        open_s = self._link.lead_s(now) + self._link.open_bytes / max(self._link.bandwidth_low, SLOWEST)
        closings_s = sum(self._shared.costs_of(each).closing_s(each.prompt_tokens) for each in first)
        fetched_s = (
            open_s + sum(each.floor_s for each in first) + self._shared.costs_of(load).closing_s(load.prompt_tokens)
        )
        return max(fetched_s, self._lanes.left_s("prefill", now) + closings_s)

    def contention_s(self, load: Load) -> float:
        """Seconds by which fetches of other loads, which share the link with a load's last ones, may hold these up."""
        others = any(other.waiting or other.refine for other in self._loads.values() if other is not load)
        return 2 * self._link.ttfb_s + self._settings.horizon_s if others else 0.0

    def until_others_s(self, load: Load, now: float) -> float:
        """Seconds that a closing may take so that every other load still gets its chunks decoded before its cut."""
        others = [other for other in self._loads.values() if other is not load and other.due < inf]
        if any(self.rank(other)[0] for other in others):
            return 0.0  # whoever is late waits no longer than it must
        cuts = [self.handover_at(other) for other in others]
        if not cuts:
            return inf
        decoding_s = 0.0
        if self._settings.workers == 1:
            for other in self._loads.values():
                count, tokens, size = other.table.arrived() if other is not load else (0, 0, 0)
                decoding_s += self._shared.costs_among_many(other).decode.seconds(tokens, size) if count else 0.0
            decoding_s += sum(fetch.decode_s for fetch in self._link.fetches.values())
        return min(cuts) - now - decoding_s

    def until_closing_s(self, load: Load, now: float) -> float:
        """Seconds until the first cut of another load that goes first: not every engine can stop a pass."""
        if len(self._loads) == 1:
            return inf
        rank = self.rank(load)
        others = [other for other in self._loads.values() if other is not load and not self.rank(other)[0]]
        first = [other for other in others if other.due < inf and (self.rank(other) < rank or other.is_ready)]
        cuts = [self.handover_at(other) for other in first]
        return min((cut - now for cut in cuts if cut > now), default=inf)

    def latest_text_start(self, load: Load, now: float) -> float:
        """Instant at which text alone must begin to be in time; -inf where it cannot be without the link."""
        cost, seconds = self._shared.costs_of(load).prefill, self._lanes.left_s("prefill", now)
        open_ = load.table.unbegun()
        if open_ is None or not load.is_known:
            return -inf
        documents, tokens, pairs = open_
        seconds += cost.base_s * documents + cost.token_s * tokens + cost.pair_s * pairs
        return self.handover_at(load) - seconds * _SPLIT * min(self._estimates.prefill.high, DOUBT)
