"""A store in this process's memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError
from kvwire.store.base import ObjectStat, clamp_range
from kvwire.store.keys import check_key, check_prefix, entity_tag

if TYPE_CHECKING:
    from collections.abc import Iterator


class _BytesReader:
    """Bytes never change, so holding them is holding the version."""

    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def etag(self) -> str:
        return entity_tag(self._key, self._data)

    def read(self, start: int, end: int) -> bytes:
        start, stop = clamp_range(start, end, len(self._data))
        return self._data[start:stop]

    def close(self) -> None:
        self._data = b""


class MemoryStore:
    """Objects in a dictionary, for tests, demos and short-lived services."""

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Always ``memory:``; opening it again gives another, empty store."""
        return "memory:"

    def snapshot(self, key: str) -> _BytesReader:
        """Hold the object as it is now."""
        return _BytesReader(key, self._find(key))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end."""
        data = self._find(key)
        start, stop = clamp_range(start, end, len(data))
        return data[start:stop]

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag."""
        data = self._find(key)
        return ObjectStat(len(data), entity_tag(key, data))

    def put(self, key: str, data: bytes) -> None:
        """Keep a copy of the bytes."""
        check_key(key)
        with self._lock:
            self._objects[key] = bytes(data)

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

    def _find(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            msg = f"{key} is not in this memory store"
            raise NotFoundError(msg)
        return data
