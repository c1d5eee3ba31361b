"""How soon answers begin and how fast bytes come, for estimators and for hedging."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


_SAMPLE_S = 0.005  # long enough to say something about bandwidth, short enough to follow it
_REMEMBERED = 64
_LEAST_SAMPLES = 4  # fewer say nothing about what is usual


class LinkSample(NamedTuple):
    """What was observed since the sample before.

    Bytes are timed between two instants of the meter's clock during which at least one answer was coming in all the
    time; intervals of one meter do not overlap. The piece that opens such a period is left out, because nothing is
    known of the time that it took. 0 timed bytes over some time: the link was silent.

    Attributes:
        first_byte_s: Seconds from sending a request to its first byte; None where no answer began.
        wire_bytes: All bytes received.
        timed_bytes: Bytes that arrived from ``started`` to ``ended``.
        started: Beginning of the interval, in seconds.
        ended: End of the interval, in seconds.
    """

    first_byte_s: float | None
    wire_bytes: int
    timed_bytes: int
    started: float
    ended: float

    @property
    def busy_s(self) -> float:
        """Seconds from ``started`` to ``ended``."""
        return self.ended - self.started


class LinkMeter:
    """Watches all transfers that share one link. Give the same meter to fetchers that run at the same time.

    Attributes:
        pace: What requests over this link usually take.
    """

    def __init__(
        self, on_sample: Callable[[LinkSample], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start idle.

        Args:
            on_sample: Called with each sample on the event loop; it must return quickly.
            clock: Gives seconds.
        """
        self._on_sample = on_sample
        self._clock = clock
        self.pace = Pace()
        self._receiving = 0
        self._first_byte_s: float | None = None
        self._wire_bytes = 0
        self._timed_bytes = 0
        self._started = 0.0
        self._ended = 0.0

    def now(self) -> float:
        """The meter's clock."""
        return self._clock()

    def begin(self) -> Transfer:
        """A request is being sent."""
        return Transfer(self, self._clock())

    def opened(self, size: int, first_byte_s: float, now: float) -> None:
        """A transfer's first piece came in.

        Args:
            size: Bytes of the piece.
            first_byte_s: Seconds since the request was sent.
            now: Instant of the meter's clock.
        """
        if self._receiving == 0:
            self.flush()
            self._started = self._ended = now
        elif self._first_byte_s is not None:
            self.flush()  # one time to first byte for each sample
        self._first_byte_s = first_byte_s
        self._receiving += 1
        if self._receiving == 1:
            self._wire_bytes += size
        else:
            self.received(size, now)

    def received(self, size: int, now: float) -> None:
        """A further piece came in.

        Args:
            size: Bytes of the piece.
            now: Instant of the meter's clock.
        """
        self._wire_bytes += size
        self._timed_bytes += size
        self._ended = now
        if self._ended - self._started >= _SAMPLE_S:
            self.flush()

    def closed(self, *, silent: bool) -> None:
        """A transfer that had begun is over.

        Args:
            silent: Because nothing came any more.
        """
        if silent:
            self._ended = self._clock()
        self._receiving -= 1
        self.flush()

    def flush(self) -> None:
        """Hand over what was observed since the last time, if anything."""
        if not self._wire_bytes and self._ended <= self._started:
            return
        facts = (self._first_byte_s, self._wire_bytes, self._timed_bytes, self._started, self._ended)
        self._first_byte_s, self._wire_bytes, self._timed_bytes, self._started = None, 0, 0, self._ended
        if self._on_sample:
            self._on_sample(LinkSample(*facts))


class Transfer:
    """One request and its answer; made by ``LinkMeter.begin``."""

    def __init__(self, meter: LinkMeter, asked_at: float) -> None:
        """Start waiting for the first byte."""
        self._meter = meter
        self.asked_at = self.last_at = asked_at  # sent, and last heard of, on the meter's clock
        self.first_byte_s: float | None = None
        self.bytes = self.local_bytes = 0  # over the link, and from copies on this side of it

    def received_locally(self, size: int) -> None:
        """Bytes came without crossing the link: they say nothing about it."""
        self.last_at = self._meter.now()
        self.local_bytes += size

    def received(self, size: int) -> None:
        """A piece of the answer came in."""
        self.last_at = now = self._meter.now()
        self.bytes += size
        if self.first_byte_s is None:
            self.first_byte_s = now - self.asked_at
            self._meter.opened(size, self.first_byte_s, now)
        else:
            self._meter.received(size, now)

    def end(self, *, silent: bool = False) -> None:
        """The answer is over, whole or not."""
        if self.first_byte_s is not None:
            self._meter.closed(silent=silent)


class Pace:
    """Latest requests over one link, and how many second requests there were among them."""

    def __init__(self) -> None:
        """Know nothing: nothing is overdue."""
        self._first_byte_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._body_s: deque[float] = deque(maxlen=_REMEMBERED)  # seconds for each byte after the first piece
        self._requests = 0
        self._hedges = 0

    def completed(self, first_byte_s: float, total_s: float, size: int) -> None:
        """Note a request that brought all of its bytes."""
        self._first_byte_s.append(first_byte_s)
        self._body_s.append(max(0.0, total_s - first_byte_s) / max(1, size))
        self._requests += 1

    def expected_s(self, size: int) -> float | None:
        """What a request usually takes."""
        if len(self._first_byte_s) < _LEAST_SAMPLES:
            return None
        return median(self._first_byte_s) + size * median(self._body_s)

    def is_overdue(self, age_s: float, size: int, *, factor: float, least_s: float) -> bool:
        """Whether a request takes longer than usual."""
        if age_s <= least_s:
            return False
        expected_s = self.expected_s(size)
        return expected_s is not None and age_s > factor * expected_s

    def may_hedge(self, share: float) -> bool:
        """Take one second request from the budget."""
        if self._hedges >= max(1.0, share * self._requests):
            return False
        self._hedges += 1
        return True
