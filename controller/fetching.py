"""Fetches that plans name: when they open."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from .chunk_table import FETCHING, PLANNED, READY, REFINING
from .snapshot import SLOWEST
from .window import SPARE

if TYPE_CHECKING:
    from . import events as ev
    from .deadlines import Deadlines
    from .load import Load
    from .planning import Planner
    from .resources import Resources
    from .window import Window


class Fetching:
    """Gives the link something to do."""

    def __init__(self, shared: Resources, deadlines: Deadlines, window: Window, planner: Planner) -> None:
        """Start idle."""
        self._shared, self._deadlines, self._window, self._planner = shared, deadlines, window, planner
        self._settings, self._loads = shared.settings, shared.loads
        self._policy, self._link = shared.policy, shared.link

    def fetch(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the fetches that the plan wants next; several at a time where many are open and nobody is in a hurry."""
        if not self._window.is_open(spare=SPARE if load.due == inf and len(self._loads) == 1 else 0):
            return
        if now < self.waits_until(load):
            return  # likewise: what is fetched of a document cuts short the pass over it
        self._planner.refresh(load, now)
        if load.refused_s:
            return
        if load.waiting:
            self.refine(load, now, out)  # where a plan names both, what is valid goes first
        table, window, memory = load.table, self._window.size(), self._settings.memory_bytes
        until = now + self._settings.patience_s
        while load.waiting and self._window.fits(window):
            at, level = load.waiting[0]
            if table.state[at] != PLANNED or table.top[at] < level:
                load.waiting.popleft()
                continue
            size = table.sizes[level][at]
            if self._shared.held + size > memory and not self._shared.make_room(load, size, out):
                return
            load.waiting.popleft()
            doc, chunk = load.place(at)
            doc.reasons[chunk] = load.reason(at)
            table.move(at, FETCHING)
            self._shared.ask(load, (doc, chunk), 0, level, until, now, out)
            load.plan_bytes = max(0, load.plan_bytes - size)

    def refine(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the refinements that the plan names."""
        if not load.refine:
            return
        cut, table = self._deadlines.handover_at(load), load.table
        while load.refine and now < cut and self._window.is_open():
            at, level = load.refine.popleft()
            valid = table.valid_level[at]
            more = table.sizes[level][at] - (table.sizes[valid][at] if valid >= 0 else 0)
            usable = table.state[at] == READY and table.held[at] and valid < level <= table.top[at]
            if usable and self._shared.held + more <= self._settings.memory_bytes:
                if table.counts[FETCHING] and not self._leaves_time(load, more, now):
                    load.refine.appendleft((at, level))
                    return
                doc, chunk = load.place(at)
                doc.move(chunk, REFINING)
                self._shared.ask(load, (doc, chunk), valid + 1, level, cut, now, out)

    def _leaves_time(self, load: Load, size: int, now: float) -> bool:
        """Whether all that is open comes before a load's cut with more bytes besides: requests share the link."""
        low = max(self._link.bandwidth_low, SLOWEST)
        return now + self._link.lead_s(now) + (self._link.open_bytes + size) / low <= self._deadlines.handover_at(load)

    def waits_until(self, load: Load) -> float:
        """Instant until which the link waits for indexes that are about to come, too, where there is a deadline."""
        if load.is_known or load.due == inf or not (load.docs and self._policy.preemptible):
            return -inf
        return load.known_since + min(self._link.ttfb_s, self._settings.replan_s)
