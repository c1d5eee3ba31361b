"""What steering itself takes: the thread of a driver hears of one event after another, and is busy with each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from .. import events as ev

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import ChunkId

    from .flows import Flow


@dataclass(frozen=True, kw_only=True)
class Steering:
    """Seconds for which a driver's thread is busy, so that instructions come later and other events wait.

    Attributes:
        event_s: With each event, but for first bytes, which are only noted.
        decided_s: With each event besides that leads to instructions: most of them are plans.
        header_s: With each header besides, before the controller hears of it: opening it.
        request_s: With each request besides: sending it and taking its answer in.
    """

    event_s: float = 0.0
    decided_s: float = 0.0
    header_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse times that cannot be."""
        figures = (self.event_s, self.decided_s, self.header_s, self.request_s)
        if not all(isfinite(figure) and figure >= 0 for figure in figures):
            raise ArgumentError(f"steering takes finite times of at least 0 s, got {self}")

    def delays(self, event: ev.Event, instructions: Sequence[ev.Instruction]) -> list[float]:
        """Work out what one event takes."""
        decided = 0.0 if isinstance(event, ev.FirstByte) else self.event_s
        decided += self.decided_s if instructions else 0.0
        requests = accumulate((isinstance(each, ev.Fetch) for each in instructions), initial=0)
        return [decided + self.request_s * number for number in requests]


FREE = Steering()
"""Nothing takes any time."""


class Inbox:
    """Events that have happened and that the driver has not heard of; first in, first out."""

    def __init__(self) -> None:
        """Start empty and free."""
        self.free_at = 0.0  # instant from which on the driver can hear of the next one
        self._waiting: deque[tuple[ev.Event, float, Flow | None]] = deque()
        self._is_opened = False  # the header that the first one tells of

    def __len__(self) -> int:
        """Number of events that wait."""
        return len(self._waiting)

    def put(self, event: ev.Event, now: float, flow: Flow | None) -> None:
        """Add an event."""
        self._waiting.append((event, now, flow))

    def drop(self, chunk: ChunkId) -> None:
        """Forget the end of a fetch that was cancelled before the driver heard of it."""
        self._waiting = deque(each for each in self._waiting if each[2] is None or each[2].fetch.chunk != chunk)

    def take(self, now: float, header_s: float = 0.0) -> tuple[ev.Event, Flow | None] | None:
        """Take the next event out; to whom decodes report, their lanes are busy until then."""
        if not self._waiting or now < self.free_at:
            return None
        if header_s and isinstance(self._waiting[0][0], ev.IndexKnown) and not self._is_opened:
            self._is_opened, self.free_at = True, now + header_s
            return None
        self._is_opened = False
        event, happened, flow = self._waiting.popleft()
        if isinstance(event, ev.DecodeDone):
            event = replace(event, seconds=event.seconds + now - happened)
        return event, flow
