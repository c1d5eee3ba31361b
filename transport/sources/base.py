"""Where the bytes of one object come from: a store, or anything behind an emulated link. HTTP has its own module.

A source pushes bytes into a *sink*, a plain function, as they arrive: nothing is awaited and nothing copied between
the socket and what cuts the bytes into segments.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvwire.errors import KvwireError, StorageError
from kvwire.store import Data, open_object
from kvwire.transport.errors import StalledError

if TYPE_CHECKING:
    from kvwire.store import ObjectReader, Store
    from kvwire.transport.links import EmulatedLink

Sink: TypeAlias = Callable[[Data], None]
"""Takes the next bytes of a range; they are not changed afterwards."""

_PIECE_BYTES = 256 * 1024


class ByteSource(Protocol):
    """One version of one object. Raises only ``kvwire.errors``; ReplacedError once the version is gone.

    Attributes:
        on_local: Called with a length right before the sink gets so many bytes that did not cross the link.
        etag: Strong entity tag of the version, without quotes, once a read has told it; empty where it is not known.
    """

    on_local: Callable[[int], None] | None = None
    etag: str = ""

    @property
    def url(self) -> str:
        """Where the object is, for people."""
        ...

    @property
    def size(self) -> int | None:
        """Length of the object, once a read has told it."""
        ...

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes of the object to ``sink``, in order, as they arrive.

        The range is clamped at the object's end.

        Args:
            start: First byte.
            end: First byte after the range; None: to the end.
            sink: Takes each piece.
        """
        ...

    def distrust(self, start: int, end: int) -> None:
        """Hear that bytes given for this range were wrong: never give them again from a copy.

        Args:
            start: First byte.
            end: First byte after the range.
        """
        del start, end  # a source without copies has nothing to forget

    async def close(self) -> None:
        """Let go of the object."""
        ...


@dataclass(frozen=True)
class ReadTimeouts:
    """Longest waits, in seconds.

    Attributes:
        first_byte_s: For the first byte of a response, connecting included.
        stall_s: For each next piece.
    """

    first_byte_s: float = 15.0
    stall_s: float = 15.0

    def stalled(self, what: str, *, began: bool) -> StalledError:
        """Make the error of a wait of that length.

        Args:
            what: What was read, for people.
            began: Whether the first byte had come.

        Returns:
            The error to raise.
        """
        limit_s = self.stall_s if began else self.first_byte_s
        return StalledError(f"{what}: nothing came for {limit_s:g} s; try again or check the server and the network")


class StoreSource(ByteSource):
    """Reads an object of any store in worker threads; the version is held from the first read on."""

    def __init__(self, store: Store, key: str) -> None:
        """Name the object; nothing is opened yet.

        Args:
            store: Where it lies.
            key: Its key.
        """
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

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes ``start`` to ``end``, in pieces of at most 256 KiB."""
        async with self._opening:
            if self._reader is None:
                self._reader = await self._opened()
                self.etag = self._reader.etag
        reader = self._reader
        stop = reader.size if end is None else min(end, reader.size)
        while start < stop:
            piece = await asyncio.to_thread(reader.read, start, min(stop, start + _PIECE_BYTES))
            if not piece:
                raise StorageError(f"{self.url} ended {stop - start} bytes early: it was cut short while being read")
            sink(piece)
            start += len(piece)

    async def _opened(self) -> ObjectReader:
        """Open the object in a thread; where the wait was given up, what it opened is closed, by the thread if late."""
        opened: list[ObjectReader] = []  # the one that takes the reader out closes it
        left = threading.Event()

        def opening() -> None:
            opened.append(open_object(self._store, self._key))
            if left.is_set():
                _close_all(opened)

        try:
            await asyncio.to_thread(opening)
        except asyncio.CancelledError:
            left.set()
            _close_all(opened)
            raise
        return opened.pop()

    async def close(self) -> None:
        """Let go of the object."""
        if self._reader:
            self._reader.close()
            self._reader = None


def _close_all(opened: list[ObjectReader]) -> None:
    with suppress(IndexError):  # two threads may be here
        while True:
            opened.pop().close()


class LinkedSource(ByteSource):
    """Any source, behind an emulated link."""

    def __init__(self, source: ByteSource, link: EmulatedLink) -> None:
        """Put a link in front of a source.

        Args:
            source: Taken over: closing this closes it.
            link: What its bytes pass.
        """
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

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give what the source reads: a round trip late, and no faster than the link."""
        link, asked_at = self._link, self._link.now()
        waiting: asyncio.Queue[Data | None] = asyncio.Queue()
        reading = asyncio.create_task(self._source.read(start, end, waiting.put_nowait))
        reading.add_done_callback(lambda _: waiting.put_nowait(None))
        try:
            piece = await waiting.get()
            await link.round_trip(asked_at)
            async with link.sending():
                while piece is not None:
                    for cut in _cuts(piece, link.piece_bytes):
                        await link.transmit(len(cut))
                        sink(cut)
                    piece = await waiting.get()
            await reading
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, KvwireError):
                await reading

    def distrust(self, start: int, end: int) -> None:
        """Tell the source."""
        self._source.distrust(start, end)

    async def close(self) -> None:
        """Close the source."""
        await self._source.close()


def _cuts(data: Data, size: int) -> list[Data]:
    if len(data) <= size:
        return [data] if data else []
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, len(view), size)]


async def read_patiently(source: ByteSource, start: int, end: int | None, sink: Sink, patience: ReadTimeouts) -> None:
    """``source.read``, with limits for each wait."""
    now, began = asyncio.get_running_loop().time, False

    def passed(data: Data) -> None:
        nonlocal began
        began = True
        sink(data)
        timer.reschedule(now() + patience.stall_s)

    try:
        async with asyncio.timeout(patience.first_byte_s) as timer:
            await source.read(start, end, passed)
    except TimeoutError as error:
        if isinstance(error, KvwireError):  # a DeadlineError is a TimeoutError too
            raise
        raise patience.stalled(source.url, began=began) from error
    finally:
        timer = None  # type: ignore[assignment]  # it holds the task and its error, whose traceback has this frame


async def read_object(
    source: ByteSource,
    link: EmulatedLink | None = None,
    patience: ReadTimeouts | None = None,
    start: int = 0,
    end: int | None = None,
) -> bytes:
    """Read an object, or a range of it.

    Args:
        source: What to read.
        link: An emulated link to read over; None for none.
        patience: Longest waits; None for the defaults.
        start: First byte.
        end: First byte after the range; None: to the end.

    Returns:
        The bytes.

    Raises:
        StalledError: A piece was waited for too long.
    """
    linked = LinkedSource(source, link) if link else source
    pieces: list[Data] = []
    await read_patiently(linked, start, end, pieces.append, patience or ReadTimeouts())
    return b"".join(pieces)
