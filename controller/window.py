"""How much may be asked of the link at once, and how long its silence is waited out."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from .chunk_table import PLANNED
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from kvwire.types import ChunkId

    from .deadlines import Deadlines
    from .resources import Resources

SPARE = 16
"""Fetches are opened when one of so many is over, not for each alone."""
_PROBES = 8  # fetches that are open while the link is known by a guess alone
_FEWEST_OPEN = 2  # one to come in and one behind it


class Window:
    """Bytes and requests that are open: enough to keep the link busy, little enough to decide late."""

    def __init__(self, shared: Resources, deadlines: Deadlines) -> None:
        """Start idle."""
        self._shared, self._deadlines = shared, deadlines
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._link = shared.link

    @property
    def can_fetch(self) -> bool:
        """Whether fetches that a plan names are worth opening: one at a time on a link with few, several with many."""
        for load in self._loads.values():
            if load.waiting or load.refine:
                return self.is_open(spare=SPARE)
        return False

    def is_open(self, *, spare: int = 0) -> bool:
        """Whether another fetch may be opened: enough to keep the link busy, little enough to decide late."""
        fetches, most = len(self._link.fetches), self._most_open()
        if fetches >= (most - most // spare if spare else most):
            return False
        # Last, since it takes longest to find out.
        return fetches < _FEWEST_OPEN or self._link.open_bytes < self.size(spare=spare)[1]

    def _most_open(self) -> int:
        """Fetches that may be open at once."""
        most = self._settings.max_in_flight
        return min(most, _PROBES) if self._estimates.bandwidth.is_guess else most

    def size(self, *, spare: int = 0) -> tuple[int, float]:
        """Requests and bytes below which another fetch may be opened, see ``is_open``."""
        most, link = self._most_open(), self._link
        horizon = (2 * link.ttfb_s + self._settings.horizon_s) * link.bandwidth_low
        return (most - most // spare, horizon * (1 - 1 / spare)) if spare else (most, horizon)

    def fits(self, window: tuple[int, float]) -> bool:
        """Whether less than a window is open; one to come in and one behind it may always be."""
        fetches = len(self._link.fetches)
        return fetches < window[0] and (fetches < _FEWEST_OPEN or self._link.open_bytes < window[1])

    def opens_at(self, now: float) -> float:
        """Instant at which so little is open that what a plan names may be asked for; infinite where nothing waits.

        Requests side by side end together. Whoever only hears of their ends leaves the link idle for a round trip.
        """
        link, (most, size) = self._link, self.size(spare=SPARE)
        if not _FEWEST_OPEN <= len(link.fetches) < most or link.stalled:
            return inf
        if not any(load.waiting or load.refine for load in self._loads.values()):
            return inf
        return now + link.lead_s(now) + max(0.0, link.open_bytes - size) / max(link.bandwidth, SLOWEST)

    def progress(self, size: int, started: float, ended: float, chunk: ChunkId | None) -> bool:
        """Take in bytes that came."""
        guessed = self._estimates.bandwidth.is_guess
        self._link.progress(size, started, ended, chunk)
        if not guessed:
            return False
        undecided = [load for load in self._loads.values() if load.table.counts[PLANNED]]
        for load in undecided:
            load.is_stale = True  # the first bytes tell more than what the plan rests on
        return bool(undecided)

    def watch(self, now: float) -> None:
        """Notice that the link is silent."""
        self._shared.now = now
        self._link.watch(now, self.stalls_at(now))

    def stalls_at(self, now: float) -> float:
        """Instant after which silence is not waited out, or at which to look again.

        That is the stall time, or sooner the latest instant at which recomputing alone still saves a deadline.
        """
        quiet = self._link.quiet_from
        if quiet == inf:
            return inf
        stalls = self._link.stalls_at
        if now < quiet:
            return min(quiet, stalls)
        late_s = self._deadlines.unstarted_reserve_s  # what plans keep for chunks that are not begun covers it
        starts = (self._deadlines.latest_text_start(load, now) for load in self._loads.values() if load.due < inf)
        return min([stalls, *(max(start, quiet) for start in starts if start > now - late_s)])
