"""Facts for an estimator of the link: how soon answers begin and how fast bytes come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class LinkSample:
    """What was observed since the sample before.

    first_byte_s: from sending a request to its first byte; None where no answer began.
    wire_bytes: all bytes received. timed_bytes, busy_s: for a bandwidth, divide the first by the second. busy_s is
    wall time during which at least one answer was coming in; the piece that opens such a period is left out of
    timed_bytes, because nothing is known of the time that it took.
    """

    first_byte_s: float | None
    wire_bytes: int
    timed_bytes: int
    busy_s: float


class LinkMeter:
    """Watches all transfers that share one link. Give the same meter to fetchers that run at the same time."""

    def __init__(
        self,
        on_sample: Callable[[LinkSample], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_sample is called on the event loop and must return quickly."""
        self._on_sample = on_sample
        self._clock = clock
        self._receiving = 0
        self._mark = 0.0
        self._first_byte_s: float | None = None
        self._wire_bytes = 0
        self._timed_bytes = 0
        self._busy_s = 0.0

    def now(self) -> float:
        """The meter's clock."""
        return self._clock()

    def begin(self) -> Transfer:
        """A request is being sent."""
        return Transfer(self, self._clock())

    def flush(self) -> None:
        """Hand over what was observed since the last time, if anything."""
        if not self._wire_bytes:
            return
        sample = LinkSample(self._first_byte_s, self._wire_bytes, self._timed_bytes, self._busy_s)
        self._first_byte_s, self._wire_bytes, self._timed_bytes, self._busy_s = None, 0, 0, 0.0
        if self._on_sample:
            self._on_sample(sample)

    def _began(self, first_byte_s: float) -> None:
        if self._first_byte_s is not None:
            self.flush()  # one time to first byte for each sample
        self._first_byte_s = first_byte_s

    def _received(self, size: int, *, opens: bool) -> None:
        now = self._clock()
        self._wire_bytes += size
        if opens:
            self._receiving += 1
        if not (opens and self._receiving == 1):
            self._timed_bytes += size
            self._busy_s += now - self._mark
        self._mark = now

    def _ended(self) -> None:
        self._receiving -= 1


class Transfer:
    """One request and its answer."""

    def __init__(self, meter: LinkMeter, asked_at: float) -> None:
        """Use ``LinkMeter.begin``."""
        self._meter = meter
        self.asked_at = asked_at
        self.first_byte_s: float | None = None

    def received(self, size: int) -> None:
        """A piece of the answer came in."""
        opens = self.first_byte_s is None
        if self.first_byte_s is None:
            self.first_byte_s = self._meter.now() - self.asked_at
            self._meter._began(self.first_byte_s)  # noqa: SLF001 - the two classes are one thing seen from two sides
        self._meter._received(size, opens=opens)  # noqa: SLF001

    def end(self) -> None:
        """The answer is over, whole or not."""
        if self.first_byte_s is not None:
            self._meter._ended()  # noqa: SLF001
        self._meter.flush()
