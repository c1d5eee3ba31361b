"""The link that all loads share: open fetches, how much may be open, and whether bytes still come."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from operator import attrgetter
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from .snapshot import SLOWEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.types import ChunkId

    from .estimates import Estimates
    from .settings import ControllerSettings

_GAP_S = 0.02  # drivers report bytes every few milliseconds: a longer gap is silence
_FEWEST_OPEN = 2  # one that comes in and one behind it, so that the link never idles


@dataclass(eq=False, slots=True)
class InflightFetch:
    """One open fetch; ``decode_s``: seconds of its decode among others."""

    chunk: ChunkId
    left: int
    asked: float
    decode_s: float


class Link:
    """Open fetches by chunk, in the order of their requests; ``stalled``: no byte came for so long that it is dead."""

    def __init__(self, estimates: Estimates, settings: ControllerSettings) -> None:
        """Start idle."""
        self._estimates, self._settings = estimates, settings
        self.fetches: dict[ChunkId, InflightFetch] = {}
        self._left = 0  # bytes of all of them
        self._loose = 0  # bytes that came of them
        self._since = 0.0  # the last byte, or the request that ended idleness
        self._flowing = False  # a byte came since then
        self.stalled = False
        self._retry_at, self._rest_s = inf, settings.stall_s
        self._paused_at = -inf  # when the driver last was blocked
        self.now = -inf  # the instant of the event that is being handled

    @property
    def open_bytes(self) -> int:
        """Bytes that are still to come."""
        return max(0, self._left - self._loose)

    @property
    def bandwidth(self) -> float:
        """Expected bytes per second; 0 while the link is dead."""
        return self._share_left * self._estimates.bandwidth.value

    @property
    def bandwidth_low(self) -> float:
        """Bytes per second to rely on; 0 while the link is dead."""
        return self._share_left * self._estimates.bandwidth.low

    def low_over(self, horizon_s: float) -> float:
        """Bytes per second to rely on over so many seconds; 0 while the link is dead."""
        return self._share_left * self._estimates.bandwidth.low_over(horizon_s)

    @property
    def _share_left(self) -> float:
        """Share of the estimates that silence leaves: time in which nothing comes is measured as it passes."""
        if self.stalled or self.now < self.quiet_from:
            return 0.0 if self.stalled else 1.0
        return self._estimates.bandwidth.share_after(self.now - self._silent_from)

    @property
    def ttfb_s(self) -> float:
        """Expected seconds to a request's first byte."""
        return self._estimates.ttfb.value

    # How much may be open.

    @property
    def window(self) -> tuple[int, float]:
        """Requests and bytes below which another fetch may open: two round trips and the horizon at the low rate."""
        return self._settings.max_in_flight, (2 * self.ttfb_s + self._settings.horizon_s) * self.bandwidth_low

    def is_open(self, *, spare: int = 0) -> bool:
        """Whether another fetch may open; with ``spare`` only once that share of the window is free."""
        count, (most, size) = len(self.fetches), self.window
        if spare:
            most, size = most - most // spare, size * (1 - 1 / spare)
        return count < most and (count < _FEWEST_OPEN or self.open_bytes < size)

    def opens_at(self, now: float, spare: int) -> float:
        """When the window should open by itself, with requests that end together; infinite where it waits for none."""
        most, size = self.window
        if self.stalled or not _FEWEST_OPEN <= len(self.fetches) < most - most // spare:
            return inf
        more = max(0.0, self.open_bytes - size * (1 - 1 / spare))
        return now + self.lead_s(now) + more / max(self.bandwidth, SLOWEST)

    # What happens to fetches.

    def ask(self, fetch: InflightFetch) -> None:
        """Note that a fetch was asked for."""
        if not self.fetches:
            self._since, self._flowing, self._loose = fetch.asked, False, 0
        self.fetches[fetch.chunk] = fetch
        self._left += fetch.left

    def drop(self, chunk: ChunkId) -> None:
        """Note that a fetch brings nothing more."""
        if fetch := self.fetches.pop(chunk, None):
            self._left -= fetch.left

    def arrived(self, chunk: ChunkId, now: float) -> None:
        """Note that a fetch has brought what was asked for."""
        if fetch := self.fetches.pop(chunk, None):
            self._alive(now)
            self._left -= fetch.left
            self._loose = max(0, self._loose - fetch.left)

    def first_byte(self, seconds: float, now: float) -> None:
        """Take in a time to first byte, unless it was perhaps spent in a queue behind other answers."""
        if not (isfinite(seconds) and seconds >= 0):
            raise ArgumentError(f"a time to first byte must be a finite number of seconds, at least 0, got {seconds}")
        if not (self.fetches and self._flowing) and now - seconds >= self._paused_at:
            self._estimates.ttfb.add(seconds)

    def progress(self, size: int, started: float, ended: float) -> None:
        """Take in bytes that came."""
        if not isfinite(size):
            raise ArgumentError(f"a transfer needs a finite number of bytes, got {size}")
        self._estimates.bandwidth.add(size, started, ended)
        if size:
            self._alive(ended)
            self._loose += size

    def left(self) -> list[tuple[InflightFetch, int]]:
        """Open fetches, in the order of their requests, with what is left of each, were all answered alike."""
        size, left = self._loose, {}
        for number, fetch in enumerate(sorted(self.fetches.values(), key=attrgetter("left"))):
            part = min(fetch.left, size // (len(self.fetches) - number))
            size -= part
            left[fetch.chunk] = fetch.left - part
        return [(fetch, left[chunk]) for chunk, fetch in self.fetches.items()]

    def arrivals(self, now: float) -> Iterator[tuple[ChunkId, float]]:
        """Expect the arrivals of all open fetches, in seconds from now."""
        ahead, rate = 0, max(self.bandwidth, SLOWEST)
        lead_s = self.lead_s(now) if self.bandwidth > 0 else inf
        for fetch, left in self.left():
            ahead += left
            yield fetch.chunk, lead_s + ahead / rate

    # Silence.

    def _alive(self, now: float) -> None:
        self._since = max(self._since, now)
        self._flowing, self.stalled, self._rest_s = True, False, self._settings.stall_s

    def paused(self, seconds: float, now: float) -> None:
        """Note that the driver was blocked for a while: that is no silence."""
        self._paused_at = now
        self._since = max(self._since, min(self._since + seconds, now))

    def stall(self, now: float) -> None:
        """Take the link for dead; nothing is learnt from that about the link that comes back."""
        self.stalled = True
        # Twice as long each time: every try costs the chunks that it asks for.
        self._retry_at = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, self._settings.patience_s)

    def retry(self, now: float) -> None:
        """Try a dead link again once it is idle and has rested: only another fetch can tell."""
        if self.stalled and not self.fetches and now >= self._retry_at:
            self.stalled = False

    @property
    def _silent_from(self) -> float:
        return self._since if self._flowing else self._since + self.ttfb_s

    @property
    def stalls_at(self) -> float:
        """Instant at which the link counts as dead unless a byte comes; infinite where none is awaited."""
        return self._silent_from + self._settings.stall_s if self.fetches and not self.stalled else inf

    @property
    def quiet_from(self) -> float:
        """Instant from which on silence is more than a gap between reports; infinite where no byte is awaited."""
        if not self.fetches or self.stalled:
            return inf
        spread_s = 0.0 if self._flowing else self._estimates.ttfb.high - self.ttfb_s
        return self._silent_from + _GAP_S + spread_s

    def waited_s(self, now: float) -> float:
        """Seconds since the last byte, or since the request that ended idleness; 0 where nothing is open."""
        return max(0.0, now - self._since) if self.fetches else 0.0

    def lead_s(self, now: float) -> float:
        """Seconds until the link can deliver the next byte."""
        if not self.fetches:
            return self.ttfb_s
        return 0.0 if self._flowing else max(0.0, self.ttfb_s - (now - self._since))
