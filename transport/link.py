"""A slow link in front of a fast one: bandwidth shared by all requests, and one round trip before each response.

The bucket keeps a debt in seconds, not a stock of packets: a sender who comes late, because sleeps overrun, is let
through until it has caught up. So the rate holds whatever the timer's grain is.
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
    """A link: bytes per second, and seconds of one round trip."""

    bandwidth_bytes_s: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a link that could never deliver."""
        if not (0 < self.bandwidth_bytes_s < math.inf and 0 <= self.rtt_s < math.inf):
            msg = f"a link needs a bandwidth above 0 and a round trip of 0 or more, got {self}"
            raise ArgumentError(msg)


def parse_link(text: str) -> LinkSettings:
    """Read ``50mbit``, ``1gbit``, ``800kbit``, ``6.25MB/s`` or, with a round trip, ``50mbit,20ms``.

    ``bit`` means bits per second, ``B/s`` bytes per second; prefixes are powers of 1000. Raises ArgumentError.
    """
    bandwidth, comma, rtt = text.strip().partition(",")
    size, delay = _SIZE.fullmatch(bandwidth.strip().lower()), _TIME.fullmatch(rtt.strip().lower())
    # After lower-casing "Mb/s" and "MB/s" look alike, and people mean different things by the first: refuse it.
    if size is None or (comma and delay is None) or re.search(r"b/s", bandwidth):
        msg = f"{text!r} is not a link: write for example 50mbit, 6.25MB/s or 50mbit,20ms"
        raise ArgumentError(msg)
    number = float(size[1]) * _FACTORS[size[2]]
    seconds = float(delay[1]) * _SECONDS[delay[2]] if delay else 0.0
    return LinkSettings(number / _BITS if size[3].startswith("bit") else number, seconds)


class EmulatedLink:
    """Delays bytes as a link would. One instance is one link: all requests over it share its bandwidth.

    burst_bytes: most that a delayed sender may catch up on at once; by default what the link carries in 20 ms. An idle
    link saves nothing up: a transfer that starts on it gets the bandwidth and no more.
    clock, sleep: for tests.
    """

    def __init__(
        self,
        bandwidth_bytes_s: float,
        rtt_s: float = 0.0,
        *,
        burst_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Start idle."""
        self.settings = LinkSettings(bandwidth_bytes_s, rtt_s)
        burst = max(_PACKET_BYTES, bandwidth_bytes_s * _CATCH_UP_S) if burst_bytes is None else burst_bytes
        self._credit_s = burst / bandwidth_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._senders = 0
        self._free_at = -math.inf

    @classmethod
    def of(cls, settings: LinkSettings) -> EmulatedLink:
        """A link with these settings."""
        return cls(settings.bandwidth_bytes_s, settings.rtt_s)

    @property
    def piece_bytes(self) -> int:
        """Largest piece to send at once, so that arrivals are spread as on a real link: 10 ms of bandwidth."""
        wanted = int(self.settings.bandwidth_bytes_s * _PIECE_S)
        return max(_PACKET_BYTES, min(_MAX_PIECE_BYTES, wanted))

    def now(self) -> float:
        """The link's clock."""
        return self._clock()

    async def round_trip(self, asked_at: float) -> None:
        """Wait until a round trip has passed since the request was sent."""
        await self._until(asked_at + self.settings.rtt_s)

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Around the pieces of one response: while any is being sent, delays are made up for."""
        if not self._senders:
            self._free_at = max(self._free_at, self._clock())
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1

    async def transmit(self, size: int) -> None:
        """Take ``size`` bytes' time on the link, and return when the last of them would have arrived."""
        self._free_at = max(self._free_at, self._clock() - self._credit_s) + size / self.settings.bandwidth_bytes_s
        await self._until(self._free_at)

    async def _until(self, moment: float) -> None:
        delay = moment - self._clock()
        if delay >= _MIN_SLEEP_S:
            await self._sleep(delay)
