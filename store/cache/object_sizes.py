"""Lengths of objects, and how far each is to be believed. No locks of its own: the cache calls it under its lock.

A length is *stated* where the remote itself told it (``stat``, ``Content-Range``), and *told* where it is only
remembered: by a file of an earlier process, or for long. What is told never ends a read without asking the remote,
unless the remote cannot be asked. A short answer says nothing: it may be a fault.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from dataclasses import dataclass

_MOST = 1 << 16
TRUST_S = 30.0
"""How long a stated length is not asked for again by reads that end at it and wanted more, in seconds."""


@dataclass(frozen=True)
class _Size:
    bytes: int
    stated_at: float | None


class ObjectSizes:
    """Lengths by the objects' names; the oldest go where there are too many."""

    def __init__(self) -> None:
        """Know none."""
        self._sizes: OrderedDict[bytes, _Size] = OrderedDict()

    def stated(self, name: bytes, within_s: float = math.inf) -> int | None:
        """What the remote has said."""
        found = self._sizes.get(name)
        if found is None or found.stated_at is None or time.monotonic() - found.stated_at > within_s:
            return None
        return found.bytes

    def state(self, name: bytes, size: int | None) -> None:
        """Hear from the remote."""
        if size is not None:
            self._set(name, _Size(size, time.monotonic()))

    def tell(self, name: bytes, size: int | None) -> None:
        """Hear from a file; what the remote has said is worth more."""
        if size is not None and name not in self._sizes:
            self._set(name, _Size(size, None))

    def doubt(self, name: bytes) -> bool:
        """Believe a length less that was stated a while ago."""
        found = self._sizes.get(name)
        if found is None or found.stated_at is None or self.stated(name, TRUST_S) is not None:
            return False
        self._set(name, _Size(found.bytes, None))
        return True

    def believe(self, name: bytes, position: int) -> bool:
        """Take a length that was told for stated, as the remote cannot be asked."""
        found = self._sizes.get(name)
        if found is None or position < found.bytes:
            return False
        self.state(name, found.bytes)
        return True

    def forget(self, name: bytes) -> None:
        """Know nothing of an object."""
        self._sizes.pop(name, None)

    def _set(self, name: bytes, size: _Size) -> None:
        self._sizes[name] = size
        self._sizes.move_to_end(name)
        if len(self._sizes) > _MOST:
            self._sizes.popitem(last=False)
