"""One object out of the ranges of several: a document of several blobs, read as one."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvwire.transport.sources.base import ByteSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.store import Data
    from kvwire.store.crypto.joined import Extents, Piece
    from kvwire.transport.sources.base import Sink

AT_ONCE = 32
"""Parts that are read at the same time for one range: a round trip for all headers of most documents."""


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
