"""Reading, deleting and listing objects."""

from __future__ import annotations

import json
from email.utils import formatdate
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from aiohttp import web

from kvwire.errors import NotFoundError
from kvwire.store import content_digest, open_object
from kvwire.store.backends.http.semantics import answer, may_write
from kvwire.transport.server.http_errors import RefusedError, common_headers
from kvwire.transport.server.sending import Sender

if TYPE_CHECKING:
    from kvwire.store import Listed, ObjectReader, Store
    from kvwire.transport.server.credentials import Rights
    from kvwire.transport.server.locks import KeyLocks
    from kvwire.transport.server.request_context import Exchange
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.server.threads import Threads

CONDITIONS = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range", "Range")
MAX_LISTED = 1000
_TYPE = "application/octet-stream"


class Objects:
    """Answers about objects of one store. guarded: shared caches must not keep them."""

    def __init__(
        self, store: Store, settings: ServerSettings, threads: Threads, locks: KeyLocks, *, guarded: bool
    ) -> None:
        """Keep the store."""
        self._store = store
        self._threads = threads
        self._locks = locks
        self._sender = Sender(settings, threads)
        self._content_caching = f"{'private' if guarded else 'public'}, max-age=31536000, immutable"

    async def get(self, exchange: Exchange, key: str) -> web.StreamResponse:
        """Answer GET and HEAD."""
        reader: ObjectReader
        if self._store.opens_at_once(key):
            reader = open_object(self._store, key)
        else:
            reader = await self._threads.run(lambda: open_object(self._store, key))
        try:
            return await self._answer(exchange, key, reader)
        finally:
            reader.close()

    async def _answer(self, exchange: Exchange, key: str, reader: ObjectReader) -> web.StreamResponse:
        digest = content_digest(key)
        etag = digest or str(await self._threads.run(lambda: reader.etag))
        modified = float(getattr(reader, "modified", 0.0))
        chosen = answer(exchange.request.method, conditions(exchange.request), reader.size, etag, modified)
        headers = {**common_headers(exchange.request_id), "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if chosen.status == 412:  # noqa: PLR2004 - the RFC's number is the name
            raise RefusedError(412, "the object is not the one that was asked for", headers)
        if chosen.status == 416:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes */{reader.size}"
            raise RefusedError(416, "the range lies beyond the object", headers)
        headers["Cache-Control"] = self._content_caching if digest else "no-cache"
        if modified:
            headers["Last-Modified"] = formatdate(modified, usegmt=True)
        if chosen.status == 304:  # noqa: PLR2004
            return web.Response(status=304, headers=headers)
        if chosen.status == 206:  # noqa: PLR2004
            headers["Content-Range"] = f"bytes {chosen.start}-{chosen.end - 1}/{reader.size}"
        headers["Content-Type"] = _TYPE
        headers["Content-Length"] = str(chosen.end - chosen.start)
        response = web.StreamResponse(status=chosen.status, headers=headers)
        if exchange.request.method == "HEAD":
            return response
        await self._sender.send(exchange, response, reader, chosen.start, chosen.end)
        return response

    async def delete(self, exchange: Exchange, key: str) -> web.StreamResponse:
        """Answer DELETE."""
        async with self._locks.of(key):
            await check_conditions(exchange, self._store, self._threads, key)
            await self._threads.finish(lambda: self._store.delete(key))
        return web.Response(status=204, headers={**common_headers(exchange.request_id), "Cache-Control": "no-store"})

    async def listing(self, exchange: Exchange, rights: Rights) -> web.StreamResponse:
        """Answer a listing: one page of what the rights let see."""
        try:
            fields = parse_qs(exchange.query, keep_blank_values=True, max_num_fields=16)
        except ValueError as error:
            raise RefusedError(400, "too many parameters") from error
        prefix, after = fields.get("prefix", [""])[0], fields.get("after", [""])[0]
        limit = fields.get("limit", [str(MAX_LISTED)])[0]
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LISTED):  # noqa: PLR2004
            raise RefusedError(400, f"limit is a number from 1 to {MAX_LISTED}")
        found = await self._threads.run(lambda: self._scan(prefix, after, int(limit) + 1, rights))
        listed = found[: int(limit)]
        page = {
            "objects": [{"key": one.key, "size": one.size, "modified": one.modified} for one in listed],
            "truncated": len(found) > len(listed),
        }
        headers = {**common_headers(exchange.request_id), "Cache-Control": "no-store"}
        return web.Response(text=json.dumps(page), content_type="application/json", headers=headers)

    def _scan(self, prefix: str, after: str, limit: int, rights: Rights) -> list[Listed]:
        if rights.prefix.startswith(prefix):
            prefix = rights.prefix
        elif not prefix.startswith(rights.prefix):
            return []
        return list(islice(self._store.scan(prefix, after), limit))


def conditions(request: web.BaseRequest) -> dict[str, str]:
    """The header fields that decide on an answer, several lines of one joined."""
    headers = request.headers
    return {name: ", ".join(headers.getall(name)) for name in CONDITIONS if name in headers}


async def check_conditions(exchange: Exchange, store: Store, threads: Threads, key: str) -> None:
    """Refuse a write whose preconditions do not hold."""
    fields = conditions(exchange.request)
    if "If-Match" not in fields and "If-None-Match" not in fields:
        return
    etag = await threads.run(lambda: etag_of(store, key))
    if not may_write(fields, etag):
        words = "something else lies there than the request expects"
        raise RefusedError(412, words, {"ETag": f'"{etag}"'} if etag else None, reason="precondition")


def etag_of(store: Store, key: str) -> str | None:
    """Look up an object's entity tag."""
    try:
        return store.stat(key).etag
    except NotFoundError:
        return None
