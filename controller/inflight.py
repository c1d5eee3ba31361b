"""The link that all loads share: open fetches in the order of their requests, and whether bytes still come."""

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

_MOST_DOUBLINGS = 6
_GAP_S = 0.02  # between reports of a link that flows, and a little more


@dataclass(eq=False, slots=True)
class InflightFetch:
    """One open fetch.

    Attributes:
        chunk: Which chunk.
        size: Bytes of it.
        left: Bytes that are still to come.
        asked: Instant of the request.
        until: Instant after which it is of no use.
        decode_s: What decoding will take then, among others.
        last_s: What it will take beyond that if nothing comes with it.
    """

    chunk: ChunkId
    size: int
    left: int
    asked: float
    until: float
    decode_s: float
    last_s: float = 0.0


class Link:
    """Open fetches and what the estimators make of them. Times are the controller's, in seconds.

    Attributes:
        fetches: By chunk, in the order of their requests; ``credit`` brings what is left of them up to date.
        stalled: No byte came for so long that the link counts as dead.
    """

    def __init__(self, estimates: Estimates, stall_s: float) -> None:
        """Start idle."""
        self._estimates = estimates
        self._stall_s = stall_s
        self.fetches: dict[ChunkId, InflightFetch] = {}
        self._left = 0  # bytes of them that were not credited
        self._loose = 0  # bytes that came, of which nobody knows whose they are
        self._since = 0.0  # the last byte, or the request that ended idleness
        self._flowing = False  # a byte came since then
        self._silences = 0  # that are over
        self.stalled = False
        self._stalls = 0  # in a row, without a byte in between
        self._retry_at = inf
        self._paused_at = -inf  # when nobody had listened for a while

    @property
    def open_bytes(self) -> int:
        """Bytes that are still to come."""
        return max(0, self._left - self._loose)

    @property
    def condition(self) -> tuple[int, int, bool, bool, bool]:
        """How often it was measured and was silent, whether anything is open, it flows, and it counts as dead."""
        return self._estimates.bandwidth.samples, self._silences, bool(self.fetches), self._flowing, self.stalled

    @property
    def bandwidth(self) -> float:
        """Expected bytes per second; 0 while the link is silent."""
        return 0.0 if self.stalled else self._estimates.bandwidth.value

    @property
    def bandwidth_low(self) -> float:
        """Bytes per second to rely on; 0 while the link is silent."""
        return 0.0 if self.stalled else self._estimates.bandwidth.low

    def low_over(self, horizon_s: float) -> float:
        """Bytes per second to rely on over so many seconds; 0 while the link is silent."""
        return 0.0 if self.stalled else self._estimates.bandwidth.low_over(horizon_s)

    def risk(self, horizon_s: float) -> float:
        """Share of times at which the link gives less than half of what is expected for so many seconds."""
        return self._estimates.bandwidth.horizons.risk(horizon_s)

    @property
    def ttfb_s(self) -> float:
        """Expected seconds to a request's first byte."""
        return self._estimates.ttfb.value

    def ask(self, fetch: InflightFetch) -> None:
        """Note that a fetch was asked for."""
        if not self.fetches:
            self._since, self._flowing = fetch.asked, False
            self._loose = 0
        self.fetches[fetch.chunk] = fetch
        self._left += fetch.left

    def drop(self, chunk: ChunkId, now: float) -> None:
        """Note that a fetch brings nothing."""
        if chunk in self.fetches:
            self.credit(now)
            self._left -= self.fetches.pop(chunk).left

    def arrived(self, chunk: ChunkId, now: float) -> None:
        """Note that a fetch has brought what was asked for."""
        fetch = self.fetches.pop(chunk, None)
        if fetch is None:
            return
        self.alive(now)
        self._left -= fetch.left
        self._loose -= fetch.left
        if self._loose < 0:
            self._return(-self._loose)
            self._loose = 0

    def first_byte(self, seconds: float, now: float) -> bool:
        """Take in a time to first byte, unless it may have been spent in a queue behind what was asked for before."""
        if not (isfinite(seconds) and seconds >= 0):
            msg = f"a time to first byte must be a finite number of seconds, at least 0, got {seconds}"
            raise ArgumentError(msg)
        counts = not (self.fetches and self._flowing) and now - seconds >= self._paused_at
        if counts:
            self._estimates.ttfb.add(seconds)
        return counts

    def progress(self, size: int, started: float, ended: float, chunk: ChunkId | None) -> None:
        """Take in bytes that came."""
        if not isfinite(size):
            msg = f"a transfer needs a finite number of bytes, got {size}"
            raise ArgumentError(msg)
        self._estimates.bandwidth.add(size, started, ended)
        if not size:
            return
        self.alive(ended)
        if chunk is None:
            self._loose += size
        elif fetch := self.fetches.get(chunk):
            self._take(fetch, size)

    def _take(self, fetch: InflightFetch, size: int) -> int:
        taken = min(size, fetch.left)
        fetch.left -= taken
        self._left -= taken
        return taken

    def credit(self, now: float) -> None:
        """Share bytes of which nobody knows whose they are: equally among requests whose first byte can have come."""
        size, self._loose = self._loose, 0
        if not size:
            return
        ttfb_s = self._estimates.ttfb.value
        begun = [each for each in self.fetches.values() if each.left and now - each.asked >= ttfb_s]
        sharing = sorted(begun or self.fetches.values(), key=attrgetter("left"))
        for at, fetch in enumerate(sharing):
            size -= self._take(fetch, size // (len(sharing) - at))

    def _return(self, size: int) -> None:
        """Bytes that were credited to others belonged to a fetch that has arrived."""
        for fetch in self.fetches.values():
            given = min(size, fetch.size - fetch.left)
            fetch.left += given
            self._left += given
            size -= given

    def alive(self, now: float) -> None:
        """Note that the link delivers."""
        self._silences += now > self._since + _GAP_S
        self._since = max(self._since, now)
        self._flowing, self.stalled, self._stalls = True, False, 0

    def paused(self, seconds: float, now: float) -> None:
        """Note that nobody has listened for a while: that is no silence."""
        self._paused_at = now
        self._since = max(self._since, min(self._since + seconds, now))

    def watch(self, now: float, until: float) -> None:
        """Notice silence: from some instant on it marks the link as dead.

        It is no measurement: what ends a silence reports it with its bytes, and of a link that died nothing is learnt
        about the one that comes back.
        """
        if now >= until:
            self.stalled = True
            # Longer each time: every try costs the chunks that it asks for.
            self._retry_at = now + self._stall_s * 2**self._stalls
            self._stalls = min(self._stalls + 1, _MOST_DOUBLINGS)

    def retry(self, now: float) -> None:
        """Take a dead link for what it was once it is idle and has rested: only another fetch can tell."""
        if self.stalled and not self.fetches and now >= self._retry_at:
            self.stalled = False

    @property
    def _silent_from(self) -> float:
        return self._since if self._flowing else self._since + self._estimates.ttfb.value

    @property
    def stalls_at(self) -> float:
        """Instant at which the link counts as dead unless a byte comes; infinite where none is awaited."""
        return self._silent_from + self._stall_s if self.fetches and not self.stalled else inf

    @property
    def quiet_from(self) -> float:
        """Instant from which on silence is more than a pause; infinite where no byte is awaited."""
        if not self.fetches or self.stalled:
            return inf
        spread_s = 0.0 if self._flowing else self._estimates.ttfb.high - self._estimates.ttfb.value
        return self._silent_from + _GAP_S + spread_s

    def waited_s(self, now: float) -> float:
        """Seconds since the first of the requests that an idle link waits for; 0 where there is none."""
        return max(0.0, now - self._since) if self.fetches else 0.0

    def lead_s(self, now: float) -> float:
        """Seconds until the link can deliver the next byte."""
        if not self.fetches:
            return self._estimates.ttfb.value
        return 0.0 if self._flowing else max(0.0, self._estimates.ttfb.value - (now - self._since))

    def arrivals(self, now: float) -> Iterator[tuple[ChunkId, float]]:
        """Expect the arrivals of all open fetches."""
        self.credit(now)
        ahead, lead_s, rate = 0, self.lead_s(now), max(self.bandwidth, SLOWEST)
        if self.bandwidth <= 0:
            lead_s = inf
        for fetch in self.fetches.values():
            ahead += fetch.left
            yield fetch.chunk, lead_s + ahead / rate

    def arrival_s(self, chunk: ChunkId, now: float) -> float:
        """Expect the arrival of an open fetch."""
        return next((seconds for each, seconds in self.arrivals(now) if each == chunk), inf)
