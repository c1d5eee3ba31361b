"""One object behind HTTP, read in ranges. All that the fetcher must know of HTTP is in this module."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.transport.errors import ReplacedError
from kvwire.transport.http_semantics import content_range, strong_etag, unsatisfied_size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_CONNECT_S = 5.0
_READ_BUFFER_BYTES = 256 * 1024
_OK, _PARTIAL, _GONE, _UNSATISFIABLE = 200, 206, 412, 416
_REFUSED = (401, 403)
_ABSENT = (404, 410)


def open_session(*, connect_s: float = _CONNECT_S) -> aiohttp.ClientSession:
    """A session for any number of sources; close it after them.

    It keeps no cookies, follows no proxy settings and has no limit on connections: fetchers have their own.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
    )


class HttpSource:
    """Reads one object by URL; the first answer's ETag becomes the condition of every later request.

    The URL is used as it is (presigned URLs stay valid), redirects are not followed, and the token, if any, goes to
    this URL alone.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, token: str | None = None) -> None:
        """Name the object; nothing is asked yet. The session is the caller's and is not closed here."""
        self._session = session
        self._url = URL(url, encoded=True)
        if self._url.scheme not in ("http", "https") or not self._url.host:
            msg = f"{url!r} is not an http or https address"
            raise ArgumentError(msg)
        self._headers = {"Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._etag: str | None = None
        self._size: int | None = None

    @property
    def url(self) -> str:
        """The object's address without its query, which may hold a signature."""
        return str(self._url.with_query(None).with_user(None))

    @property
    def size(self) -> int | None:
        """Length of the object, once an answer has told it."""
        return self._size

    async def read(self, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
        """Bytes ``start`` to ``end``, as they arrive; one request."""
        if start < 0 or (end is not None and end < start):
            msg = f"a byte range must run forwards from 0 or later, got {start} to {end}"
            raise ArgumentError(msg)
        if end == start:
            return
        async with self._asked(start, end) as response:
            left = self._checked(response, start, end)
            async for piece in response.content.iter_any():
                if len(piece) > left and response.status == _PARTIAL:
                    msg = f"{self.url}: the server sent more than it announced; its ranges are broken"
                    raise StorageError(msg)
                if left:
                    yield piece[:left]
                left -= min(left, len(piece))
                if not left and response.status == _OK and end is not None:
                    return  # a server without ranges: the rest of the object is not wanted
            if left:
                msg = f"{self.url}: the answer ended {left} bytes early; try again"
                raise StorageError(msg)

    async def close(self) -> None:
        """Nothing is held: connections belong to the session."""

    @asynccontextmanager
    async def _asked(self, start: int, end: int | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = dict(self._headers)
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if self._etag:
            headers["If-Match"] = self._etag
        try:
            async with self._session.get(self._url, headers=headers, allow_redirects=False) as response:
                yield response
        except KvwireError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            msg = f"{self.url}: the connection failed ({_words(error)}); try again or check the server"
            raise StorageError(msg) from error

    def _checked(self, response: aiohttp.ClientResponse, start: int, end: int | None) -> int:
        """Number of bytes to expect. Raises where the answer is not the bytes asked for."""
        status = response.status
        if status == _UNSATISFIABLE:
            self._learn(response, unsatisfied_size(response.headers.get("Content-Range")))
            return 0
        if status not in (_OK, _PARTIAL):
            raise self._refusal(status)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            msg = f"{self.url}: the answer is compressed in transit; switch that off for these objects"
            raise StorageError(msg)
        if status == _OK:
            return self._whole(response, start, end)
        told = content_range(response.headers.get("Content-Range"))
        wanted_end = None if told is None else (told[1] if end is None else min(end, told[2] or end))
        if told is None or told[0] != start or told[1] != wanted_end:
            msg = f"{self.url}: asked for bytes from {start} to {end}, got others; the server's ranges are broken"
            raise StorageError(msg)
        self._learn(response, told[2])
        return told[1] - start

    def _whole(self, response: aiohttp.ClientResponse, start: int, end: int | None) -> int:
        size = response.content_length
        if start or size is None:
            msg = f"{self.url}: the server ignores byte ranges or tells no length; use one that supports ranges"
            raise StorageError(msg)
        self._learn(response, size)
        return size if end is None else min(end, size)

    def _learn(self, response: aiohttp.ClientResponse, size: int | None) -> None:
        """Remember tag and size, or notice that they changed."""
        etag = strong_etag(response.headers.get("ETag"))
        known_tag, known_size = self._etag or etag, size if self._size is None else self._size
        if (etag and etag != known_tag) or (size is not None and size != known_size):
            raise self._replaced()
        self._etag, self._size = known_tag, known_size

    def _refusal(self, status: int) -> StorageError | NotFoundError | AuthError:
        if status == _GONE:
            return self._replaced()
        if status in _ABSENT:
            return (
                self._replaced()
                if self._size is not None
                else NotFoundError(f"{self.url} is not there; check the address")
            )
        if status in _REFUSED:
            return AuthError(f"{self.url}: the server refused the credentials (status {status}); check the token")
        return StorageError(f"{self.url}: the server answered with status {status}; try again later")

    def _replaced(self) -> ReplacedError:
        return ReplacedError(f"{self.url} was replaced while being read: open it again")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
