"""Takes uploads: to a nameless file first, into the store once they are proved to be what their key says."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import re
import tempfile
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from kvwire._printable import name_problem
from kvwire.errors import ArgumentError, CorruptError
from kvwire.store import CatalogEntry, content_digest
from kvwire.store.base import tag_of
from kvwire.store.key_kinds import check_object, kind_of, max_bytes
from kvwire.types import SEALED_MAGIC

from .exchange import EXCHANGE, GONE, RefusedError, refusal_of
from .storage import conditions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvwire.store import Data

    from .exchange import Exchange
    from .metrics import ServerMetrics
    from .settings import ServerSettings
    from .storage import Storage

_BATCH_BYTES = 1 << 20  # hashed and written at a time: a hop between threads costs as much as hashing 100 KB
_LENGTH = re.compile(r"[0-9]{1,18}")
_ETAG = re.compile(r'\s*"([^"]*)"\s*')
_HEAD_BYTES = 2 << 20  # more than an entry, or a blob's metadata, may have


class SpoolBudget:
    """Bytes that all running uploads hold together, and each client's share of them."""

    def __init__(self, limit: int, upload_bytes: int, metrics: ServerMetrics) -> None:
        """Start empty."""
        self._limit = limit
        self._client_limit = min(limit, max(limit // 2, upload_bytes))
        self._used = 0
        self._by_client: Counter[str] = Counter()
        self._metrics = metrics

    @contextmanager
    def share(self, client: str, announced: int) -> Iterator[Callable[[int], None]]:
        """For one upload: gives what counts bytes that have come, which alone take room; at the end they are free."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            self._check(client, size)
            self._count(client, size)
            taken += size

        self._check(client, announced)
        try:
            yield take
        finally:
            self._count(client, -taken)

    def _check(self, client: str, size: int) -> None:
        if self._used + size > self._limit or self._by_client[client] + size > self._client_limit:
            raise RefusedError(503, "too many uploads at a time: try again later", {"Retry-After": "5"}, reason="spool")

    def _count(self, client: str, size: int) -> None:
        self._used += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]
        self._metrics.spool_bytes.set(self._used)


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

    def __init__(self, storage: Storage, settings: ServerSettings, metrics: ServerMetrics) -> None:
        """Keep the store; nothing is made yet."""
        self._storage = storage
        self._settings = settings
        self._metrics = metrics
        self._budget = SpoolBudget(settings.max_spool_bytes, settings.max_upload_bytes, metrics)

    async def put(self, request: web.BaseRequest, key: str, client: str) -> web.StreamResponse:
        """Write one object, or refuse it and leave nothing."""
        try:
            etag = await self._put(request, key, client)
        except RefusedError as error:  # raised from itself, or held by this frame, it would be a cycle
            self._counted(error)
            raise
        except Exception as error:
            raise self._counted(refusal_of(error, request[EXCHANGE].request_id)) from error
        self._metrics.uploads_accepted.inc()
        return web.Response(status=201, headers={"ETag": f'"{etag}"'} if etag else None)

    def _counted(self, refusal: RefusedError) -> RefusedError:
        self._metrics.uploads_refused.labels(refusal.reason or "other").inc()
        return refusal

    async def _put(self, request: web.BaseRequest, key: str, client: str) -> str:
        storage, digest, fields = self._storage, content_digest(key), conditions(request)
        limit = max_bytes(key, self._settings.max_upload_bytes)
        if limit is None:
            raise RefusedError(403, "only blobs, profiles, texts and catalog entries can be written", reason="key")
        length = _length(request, limit)
        await storage.check_conditions(fields, key)
        with self._budget.share(client, length) as take, closing(await storage.finish(self._spool)) as spool:
            await self._receive(request, spool, take, length)
            if digest is not None and spool.sha256 != digest:
                raise RefusedError(422, "the body's SHA-256 is not the one in the key", reason="digest")
            async with storage.lock(key):
                await storage.check_conditions(fields, key)  # the body may have taken an hour
                return await storage.finish(lambda: self._keep(key, spool, fields))

    def _spool(self) -> Spool:
        folder = self._settings.spool_folder
        if folder is None and (folder := self._storage.store.folder) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return Spool(folder)

    async def _receive(self, request: web.BaseRequest, spool: Spool, take: Callable[[int], None], length: int) -> None:
        exchange = request[EXCHANGE]
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._settings.upload_s):
                await self._pieces(request, exchange, spool, take)
        except TimeoutError as error:
            raise RefusedError(408, "the upload was too slow", reason="slow") from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RefusedError(GONE, "the client went away", reason="gone") from error
        if exchange.received_bytes != length:
            raise RefusedError(400, "the body's length is not the Content-Length", reason="length")

    async def _pieces(
        self, request: web.BaseRequest, exchange: Exchange, spool: Spool, take: Callable[[int], None]
    ) -> None:
        batch: list[bytes] = []
        held = 0
        more = True
        while more:
            async with asyncio.timeout(self._settings.upload_idle_s):
                piece = await request.content.readany()
            more = bool(piece)
            batch.append(piece)
            held += len(piece)
            exchange.received_bytes += len(piece)
            if held >= _BATCH_BYTES or not more:
                take(held)
                await self._storage.finish(partial(spool.write, batch))
                batch, held = [], 0

    def _keep(self, key: str, spool: Spool, fields: dict[str, str]) -> str:
        """Write what was received; gives the store's entity tag of it, empty where that is not known to be of it."""
        store = self._storage.store
        is_content, create = content_digest(key) is not None, fields.get("If-None-Match", "").strip() == "*"
        with spool.view() as data:
            if not is_content:
                _check(key, data)
            check_names(key, data)
            version = None if is_content else _version(fields)
            if version is not None:  # the store compares: another server may write to it, too
                written = store.replace(key, data, version)
            elif create:
                written = store.create(key, data)
            else:
                store.put(key, data)
                written = True
            etag = spool.sha256 if is_content else tag_of(store, key)
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


def check_names(key: str, data: Data) -> None:
    """Refuse an entry or a blob with a name that no new document, level or model may have. Sealed ones are opaque."""
    head = bytes(data[:_HEAD_BYTES])
    for name in () if head.startswith(SEALED_MAGIC) else _names(key, head):
        problem = name_problem(name)
        if problem:
            words = f"a name in it holds {problem}: name the document, level or model otherwise and encode it again"
            raise RefusedError(422, words, reason="name")


def _names(key: str, head: bytes) -> Iterator[str]:
    kind = kind_of(key)
    name = kind.name if kind else ""
    if name == "blob":
        from kvwire.codec.format.header import header_names

        yield from header_names(head)
    elif name in ("document entry", "token entry"):
        entry = CatalogEntry.from_json(head)
        yield entry.document_id
        yield from (level for level, _ in entry.levels)
