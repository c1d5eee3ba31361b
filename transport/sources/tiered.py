"""One object of a tiered store: what the tiers hold comes from there, gaps come from the remote and are kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError
from kvwire.store.cache import TierReading
from kvwire.transport.sources.base import ByteSource

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvwire.store.cache import Cached
    from kvwire.transport.sources.base import Sink


class TieredSource(ByteSource):
    """Reads content through the tiers; readers that want the same bytes share one request. See ``TierReading``."""

    def __init__(self, store: Cached, key: str, remote: ByteSource) -> None:
        """Name the object."""
        name = store.name(key)
        if name is None:
            msg = f"{key} is not content-addressed and so never cached: read it from the store below the tiers"
            raise ArgumentError(msg)
        self._cache = store.cache
        self._name = name
        self._remote = remote
        self._used = False

    @property
    def url(self) -> str:
        """The object's address on the remote."""
        return self._remote.url

    @property
    def size(self) -> int | None:
        """Length of the object, once a read has told it, be it another reader's."""
        return self._cache.size(self._name, recent=True) or self._remote.size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end``, each from the nearest tier that has it, as they arrive."""
        if not self._used:  # one use, however many reads there are
            self._used = True
            self._cache.use(self._name)
        reading = TierReading(self._cache, self._name, self._remote, _wait, sink, owner=self, on_local=self.on_local)
        await reading.read(start, end)

    def distrust(self, start: int, end: int) -> None:
        """Forget the bytes of a range in all tiers: the next read of them asks the remote."""
        self._cache.drop(self._name, start, end)
        self._remote.distrust(start, end)

    async def close(self) -> None:
        """Close the remote's source; what was read stays in the tiers."""
        await self._remote.close()


async def _wait(future: Future[Any], seconds: float) -> None:
    view = asyncio.wrap_future(future)
    try:
        await asyncio.wait({view}, timeout=seconds)
    finally:
        view.cancel()  # this reader's view of it alone
