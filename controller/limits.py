"""How much may begin at once, how long a pass may be, and how long the link is waited for."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvwire.controller.costs import busiest
from kvwire.controller.document_state import ChunkState, among
from kvwire.controller.resources import Resources

if TYPE_CHECKING:
    from kvwire.controller.costs import CostModel
    from kvwire.controller.estimates import Estimates
    from kvwire.controller.load import Load, Place
    from kvwire.controller.policies.base import Policy
    from kvwire.controller.settings import ControllerSettings
    from kvwire.types import ChunkId

_S = ChunkState
_LONG_PASS = 10.0  # a pass of that many times its fixed cost may end: going on would save less than a tenth of it
_SPLIT = 1.1  # what cutting a long recomputation into passes adds at most, hence
_DOUBT = 1.6  # estimates that may be wrong by less are relied on
_LATE_START_S = 0.01  # by which a start may be late: the reserve covers it


class Limits(Resources):
    """What all loads share, and how much of it may be taken."""

    def __init__(
        self, estimates: Estimates, settings: ControllerSettings, policy: Policy, loads: dict[int, Load]
    ) -> None:
        """Start idle.

        Args:
            estimates: Of link and engine.
            settings: How loads are steered.
            policy: Decides.
            loads: Those under way, by number; ended ones are taken out.
        """
        super().__init__(estimates, settings, loads)
        self._policy = policy

    def _cut(self, load: Load) -> float:
        """Instant at which a load is handed over as it is, so that the first token is in time."""
        return load.due - self._settings.reserve_s - self.costs_of(load).closing_s(load.prompt_tokens)

    @property
    def can_fetch(self) -> bool:
        """Whether a fetch that a plan names may be opened."""
        return any(load.waiting or load.refine for load in self._loads.values()) and self._window_open()

    def _window_open(self) -> bool:
        """Whether another fetch may be opened: enough to keep the link busy, little enough to decide late."""
        settings, link = self._settings, self.link
        if len(link.fetches) >= settings.max_in_flight:
            return False
        horizon = (2 * link.ttfb_s + settings.horizon_s) * link.bandwidth_low
        return len(link.fetches) < 2 or link.open_bytes < horizon  # noqa: PLR2004 - one to come in, one behind it

    def progress(self, size: int, started: float, ended: float, chunk: ChunkId | None) -> bool:
        """Take in bytes that came.

        Args:
            size: Bytes.
            started: When they began to come.
            ended: When the last of them had come.
            chunk: Whose bytes; None: nobody knows.

        Returns:
            Whether there may be something to do.
        """
        guessed = self._estimates.bandwidth.is_guess
        self.link.progress(size, started, ended, chunk)
        undecided = [load for load in self._loads.values() if guessed and any(doc.has(_S.PLANNED) for doc in load.docs)]
        for load in undecided:
            load.planned_at = -inf  # the first bytes tell more than what the plan rests on
        return bool(undecided) or self.can_fetch

    def watch(self, now: float) -> None:
        """Notice that the link is silent.

        Args:
            now: The instant, in seconds of the controller's clock.
        """
        self.link.watch(now, self._stalls_at(now))

    def _stalls_at(self, now: float) -> float:
        """Instant after which silence is not waited out, or at which to look again.

        That is the stall time, or sooner the latest instant at which recomputing alone still saves a deadline.
        """
        quiet, stalls = self.link.quiet_from, self.link.stalls_at
        if now < quiet:
            return min(quiet, stalls)
        starts = (self._latest_start(load, now) for load in self._loads.values() if load.due < inf)
        return min([stalls, *(max(start, quiet) for start in starts if start > now - _LATE_START_S)])

    def _latest_start(self, load: Load, now: float) -> float:
        """Instant at which text alone must begin to be in time; -inf where it cannot be without the link."""
        cost, seconds = self.costs_of(load).prefill, self.lanes.left_s("prefill", now)
        for doc in load.docs:
            open_ = among(doc.state, (_S.PLANNED, _S.FETCHING))
            if not load.is_known or (open_ & ~doc.can_text).any():
                return -inf
            if open_.any():
                tokens, context = doc.tokens[open_], doc.context[open_]
                pairs = float((tokens * (context + tokens / 2)).sum())
                seconds += cost.base_s + cost.token_s * int(tokens.sum()) + cost.pair_s * pairs
        return self._cut(load) - seconds * _SPLIT * min(self._estimates.prefill.high, _DOUBT)

    def _pass_limit_s(self, load: Load, costs: CostModel) -> float:
        """Seconds that a pass may take: half of what is to be recomputed, so that the meeting point can still move."""
        least = _LONG_PASS * costs.prefill.base_s
        if not self._policy.preemptible or load.compute_s < 2 * least:
            return inf
        return max(least, min(self._settings.max_pass_s, load.compute_s / 2))

    def _heard_s(self, now: float) -> float:
        """Seconds that a pass may take while the first bytes, which tell more than any prior, are waited for.

        It is no longer than they have been waited for, so that what is computed in vain is at most as much again.
        """
        listening = self._estimates.bandwidth.is_guess and self.link.fetches and self._policy.preemptible
        return self.link.waited_s(now) if listening else inf

    def _sure_s(self, load: Load, costs: CostModel, now: float) -> float:
        """Seconds that a pass may be expected to take while costs or link are hardly known.

        A pass cannot be called back, and even if it takes longer than expected it should not be what ends last.
        """
        if not self._policy.preemptible or load.plan is None or not (load.plan.bytes or self.link.fetches):
            return inf
        bandwidth, doubt = self._estimates.bandwidth, self._estimates.prefill.high
        ends = load.planned_at + load.plan.finish_s - costs.closing_s(load.prompt_tokens)
        if load.goal.objective != "earliest" and load.plan.in_time:
            ends = self._cut(load)  # that the link may be faster than expected makes nothing late
        else:
            doubt = max(doubt, bandwidth.high / max(bandwidth.value, 1.0))
        return inf if doubt <= _DOUBT else (ends - now) / doubt

    def _decode_s(self, load: Load, places: list[Place]) -> float:
        """Seconds that decoding a batch should not exceed: a standard deviation more than expected."""
        chunks = [(int(doc.tokens[chunk]), doc.size(chunk, int(doc.level[chunk]))) for doc, chunk in places]
        seconds = self.costs_of(load).decode.seconds(*busiest(chunks, self._settings.decode_threads))
        return seconds * (1 + min(self._estimates.decode.spread, 1.0))
