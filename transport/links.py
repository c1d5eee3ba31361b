"""A slow link in front of a fast one: bandwidth shared by all requests, and one round trip before each response.

The bucket keeps a debt, not a stock of packets: a sender who comes late, because sleeps overrun, is let through until
it has caught up. So the rate holds whatever the timer's grain is. The debt is kept as a place on the curve of the bytes
that the link has carried by each instant, so that it stays right where the rate changes.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmg]?)(bit(?:/s|ps)?|b/s)")
_TIME = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|ms|s)")
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = 8
_MIN_SLEEP_S = 0.001  # shorter debts wait for the next piece: the event loop's timer has this grain
_PACKET_BYTES = 1500
_PIECE_S = 0.01
_MAX_PIECE_BYTES = 256 * 1024
_CATCH_UP_S = 0.02  # longest delay of a sender that is made up for, by default


@dataclass(frozen=True)
class LinkSettings:
    """A link.

    Attributes:
        bandwidth_bytes_s: Bytes per second.
        rtt_s: Seconds of one round trip.
    """

    bandwidth_bytes_s: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a link that could never deliver."""
        if not (0 < self.bandwidth_bytes_s < math.inf and 0 <= self.rtt_s < math.inf):
            raise ArgumentError(f"a link needs a bandwidth above 0 and a round trip of 0 or more, got {self}")


def parse_link(text: str) -> LinkSettings:
    """Read ``50mbit``, ``1gbit``, ``800kbit``, ``6.25MB/s`` or, with a round trip, ``50mbit,20ms``.

    ``bit`` means bits per second, ``B/s`` bytes per second; prefixes are powers of 1000.

    Args:
        text: The link in one of these forms.

    Returns:
        The link.

    Raises:
        ArgumentError: The text is no link.
    """
    bandwidth, comma, rtt = text.strip().partition(",")
    size, delay = _SIZE.fullmatch(bandwidth.strip().lower()), _TIME.fullmatch(rtt.strip().lower())
    # After lower-casing "Mb/s" and "MB/s" look alike, and people mean different things by the first: refuse it.
    if size is None or (comma and delay is None) or re.search(r"b/s", bandwidth):
        raise ArgumentError(f"{text!r} is not a link: write for example 50mbit, 6.25MB/s or 50mbit,20ms")
    number = float(size[1]) * _FACTORS[size[2]]
    seconds = float(delay[1]) * _SECONDS[delay[2]] if delay else 0.0
    return LinkSettings(number / _BITS if size[3].startswith("bit") else number, seconds)


RateSchedule = RateTrace
"""The transport's name for the rates that an emulated link follows."""


class EmulatedLink:
    """Delays bytes as a link would. One instance is one link: all requests over it share its bandwidth."""

    def __init__(
        self,
        bandwidth: float | RateTrace,
        rtt_s: float = 0.0,
        *,
        burst_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Start idle.

        Args:
            bandwidth: Bytes per second, or a schedule of them, which starts with the first request or with ``begin``.
            rtt_s: Seconds of a round trip.
            burst_bytes: Most that a delayed sender may catch up on at once; by default what the link carries in 20 ms.
                An idle link saves nothing up: a transfer that starts on it gets the bandwidth and no more.
            clock: For tests.
            sleep: For tests.

        Raises:
            ArgumentError: The link could never deliver.
        """
        if not isinstance(bandwidth, RateTrace):
            bandwidth = RateTrace((0.0,), (LinkSettings(bandwidth, rtt_s).bandwidth_bytes_s,))
        if not bandwidth.delivers:
            msg = "an emulated link must not stay at 0: let its schedule repeat or end with a rate above 0"
            raise ArgumentError(msg)
        self._schedule = bandwidth
        self._rtt_s = LinkSettings(bandwidth.slowest, rtt_s).rtt_s
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._sleep = sleep
        self._senders = 0
        self._began: float | None = None
        self._sent = 0.0  # bytes, on the schedule's curve: those that were let pass and those that were never sent

    @classmethod
    def of(cls, settings: LinkSettings) -> EmulatedLink:
        """Make a link with these settings.

        Args:
            settings: Bandwidth and round trip.

        Returns:
            The link, idle.
        """
        return cls(settings.bandwidth_bytes_s, settings.rtt_s)

    @property
    def piece_bytes(self) -> int:
        """Largest piece to send at once, so that arrivals are spread as on a real link: 10 ms of the lowest rate."""
        wanted = int(self._schedule.slowest * _PIECE_S)
        return max(_PACKET_BYTES, min(_MAX_PIECE_BYTES, wanted))

    def now(self) -> float:
        """The link's clock."""
        return self._clock()

    def begin(self) -> None:
        """Start the schedule now, again where it runs already.

        Raises:
            ArgumentError: A response is being sent.
        """
        if self._senders:
            raise ArgumentError("a link cannot begin anew while it carries a response: begin before the first request")
        self._began, self._sent = self._clock(), 0.0

    async def round_trip(self, asked_at: float) -> None:
        """Wait until a round trip has passed since the request was sent.

        Args:
            asked_at: When it was sent, on the link's clock.
        """
        if self._began is None:
            self._began = asked_at
        await self._until(asked_at + self._rtt_s)

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Around the pieces of one response: while any is being sent, delays are made up for."""
        if not self._senders:
            began = self._beginning()
            self._sent = max(self._sent, self._schedule.bytes_by(self._clock() - began))
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1

    async def transmit(self, size: int) -> None:
        """Take the bytes' time on the link, and return when the last of them would have arrived.

        Args:
            size: Bytes.
        """
        began = self._beginning()
        self._sent = max(self._sent, self._caught_up(self._clock() - began)) + size
        await self._until(began + self._schedule.moment_of(self._sent))

    def _beginning(self) -> float:
        if self._began is None:
            self._began = self._clock()
        return self._began

    def _caught_up(self, elapsed: float) -> float:
        """Least place on the curve that a sender is put at, however late it is."""
        carried = self._schedule.bytes_by(elapsed)
        if self._burst_bytes is not None:
            return carried - self._burst_bytes
        return min(carried - _PACKET_BYTES, self._schedule.bytes_by(elapsed - _CATCH_UP_S))

    async def _until(self, moment: float) -> None:
        delay = moment - self._clock()
        if delay >= _MIN_SLEEP_S:
            await self._sleep(delay)
