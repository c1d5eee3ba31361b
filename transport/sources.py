"""Where the bytes of one object come from: a store, or anything behind an emulated link. HTTP has its own module."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvwire.errors import KvwireError, StorageError
from kvwire.store import open_object
from kvwire.transport.errors import StalledError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvwire.store import ObjectReader, Store
    from kvwire.transport.link import EmulatedLink

_PIECE_BYTES = 256 * 1024


class ByteSource(Protocol):
    """One version of one object. Raises only ``kvwire.errors``; ReplacedError once the version is gone."""

    @property
    def url(self) -> str:
        """Where the object is, for people."""
        ...

    @property
    def size(self) -> int | None:
        """Length of the object, once a read has told it."""
        ...

    def read(self, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
        """Bytes ``start`` to ``end`` (exclusive; None: to the end), clamped at the object's end, as they arrive."""
        ...

    async def close(self) -> None:
        """Let go of the object."""
        ...


@dataclass(frozen=True)
class Patience:
    """Longest waits, in seconds: for the first byte of a response, connecting included, and for each next piece."""

    first_byte_s: float = 15.0
    stall_s: float = 15.0


class StoreSource:
    """Reads an object of any store in worker threads; the version is held from the first read on."""

    def __init__(self, store: Store, key: str) -> None:
        """Name the object; nothing is opened yet."""
        self._store = store
        self._key = key
        self._reader: ObjectReader | None = None
        self._opening = asyncio.Lock()

    @property
    def url(self) -> str:
        """The store's address and the key."""
        return f"{self._store.url.rstrip('/')}/{self._key}"

    @property
    def size(self) -> int | None:
        """Length of the object, once a read has opened it."""
        return self._reader.size if self._reader else None

    async def read(self, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
        """Bytes ``start`` to ``end``, in pieces of at most 256 KiB."""
        async with self._opening:
            if self._reader is None:
                self._reader = await asyncio.to_thread(open_object, self._store, self._key)
        reader = self._reader
        stop = reader.size if end is None else min(end, reader.size)
        while start < stop:
            piece = await asyncio.to_thread(reader.read, start, min(stop, start + _PIECE_BYTES))
            if not piece:
                msg = f"{self.url} ended {stop - start} bytes early: it was cut short while being read"
                raise StorageError(msg)
            yield piece
            start += len(piece)

    async def close(self) -> None:
        """Let go of the object."""
        if self._reader:
            self._reader.close()
            self._reader = None


class LinkedSource:
    """Any source, behind an emulated link."""

    def __init__(self, source: ByteSource, link: EmulatedLink) -> None:
        """Take over the source: closing this closes it."""
        self._source = source
        self._link = link

    @property
    def url(self) -> str:
        """The source's address."""
        return self._source.url

    @property
    def size(self) -> int | None:
        """Length of the object, once a read has told it."""
        return self._source.size

    async def read(self, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
        """What the source reads: a round trip late, and no faster than the link."""
        link = self._link
        asked_at = link.now()
        async with aclosing(self._source.read(start, end)) as pieces:
            first = await anext(pieces, b"")
            await link.round_trip(asked_at)
            async with link.sending():
                for cut in _cuts(first, link.piece_bytes):
                    await link.transmit(len(cut))
                    yield cut
                async for piece in pieces:
                    for cut in _cuts(piece, link.piece_bytes):
                        await link.transmit(len(cut))
                        yield cut

    async def close(self) -> None:
        """Close the source."""
        await self._source.close()


def _cuts(data: bytes, size: int) -> list[bytes]:
    if len(data) <= size:
        return [data] if data else []
    return [data[start : start + size] for start in range(0, len(data), size)]


async def timed(pieces: AsyncGenerator[bytes, None], patience: Patience, what: str) -> AsyncGenerator[bytes, None]:
    """Pass pieces on, and raise StalledError where one is waited for too long."""
    limit_s = patience.first_byte_s
    async with aclosing(pieces):
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    piece = await anext(pieces, None)
            except TimeoutError as error:
                if isinstance(error, KvwireError):  # a DeadlineError is a TimeoutError too
                    raise
                msg = f"{what}: nothing came for {limit_s:g} s; try again or check the server and the network"
                raise StalledError(msg) from error
            if piece is None:
                return
            yield piece
            limit_s = patience.stall_s


async def read_object(source: ByteSource, link: EmulatedLink | None = None, patience: Patience | None = None) -> bytes:
    """Read a whole object, over ``link`` where one is given."""
    linked = LinkedSource(source, link) if link else source
    async with aclosing(timed(linked.read(0, None), patience or Patience(), source.url)) as pieces:
        return b"".join([piece async for piece in pieces])
