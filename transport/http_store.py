"""A store behind HTTP, for reading catalog entries and profiles. Blobs are fetched by ``BlobFetcher``."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import HttpAddress, ObjectStat, Store, check_key
from kvwire.transport.http_semantics import content_range, strong_etag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from urllib.parse import SplitResult

    from kvwire.store import Data, Listed

_SIZE = re.compile(r"[0-9]{1,18}")
_PIECE_BYTES = 64 * 1024
_OK, _PARTIAL, _UNSATISFIABLE = 200, 206, 416
_REFUSED = (401, 403)
_ABSENT = (404, 410)


@dataclass(frozen=True)
class HttpStoreSettings:
    """Longest waits, in seconds: for the connection or the next bytes, and for one whole answer."""

    stall_s: float = 15.0
    total_s: float = 600.0


class HttpStore(Store):
    """Reads objects from ``http(s)://host[:port][/prefix]``, such as ``serve`` offers. It cannot write or list.

    One connection, kept open between calls and shared by threads in turn. Redirects and proxy settings are not
    followed, so that a token goes nowhere else.
    """

    def __init__(self, url: str, *, token: str | None = None, settings: HttpStoreSettings | None = None) -> None:
        """Keep the address; nothing is connected yet."""
        self._parts = _address(url)
        self._token = token or None
        self._settings = settings or HttpStoreSettings()
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    @property
    def url(self) -> str:
        """The address, without a slash at the end."""
        return self._parts.geturl().rstrip("/")

    @property
    def token(self) -> str | None:
        """The bearer token, for sources that read objects of this store."""
        return self._token

    def object_url(self, key: str) -> str:
        """Address of one object."""
        return f"{self.url}/{check_key(key)}"

    def http_address(self, key: str, *, renew: bool = False) -> HttpAddress:  # noqa: ARG002 - it never expires
        """Address of one object, with the token in its headers."""
        headers = (("Authorization", f"Bearer {self._token}"),) if self._token else ()
        return HttpAddress(self.object_url(key), headers)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end."""
        if start < 0 or (end is not None and end < start):
            msg = f"a byte range must run forwards from 0 or later, got {start} to {end}"
            raise ArgumentError(msg)
        if end == start:
            self.stat(key)
            return b""
        headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        status, fields, body = self._ask("GET", key, headers)
        if status == _UNSATISFIABLE:
            return b""
        if status == _OK:  # the whole object: asked for, or a server without ranges
            return body[start:end]
        told = content_range(fields.get("Content-Range"))
        if told is None or told[0] != start or told[1] - start != len(body) or (end is not None and told[1] > end):
            msg = f"{self.object_url(key)}: asked for bytes from {start} to {end}, got others; its ranges are broken"
            raise StorageError(msg)
        return body

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag, as the server tells them; the tag is empty where it has none that is strong."""
        _, fields, _ = self._ask("HEAD", key, {})
        size = fields.get("Content-Length") or ""
        if not _SIZE.fullmatch(size):
            msg = f"{self.object_url(key)}: the server does not tell the object's size"
            raise StorageError(msg)
        return ObjectStat(int(size), (strong_etag(fields.get("ETag")) or "").strip('"'))

    def put(self, key: str, data: Data) -> NoReturn:  # noqa: ARG002 - the protocol's parameters
        """Refuse: StorageError."""
        self._refuse_writing()

    def delete(self, key: str) -> NoReturn:  # noqa: ARG002 - the protocol's parameters
        """Refuse: StorageError."""
        self._refuse_writing()

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:  # noqa: ARG002 - the protocol's parameters
        """Refuse: ArgumentError."""
        msg = f"{self.url} cannot list its keys: look documents up by id, or list the store on the server's side"
        raise ArgumentError(msg)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    def _refuse_writing(self) -> NoReturn:
        msg = f"{self.url} is read-only: write to the store on the server's side"
        raise StorageError(msg)

    def _ask(self, method: str, key: str, headers: dict[str, str]) -> tuple[int, http.client.HTTPMessage, bytes]:
        path = f"{self._parts.path.rstrip('/')}/{check_key(key)}"
        if self._token:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        with self._lock:
            reused = self._connection is not None
            try:
                status, fields, body = self._exchange(method, path, headers)
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                if not reused:
                    raise self._failed(error) from error
                status, fields, body = self._once_more(method, path, headers)
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error) from error
        self._check(status, key)
        return status, fields, body

    def _once_more(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A connection that was kept may have been closed by the server meanwhile: that is no failure yet."""
        try:
            return self._exchange(method, path, headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, http.client.HTTPMessage, bytes]:
        whole = False
        try:
            connection = self._connected()
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            body = self._body(response)
            whole = True
            if response.will_close:
                self._disconnect()
            return response.status, response.msg, body
        finally:
            if not whole:
                self._disconnect()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        """Read piece by piece: memory grows with what has come, not with what is announced."""
        give_up_at = time.monotonic() + self._settings.total_s
        pieces = []
        announced = response.length
        while piece := response.read(_PIECE_BYTES):
            pieces.append(piece)
            if time.monotonic() > give_up_at:
                msg = f"the answer took longer than {self._settings.total_s:g} s"
                raise TimeoutError(msg)
        body = b"".join(pieces)
        if announced is not None and len(body) != announced:
            msg = f"the answer ended {announced - len(body)} bytes early"
            raise http.client.HTTPException(msg)
        return body

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port, wait_s = self._parts.hostname or "", self._parts.port, self._settings.stall_s
            if self._parts.scheme == "https":
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(host, port, timeout=wait_s, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=wait_s)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failed(self, error: Exception) -> StorageError:
        words = str(error) or type(error).__name__
        return StorageError(f"{self.url}: the connection failed ({words}); try again or check the server")

    def _check(self, status: int, key: str) -> None:
        if status in (_OK, _PARTIAL, _UNSATISFIABLE):
            return
        if status in _ABSENT:
            msg = f"{key} is not in {self.url}"
            raise NotFoundError(msg)
        if status in _REFUSED:
            msg = f"{self.url} refused the credentials (status {status}): check the token"
            raise AuthError(msg)
        msg = f"{self.url} answered with status {status}: try again later or check the server"
        raise StorageError(msg)


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment:
        msg = f"{url!r} is not the address of an http store: write http://host:port or https://host/prefix"
        raise ArgumentError(msg)
    if parts.username is not None:
        msg = "an http store's address must not hold a password: pass a token"
        raise ArgumentError(msg)
    return parts
