"""Reads, deletions and listings. Files are sent by the kernel, all else in pieces through threads."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache, partial
from itertools import islice
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import parse_qs

from aiohttp import web

from kvwire.errors import KvwireError, StorageError
from kvwire.store import content_digest, open_object
from kvwire.store.backends.http.semantics import answer

from .exchange import EXCHANGE, RefusedError, mark
from .storage import conditions

if TYPE_CHECKING:
    from kvwire.store import Listed, ObjectReader
    from kvwire.store.files.files import FileReader

    from .exchange import Exchange, Rights
    from .settings import ServerSettings
    from .storage import Storage

_log = logging.getLogger(__name__)
_MAX_LISTED = 1000
_FILE_PIECE = 1 << 20  # sent before the clock for a client that takes nothing starts again
_GONE = "the client went away"
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class Objects:
    """Answers about objects of one store. guarded: shared caches must not keep them."""

    def __init__(self, storage: Storage, settings: ServerSettings, *, guarded: bool) -> None:
        """Keep the store."""
        self._storage = storage
        self._settings = settings
        self._content_caching = f"{'private' if guarded else 'public'}, max-age=31536000, immutable"

    async def get(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """Answer GET and HEAD."""
        store = self._storage.store
        open_it = partial(open_object, store, key)
        reader: ObjectReader = open_it() if store.opens_at_once(key) else await self._storage.start(open_it)
        try:
            return await self._answer(request, key, reader)
        finally:
            reader.close()

    async def _answer(self, request: web.BaseRequest, key: str, reader: ObjectReader) -> web.StreamResponse:
        digest = content_digest(key)
        etag = digest or str(await self._storage.start(lambda: reader.etag))
        modified = float(getattr(reader, "modified", 0.0))
        chosen = answer(request.method, conditions(request), reader.size, etag, modified)
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if chosen.status == 412:  # noqa: PLR2004 - the RFC's number is the name
            raise RefusedError(412, "the object is not the one that was asked for", headers)
        if chosen.status == 416:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes */{reader.size}"
            raise RefusedError(416, "the range lies beyond the object", headers)
        headers["Cache-Control"] = self._content_caching if digest else "no-cache"
        if modified:
            headers["Last-Modified"] = _http_date(int(modified))
        if chosen.status == 304:  # noqa: PLR2004
            return web.Response(status=304, headers=headers)
        if chosen.status == 206:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes {chosen.start}-{chosen.end - 1}/{reader.size}"
        headers["Content-Type"] = "application/octet-stream"
        headers["Content-Length"] = str(chosen.end - chosen.start)
        response = web.StreamResponse(status=chosen.status, headers=headers)
        if request.method == "GET":
            await self._send(request, response, reader, chosen.start, chosen.end)
        return response

    async def delete(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """Answer DELETE."""
        storage = self._storage
        async with storage.lock(key):
            await storage.check_conditions(conditions(request), key)
            await storage.finish(lambda: storage.store.delete(key))
        return web.Response(status=204)

    async def listing(self, request: web.BaseRequest, rights: Rights) -> web.StreamResponse:
        """Answer a listing: one page of what the rights let see."""
        try:
            fields = parse_qs(request.query_string, keep_blank_values=True, max_num_fields=16)
        except ValueError as error:
            raise RefusedError(400, "too many parameters") from error
        prefix, after = fields.get("prefix", [""])[0], fields.get("after", [""])[0]
        limit = fields.get("limit", [str(_MAX_LISTED)])[0]
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_LISTED):  # noqa: PLR2004
            raise RefusedError(400, f"limit is a number from 1 to {_MAX_LISTED}")
        found = await self._storage.start(lambda: self._scan(prefix, after, int(limit) + 1, rights))
        listed = found[: int(limit)]
        page = {
            "objects": [{"key": one.key, "size": one.size, "modified": one.modified} for one in listed],
            "truncated": len(found) > len(listed),
        }
        return web.json_response(page)

    def _scan(self, prefix: str, after: str, limit: int, rights: Rights) -> list[Listed]:
        if rights.prefix.startswith(prefix):
            prefix = rights.prefix
        elif not prefix.startswith(rights.prefix):
            return []
        return list(islice(self._storage.store.scan(prefix, after), limit))

    async def _send(
        self, request: web.BaseRequest, response: web.StreamResponse, reader: ObjectReader, start: int, end: int
    ) -> None:
        """Send headers and bytes. What fails before the headers is raised; later, the connection is broken off."""
        exchange = request[EXCHANGE]
        file = cast("FileReader", reader) if hasattr(reader, "fileno") and _takes_files(request) else None
        first = b"" if file else await self._piece(reader, start, min(end, start + self._settings.piece_bytes))
        try:
            mark(response, exchange.request_id)
            await response.prepare(request)
            exchange.first_byte_at = time.perf_counter()
            if file:
                await self._send_file(request, exchange, file, start, end)
            else:
                await self._send_pieces(exchange, response, reader, first, start, end)
        except Exception as error:  # noqa: BLE001 - whatever it is, no second status line may follow the first
            client_failed = isinstance(error, TimeoutError | ConnectionError) and not isinstance(error, KvwireError)
            exchange.store_failed = not client_failed
            _tell(exchange, error)
            if request.transport is not None:  # a client must see a broken answer, not a short one that looks whole
                request.transport.abort()

    async def _send_pieces(
        self, exchange: Exchange, response: web.StreamResponse, reader: ObjectReader, piece: bytes, start: int, end: int
    ) -> None:
        """Send a piece while the next is read; pieces grow."""
        size = self._settings.piece_bytes
        coming: asyncio.Future[bytes] | None = None
        try:
            while piece:
                start += len(piece)
                size = min(2 * size, self._settings.max_piece_bytes)
                coming = None
                if start < end:
                    coming = asyncio.ensure_future(self._piece(reader, start, min(end, start + size)))
                async with asyncio.timeout(self._settings.send_s):
                    await response.write(piece)
                exchange.sent_bytes += len(piece)
                piece = await coming if coming else b""
        finally:
            if coming is not None:
                await asyncio.wait({coming})  # the reader is closed next
                coming.cancelled() or coming.exception()  # asyncio logs errors that were never retrieved

    async def _piece(self, reader: ObjectReader, start: int, end: int) -> bytes:
        if start >= end:  # of an empty object
            return b""
        piece = await self._storage.start(lambda: reader.read(start, end))
        if not piece:
            raise StorageError(f"the object ended {end - start} bytes early")
        return piece

    async def _send_file(
        self, request: web.BaseRequest, exchange: Exchange, file: FileReader, start: int, end: int
    ) -> None:
        while start < end:
            count = min(end - start, _FILE_PIECE)
            if _is_cold(file, start, count):
                await self._storage.start(partial(file.read, start, start + count))  # into the page cache
            sent = await self._send_from(request, file, start, count)
            if not sent:
                raise StorageError(f"the object ended {end - start} bytes early")
            start += sent
            exchange.sent_bytes += sent

    async def _send_from(self, request: web.BaseRequest, file: FileReader, start: int, count: int) -> int:
        """Send without waiting what the socket takes at once, and only the rest through the event loop."""
        transport = request.transport
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


@lru_cache(1024)
def _http_date(seconds: int) -> str:
    """A time in a header; remembered, as an object's ranges are asked for one after the other."""
    return formatdate(seconds, usegmt=True)


def _tell(exchange: Exchange, error: Exception) -> None:
    """Log why an answer was broken off; a client that leaves is not worth an operator's look."""
    if isinstance(error, ConnectionError):
        _log.debug("request %s: the answer was broken off: %s", exchange.request_id, _GONE)
        return
    level = logging.WARNING if exchange.store_failed else logging.INFO
    words = error if str(error) else type(error).__name__
    _log.log(level, "request %s: the answer was broken off: %s", exchange.request_id, words)


def _takes_files(request: web.BaseRequest) -> bool:
    transport = request.transport
    plain = transport is not None and transport.get_extra_info("sslcontext") is None
    return plain and isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


def _is_cold(file: FileReader, start: int, count: int) -> bool:
    """Whether the disk would have to be waited for, judged by the first and the last byte."""
    try:
        for at in (start, start + count - 1):
            os.preadv(file.fileno(), [bytearray(1)], at, _NOWAIT)
    except OSError:  # not in memory, or a file system that cannot tell
        return True
    return False
