"""One object behind HTTP, read in ranges. All that the fetcher must know of HTTP is in this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
from aiohttp.hdrs import CONTENT_RANGE, ETAG, LOCATION
from yarl import URL

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import HttpAddress, clamp_range, range_header, range_told
from kvwire.store.backends.http.semantics import retry_after_s, strong_etag, unsatisfied_size
from kvwire.store.http_clients import (
    MAX_REDIRECTS,
    PERMANENT,
    PROXY_ADVICE,
    WRONG_ADDRESS,
    connection_failed,
    is_passing,
    other_range,
    proxy_for,
    refuse_other_bytes,
    too_many_redirects,
    usual_tls,
)
from kvwire.transport.errors import BusyError, RejectedError, ReplacedError
from kvwire.transport.sources.base import ByteSource

if TYPE_CHECKING:
    from types import SimpleNamespace

    from kvwire.transport.links import EmulatedLink
    from kvwire.transport.sources.base import Sink

Addresses: TypeAlias = Callable[[bool], HttpAddress]
"""Gives an object's address; told True, a fresh one, because the last was refused. May block."""

_CONNECT_S = 5.0
_KEPT_S = 60.0  # a connection idle for so long is closed; servers close theirs about then, too
_TLS_TRIPS = 2
_READ_BUFFER_BYTES = 512 * 1024
_RENEW_BEFORE_S = 30.0  # an address that is about to expire is not used for another request
_OK, _PARTIAL, _GONE, _UNSATISFIABLE = 200, 206, 412, 416
_REFUSED = (401, 403)
_ABSENT = (404, 410)
_BUSY = (429, 503)
_PROXYS = 407


def open_session(
    *, connect_s: float = _CONNECT_S, connections: int = 0, link: EmulatedLink | None = None
) -> aiohttp.ClientSession:
    """A session for any number of sources; close it after them. It keeps no cookies; sources know their proxies.

    Args:
        connect_s: Longest wait for a connection, in seconds.
        connections: At most so many at a time, requests wait for one; 0: no limit, since fetchers have their own.
        link: An emulated link, on which a connection takes its round trips: one for TCP, one more for TLS 1.3.

    Returns:
        The session, which keeps connections open between requests.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_KEPT_S),
        trace_configs=[_connecting_over(link)] if link else [],
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
    )


def _connecting_over(link: EmulatedLink) -> aiohttp.TraceConfig:
    """Makes a new connection wait as long as it would over the link."""

    async def asked(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestStartParams) -> None:
        context.trips = _TLS_TRIPS if params.url.scheme == "https" else 1

    async def connected(_: object, context: SimpleNamespace, __: object) -> None:
        for _trip in range(context.trips):
            await link.round_trip(link.now())

    config = aiohttp.TraceConfig()
    config.on_request_start.append(asked)
    config.on_connection_create_end.append(connected)
    return config


@dataclass(frozen=True)
class _Target:
    """An address, ready to be asked."""

    address: HttpAddress
    url: URL
    headers: dict[str, str]

    @classmethod
    def of(cls, address: HttpAddress) -> _Target:
        try:
            url = URL(address.url, encoded=True)
            fits = url.scheme in ("http", "https") and url.host and url.port
        except ValueError:
            msg = "an object's address is no URL: use http://host:port/key"
            raise ArgumentError(msg) from None  # the cause quotes the address
        if not fits:
            raise ArgumentError(f"{address.url.partition('?')[0].rpartition('@')[2]!r} is not an http or https address")
        headers = {"Accept-Encoding": "identity", **dict(address.headers)}
        if address.proxy and url.scheme == "http":  # which forwards the request as it is
            headers |= address.proxy.headers
        return cls(address, url, headers)

    @property
    def is_fresh(self) -> bool:
        return time.time() < self.address.expires_at - _RENEW_BEFORE_S


class HttpSource(ByteSource):
    """Reads one object by URL; the first answer's ETag becomes the condition of every later request.

    The URL is used as it is (presigned URLs stay valid), and credentials go to its server alone. Redirects are followed
    where the address allows it, and kept for later reads where they are permanent. Where addresses are found, one that
    is about to expire, or was refused, is replaced by a fresh one, once a read.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str | Addresses, *, token: str | None = None) -> None:
        """Name the object; nothing is asked yet.

        Args:
            session: The caller's; it is not closed here.
            url: The object's address, or what finds one.
            token: Bearer token for ``url``; not used where addresses are found.
        """
        self._session = session
        self._find = url if callable(url) else None
        self._target: _Target | None = None
        if not callable(url):
            headers = (("Authorization", f"Bearer {token}"),) if token else ()
            target = _Target.of(HttpAddress(url, headers))
            self._target = _Target.of(replace(target.address, proxy=proxy_for(url)))
        self._etag: str | None = None
        self._size: int | None = None

    @property
    def url(self) -> str:
        """The object's address without its query, which may hold a signature."""
        return str(self._target.url.with_query(None).with_user(None)) if self._target else "an object behind http"

    @property
    def size(self) -> int | None:
        """Length of the object, once an answer has told it."""
        return self._size

    async def read(self, start: int, end: int | None, sink: Sink) -> None:
        """Give bytes of the object, as they arrive; one request, besides redirects, two where the address was refused.

        Args:
            start: First byte.
            end: First byte after the range; None: to the end.
            sink: Takes each piece.

        Raises:
            ArgumentError: The range does not run forwards from 0 or later.
        """
        clamp_range(start, end, 0)
        if end == start:
            return
        target = self._target
        if target is None or not target.is_fresh:
            target = await self._renewed(refused=False)
        try:
            await self._ask(target, start, end, sink)
        except (AuthError, RejectedError):
            if self._find is None:
                raise
            await self._ask(await self._renewed(refused=True), start, end, sink)

    async def _renewed(self, *, refused: bool) -> _Target:
        if self._find is None:
            raise AuthError(f"{self.url}: the address has expired; ask for a fresh one")
        try:
            self._target = _Target.of(await asyncio.to_thread(self._find, refused))
        except NotFoundError as error:
            if self._size is None:
                raise
            raise self._replaced() from error
        return self._target

    async def _ask(self, target: _Target, start: int, end: int | None, sink: Sink) -> None:
        is_permanent = True
        for _ in range(MAX_REDIRECTS + 1):
            further = await self._ask_once(target, start, end, sink)
            if further is None:
                return
            target, is_permanent = further[0], is_permanent and further[1]
            if is_permanent:
                self._target = target
        raise too_many_redirects(self.url)

    async def _ask_once(self, target: _Target, start: int, end: int | None, sink: Sink) -> tuple[_Target, bool] | None:
        """Where the answer leads, and whether for good; None where it gave the bytes."""
        headers = dict(target.headers)
        if start or end is not None:
            headers["Range"] = range_header(start, end)
        if self._etag:
            headers["If-Match"] = self._etag
        address, is_secure = target.address, target.url.scheme == "https"
        way: dict[str, Any] = {"ssl": (address.tls or usual_tls()) if is_secure else True}
        if address.proxy:
            way |= {"proxy": address.proxy.url, "proxy_headers": address.proxy.headers if is_secure else None}
        try:
            async with self._session.get(target.url, headers=headers, allow_redirects=False, **way) as response:
                if further := address.redirected(response.status, response.headers.get(LOCATION)):
                    return _Target.of(further), response.status in PERMANENT
                await self._take(response, start, end, sink)
        except KvwireError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            at_proxy = isinstance(error, aiohttp.ClientProxyConnectionError | aiohttp.ClientHttpProxyError)
            msg = connection_failed(self.url, error, at_proxy=at_proxy)
            raise StorageError(msg) from None  # the cause holds the whole URL and the headers
        return None

    async def _take(self, response: aiohttp.ClientResponse, start: int, end: int | None, sink: Sink) -> None:
        left = self._checked(response, start, end)
        content = response.content
        while left:
            piece, is_chunk_end = await content.readchunk()
            if len(piece) > left:
                if response.status == _PARTIAL:
                    raise self._lied()
                piece = piece[:left]
            if piece:
                sink(piece)
                left -= len(piece)
            elif not is_chunk_end:
                raise StorageError(f"{self.url}: the answer ended {left} bytes early; try again")
        if response.content_length is None and response.status == _PARTIAL and await content.read(1):
            raise self._lied()

    async def close(self) -> None:
        """Nothing is held: connections belong to the session."""

    def _checked(self, response: aiohttp.ClientResponse, start: int, end: int | None) -> int:
        """Number of bytes to expect. Raises where the answer is not the bytes asked for."""
        status = response.status
        if status == _UNSATISFIABLE:
            self._learn(response, unsatisfied_size(response.headers.get(CONTENT_RANGE)))
            return 0
        if status not in (_OK, _PARTIAL):
            raise self._refusal(status, response)
        refuse_other_bytes(self.url, status, response.headers)
        if status == _OK:
            return self._whole(response, start, end)
        told = self._range_told(response.headers.get(CONTENT_RANGE), start, end)
        if told is None:
            raise other_range(self.url, start, end)
        self._learn(response, told[2])
        if response.content_length not in (None, told[1] - start):
            raise self._lied()
        return told[1] - start

    def _range_told(self, field: str | None, start: int, end: int | None) -> tuple[int, int, int | None] | None:
        """``range_told``, without parsing what is just as expected."""
        size = self._size
        if end is not None and size is not None and end <= size and field == f"bytes {start}-{end - 1}/{size}":
            return start, end, size
        return range_told(field, start, end)

    def _whole(self, response: aiohttp.ClientResponse, start: int, end: int | None) -> int:
        size = response.content_length
        if start or size is None:
            msg = f"{self.url}: the server ignores byte ranges or tells no length; use one that supports ranges"
            raise StorageError(msg)
        self._learn(response, size)
        return size if end is None else min(end, size)

    def _learn(self, response: aiohttp.ClientResponse, size: int | None) -> None:
        """Remember tag and size, or notice that they changed."""
        field = response.headers.get(ETAG)
        etag = field if field == self._etag else strong_etag(field)
        known_tag, known_size = self._etag or etag, size if self._size is None else self._size
        if (etag and etag != known_tag) or (size is not None and size != known_size):
            raise self._replaced()
        self._etag, self._size = known_tag, known_size
        self.etag = (known_tag or "").strip('"')

    def _refusal(self, status: int, response: aiohttp.ClientResponse) -> KvwireError:
        if status == _GONE or (status in _ABSENT and self._size is not None):
            return self._replaced()
        if status in _ABSENT:
            return NotFoundError(f"{self.url} is not there; check the address")
        if status in _REFUSED:
            return AuthError(f"{self.url}: the server refused the credentials (status {status}); check the token")
        words = f"{self.url}: the server answered with status {status}"
        if status in _BUSY:
            wait_s = retry_after_s(response.headers.get("Retry-After", ""))
            return BusyError(f"{words}; try again {f'in {ceil(wait_s)} s' if wait_s else 'later'}", wait_s)
        if is_passing(status):
            return StorageError(f"{words}; try again later")
        return RejectedError(f"{words}; {PROXY_ADVICE if status == _PROXYS else WRONG_ADDRESS}")

    def _lied(self) -> StorageError:
        return StorageError(f"{self.url}: the server sent another number of bytes than it announced; try again")

    def _replaced(self) -> ReplacedError:
        return ReplacedError(f"{self.url} was replaced while being read: open it again")
