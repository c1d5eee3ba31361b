"""One of several equal parts of a store, so that processes can share a long walk, and take it up again part by part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.store.key_kinds import KINDS, key_digest
from kvwire.store.listing import content

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store.base import Listed, Store
    from kvwire.store.keys import KeySpace

MAX_PARTS = 65536
_DIGITS = 8  # of a digest, that decide on its part
_ALL = 1 << 4 * _DIGITS
_WRITTEN = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True)
class Part:
    """Keys whose digests lie in one of ``count`` ranges of equal length; the first part has keys without digests, too.

    Digests are evenly spread, so that one part is a random sample as well.

    Attributes:
        number: From 1.
        count: Of all parts.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse parts that there are not."""
        if not 1 <= self.number <= self.count <= MAX_PARTS:
            msg = f"a part is K/N with K from 1 to N and N at most {MAX_PARTS}, got {self.number}/{self.count}"
            raise ArgumentError(msg)

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read ``K/N``.

        Args:
            text: As a command takes it.

        Returns:
            The part.

        Raises:
            ArgumentError: There is no such part.
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            msg = f"a part is K/N, such as 3/16, got {text!r}"
            raise ArgumentError(msg)
        return cls(int(found[1]), int(found[2]))

    def has(self, key: str) -> bool:
        """Whether a key is of this part.

        Args:
            key: A key.
        """
        return self.number_of(key) == self.number

    def number_of(self, key: str) -> int:
        """Which of the ``count`` parts a key is of.

        Args:
            key: A key.

        Returns:
            The part's number.
        """
        return int(key_digest(key)[:_DIGITS] or "0", 16) * self.count // _ALL + 1

    def content(self, store: Store, space: KeySpace) -> Iterator[Listed]:
        """What ``listing.content`` lists of this part.

        Args:
            store: Where it lies.
            space: The tenant and model configuration.

        Returns:
            The objects; of the first of several parts, all others are listed and passed over.
        """
        if self.number == 1:
            return (listed for listed in content(store, space) if self.has(listed.key))
        prefixes = {kind.prefix(space) for kind in KINDS if not kind.prefix(space).startswith(space.catalog)}
        return (listed for prefix in sorted(prefixes) for listed in self._between(store, prefix, space.catalog))

    def scan(self, store: Store, prefix: str) -> Iterator[Listed]:
        """Objects of this part below a prefix.

        Args:
            store: Where they lie.
            prefix: Of one kind of keys.

        Returns:
            The objects.
        """
        if self.number == 1:
            return (listed for listed in store.scan(prefix) if self.has(listed.key))
        return self._between(store, prefix, "")

    def _between(self, store: Store, prefix: str, skipped: str) -> Iterator[Listed]:
        """Objects whose keys go on with digits of this part's range, but those below a prefix that is skipped."""
        first, last = ((number * _ALL - 1) // self.count + 1 for number in (self.number - 1, self.number))
        after, stop = f"{prefix}{first:0{_DIGITS}x}"[: len(prefix) + 2], f"{prefix}{last - 1:0{_DIGITS}x}"
        stop = f"{stop[: len(prefix) + 2]}~"
        more = True
        while more:
            more = False
            for listed in store.scan(prefix, after):
                if listed.key > stop:
                    break
                if skipped and listed.key.startswith(skipped):
                    after, more = f"{skipped}~", True
                    break
                if self.has(listed.key):
                    yield listed


WHOLE = Part()
"""All of a store."""
