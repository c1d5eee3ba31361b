"""How often each of very many keys was used of late, in a fixed amount of memory.

A count-min sketch with conservative update and ageing by halving, as in TinyLFU (arXiv 1512.00727, section 3).
"""

from __future__ import annotations

import hashlib
import struct

from kvwire.errors import ArgumentError

_ROWS = 4
_INDICES = struct.Struct("<4I")
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Counts uses, never too few between two halvings, now and then too many.

    width: counters in each of four rows, a power of two. limit: counts stop there, at most 255.
    """

    def __init__(self, width: int = 1 << 16, limit: int = 15) -> None:
        """Start at zero."""
        if width < 1 or width & (width - 1) or not 1 <= limit < len(_HALVED):
            msg = f"a sketch needs a power of two as its width and a limit of 1 to 255, got {width} and {limit}"
            raise ArgumentError(msg)
        self._width = width
        self._limit = limit
        self._counts = bytearray(width * _ROWS)
        self.additions = 0
        """Uses counted since the last halving, those that were halved counting half."""

    def add(self, key: bytes) -> None:
        """Count one use."""
        places = self._places(key)
        least = min(self._counts[place] for place in places)
        if least < self._limit:
            for place in places:
                if self._counts[place] == least:
                    self._counts[place] = least + 1
        self.additions += 1

    def estimate(self, key: bytes) -> int:
        """Uses of a key, as far as they have not aged."""
        return min(self._counts[place] for place in self._places(key))

    def halve(self) -> None:
        """Let everything count half."""
        self._counts = self._counts.translate(_HALVED)
        self.additions //= 2

    def _places(self, key: bytes) -> list[int]:
        mask = self._width - 1
        digest = hashlib.blake2b(key, digest_size=_INDICES.size).digest()
        return [row * self._width + (index & mask) for row, index in enumerate(_INDICES.unpack(digest))]


class UseCounter:
    """Tells whether a key has been used often enough to be worth keeping."""

    def __init__(self, admit_after: int = 1, width: int = 1 << 16) -> None:
        """Admit from use number ``admit_after`` on, 1 to 255; old uses age after ten for each counter."""
        self._admit_after = admit_after
        self._sample = 10 * width
        self._sketch = FrequencySketch(width, limit=admit_after)

    def used(self, key: bytes) -> None:
        """Count one use."""
        if self._admit_after > 1:
            self._sketch.add(key)
            if self._sketch.additions >= self._sample:
                self._sketch.halve()

    def admits(self, key: bytes) -> bool:
        """Whether it was used that often."""
        return self._admit_after <= 1 or self._sketch.estimate(key) >= self._admit_after
