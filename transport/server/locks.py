"""Writers of one key wait for each other, so that what a condition was checked on is what is replaced."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class KeyLocks:
    """A lock for each key that is being written; it is forgotten with its last holder."""

    def __init__(self) -> None:
        """Start with none."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """The lock of a key."""
        return self._locks.setdefault(key, asyncio.Lock())

    def __len__(self) -> int:
        """Keys that are being written."""
        return len(self._locks)
