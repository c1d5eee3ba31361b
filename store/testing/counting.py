"""A store that counts what is asked of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.store.testing.wrapping import Request, StoreWrapper, T

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store import Data, Store


@dataclass(frozen=True)
class Tally:
    """Number of calls, failed ones included, and of payload bytes that they brought or took along."""

    requests: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.requests + other.requests, self.bytes + other.bytes)


class CountingStore(StoreWrapper):
    """Counts calls and bytes by method and key. ``keys`` counts as ``scan``; a scan's key is its prefix."""

    def __init__(self, inner: Store) -> None:
        """Take over the inner store, and start from nothing."""
        super().__init__(inner)
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], Tally] = {}

    def tallies(self) -> dict[tuple[str, str], Tally]:
        """What was counted, by method and key."""
        with self._lock:
            return dict(self._tallies)

    def tally(self, method: str | None = None, key: str | None = None) -> Tally:
        """The sum over one method or all, and one key or all."""
        wanted = [
            one
            for (a_method, a_key), one in self.tallies().items()
            if method in (None, a_method) and key in (None, a_key)
        ]
        return sum(wanted, Tally())

    def reset(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self._tallies.clear()

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        moved = memoryview(request.data).nbytes
        try:
            result = call(request.data)
            moved += len(result) if isinstance(result, bytes) else 0
            return result
        finally:
            name = request.method, request.key
            with self._lock:
                self._tallies[name] = self._tallies.get(name, Tally()) + Tally(1, moved)
