"""Answers under way on a simulated link, and which of them the link carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..events import Fetch

DONE_BYTES = 0.5
"""An answer with less to come is here: rounding leaves so much."""
_BURST_BYTES = 14_600  # ten packets, the initial window of RFC 6928


@dataclass(eq=False)
class Flow:
    """One answer."""

    fetch: Fetch  # that is answered
    asked: float  # instant of the request
    begins: float  # instant at which the round trip ends
    left: float  # bytes still to come
    fails_at: float  # at how many bytes still to come it breaks off, below 0 for never
    corrupt: bool  # it cannot be decoded
    begun: bool = False  # the round trip is over
    is_heard: bool = False  # so is the wait behind others

    @property
    def burst(self) -> float:
        """Bytes of the first packets that are still to come."""
        return self.left - max(0, self.fetch.bytes - _BURST_BYTES)

    @property
    def stretch(self) -> float:
        """Bytes until it ends, breaks off or has brought its first packets."""
        rest = self.left - max(self.fails_at, 0.0)
        return min(rest, self.burst) if self.burst > DONE_BYTES else rest


def served(flows: Iterable[Flow]) -> list[Flow]:
    """Who has the link, in equal shares: the first of those whose first packets wait, and all past theirs."""
    begun = [flow for flow in flows if flow.begun]
    first = next((flow for flow in begun if flow.burst > DONE_BYTES), None)
    return [flow for flow in begun if flow is first or flow.burst <= DONE_BYTES]
