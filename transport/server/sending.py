"""Sends bytes of an object: files straight from the kernel, all else in pieces through threads."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Protocol, cast

from kvwire.errors import KvwireError, StorageError

if TYPE_CHECKING:
    from aiohttp import web

    from kvwire.store import ObjectReader
    from kvwire.transport.server.request_context import Exchange
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.server.threads import Threads

_log = logging.getLogger(__name__)
_FILE_PIECE = 1 << 20  # sent before the clock for a client that takes nothing starts again
_GONE = "the client went away"
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class _OpenFile(Protocol):
    """A reader whose object is one plain file."""

    def fileno(self) -> int:
        """The descriptor."""
        ...

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end``."""
        ...


class Sender:
    """Sends ranges of open objects."""

    def __init__(self, settings: ServerSettings, threads: Threads) -> None:
        """Keep the limits."""
        self._settings = settings
        self._threads = threads

    async def send(
        self, exchange: Exchange, response: web.StreamResponse, reader: ObjectReader, start: int, end: int
    ) -> None:
        """Send headers and bytes. What fails before the headers is raised; later, the connection is broken off."""
        request = exchange.request
        file = cast("_OpenFile", reader) if hasattr(reader, "fileno") and _takes_files(request) else None
        first = b"" if file else await self._piece(reader, start, min(end, start + self._settings.piece_bytes))
        try:
            await response.prepare(request)
            exchange.begin_body()
            if file:
                await self._send_file(exchange, file, start, end)
            else:
                await self._send_pieces(exchange, response, reader, first, start, end)
        except Exception as error:  # noqa: BLE001 - whatever it is, no second status line may follow the first
            exchange.store_failed = isinstance(error, KvwireError) or not isinstance(
                error, TimeoutError | ConnectionError
            )
            _tell(exchange, error)
            break_off(request)

    async def _send_pieces(
        self,
        exchange: Exchange,
        response: web.StreamResponse,
        reader: ObjectReader,
        piece: bytes,
        start: int,
        end: int,
    ) -> None:
        size = self._settings.piece_bytes
        coming: asyncio.Future[bytes] | None = None
        try:
            while piece:
                start += len(piece)
                size = min(2 * size, self._settings.max_piece_bytes)
                coming = self._ahead(reader, start, min(end, start + size)) if start < end else None
                async with asyncio.timeout(self._settings.send_s):
                    await response.write(piece)
                exchange.sent_bytes += len(piece)
                piece = await coming if coming else b""
        finally:
            if coming is not None:
                await asyncio.wait({coming})  # the reader is closed next
                coming.cancelled() or coming.exception()  # asyncio logs errors that nobody looked at

    def _ahead(self, reader: ObjectReader, start: int, end: int) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self._piece(reader, start, end))

    async def _piece(self, reader: ObjectReader, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        piece = await self._threads.run(lambda: reader.read(start, end))
        if not piece:
            msg = f"the object ended {end - start} bytes early"
            raise StorageError(msg)
        return piece

    async def _send_file(self, exchange: Exchange, file: _OpenFile, start: int, end: int) -> None:
        while start < end:
            count = min(end - start, _FILE_PIECE)
            if _is_cold(file, start, count):
                await self._threads.run(partial(file.read, start, start + count))  # into the page cache
            sent = await self._send_from(exchange, file, start, count)
            if not sent:
                msg = f"the object ended {end - start} bytes early"
                raise StorageError(msg)
            start += sent
            exchange.sent_bytes += sent

    async def _send_from(self, exchange: Exchange, file: _OpenFile, start: int, count: int) -> int:
        """Send without waiting what the socket takes at once, and only the rest through the event loop."""
        transport = exchange.request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError(_GONE)
        sent = 0
        if not transport.get_write_buffer_size():
            with suppress(BlockingIOError):
                sent = os.sendfile(transport.get_extra_info("socket").fileno(), file.fileno(), start, count)
            if sent == count:
                return sent
        start, count = start + sent, count - sent
        try:
            async with asyncio.timeout(self._settings.send_s):
                loop = asyncio.get_running_loop()
                return sent + await loop.sendfile(transport, cast("IO[bytes]", file), start, count, fallback=False)
        except asyncio.SendfileNotAvailableError:  # it does not say why: the same call, made again, does
            if transport.is_closing():
                raise ConnectionResetError(_GONE) from None
            return sent + os.sendfile(transport.get_extra_info("socket").fileno(), file.fileno(), start, count)


def _tell(exchange: Exchange, error: Exception) -> None:
    """Log why an answer was broken off: a client that closes its connection is nothing that anybody must look at."""
    if isinstance(error, ConnectionError):
        _log.debug("request %s: the answer was broken off: %s", exchange.request_id, _GONE)
        return
    level = logging.WARNING if exchange.store_failed else logging.INFO
    words = error if str(error) else type(error).__name__
    _log.log(level, "request %s: the answer was broken off: %s", exchange.request_id, words)


def break_off(request: web.BaseRequest) -> None:
    """Close the connection hard: a client must see a broken answer, not a short one that looks whole."""
    if request.transport is not None:
        request.transport.abort()


def _takes_files(request: web.BaseRequest) -> bool:
    transport = request.transport
    plain = transport is not None and transport.get_extra_info("sslcontext") is None
    return plain and isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


def _is_cold(file: _OpenFile, start: int, count: int) -> bool:
    """Whether the disk would have to be waited for, judged by the first and the last byte."""
    try:
        for at in (start, start + count - 1):
            os.preadv(file.fileno(), [bytearray(1)], at, _NOWAIT)
    except OSError:  # not in memory, or a file system that cannot tell
        return True
    return False
