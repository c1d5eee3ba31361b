"""Facts for an estimator of the link: how soon answers begin and how fast bytes come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE_S = 0.005  # long enough to say something about bandwidth, short enough to follow it


@dataclass(frozen=True)
class LinkSample:
    """What was observed since the sample before.

    first_byte_s: from sending a request to its first byte; None where no answer began.
    wire_bytes: all bytes received.
    timed_bytes, started, ended: bytes that arrived between two instants of the meter's clock during which at least
    one answer was coming in all the time; intervals of one meter do not overlap. The piece that opens such a period is
    left out, because nothing is known of the time that it took. 0 bytes over some time: the link was silent.
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
    """Watches all transfers that share one link. Give the same meter to fetchers that run at the same time."""

    def __init__(
        self,
        on_sample: Callable[[LinkSample], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start idle. on_sample is called on the event loop and must return quickly."""
        self._on_sample = on_sample
        self._clock = clock
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

    def opened(self, size: int, first_byte_s: float) -> None:
        """A transfer's first piece came in."""
        if self._receiving == 0:
            self.flush()
            self._started = self._ended = self._clock()
        elif self._first_byte_s is not None:
            self.flush()  # one time to first byte for each sample
        self._first_byte_s = first_byte_s
        self._receiving += 1
        if self._receiving == 1:
            self._wire_bytes += size
        else:
            self.received(size)

    def received(self, size: int) -> None:
        """A further piece came in."""
        self._wire_bytes += size
        self._timed_bytes += size
        self._ended = self._clock()
        if self._ended - self._started >= _SAMPLE_S:
            self.flush()

    def closed(self, *, silent: bool) -> None:
        """A transfer that had begun is over; ``silent``: because nothing came any more."""
        if silent:
            self._ended = self._clock()
        self._receiving -= 1
        self.flush()

    def flush(self) -> None:
        """Hand over what was observed since the last time, if anything."""
        if not self._wire_bytes and self._ended <= self._started:
            return
        sample = LinkSample(self._first_byte_s, self._wire_bytes, self._timed_bytes, self._started, self._ended)
        self._first_byte_s, self._wire_bytes, self._timed_bytes, self._started = None, 0, 0, self._ended
        if self._on_sample:
            self._on_sample(sample)


class Transfer:
    """One request and its answer; made by ``LinkMeter.begin``."""

    def __init__(self, meter: LinkMeter, asked_at: float) -> None:
        """Start waiting for the first byte."""
        self._meter = meter
        self.asked_at = asked_at
        self.first_byte_s: float | None = None

    def received(self, size: int) -> None:
        """A piece of the answer came in."""
        if self.first_byte_s is None:
            self.first_byte_s = self._meter.now() - self.asked_at
            self._meter.opened(size, self.first_byte_s)
        else:
            self._meter.received(size)

    def end(self, *, silent: bool = False) -> None:
        """The answer is over, whole or not; ``silent``: it stalled."""
        if self.first_byte_s is not None:
            self._meter.closed(silent=silent)
