"""A store in this process's memory."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

from kvwire._forks import lock_of_process
from kvwire.errors import NotFoundError
from kvwire.store.base import Listed, ObjectStat, Store, clamp_range
from kvwire.store.key_kinds import entity_tag
from kvwire.store.keys import check_after, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store.base import Data, ObjectReader


class MemorySnapshot:
    """Bytes and, once asked for, their tag. Neither changes, so holding this is holding the version."""

    def __init__(self, key: str, data: bytes, modified: float) -> None:
        """Keep the content."""
        self._key = key
        self.data = data
        self.modified = modified

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    @cached_property
    def etag(self) -> str:
        """SHA-256, from the key where it carries one."""
        return entity_tag(self._key, self.data)

    def read(self, start: int, end: int | None) -> bytes:
        """Read a range."""
        start, stop = clamp_range(start, end, len(self.data))
        return self.data[start:stop]

    def close(self) -> None:
        """Nothing is held but memory."""


class MemoryStore(Store):
    """Objects in a dictionary, for tests, demos and short-lived services."""

    is_local = True
    is_lasting = False

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[str, MemorySnapshot] = {}
        self._lock = lock_of_process()

    @property
    def url(self) -> str:
        """Always ``memory:``; opening it again gives another, empty store."""
        return "memory:"

    def snapshot(self, key: str) -> ObjectReader:
        """Hold the object as it is now."""
        return self._find(key)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end."""
        return self._find(key).read(start, end)

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag."""
        found = self._find(key)
        return ObjectStat(found.size, found.etag, found.modified)

    def put(self, key: str, data: Data) -> None:
        """Keep a copy of the bytes."""
        check_key(key)
        with self._lock:
            self._objects[key] = MemorySnapshot(key, bytes(data), time.time())

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Keep a copy of the bytes where the version is still the one with this tag; tells whether it did."""
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
            if (found.etag if found else "") != etag:
                return False
            self._objects[key] = MemorySnapshot(key, bytes(data), time.time())
        return True

    def delete(self, key: str) -> None:
        """Forget the object, if there is one."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys start with ``prefix`` and come after ``after`` at the time of the call, in order."""
        check_after(prefix, after)
        with self._lock:
            found = [
                Listed(key, one.size, one.modified)
                for key, one in self._objects.items()
                if key.startswith(prefix) and key > after
            ]
        return iter(sorted(found, key=lambda listed: listed.key))

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._objects.clear()

    def _find(self, key: str) -> MemorySnapshot:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFoundError(f"{key} is not in this memory store")
        return found
