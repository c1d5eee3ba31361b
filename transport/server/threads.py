"""Where blocking calls of the store and of disks run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Threads:
    """A pool of worker threads, made on first use."""

    def __init__(self, count: int) -> None:
        """Start none yet."""
        self._count = count
        self._executor: ThreadPoolExecutor | None = None

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Begin a call in a thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="kvwire-serve")
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run a call in a thread; whoever is cancelled does not wait for it."""
        return await self.start(call)

    async def finish(self, call: Callable[[], _T]) -> _T:
        """Run a call that uses something the caller will close: also who is cancelled waits for its end."""
        running = self.start(call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
