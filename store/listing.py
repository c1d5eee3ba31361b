"""Looking through many keys: what lies below a prefix, and reading small objects ahead."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from kvwire.store.folder import FolderStore
from kvwire.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvwire.store.base import Store

T = TypeVar("T")

_THREADS = 16
_AHEAD = 64
"""Objects asked for at a time where each costs a round trip."""


def read_ahead(store: Store, keys: Iterable[str], read: Callable[[str], T]) -> Iterator[tuple[str, Callable[[], T]]]:
    """Keys in their order, each with a function that gives or raises what ``read`` of it does.

    A store on this machine is read when the function is called, any other one ahead and several objects at a time.
    """
    if isinstance(store, FolderStore | MemoryStore):
        yield from ((key, lambda key=key: read(key)) for key in keys)
        return
    with ThreadPoolExecutor(_THREADS, "kvwire-catalog") as pool:
        asked: deque[tuple[str, Future[T]]] = deque()
        try:
            for key in keys:
                asked.append((key, pool.submit(read, key)))
                if len(asked) >= _AHEAD:
                    first, found = asked.popleft()
                    yield first, found.result
            while asked:
                first, found = asked.popleft()
                yield first, found.result
        finally:
            for _, found in asked:
                found.cancel()


def tenants(store: Store) -> Iterator[str]:
    """Hashes of the tenants that a store has anything of."""
    return children(store, "v1/")


def children(store: Store, prefix: str) -> Iterator[str]:
    """First parts of the keys below a prefix, each found with one look at the listing."""
    last, after = "", ""
    while (found := next(iter(store.scan(prefix, after)), None)) is not None:
        name, slash, _ = found.key.removeprefix(prefix).partition("/")
        if slash and name != last:
            yield name
            last = name
        after = max(found.key, f"{prefix}{name}/~")  # past all keys that are in use below it
