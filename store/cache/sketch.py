"""How often each of very many keys was used of late, in a fixed amount of memory.

A count-min sketch with conservative update and ageing by halving, as in TinyLFU (arXiv 1512.00727, section 3).
"""

from __future__ import annotations

import hashlib
import struct

_ROWS = 4
_INDICES = struct.Struct("<4I")
_LIMIT = 15  # counts stop there: section 3.4.1 of the paper, where a counter has four bits
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Counts uses, never too few between two halvings, now and then too many."""

    def __init__(self, width: int = 1 << 16) -> None:
        """Start at zero."""
        self._width = width
        self._counts = bytearray(width * _ROWS)
        self.additions = 0
        """Uses counted since the last halving, those that were halved counting half."""

    def add(self, key: bytes) -> None:
        """Count one use."""
        places = self._places(key)
        least = min(self._counts[place] for place in places)
        if least < _LIMIT:
            for place in places:
                if self._counts[place] == least:
                    self._counts[place] = least + 1
        self.additions += 1

    def estimate(self, key: bytes) -> int:
        """How often a key was used."""
        return min(self._counts[place] for place in self._places(key))

    def halve(self) -> None:
        """Let everything count half."""
        self._counts = self._counts.translate(_HALVED)
        self.additions //= 2

    def _places(self, key: bytes) -> list[int]:
        mask = self._width - 1
        digest = hashlib.blake2b(key, digest_size=_INDICES.size).digest()
        return [row * self._width + (index & mask) for row, index in enumerate(_INDICES.unpack(digest))]
