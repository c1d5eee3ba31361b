"""What all loads share: link, workers, costs and a bound on bytes; and who goes first, by when."""

from __future__ import annotations

from dataclasses import replace
from math import exp2, inf, log
from typing import TYPE_CHECKING

from . import events as ev
from .chunk_table import PLANNED, READY
from .link import Link
from .snapshot import SLOWEST
from .workers import Workers

if TYPE_CHECKING:
    from .costs import CostModel, DecodeCost
    from .document_state import DocumentState
    from .estimates import Estimates
    from .load import Load
    from .settings import ControllerSettings
    from .snapshot import Policy

_HALF_LIVES_S = (0.2, 1.0)  # of arrivals: the short one notices a rush at once, the long one remembers it
SLOWEST_PASS = 5.0
"""Times what is expected: a pass that takes as long still ends before a deadline."""
DOUBT = 1.6
"""Estimates that may be wrong by less are relied on."""
_UNSURE = 2.0  # times the reserve while chunks are not begun, loads share, or the engine was slow lately
_TURNS = 4  # every fourth thing is begun for a late load, so that none waits for ever
_AMPLE = 5.0  # times what its floor takes: a load with more time is in time even if it takes its share of a short rush


class ArrivalRate:
    """Loads that came in lately, and the share of the time that fetching them at their floors takes."""

    def __init__(self) -> None:
        """Start without loads."""
        self._sums = [(0.0, 0.0)] * len(_HALF_LIVES_S)
        self._at = -inf

    def add(self, load: Load, now: float) -> None:
        """Take in a load once it is known."""
        fades = [exp2((self._at - now) / half_s) for half_s in _HALF_LIVES_S]
        self._sums = [
            (f * loads + 1, f * busy + load.floor_s) for f, (loads, busy) in zip(fades, self._sums, strict=True)
        ]
        self._at, load.came, load.asked_bytes = now, (now, load.floor_s), 0

    def others(self, load: Load, now: float) -> tuple[float, float]:
        """Loads a second besides one, and the share of the time that they take; the larger ones count."""
        came, floor_s = load.came or (-inf, 0.0)
        found = []
        for half_s, (loads, busy) in zip(_HALF_LIVES_S, self._sums, strict=True):
            fade, own, per_s = exp2((self._at - now) / half_s), exp2((came - now) / half_s), log(2) / half_s
            found.append(((fade * loads - own) * per_s, (fade * busy - own * floor_s) * per_s))
        rates, shares = zip(*found, strict=True)
        return max(rates), max(0.0, *shares)


class State:
    """One link, one engine and the loads that share them."""

    def __init__(self, estimates: Estimates, settings: ControllerSettings, policy: Policy) -> None:
        """Start idle."""
        self.estimates, self.settings, self.policy = estimates, settings, policy
        self.loads: dict[int, Load] = {}
        self.link, self.workers = Link(estimates, settings), Workers(settings.workers, settings.patience_s)
        self.arrivals = ArrivalRate()
        self.now = -inf
        self.held = 0  # bytes asked for, arrived or kept
        self.turns = 0  # things begun so far
        self._handovers: dict[int, tuple[float, float]] | None = None
        self._known_costs: dict[int, CostModel] = {}  # by tokens of the question
        self._decode: tuple[DecodeCost, DecodeCost] | None = None
        self._among: tuple[CostModel, CostModel] | None = None

    def changed(self) -> None:
        """Forget who goes first, by when: a plan was made, or a load is over."""
        self._handovers = None

    def forget(self) -> None:
        """Forget all that was worked out for one event."""
        self._handovers = None
        self._known_costs.clear()

    def turn(self, load: Load) -> None:
        """Count another thing begun, for a load."""
        self.turns += 1
        load.began = self.turns

    # Bytes.

    def hold(self, doc: DocumentState, chunk: int, size: int) -> None:
        """Note how many bytes are held for a chunk from now on."""
        self.held += doc.table.hold(doc.start + chunk, size)

    def release(self, doc: DocumentState, chunk: int, out: list[ev.Instruction]) -> None:
        """Forget a chunk's bytes."""
        if doc.table.held[doc.start + chunk]:
            self.hold(doc, chunk, 0)
            out.append(ev.Release(doc.id(chunk)))

    def settle(self, doc: DocumentState, chunk: int) -> None:
        """Have a chunk that was to become finer stay as it is."""
        doc.move(chunk, READY)
        table, at = doc.table, doc.start + chunk
        table.level[at] = table.top[at] = level = table.valid_level[at]
        self.hold(doc, chunk, doc.size(chunk, level))

    def make_room(self, load: Load, size: int, out: list[ev.Instruction]) -> bool:
        """Forget what is only kept for refinements, as far as that is needed."""
        others = sorted((each for each in self.loads.values() if each is not load), key=lambda other: -other.due)
        for each in (*others, load):
            for doc, chunk in each.having(READY):
                if self.held + size <= self.settings.memory_bytes:
                    return True
                self.release(doc, chunk, out)
        return self.held + size <= self.settings.memory_bytes

    # Costs.

    def costs_of(self, load: Load) -> CostModel:
        """What computing costs for a load, by what is known now."""
        tokens = load.query_tokens
        base = self._known_costs.get(tokens)
        if base is None:
            base = self._known_costs[tokens] = self.estimates.costs(tokens)
        return load.costs(base) if load.repair_share else base

    def costs_among_many(self, load: Load) -> CostModel:
        """``costs_of`` with what decoding costs for a chunk of many, which share batches and threads."""
        costs = self.costs_of(load)
        if self._among is None or self._among[0] is not costs:
            self._among = costs, replace(costs, decode=self.decode_among_many)
        return self._among[1]

    @property
    def decode_among_many(self) -> DecodeCost:
        """What decoding a chunk of many costs."""
        cost = self.estimates.decode.cost
        if self._decode is None or self._decode[0] is not cost:
            self._decode = cost, cost.shared(self.settings.decode_batch, self.settings.decode_threads)
        return self._decode[1]

    def closing_s(self, load: Load) -> float:
        """Seconds to keep for a load's closing, as most take: many times that where a pass had to be stopped lately."""
        seconds = self.costs_of(load).closing_s(load.prompt_tokens)
        if self.workers.was_interrupted(self.now):
            return seconds * SLOWEST_PASS
        closing = self.estimates.closing
        unsure_s = (closing.high - closing.value) * load.prompt_tokens if closing.is_measured else 0.0
        return seconds + min(unsure_s, seconds)

    # Deadlines.

    def rank(self, load: Load) -> tuple[bool, float, int]:
        """Whether a load is late anyway, when it is due, and its number; less goes first."""
        if load.due == inf:
            # Before anything is known of it nobody can tell, and loads with a deadline go first.
            due = inf if load.first_s is None else load.asked_at + self.settings.stretch * load.first_s
            return False, due, load.number
        finish = -inf
        if load.plan:
            finish = load.planned_at + load.plan.finish_s - load.optional_repair_s - load.overlapped_s
        return max(finish, self.now) > load.due, load.due, load.number

    def is_late(self, load: Load) -> bool:
        """Whether a load is late anyway."""
        return self.rank(load)[0]

    def order(self) -> list[Load]:
        """Loads in the order of their turns."""
        if len(self.loads) <= 1:
            return [*self.loads.values()]
        order = sorted(self.loads.values(), key=self.rank)
        if self.turns % _TURNS == _TURNS - 1:
            late = [load for load in order if self.is_late(load) and load.is_undecided]
            longest = min(late, key=lambda load: load.began, default=order[0])
            order.remove(longest)
            order.insert(0, longest)
        return order

    @property
    def reserve_s(self) -> float:
        """Seconds of a deadline left unused: more where closings may meet, or the engine was slow lately."""
        is_calm = len(self.loads) == 1 and not self.workers.was_interrupted(self.now)
        return self.steady_reserve_s * (1 if is_calm else _UNSURE)

    @property
    def steady_reserve_s(self) -> float:
        """What one load alone leaves unused: half of the setting where computing takes just what is expected."""
        off = max(self.estimates.prefill.spread, self.estimates.decode.spread)
        return self.settings.reserve_s * min(1.0, 0.5 + 10 * off)

    @property
    def unstarted_reserve_s(self) -> float:
        """What plans leave unused while there are chunks that nothing was begun for."""
        return _UNSURE * self.steady_reserve_s

    def handover_at(self, load: Load) -> float:
        """Instant at which a load is handed over as it is, so that the first token is in time."""
        return self.handovers()[load.number][0]

    def handovers(self) -> dict[int, tuple[float, float]]:
        """For each load its hand-over, and the instant by which it must be done with the link.

        Worked out from the last one due to the first: closings take turns, so the earlier ones leave room for the later
        ones, and so do fetches, for what the later ones need at their floor. A load that is late anyway gets no room.
        """
        if self._handovers is not None:
            return self._handovers
        self._handovers = found = {}
        closing = link = inf
        reserve_s = self.reserve_s
        alone = len(self.loads) == 1
        for load in self.loads.values() if alone else sorted(self.loads.values(), key=self.rank, reverse=True):
            closing_s = self.closing_s(load)
            own = load.due - reserve_s - closing_s
            if load.due == inf or (not alone and self.is_late(load)):
                found[load.number] = own, inf
                continue
            closing = min(own, closing - closing_s)
            found[load.number] = closing, min(closing, link)
            link = min(closing, link) - load.floor_s
        return found

    def left_s(self, load: Load, costs: CostModel) -> float:
        """Seconds that a plan may take: until the load is due, and so that later ones are in time at their floor."""
        closing_s = costs.closing_s(load.prompt_tokens)
        # What is not valid makes a load late, what could become finer does not.
        reserve_s = self.unstarted_reserve_s if load.table.counts[PLANNED] else self.reserve_s
        left_s = load.due - self.now - reserve_s - max(0.0, self.closing_s(load) - closing_s)
        if len(self.loads) > 1:
            left_s = min(left_s, min(self.handovers()[load.number]) - self.now + closing_s)
        rate, busy = self.arrivals.others(load, self.now)
        if load.came and rate > 0:
            # As many loads are to find their time as came lately, and a queue is to grow by no more than what is spare,
            # in all of a load's plans together. Where that is less than its floor takes, the soonest plan is the one,
            # unless there is ample time: then the rush may be a short one.
            floor_s, spare = self._queue_s(load) + load.floor_s + closing_s, max(0.0, 1 - busy)
            bound_s = min(floor_s + max(0.0, spare / rate - self._spent_s(load)), spare * left_s)
            left_s = min(left_s, max(floor_s, bound_s) if _AMPLE * floor_s < left_s else bound_s)
        return left_s - self.contention_s(load)

    def _spent_s(self, load: Load) -> float:
        """Seconds of the link that a load has asked for beyond what its floor took when it came."""
        asked_s = load.asked_bytes / max(self.link.bandwidth_low, SLOWEST)
        return max(0.0, asked_s + load.floor_left_s - load.came[1]) if load.came else 0.0

    def _queue_s(self, load: Load) -> float:
        """Seconds of work that goes before a load's open chunks."""
        link, rank = self.link, self.rank(load)
        ahead = sum(other.plan_bytes for other in self.loads.values() if self.rank(other) < rank)
        busy_s = max(self.workers.left_s("prefill", self.now), self.workers.left_s("decode", self.now))
        return max(link.lead_s(self.now) + (link.open_bytes + ahead) / max(link.bandwidth_low, SLOWEST), busy_s)

    def contention_s(self, load: Load) -> float:
        """Seconds by which fetches of other loads, which share the link with a load's last ones, may hold these up."""
        others = any(other.waiting or other.refine for other in self.loads.values() if other is not load)
        return 2 * self.link.ttfb_s + self.settings.horizon_s if others else 0.0

    def room_s(self, load: Load, *, of_all: bool = False) -> float:
        """Seconds until the first hand-over of another load that goes first, or of any: a pass must not cross it."""
        if len(self.loads) == 1:
            return inf
        rank = self.rank(load)
        others = [(self.rank(each), each) for each in self.loads.values() if each is not load and each.due < inf]
        if of_all and any(is_late for (is_late, *_), _ in others):
            return 0.0  # a load that is late waits no longer than it must
        first = [each for own, each in others if not own[0] and (of_all or own < rank or each.is_ready)]
        left = (self.handover_at(each) - self.now for each in first)
        return min((seconds for seconds in left if of_all or seconds > 0), default=inf)

    def floors_s(self, load: Load) -> float:
        """Seconds to a load's first token where it and all that goes first are fetched at their floors."""
        rank = self.rank(load)
        first = [each for each in self.loads.values() if each is load or self.rank(each) < rank]
        open_s = self.link.lead_s(self.now) + self.link.open_bytes / max(self.link.bandwidth_low, SLOWEST)
        closings_s = [self.costs_of(each).closing_s(each.prompt_tokens) for each in first]
        fetched_s = open_s + sum(each.floor_s for each in first) + self.costs_of(load).closing_s(load.prompt_tokens)
        return max(fetched_s, self.workers.left_s("prefill", self.now) + sum(closings_s))

    def latest_text_start(self, load: Load) -> float:
        """Instant at which text alone must begin to be in time; -inf where it cannot be without the link."""
        open_ = load.table.unbegun()
        if open_ is None or not load.is_known:
            return -inf
        (documents, tokens, pairs), cost = open_, self.costs_of(load).prefill
        seconds = cost.base_s * documents + cost.token_s * tokens + cost.pair_s * pairs
        seconds += self.workers.left_s("prefill", self.now)
        return self.handover_at(load) - seconds * min(1.1 * self.estimates.prefill.high, DOUBT)

    def stalls_at(self) -> float:
        """Instant after which silence is not waited out, or at which to look again.

        That is the stall time, or sooner the latest instant at which recomputing alone still saves a deadline.
        """
        link, quiet = self.link, self.link.quiet_from
        if quiet == inf:
            return inf
        if self.now < quiet:
            return min(quiet, link.stalls_at)
        late_s = self.unstarted_reserve_s  # what plans keep for chunks that are not begun covers it
        starts = (self.latest_text_start(load) for load in self.loads.values() if load.due < inf)
        return min([link.stalls_at, *(max(start, quiet) for start in starts if start > self.now - late_s)])
