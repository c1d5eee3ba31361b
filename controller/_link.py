"""The link of a load: open fetches in the order of their requests, and whether bytes still come."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ._board import ChunkState

if TYPE_CHECKING:
    from kvwire.types import ChunkId

    from ._board import Card
    from .estimators import BandwidthEstimator, TtfbEstimator
    from .request import InFlight


class Link:
    """Open fetches and what the estimators make of them. Times are the session's, in seconds."""

    def __init__(self, bandwidth: BandwidthEstimator, ttfb: TtfbEstimator, stall_s: float) -> None:
        """Start idle."""
        self._bandwidth = bandwidth
        self._ttfb = ttfb
        self._stall_s = stall_s
        self._open: list[Card] = []
        self._since = 0.0  # the last byte, or the request that ended idleness
        self._flowing = False  # a byte came since then
        self.stalled = False

    @property
    def open_count(self) -> int:
        """Fetches that are open."""
        return len(self._open)

    @property
    def bandwidth(self) -> float:
        """Bytes per second to plan with; 0 while the link is silent."""
        return 0.0 if self.stalled else self._bandwidth.low

    @property
    def ttfb_s(self) -> float:
        """Expected seconds to a request's first byte."""
        return self._ttfb.value

    def fetch(self, card: Card, level: int, now: float) -> None:
        """Note that a fetch was asked for."""
        card.move(ChunkState.FETCHING)
        card.level = level
        card.bytes_left = card.size
        if not self._open:
            self._since, self._flowing = now, False
        self._open.append(card)

    def close(self, card: Card) -> None:
        """Note that a fetch ended, one way or another."""
        self._open = [other for other in self._open if other is not card]

    def first_byte(self, seconds: float) -> None:
        """Take in a time to first byte."""
        self._ttfb.add(seconds)

    def progress(self, size: int, started: float, ended: float, chunk: ChunkId | None) -> None:
        """Take in bytes that came."""
        self._bandwidth.add(size, started, ended)
        if size:
            self.alive(ended)
        card = next((card for card in self._open if chunk is None or card.chunk == chunk), None)
        if card is not None:
            card.bytes_left = max(0, card.bytes_left - size)

    def alive(self, now: float) -> None:
        """Note that the link delivers."""
        self._since = max(self._since, now)
        self._flowing = True
        self.stalled = False

    def watch(self, now: float) -> None:
        """Notice silence: it lowers the estimate and, after ``stall_s``, marks the link as dead."""
        silent_from = self._since if self._flowing else self._since + self._ttfb.value
        if self._open and now - silent_from >= self._stall_s:
            self._bandwidth.add(0, silent_from, now)
            self.stalled = True

    def lead_s(self, now: float) -> float:
        """Seconds until the link can deliver the next byte."""
        if not self._open:
            return self._ttfb.value
        return 0.0 if self._flowing else max(0.0, self._ttfb.value - (now - self._since))

    def in_flight(self) -> tuple[InFlight, ...]:
        """Open fetches as the planner sees them."""
        return tuple(card.as_flight() for card in self._open)

    def arrival_s(self, card: Card, now: float) -> float:
        """Seconds until an open fetch should have arrived; infinite on a dead link."""
        if self.bandwidth <= 0:
            return inf
        ahead = self._open[: self._open.index(card) + 1]
        return self.lead_s(now) + sum(other.bytes_left for other in ahead) / self.bandwidth
