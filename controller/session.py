"""One load as a state machine: events in, instructions out; no clock, thread or socket of its own."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from . import events as ev
from ._board import Board, ChunkState
from ._compute import Compute
from ._link import Link
from .costs import CostCorrection
from .planner import plan
from .request import PlanRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import ChunkId

    from ._board import Card
    from .costs import CostModel
    from .documents import DocumentPlanInput
    from .estimators import BandwidthEstimator, TtfbEstimator
    from .request import Plan
    from .settings import SessionSettings


class LoadSession:
    """Steers one load from its start to ``Finish`` or ``Fail``, of which exactly one comes, once.

    An executor carries out the instructions and reports what happens. When an outcome frees the link or compute, and
    at every tick, the chunks that nothing was started for are planned anew with fresh estimates, at most every
    ``replan_s`` unless something failed; measurements (``FirstByte``, ``TransferProgress``) wait for that. An event
    that cannot happen in the present state raises ArgumentError and changes nothing; what is still reported of a
    cancelled fetch, and all that comes after the end, is ignored.

    log: every call so far; feeding its events to an equal new session gives the same instructions.
    fallbacks: chunks for which a fetch or decode was given up for recomputation. last_plan: the latest, or None.
    """

    def __init__(
        self,
        documents: Sequence[DocumentPlanInput],
        costs: CostModel,
        settings: SessionSettings,
        *,
        bandwidth: BandwidthEstimator,
        ttfb: TtfbEstimator,
        correction: CostCorrection | None = None,
    ) -> None:
        """Lay the load out. Estimators and correction are updated in place and may serve the next load."""
        self._settings = settings
        self._board = Board(documents)
        self._link = Link(bandwidth, ttfb, settings.stall_s)
        self._compute = Compute(costs, correction or CostCorrection(), settings.compute_workers)
        self._now: float | None = None
        self._due: float | None = None
        self._over = False
        self.log: list[ev.LogEntry] = []
        self.fallbacks = 0
        self.last_plan: Plan | None = None
        self._planned_at = -inf

    @property
    def is_over(self) -> bool:
        """Whether ``Finish`` or ``Fail`` was given."""
        return self._over

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take in one event at ``now`` seconds of any clock that never goes back; returns what to do."""
        self._check(event, now)
        # Taking in comes first: it raises before it changes anything.
        acts = not self._over and self._take(event, now)
        instructions = self._act(now, is_tick=isinstance(event, ev.Tick)) if acts else []
        self._now = now
        self.log.append(ev.LogEntry(now, event, tuple(instructions)))
        return instructions

    def _check(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Started) == (self._now is not None):
            msg = "Started comes first, and once"
            raise ArgumentError(msg)
        if isinstance(event, ev.Started) and event.deadline_s is not None and not isfinite(event.deadline_s):
            msg = f"a deadline must be a finite number of seconds, or None for none, got {event.deadline_s}"
            raise ArgumentError(msg)
        if not isfinite(now) or (self._now is not None and now < self._now):
            msg = f"time must be finite and never go back: {now} after {self._now}"
            raise ArgumentError(msg)

    def _take(self, event: ev.Event, now: float) -> bool:  # noqa: C901 - one case for each event
        """Take in an event; returns whether there may be something to do."""
        match event:
            case ev.Started(deadline_s):
                self._due = None if deadline_s is None else now + deadline_s
            case ev.FirstByte(seconds):
                self._link.first_byte(seconds)
                return False
            case ev.TransferProgress(size, started, ended, chunk):
                self._link.progress(size, started, ended, chunk)
                return False
            case ev.ChunkArrived(chunk, level):
                return self._arrived(chunk, level, now)
            case ev.ChunkFailed(chunk, reason):
                return self._fetch_failed(chunk, reason)
            case ev.DecodeDone(chunk, seconds):
                self._compute.end_decode(chunk, seconds).move(ChunkState.READY)
            case ev.DecodeFailed(chunk, reason):
                self._fall_back(self._compute.end_decode(chunk, None), f"decode failed: {reason}")
            case ev.RecomputeDone(chunks, seconds):
                for card in self._compute.end_pass(chunks, seconds):
                    card.move(ChunkState.READY)
            case ev.RecomputeFailed(chunk, reason):
                self._recompute_failed(chunk, reason)
            case ev.Tick():
                self._link.watch(now)
        return True

    def _arrived(self, chunk: ChunkId, level: int, now: float) -> bool:
        card = self._board.card(chunk)
        if card.cancelled:
            return False
        if card.state is ChunkState.FETCHING and level != card.level:
            msg = f"level {level} of {chunk} arrived, level {card.level} was asked for"
            raise ArgumentError(msg)
        self._compute.arrived(card)
        self._link.close(card)
        self._link.alive(now)
        return True

    def _fetch_failed(self, chunk: ChunkId, reason: str) -> bool:
        card = self._board.card(chunk)
        if card.cancelled:
            return False
        if card.state is not ChunkState.FETCHING:
            msg = f"{chunk} is {card.state.value}, not being fetched; report each outcome once"
            raise ArgumentError(msg)
        self._fall_back(card, f"fetch failed: {reason}")
        self._link.close(card)
        return True

    def _fall_back(self, card: Card, trouble: str) -> None:
        card.lose(trouble, fetch=True)
        self._planned_at = -inf
        self.fallbacks += card.can_recompute

    def _recompute_failed(self, chunk: ChunkId, reason: str) -> None:
        cards = self._compute.abort_pass(chunk)
        self._planned_at = -inf
        for card in cards:
            if card.chunk == chunk:
                card.lose(f"recomputation failed: {reason}", fetch=False)
            else:
                card.move(ChunkState.PLANNED)

    def _act(self, now: float, *, is_tick: bool) -> list[ev.Instruction]:
        failed = self._board.having(ChunkState.FAILED)
        if failed:
            return self._fail(failed[0])
        if len(self._board.having(ChunkState.READY)) == len(self._board.cards):
            return [self._finish(now)]
        out: list[ev.Instruction] = []
        if self._compute.can_decode:
            card = self._compute.start_decode(now)
            out.append(ev.Decode(card.chunk, card.level or 0))
        out += self._start_planned(now)
        if is_tick and self._compute.can_recompute:
            out += self._reclaim(now)
        return out

    def _start_planned(self, now: float) -> list[ev.Instruction]:
        room = self._settings.max_in_flight - self._link.open_count
        if not (room > 0 or self._compute.can_recompute) or not self._board.having(ChunkState.PLANNED):
            return []
        made = self._plan(now)
        decisions = {decision.chunk: decision for decision in made.decisions}
        waiting = [card for card in map(self._board.card, made.fetch_order) if card.state is ChunkState.PLANNED]
        out: list[ev.Instruction] = []
        for card in waiting[: max(0, room)]:
            card.reason = decisions[card.chunk].reason
            self._link.fetch(card, decisions[card.chunk].level or 0, now)
            out.append(ev.Fetch(card.chunk, card.level or 0, card.size))
        if self._compute.can_recompute:
            wanted = [chunk for chunk, decision in decisions.items() if decision.action == "recompute"]
            cards = self._compute.worth_merging(self._board.next_pass(wanted, self._settings.merge_chunks))
            for card in cards:
                card.reason = decisions[card.chunk].reason
            out += self._start_pass(cards, now)
        return out

    def _plan(self, now: float) -> Plan:
        """The latest plan while it is fresh, for it still covers all that is open, or a new one."""
        if self.last_plan is None or now - self._planned_at >= self._settings.replan_s:
            self.last_plan, self._planned_at = plan(self._request(now)), now
        return self.last_plan

    def _start_pass(self, cards: list[Card], now: float) -> list[ev.Instruction]:
        if not cards:
            return []
        self._compute.start_pass(cards, now)
        return [ev.Recompute(cards[0].chunk, cards[-1].chunk)]

    def _reclaim(self, now: float) -> list[ev.Instruction]:
        """Give up the first fetch that idle compute would beat."""
        costs = self._compute.costs
        for card in self._board.having(ChunkState.FETCHING):
            if card.can_recompute and self._board.is_next(card):
                ready_s = self._link.arrival_s(card, now) + costs.decode.seconds(card.tokens, card.size)
                if ready_s > self._settings.cancel_margin * costs.prefill.seconds(card.tokens, card.context):
                    self._link.close(card)
                    self._fall_back(card, "the link is silent" if self._link.stalled else "the link became slow")
                    card.cancelled, card.reason = True, "sooner than a fetch"
                    return [ev.Cancel(card.chunk), *self._start_pass([card], now)]
        return []

    def _request(self, now: float) -> PlanRequest:
        return PlanRequest(
            open_chunks=self._board.open_chunks(),
            costs=self._compute.costs,
            bandwidth=self._link.bandwidth,
            quality_floor=self._settings.quality_floor,
            in_flight=self._link.in_flight(),
            busy_s=self._compute.busy_s(now),
            prompt_tokens=self._board.tokens,
            lead_s=self._link.lead_s(now),
            ttfb_s=self._link.ttfb_s,
            parallel=self._settings.max_in_flight,
            deadline_s=None if self._due is None else self._due - now - self._settings.reserve_s,
            merge_chunks=self._settings.merge_chunks,
        )

    def _finish(self, now: float) -> ev.Finish:
        self._over = True
        decisions = tuple(card.decision for card in self._board.cards)
        if self._due is None:
            return ev.Finish(decisions, "all chunks are ready")
        left = self._due - now - self._compute.costs.closing_s(self._board.tokens)
        return ev.Finish(decisions, f"in time by {left:.3f} s" if left >= 0 else f"late by {-left:.3f} s")

    def _fail(self, card: Card) -> list[ev.Instruction]:
        self._over = True
        open_fetches = [ev.Cancel(other.chunk) for other in self._board.having(ChunkState.FETCHING)]
        return [*open_fetches, ev.Fail(f"{card.chunk} cannot be made ready: {card.trouble}")]
