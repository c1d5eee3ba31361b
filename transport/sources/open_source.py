"""From a store and a key to the best source for it: through tiers, and of several parts as one."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvwire.errors import ArgumentError
from kvwire.transport.sources.base import ByteSource, StoreSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import aiohttp

    from kvwire.store import Addressed, Catalog, CatalogEntry, Data, Store, TieredStore
    from kvwire.store.crypto.joined import Extents, Piece
    from kvwire.transport.sources.base import Sink

    Session: TypeAlias = aiohttp.ClientSession | Callable[[], aiohttp.ClientSession] | None

AT_ONCE = 32
"""Parts that are read at the same time for one range: a round trip for all headers of most documents."""


class TieredSource(ByteSource):
    """Reads content through the tiers; readers that want the same bytes share one request. See ``TierReading``."""

    def __init__(self, store: TieredStore, key: str, remote: ByteSource) -> None:
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
        return self._cache.sizes.get(self._name) or self._remote.size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end``, each from the nearest tier that has it, as they arrive."""
        if not self._used:  # one use, however many reads there are
            self._used = True
            self._cache.use(self._name)
        from kvwire.store.cache.reading import TierReading

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


class PartsSource(ByteSource):
    """Reads parts side by side, and gives their bytes in order."""

    def __init__(self, sources: Sequence[ByteSource], extents: Extents) -> None:
        """Name the parts; nothing is read yet."""
        self._sources, self._extents = sources, extents
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._local = [False] * len(sources)
        for number, source in enumerate(sources):
            source.on_local = partial(self._mark_local, number)

    @property
    def url(self) -> str:
        """Where the first part is, and how many there are."""
        return f"{self._sources[0].url} and {len(self._sources) - 1} more"

    @property
    def size(self) -> int | None:
        """Length of the joined object."""
        return self._extents.size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end`` in order: of the first incomplete part as they arrive, then of later ones."""
        order = _Order(list(self._extents.pieces(start, end)), sink, self)
        tasks = [asyncio.create_task(self._read_piece(at, order)) for at in range(len(order.pieces))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_piece(self, at: int, order: _Order) -> None:
        piece = order.pieces[at]
        async with self._slots:
            await self._sources[piece.part].read(piece.start, piece.end, partial(self._arrived, at, order))
        order.complete(at)

    def _arrived(self, at: int, order: _Order, data: Data) -> None:
        number = order.pieces[at].part
        is_local, self._local[number] = self._local[number], False
        order.take(at, data, is_local=is_local)

    def _mark_local(self, number: int, _: int) -> None:
        """What comes next of a part, and that at once, did not cross the link."""
        self._local[number] = True

    def distrust(self, start: int, end: int) -> None:
        """Tell the parts that hold the range."""
        for piece in self._extents.pieces(start, end):
            self._sources[piece.part].distrust(piece.start, piece.end)

    async def close(self) -> None:
        """Close all parts."""
        for source in self._sources:
            source.on_local = None  # a cycle would keep both until Python collects garbage
            await source.close()


class _Order:
    """Pieces of one range; what comes too early waits."""

    def __init__(self, pieces: list[Piece], sink: Sink, source: PartsSource) -> None:
        self.pieces, self._sink, self._source = pieces, sink, source
        self._waiting: list[deque[tuple[Data, bool]]] = [deque() for _ in pieces]
        self._is_complete = [False] * len(pieces)
        self._front = 0

    def take(self, at: int, data: Data, *, is_local: bool) -> None:
        self._waiting[at].append((data, is_local))
        if at == self._front:
            self._give()

    def complete(self, at: int) -> None:
        self._is_complete[at] = True
        while self._front < len(self.pieces) and self._is_complete[self._front]:
            self._give()
            self._front += 1
        if self._front < len(self.pieces):
            self._give()

    def _give(self) -> None:
        waiting = self._waiting[self._front]
        while waiting:
            data, is_local = waiting.popleft()
            if is_local and self._source.on_local:
                self._source.on_local(len(data))
            self._sink(data)


def open_source(store: Store, key: str, session: Session = None) -> ByteSource:
    """Make a source: ranges over HTTP where the store gives addresses, worker threads for any other store.

    Content of a ``TieredStore`` comes through its tiers, and the gaps from what lies below them in the same way.

    Args:
        store: Where the object lies.
        key: Its key.
        session: From ``open_session``, or what opens one; only a store that is ``Addressed`` needs it.

    Returns:
        The source; close it after use.

    Raises:
        ArgumentError: The store needs a session and none is given.
    """
    if hasattr(store, "cache"):  # isinstance takes 20 us, and importing the tiers or aiohttp 10 and 95 ms
        tiers = cast("TieredStore", store)
        below = open_source(tiers.origin(key), key, session)
        return below if tiers.name(key) is None else TieredSource(tiers, key, below)
    if not hasattr(store, "http_address"):
        return StoreSource(store, key)
    if session is None:
        raise ArgumentError("an object behind http needs a session: pass one from open_session()")
    from kvwire.transport.sources.http import HttpSource

    addressed = cast("Addressed", store)
    opened = session() if callable(session) else session
    return HttpSource(opened, lambda refused: addressed.http_address(key, renew=refused))


def open_document(catalog: Catalog, entry: CatalogEntry, session: Session = None) -> ByteSource:
    """Make a source of a document's blob, or of its parts as one object.

    Args:
        catalog: Of the document's tenant.
        entry: The document's, with a blob.
        session: As for ``open_source``.

    Returns:
        The source; close it after use.

    Raises:
        ArgumentError: The store needs a session and none is given.
    """
    sources = [open_source(catalog.store, key, session) for key in catalog.blobs.of(entry)]
    if not entry.parts:
        return sources[0]
    from kvwire.store.crypto.joined import Extents

    return PartsSource(sources, Extents(entry.parts))
