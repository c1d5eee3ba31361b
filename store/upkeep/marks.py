"""What entries name, in 8 bytes each: of two keys that share these, both stay."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from kvwire.store.key_kinds import key_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.store.listing import Part

SAMPLE = 64
"""Keys that are kept whole: one that is there shows that the catalog is not lost."""
_MOST_RECENT = 1 << 20  # as numbers of Python, quick to look up; the rest is packed


class Marks:
    """Keys of content that entries name, of one configuration. What was added is always found.

    part: whose keys are added; the sample may be of others. at: instant since which entries are to be read, in seconds
    since 1970; 0: none has been.
    """

    def __init__(self, part: Part) -> None:
        """Begin without marks."""
        self.part, self.at, self.sample = part, 0.0, list[str]()
        self._recent: set[int] = set()
        self._packed = array("Q")  # sorted

    def add_all(self, keys: Iterable[str], at: float) -> None:
        """Take in what entries name that were read from this instant on."""
        for key in keys:
            if self.part.count == 1 or self.part.has(key):
                self._recent.add(_number(key))
                if len(self._recent) >= _MOST_RECENT:
                    self.pack()
            if len(self.sample) < SAMPLE:
                self.sample.append(key)
        self.at = at

    def __contains__(self, key: str) -> bool:
        """Whether an entry names a key."""
        number = _number(key)
        if number in self._recent:
            return True
        at = bisect_left(self._packed, number)
        return at < len(self._packed) and self._packed[at] == number

    def pack(self) -> None:
        """Keep all in 8 bytes each."""
        more = np.fromiter(self._recent, np.uint64, len(self._recent))
        more.sort()
        self._packed.frombytes(more.tobytes())
        np.frombuffer(self._packed, np.uint64).sort(kind="stable")  # in place: merges two sorted runs
        self._recent = set()


def _number(key: str) -> int:
    """The first 8 bytes of a key's digest, be it its own or one of the key."""
    return int((key_digest(key) or hashlib.sha256(key.encode()).hexdigest())[:16], 16)
