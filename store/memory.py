"""A store in this process's memory."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError
from kvwire.store.base import ObjectStat, clamp_range
from kvwire.store.keys import check_key, check_prefix, entity_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store.base import ObjectReader


class _Object:
    """Bytes and, once asked for, their tag. Neither changes, so holding this is holding the version."""

    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self.data = data

    @cached_property
    def etag(self) -> str:
        return entity_tag(self._key, self.data)

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, end: int | None) -> bytes:
        start, stop = clamp_range(start, end, len(self.data))
        return self.data[start:stop]

    def close(self) -> None:
        pass


class MemoryStore:
    """Objects in a dictionary, for tests, demos and short-lived services."""

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()

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
        return ObjectStat(found.size, found.etag)

    def put(self, key: str, data: bytes) -> None:
        """Keep a copy of the bytes."""
        check_key(key)
        with self._lock:
            self._objects[key] = _Object(key, bytes(data))

    def delete(self, key: str) -> None:
        """Forget the object, if there is one."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys that start with ``prefix`` at the time of the call, in ascending order."""
        check_prefix(prefix)
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix))
        return iter(found)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._objects.clear()

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            msg = f"{key} is not in this memory store"
            raise NotFoundError(msg)
        return found
