"""A store behind HTTP: what ``kvwire serve`` offers, or any server of files, which can only be read.

Blobs are fetched in ranges by ``BlobFetcher``, from the addresses that this store gives.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from urllib3.util import parse_url

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.store.backends.http.exchange import HttpExchange, HttpStoreSettings, Reply
from kvwire.store.backends.http.replies import MAX_PAGE_BYTES, PAGE_KEYS, is_hidden, page, refusal
from kvwire.store.backends.http.semantics import strong_etag
from kvwire.store.base import ObjectStat, Store, clamp_range, holds
from kvwire.store.http_clients import content_range, other_range, range_header, range_told, refuse_other_bytes
from kvwire.store.key_kinds import check_place
from kvwire.store.keys import check_after, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from urllib.parse import SplitResult

    from kvwire.store.base import Data, Listed
    from kvwire.store.http_clients import HttpAddress

_log = logging.getLogger(__name__)
_SIZE = re.compile(r"[0-9]{1,18}")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_OK, _PARTIAL, _FORBIDDEN, _CHANGED, _UNSATISFIABLE = 200, 206, 403, 412, 416
_WRITTEN = (200, 201, 204)
_ABSENT = (404, 410)

__all__ = ["HttpStore", "HttpStoreSettings"]


def check_token(token: str) -> str:
    """Check a bearer token."""
    if not _TOKEN.fullmatch(token):
        raise ArgumentError("a bearer token has visible ASCII characters only: check for spaces or line ends around it")
    return token


class HttpStore(Store):
    """Objects below ``http(s)://host[:port][/prefix]``; any number of threads may ask at once.

    A server other than kvwire's refuses to write or list: StorageError and ArgumentError say so.
    """

    def __init__(self, url: str, *, token: str | None = None, settings: HttpStoreSettings | None = None) -> None:
        """Keep the address; nothing is connected yet."""
        self._parts = _address(url)
        checked = check_token(token) if token else None
        self._exchange = HttpExchange(self._parts, checked, settings or HttpStoreSettings())
        self._is_trusted = token is None  # or once an object was read with it
        self._has_warned = False
        self._lists = False  # what it lists it shows: a collector must not take a refusal for absence

    @property
    def url(self) -> str:
        """The address, without a slash at the end."""
        return self._parts.geturl().rstrip("/")

    def object_url(self, key: str) -> str:
        """Address of one object."""
        return f"{self.url}/{check_key(key)}"

    def http_address(self, key: str, *, renew: bool = False) -> HttpAddress:
        """Address of one object, with the token in its headers; asked to renew it, what the server has against it."""
        if renew:
            self.stat(key)
        return replace(self._exchange.address, url=self.object_url(key))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end; no more than these are read."""
        clamp_range(start, end, 0)
        if end == start:
            self.stat(key)
            return b""
        return self._read(key, start, end)[0]

    def get_with_etag(self, key: str, end: int | None = None) -> tuple[bytes, str]:
        """The object's first bytes and their entity tag; one more request where the answer has no strong tag."""
        data, etag = self._read(key, 0, end)
        return (data, etag) if etag else super().get_with_etag(key, end)

    def _read(self, key: str, start: int, end: int | None) -> tuple[bytes, str]:
        headers = {"Range": range_header(start, end)} if start or end is not None else {}
        reply = self._ask("GET", key, headers, limit=end, allowed=(_OK, _PARTIAL, _UNSATISFIABLE))
        refuse_other_bytes(self.object_url(key), reply.status, reply.fields)
        if reply.status == _UNSATISFIABLE:
            return b"", ""
        etag = _etag(reply)
        if reply.status == _OK:  # the whole object: asked for, or a server without ranges
            return reply.body[start:end], etag
        told = range_told(reply.fields.get("Content-Range"), start, end)
        if told is None or len(reply.body) != told[1] - told[0]:
            raise other_range(self.object_url(key), start, end)
        return reply.body, etag

    def stat(self, key: str) -> ObjectStat:
        """Size, entity tag and time of writing, as the server tells them; the tag is empty where it is not strong."""
        reply = self._ask("HEAD", key, {}, allowed=(_OK, _PARTIAL))
        refuse_other_bytes(self.object_url(key), reply.status, reply.fields)
        size = reply.fields.get("Content-Length") or ""
        if reply.status == _PARTIAL and (told := content_range(reply.fields.get("Content-Range"))):
            size = str(told[2])
        if not _SIZE.fullmatch(size):
            raise StorageError(f"{self.object_url(key)}: the server does not tell the object's size")
        return ObjectStat(int(size), _etag(reply), _seconds(reply.fields.get("Last-Modified")))

    def put(self, key: str, data: Data) -> None:
        """Write the object. ArgumentError where the server finds that the bytes do not belong to the key."""
        self._ask("PUT", check_place(key), {}, data=data, allowed=_WRITTEN)

    def create(self, key: str, data: Data) -> bool:
        """Write where there is nothing of that size yet; tells whether it wrote."""
        return self._put_if(key, data, {"If-None-Match": "*"}) or super().create(key, data)

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write where the version is still the one with this tag; the server compares."""
        return self._put_if(key, data, {"If-Match": f'"{etag}"'} if etag else {"If-None-Match": "*"})

    def _put_if(self, key: str, data: Data, condition: dict[str, str]) -> bool:
        """Whether a conditional write was done, be it by a request whose answer was lost."""
        reply = self._ask("PUT", check_place(key), condition, data=data, allowed=(*_WRITTEN, _CHANGED))
        return reply.status != _CHANGED or (reply.is_repeated and holds(self, key, data))

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        self._ask("DELETE", key, {}, allowed=(*_WRITTEN, *_ABSENT))

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys start with ``prefix`` and come after ``after``, in order, asked for while iterating.

        ArgumentError where the server knows no listings.
        """
        check_after(prefix, after)
        return self._pages(prefix, after)

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()

    def _pages(self, prefix: str, after: str) -> Iterator[Listed]:
        more = True
        while more:
            query = urlencode({"prefix": prefix, "after": after, "limit": PAGE_KEYS})
            reply = self._exchange.ask("GET", f"{self._root}/?list&{query}", {}, limit=MAX_PAGE_BYTES)
            found, more = page(reply, prefix, after, self.url)
            self._lists = True
            yield from found
            after = found[-1].key if found else after

    @property
    def _root(self) -> str:
        return self._parts.path.rstrip("/")

    def _ask(
        self,
        method: str,
        key: str,
        headers: dict[str, str],
        *,
        allowed: tuple[int, ...],
        data: Data | None = None,
        limit: int | None = None,
    ) -> Reply:
        target = f"{self._root}/{check_key(key)}"
        reply = self._exchange.ask(method, target, headers, data=data, limit=limit)
        if method == "HEAD" and reply.status == _FORBIDDEN:  # an answer without a body does not say why
            reply = self._exchange.ask("GET", target, {"Range": range_header(0, 1)}, limit=1)
        if reply.status in allowed:
            self._is_trusted = True
            return reply
        is_read = data is None and method != "DELETE"
        if is_read and not self._lists and is_hidden(reply, is_trusted=self._is_trusted):
            raise self._hidden(key)
        raise refusal(reply, method, key, self.url)

    def _hidden(self, key: str) -> NotFoundError:
        """What may not be read counts as absent: nothing tells the two apart, and a text can answer for either."""
        msg = (
            f"{key} is not in {self.url}, or may not be read there (status 403). Buckets answer so for what is absent "
            "where listing them is not allowed; otherwise check what the server, and the token, may read"
        )
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s. Further ones count as absent, too", msg)
        return NotFoundError(msg)


def _etag(reply: Reply) -> str:
    return (strong_etag(reply.fields.get("ETag")) or "").strip('"')


def _seconds(date: str | None) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() if date else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        fits = fits and not re.search(r"\s", parts.netloc)
        parse_url(url)  # stricter about hosts
        (parts.hostname or "").encode("idna")  # so are resolvers
    except ValueError:
        fits = False
    if fits and parts.username is not None:
        raise ArgumentError("an http store's address must not hold a password: pass a token")
    if not fits or parts.query or parts.fragment:
        msg = f"{url.partition('?')[0].rpartition('@')[2]!r} is not the address of an http store: "
        raise ArgumentError(msg + "write http://host:port or https://host/prefix")
    return parts
