"""Documents that are fetched ahead of the loads that will need them."""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future


class Prefetch:
    """Fetches in the background, made by ``Corpus.prefetch``. Await it, or ``wait``, or let it be."""

    def __init__(self, hints: Sequence[Future[bool]]) -> None:
        """Keep what tells of each range."""
        self._hints = hints

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is fetched, dropped or cancelled.

        Args:
            timeout_s: Longest wait in seconds; None: as long as it takes.

        Returns:
            Whether all of it is in the cache.
        """
        done, late = wait(self._hints, timeout_s)
        return not late and all(not each.cancelled() and each.result() for each in done)

    def cancel(self) -> None:
        """Fetch no more of it."""
        for hint in self._hints:
            hint.cancel()

    def __await__(self) -> Generator[object, None, bool]:
        """``wait`` on an event loop; cancelling the caller cancels the fetches."""
        return self._all().__await__()

    async def _all(self) -> bool:
        found = await asyncio.gather(*map(asyncio.wrap_future, self._hints), return_exceptions=True)
        return all(each is True for each in found)  # of one that was cancelled elsewhere, it is an error
