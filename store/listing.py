"""Looking through many keys: what lies below a prefix, and reading small objects ahead."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvwire.store.keys import is_tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvwire.store.base import Listed, Store
    from kvwire.store.keys import KeySpace

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 16
_AHEAD = 4
"""Items begun for each thread: enough that none waits for the one that takes the results."""


def read_ahead(store: Store, keys: Iterable[str], read: Callable[[str], R]) -> Iterator[tuple[str, Callable[[], R]]]:
    """Read many objects.

    A store on this machine is read when the function is called, any other one ahead and several objects at a time.

    Args:
        store: Where they lie.
        keys: The objects.
        read: What reads one.

    Returns:
        Keys in their order, each with a function that gives or raises what ``read`` of it does.
    """
    if store.is_local:
        return ((key, partial(read, key)) for key in keys)
    return ahead(keys, read, _THREADS)


def ahead(items: Iterable[T], work: Callable[[T], R], threads: int) -> Iterator[tuple[T, Callable[[], R]]]:
    """Work on many items, in threads.

    Only so many are begun that memory stays bounded, however many items there are. What a consumer leaves is cancelled,
    and threads that still work are not waited for: a generator may be ended by the garbage collector, anywhere.
    """
    pool = ThreadPoolExecutor(threads, "kvwire-store")
    begun: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            begun.append((item, pool.submit(work, item)))
            if len(begun) >= _AHEAD * threads:
                first, future = begun.popleft()
                yield first, future.result
        while begun:
            first, future = begun.popleft()
            yield first, future.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def content(store: Store, space: KeySpace) -> Iterator[Listed]:
    """Everything of a configuration but its catalog, which can be longer than all else."""
    catalog, after = space.catalog, ""
    while True:
        for listed in store.scan(space.root, after):
            if listed.key.startswith(catalog):
                after = f"{catalog}~"
                break
            yield listed
        else:
            return


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
