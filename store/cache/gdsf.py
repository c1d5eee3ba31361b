"""Greedy-Dual-Size-Frequency (Cherkasova, HP Labs report HPL-98-69R1)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvwire.store.cache.policy import EvictionPolicy

_ROUND_TRIP_BYTES = 1 << 20


@dataclass
class _Held:
    size: int
    frequency: int
    priority: float
    turn: int  # of its one valid entry in the heap


class GreedyDualSizeFrequency(EvictionPolicy):
    """Gives up the least ``L + frequency * cost / size``, where ``L`` is the priority of the last victim.

    The cost of a miss is its bytes plus ``round_trip_bytes``, what the link could have carried while the request was
    under way; so small objects are worth more for each byte, but not without bound.
    """

    def __init__(self, round_trip_bytes: int = _ROUND_TRIP_BYTES) -> None:
        """Start empty."""
        self._round_trip_bytes = round_trip_bytes
        self._held: dict[bytes, _Held] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._floor = 0.0
        self._turn = 0

    def touched(self, name: bytes) -> None:
        """Count the use and take the floor of the moment."""
        if held := self._held.get(name):
            held.frequency += 1
            self._rank(name, held)

    def added(self, name: bytes, size: int) -> None:
        """Begin with one use, or keep the count and take the new size."""
        held = self._held.setdefault(name, _Held(size, 1, 0.0, 0))
        held.size = size
        self._rank(name, held)

    def removed(self, name: bytes) -> None:
        """Forget it."""
        self._held.pop(name, None)

    def victim(self, excess: int) -> bytes:
        """The one of least priority, which becomes the floor."""
        del excess
        while True:
            priority, turn, name = self._heap[0]
            held = self._held.get(name)
            if held is not None and held.turn == turn:
                self._floor = priority
                return name
            heapq.heappop(self._heap)

    def _rank(self, name: bytes, held: _Held) -> None:
        self._turn += 1
        held.turn = self._turn
        held.priority = self._floor + held.frequency * (1 + self._round_trip_bytes / max(1, held.size))
        heapq.heappush(self._heap, (held.priority, held.turn, name))
        if len(self._heap) > 2 * len(self._held) + 64:  # outdated entries are dropped before they pile up
            self._heap = [(one.priority, one.turn, key) for key, one in self._held.items()]
            heapq.heapify(self._heap)
