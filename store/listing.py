"""Looking through many keys: children of a prefix, equal parts of a store, and reading and writing many objects."""

from __future__ import annotations

import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import ArgumentError
from kvwire.store.key_kinds import KINDS, key_digest
from kvwire.store.keys import is_tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvwire.store.base import Data, Listed, Store
    from kvwire.store.keys import KeySpace


T = TypeVar("T")
R = TypeVar("R")

_THREADS = 16
_AHEAD = 4
"""Items begun for each thread: enough that none waits for the one that takes the results."""
MAX_PARTS = 65536
_DIGITS = 8  # of a digest, that decide on its part
_ALL = 1 << 4 * _DIGITS
_WRITTEN = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


def read_ahead(store: Store, keys: Iterable[T], read: Callable[[T], R]) -> Iterator[tuple[T, Callable[[], R]]]:
    """Read many objects.

    A store on this machine is read when the function is called, any other one ahead and several objects at a time.

    Args:
        store: Where they lie.
        keys: The objects, or ranges of them.
        read: What reads one.

    Returns:
        Keys in their order, each with a function that gives or raises what ``read`` of it does.
    """
    if store.is_local:
        return ((key, partial(read, key)) for key in keys)
    return ahead(keys, read, _THREADS)


def write_all(store: Store, items: Iterable[tuple[str, Data]], threads: int = 8) -> None:
    """Write many objects, in as few steps as a store on this machine knows how to, any other several at a time."""
    if store.is_local:
        store.put_many(items)
        return
    for _, written in ahead(items, lambda pair: store.put(*pair), threads):
        written()


def ahead(items: Iterable[T], work: Callable[[T], R], threads: int) -> Iterator[tuple[T, Callable[[], R]]]:
    """Work on many items, in threads; so few are begun ahead that memory stays bounded."""
    pool = ThreadPoolExecutor(threads, "kvwire-store")
    begun: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            begun.append((item, pool.submit(work, item)))
            if len(begun) >= _AHEAD * threads:
                first, future = begun.popleft()
                yield first, future.result
        # Threads end with their work: who takes results may fail, and an error keeps this generator until the garbage
        # collector comes.
        pool.shutdown(wait=False)
        while begun:
            first, future = begun.popleft()
            yield first, future.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # the garbage collector may end a generator, anywhere


def content(store: Store, space: KeySpace) -> Iterator[Listed]:
    """Everything of a configuration but its catalog, which can be longer than all else."""
    return _outside(store, space.root, skipped=space.catalog)


def _outside(store: Store, prefix: str, after: str = "", *, stop: str = "~", skipped: str = "") -> Iterator[Listed]:
    """Objects behind one key and up to another, but those below a prefix that is skipped."""
    more = True
    while more:
        more = False
        for listed in store.scan(prefix, after):
            if listed.key > stop:
                return
            if skipped and listed.key.startswith(skipped):
                after, more = f"{skipped}~", True
                break
            yield listed


def tenants(store: Store) -> Iterator[str]:
    """Hashes of the tenants that a store has anything of; other people's keys are passed over.

    Args:
        store: The store.

    Returns:
        The hashes.
    """
    return (name for name in children(store, "v1/") if is_tenant(name))


def children(store: Store, prefix: str) -> Iterator[str]:
    """First parts of the keys below a prefix, each found with one look at the listing."""
    last, after = "", ""
    while (found := next(iter(store.scan(prefix, after)), None)) is not None:
        name, slash, _ = found.key.removeprefix(prefix).partition("/")
        if slash and name != last:
            yield name
            last = name
        after = max(found.key, f"{prefix}{name}/~")  # past all keys that are in use below it


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
            raise ArgumentError(f"a part is K/N, such as 3/16, got {text!r}")
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
        prefixes = {kind.prefix(space) for kind in KINDS if not kind.is_catalog}
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
        found = _outside(store, prefix, after, stop=f"{stop[: len(prefix) + 2]}~", skipped=skipped)
        return (listed for listed in found if self.has(listed.key))


WHOLE = Part()
"""All of a store."""
