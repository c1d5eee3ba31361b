"""What a policy of eviction is, and the policies by name."""

from __future__ import annotations

from typing import Protocol

from kvwire.errors import ArgumentError


class EvictionPolicy(Protocol):
    """Decides which object a tier gives up. It holds names and sizes only and is called under the tier's lock.

    A tier first adds what it would like to keep and asks for victims while it holds too much; an object that is not
    worth its room is its own victim, which is how admission is refused.
    """

    def touched(self, name: bytes) -> None:
        """An object was used, whether it is held or not."""
        ...

    def added(self, name: bytes, size: int) -> None:
        """An object is held now with ``size`` bytes: it is new, or its size has changed."""
        ...

    def removed(self, name: bytes) -> None:
        """An object is not held any more; one that never was is no error."""
        ...

    def victim(self, excess: int) -> bytes:
        """A held object to give up next; ``excess``: bytes that the tier must lose. Asked only while any is held."""
        ...


POLICIES = ("gdsf", "lru", "tinylfu")
"""Names that ``make_policy`` knows."""


def make_policy(name: str, budget_bytes: int) -> EvictionPolicy:
    """A fresh policy for a tier of that many bytes. Raises ArgumentError for any other name."""
    from kvwire.store.cache.gdsf import GreedyDualSizeFrequency
    from kvwire.store.cache.lru import LeastRecentlyUsed
    from kvwire.store.cache.tinylfu import WindowTinyLfu

    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "tinylfu":
            return WindowTinyLfu(budget_bytes)
        case "gdsf":
            return GreedyDualSizeFrequency()
    msg = f"{name!r} is no policy of eviction: use one of {', '.join(POLICIES)}"
    raise ArgumentError(msg)
