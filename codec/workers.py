"""Threads that code chunks in parallel.

Chunks share nothing. Each worker takes whole chunks and runs every kernel and matrix product on one core, so results
do not depend on the number of workers.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from threadpoolctl import ThreadpoolController

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

if hasattr(os, "register_at_fork"):  # a forked child lacks torch's threads and would wait for them forever
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    """Return the process's thread pools; finding them reads all memory maps."""
    return ThreadpoolController()


@contextmanager
def one_core() -> Iterator[None]:
    """Run this thread's matrix products on this thread alone."""
    torch.get_num_threads()  # torch sets up its threads now; later it would overwrite the limit
    with _controller().limit(limits=1, user_api="openmp"):
        yield


def map_parallel(work: Callable[[_In], _Out], items: Iterable[_In], threads: int | None) -> list[_Out]:
    """Compute ``[work(item) for item in items]`` in threads; an error cancels the items that have not begun."""
    if threads is not None and threads < 1:
        raise ArgumentError(f"threads must be at least 1, or None for every core, got {threads}")
    listed = list(items)
    count = min(len(listed), cores() if threads is None else threads)
    if count <= 1:
        with one_core():
            return [work(item) for item in listed]
    with ThreadPoolExecutor(count, "kvwire-codec", initializer=stay_on_one_core) as pool:
        running = [pool.submit(work, item) for item in listed]
        try:
            return [future.result() for future in running]
        finally:
            for future in running:
                future.cancel()


def map_ahead(work: Callable[[_In], _Out], items: Sequence[_In]) -> Iterator[_Out]:
    """Yield ``work(item)`` in order, from one thread per core, at most two items per thread ahead of the caller."""
    threads = max(1, min(len(items), cores()))
    with ThreadPoolExecutor(threads, "kvwire-staging") as pool:
        running: deque[Future[_Out]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > 2 * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def stay_on_one_core() -> None:
    """Limit this thread's matrix products to this thread for the rest of its life."""
    torch.get_num_threads()  # as in one_core
    _controller().limit(limits=1, user_api="openmp")
