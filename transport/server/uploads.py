"""Takes uploads: to a nameless file first, into the store once they are proved to be what their key says."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import re
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from kvwire.errors import ArgumentError, CorruptError
from kvwire.store import content_digest
from kvwire.store.key_kinds import check_object, kind_of, max_bytes
from kvwire.transport.server.http_errors import GONE, RefusedError, common_headers, refusal_of
from kvwire.transport.server.limits import SpoolBudget
from kvwire.transport.server.names import check_names
from kvwire.transport.server.objects import check_conditions, conditions, etag_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvwire.store import Data, Store
    from kvwire.transport.server.limits import SpoolShare
    from kvwire.transport.server.locks import KeyLocks
    from kvwire.transport.server.metrics import ServerMetrics
    from kvwire.transport.server.request_context import Exchange
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.server.threads import Threads

_BATCH_BYTES = 1 << 20  # hashed and written at a time: a hop between threads costs as much as hashing 100 KB
_LENGTH = re.compile(r"[0-9]{1,18}")
_ETAG = re.compile(r'\s*"([^"]*)"\s*')


class Spool:
    """A file without a name: whatever happens to this process, nothing of it is left."""

    def __init__(self, folder: Path | None) -> None:
        """Make the file."""
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".tmp-", buffering=0)  # noqa: SIM115 - close() ends it
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Digest of what was written."""
        return self._digest.hexdigest()

    def write(self, pieces: list[bytes]) -> None:
        """Append to the file."""
        for piece in pieces:
            self._digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(self._file.fileno(), view) :]

    @contextmanager
    def view(self) -> Iterator[Data]:
        """All that was written, mapped rather than read."""
        size = os.fstat(self._file.fileno()).st_size
        if not size:
            yield b""
            return
        with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


class Uploads:
    """Answers PUT."""

    def __init__(
        self, store: Store, settings: ServerSettings, threads: Threads, locks: KeyLocks, metrics: ServerMetrics
    ) -> None:
        """Keep the store; nothing is made yet."""
        self._store = store
        self._settings = settings
        self._threads = threads
        self._metrics = metrics
        self._locks = locks
        self._budget = SpoolBudget(settings.max_spool_bytes, settings.max_upload_bytes, metrics)

    async def put(self, exchange: Exchange, key: str, client: str) -> web.StreamResponse:
        """Write one object, or refuse it and leave nothing."""
        try:
            etag = await self._put(exchange, key, client)
        except Exception as error:
            refusal = refusal_of(error, exchange.request_id)
            self._metrics.uploads_refused.labels(refusal.reason or "other").inc()
            raise refusal from error
        self._metrics.uploads_accepted.inc()
        told = {"ETag": f'"{etag}"'} if etag else {}
        headers = {**common_headers(exchange.request_id), **told, "Cache-Control": "no-store"}
        return web.Response(status=201, headers=headers)

    async def _put(self, exchange: Exchange, key: str, client: str) -> str:
        digest = content_digest(key)
        limit = max_bytes(key, self._settings.max_upload_bytes)
        if limit is None:
            raise RefusedError(403, "only blobs, profiles, texts and catalog entries can be written", reason="key")
        length = _length(exchange.request, limit)
        await check_conditions(exchange, self._store, self._threads, key)
        with self._budget.share(client, length) as share, closing(await self._threads.finish(self._spool)) as spool:
            await self._receive(exchange, spool, share, length)
            if digest is not None and spool.sha256 != digest:
                raise RefusedError(422, "the body's SHA-256 is not the one in the key", reason="digest")
            fields = conditions(exchange.request)
            async with self._locks.of(key):
                await check_conditions(exchange, self._store, self._threads, key)  # the body may have taken an hour
                return await self._threads.finish(lambda: self._keep(key, spool, fields))

    def _spool(self) -> Spool:
        folder = self._settings.spool_folder
        if folder is None and (folder := self._store.folder) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return Spool(folder)

    async def _receive(self, exchange: Exchange, spool: Spool, share: SpoolShare, length: int) -> None:
        request = exchange.request
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._settings.upload_s):
                await self._pieces(exchange, spool, share)
        except TimeoutError as error:
            raise RefusedError(408, "the upload was too slow", reason="slow") from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RefusedError(GONE, "the client went away", reason="gone") from error
        if exchange.received_bytes != length:
            raise RefusedError(400, "the body's length is not the Content-Length", reason="length")

    async def _pieces(self, exchange: Exchange, spool: Spool, share: SpoolShare) -> None:
        batch: list[bytes] = []
        held = 0
        more = True
        while more:
            async with asyncio.timeout(self._settings.upload_idle_s):
                piece = await exchange.request.content.readany()
            more = bool(piece)
            batch.append(piece)
            held += len(piece)
            exchange.received_bytes += len(piece)
            if held >= _BATCH_BYTES or not more:
                share.take(held)
                await self._threads.finish(partial(spool.write, batch))
                batch, held = [], 0

    def _keep(self, key: str, spool: Spool, fields: dict[str, str]) -> str:
        """Write what was received; gives the store's entity tag of it, empty where that is not known to be of it."""
        is_content, create = content_digest(key) is not None, fields.get("If-None-Match", "").strip() == "*"
        with spool.view() as data:
            if not is_content:
                _check(key, data)
            check_names(key, data)
            version = None if is_content else _version(fields)
            if version is not None:  # the store compares: another server may write to it, too
                written = self._store.replace(key, data, version)
            elif create:
                written = self._store.create(key, data)
            else:
                self._store.put(key, data)
                written = True
            etag = spool.sha256 if is_content else etag_of(self._store, key)
            if not written:
                headers = {"ETag": f'"{etag}"'} if etag else None
                raise RefusedError(412, "something lies there already", headers, reason="precondition")
            return spool.sha256 if etag == spool.sha256 else ""  # S3's tag may be another writer's by now


def _version(fields: dict[str, str]) -> str | None:
    """The one version that a write may replace, empty for none at all; None where it may replace several."""
    if list(fields) == ["If-None-Match"] and fields["If-None-Match"].strip() == "*":
        return ""
    tag = _ETAG.fullmatch(fields.get("If-Match", "")) if list(fields) == ["If-Match"] else None
    return tag[1] if tag else None


def _check(key: str, data: Data) -> None:
    """Refuse bytes that do not belong under a key."""
    try:
        check_object(key, data)
    except (ArgumentError, CorruptError) as error:
        kind = kind_of(key)
        raise RefusedError(422, f"not a {kind.name if kind else 'catalog entry'}: {error}", reason="entry") from error


def _length(request: web.BaseRequest, limit: int) -> int:
    """The announced length of a body."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedError(415, "send the bytes as they are, without Content-Encoding", reason="encoding")
    told = request.headers.get("Content-Length", "")
    if not _LENGTH.fullmatch(told) or "Transfer-Encoding" in request.headers:
        raise RefusedError(411, "an upload needs a Content-Length", reason="length")
    if int(told) > limit:
        raise RefusedError(413, f"an upload here has at most {limit} bytes", reason="too_large")
    return int(told)
