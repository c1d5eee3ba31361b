"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict

from kvwire.store.cache.policy import EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Gives up what was not used for the longest time. One scan through many objects empties it."""

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def touched(self, name: bytes) -> None:
        """Move it to the end."""
        if name in self._order:
            self._order.move_to_end(name)

    def added(self, name: bytes, size: int) -> None:
        """Being added, or growing, is a use."""
        del size
        self._order[name] = None
        self._order.move_to_end(name)

    def removed(self, name: bytes) -> None:
        """Forget it."""
        self._order.pop(name, None)

    def victim(self, excess: int) -> bytes:
        """The first in order."""
        del excess
        return next(iter(self._order))
