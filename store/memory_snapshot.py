"""One version of an object whose bytes are in memory: what rows, pending writes and the memory store hand out."""

from __future__ import annotations

from functools import cached_property

from kvwire.store.base import clamp_range
from kvwire.store.key_kinds import entity_tag


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
