"""What every client that asks a server over HTTP agrees on: addresses, trust, proxies, redirects and byte ranges."""

from __future__ import annotations

import math
import os
import re
import ssl
from base64 import b64encode
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from kvwire.errors import ArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from urllib.parse import SplitResult

MAX_REDIRECTS = 5
"""More in a row lead nowhere."""
LOGIN_ADVICE = "check the address, and in a browser whether this network asks for a login first"
PROXY_ADVICE = "check the proxy and its password in HTTP_PROXY or HTTPS_PROXY, or name the server in NO_PROXY"
TRUST_ADVICE = "name a file with its authority's certificate in SSL_CERT_FILE (AWS_CA_BUNDLE for s3)"
WRONG_ADDRESS = "asking again changes nothing: check the store's address and what answers there"
PERMANENT = (301, 308)
"""Redirects that hold for later requests, too."""
_OK, _LATER, _FIRST_OF_SERVERS = 200, (408, 425), 500
_MAX_WORDS = 200
_READS = ("GET", "HEAD")
_REDIRECTS = (301, 302, 303, 307, 308)
_KEEP_METHOD = (307, 308)  # the others may turn a PUT into a GET
_PORTS = {"http": 80, "https": 443}
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def client_tls(cafile: str | None = None) -> ssl.SSLContext:
    """Make a context for connections to servers. Not every Python refuses old versions by itself."""
    more = None if cafile else os.environ.get("REQUESTS_CA_BUNDLE")
    try:
        context = ssl.create_default_context(cafile=cafile)
        if more:
            is_folder = os.path.isdir(more)  # noqa: PTH112 - as OpenSSL takes it
            context.load_verify_locations(**{"capath" if is_folder else "cafile": more})
    except OSError as error:
        raise ArgumentError(
            "the certificates that AWS_CA_BUNDLE (or ca_bundle in the profile), REQUESTS_CA_BUNDLE or SSL_CERT_FILE "
            "names cannot be read: name a readable file of certificates"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@cache
def usual_tls() -> ssl.SSLContext:
    """One for all: reading the system's certificates takes milliseconds."""
    return client_tls()


def connection_failed(where: str, cause: BaseException | str, *, at_proxy: bool = False) -> str:
    """Words and advice for a connection that failed. Of an error only its kind and the system's reason.

    Any other text of it may hold the URL's query or headers, or what a server sent.
    """
    advice = PROXY_ADVICE if at_proxy else "try again or check the server"
    if isinstance(getattr(cause, "certificate_error", cause), ssl.SSLCertVerificationError) and not at_proxy:
        advice = TRUST_ADVICE
    if not isinstance(cause, str):
        reason = cause.strerror if isinstance(cause, OSError) else None
        cause = ": ".join(filter(None, (type(cause).__name__, reason)))[:_MAX_WORDS]
    return f"{where}: the connection failed ({cause}); {advice}"


@dataclass(frozen=True)
class Proxy:
    """A forward proxy: its address without credentials, and secret headers for it alone."""

    url: str
    headers: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class HttpAddress:
    """Where one object can be read over HTTP, in ranges.

    Attributes:
        url: Used as it is; may hold a signature, so it never goes into logs or messages.
        headers: To send along, likewise secret.
        expires_at: Unix seconds.
        tls: Trusted certificates; None for the system's.
        proxy: None: the server is asked directly.
        redirects: Whether they are followed; not where a signature is good for one server only.
    """

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    expires_at: float = math.inf
    tls: ssl.SSLContext | None = None
    proxy: Proxy | None = None
    redirects: bool = True

    def redirected(self, status: int, location: str | None, method: str = "GET") -> HttpAddress | None:
        """Follow a redirect, by the same rules for every client; another server gets no credentials.

        Args:
            status: The answer's.
            location: Its ``Location``.
            method: The request's.

        Returns:
            The address to ask instead; None: the answer redirects nowhere.
        """
        url = _redirected(self.url, status, location, method) if self.redirects else None
        if url is None:
            return None
        tls = self.tls if url.startswith("https:") else None
        headers = self.headers if _keeps_credentials(self.url, url) else ()
        return replace(self, url=url, headers=headers, tls=tls, proxy=proxy_for(url))


@runtime_checkable
class Addressed(Protocol):
    """A store whose objects can be read over plain HTTP, which is how transfers prefer it."""

    def http_address(self, key: str, *, renew: bool = False) -> HttpAddress:
        """Address of one object, the same for all ranges.

        Args:
            key: The object.
            renew: Ask for a fresh one, since the last was refused. The store asks the server itself, which finds out
                why.

        Returns:
            The address, with the headers to send along.

        Raises:
            KvwireError: Told to renew, what the store's own request fails with.
        """
        ...


def proxy_for(url: str) -> Proxy | None:
    """The proxy before a server: HTTP_PROXY, HTTPS_PROXY and NO_PROXY, read as boto3 and curl read them."""
    parts = urlsplit(url)
    if proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    named = getproxies().get(parts.scheme)
    if not named:
        return None
    try:
        proxy = urlsplit(named if "://" in named else f"http://{named.lstrip('/')}")
        fits = proxy.scheme in _PORTS and bool(proxy.hostname) and proxy.port != 0
    except ValueError:
        fits = False
    if not fits:
        msg = f"{parts.scheme.upper()}_PROXY names no proxy that can be used: write http://host:port, or unset it"
        raise ArgumentError(msg) from None  # it may hold a password
    headers = {}
    if proxy.username is not None:
        words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        headers = {"Proxy-Authorization": f"Basic {b64encode(words).decode()}"}
    return Proxy(f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}", headers)


def _redirected(url: str, status: int, location: str | None, method: str) -> str | None:
    if status not in _REDIRECTS or not (method in _READS or status in _KEEP_METHOD):
        return None
    here = urlsplit(url)
    where = f"{here.scheme}://{here.netloc.rpartition('@')[2]}"
    try:
        there = urldefrag(urljoin(url, location or "")).url if location else ""
        parts = urlsplit(there)
        fits = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        fits = False
    if not fits:
        raise StorageError(f"{where} redirects without saying where to (status {status}): check the server") from None
    if here.scheme == "https" != parts.scheme:
        msg = f"{where} redirects to plain http (status {status}), which is not followed: let it redirect to https"
        raise StorageError(msg)
    return None if parts.path == f"{here.path}/" else there


def _keeps_credentials(url: str, further: str) -> bool:
    """Whether a redirect's target may see the token: the same server, or its https."""
    here, there = urlsplit(url), urlsplit(further)
    if here.hostname != there.hostname:
        return False
    is_upgrade = (here.scheme, there.scheme, _port(here), _port(there)) == ("http", "https", 80, 443)
    return is_upgrade or (here.scheme, _port(here)) == (there.scheme, _port(there))


def refuse_other_bytes(where: str, status: int, fields: Mapping[str, str]) -> None:
    """Raise StorageError where an answer's bytes are not the object's.

    They are compressed, or a page for people with status 200, as networks send that ask for a login.
    """
    if status == _OK and fields.get("Content-Type", "").lower().startswith("text/html"):
        raise StorageError(f"{where}: a web page came instead of the object: {LOGIN_ADVICE}")
    if fields.get("Content-Encoding", "identity").lower() != "identity":
        raise StorageError(f"{where}: the answer is compressed in transit; switch that off for these objects")


def is_passing(status: int) -> bool:
    """Whether asking again later may bring another status than this refusal."""
    return status in _LATER or status >= _FIRST_OF_SERVERS


def too_many_redirects(where: str) -> StorageError:
    """The error for a server that leads in circles, or too far."""
    return StorageError(f"{where}: more than {MAX_REDIRECTS} redirects in a row: name the address that they lead to")


def other_range(where: str, start: int, end: int | None) -> StorageError:
    """The error for an answer with other bytes than those asked for."""
    return StorageError(f"{where}: asked for bytes from {start} to {end}, got others; the server's ranges are broken")


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]


ContentRange = tuple[int, int, int | None]
"""Start, end (exclusive) and the object's size, None where that is unknown."""


def range_header(start: int, end: int | None) -> str:
    """The Range header of a request.

    Args:
        start: First byte.
        end: The byte after the last; None: to the end.

    Returns:
        The header's value.
    """
    return f"bytes={start}-{'' if end is None else end - 1}"


def content_range(field: str | None) -> ContentRange | None:
    """Read a Content-Range header."""
    match = _CONTENT_RANGE.fullmatch(field or "")
    if match is None:
        return None
    start, end = int(match[1]), int(match[2]) + 1
    size = None if match[3] == "*" else int(match[3])
    if start >= end or (size is not None and end > size):
        return None
    return start, end, size


def range_told(field: str | None, start: int, end: int | None) -> ContentRange | None:
    """Read the Content-Range of an answer, and compare it with what was asked for.

    An answer to an open range that does not tell the object's size is taken as it is: nothing shows where it was cut.

    Args:
        field: The header's value; None where it is missing.
        start: First byte asked for.
        end: The byte after the last asked for; None: to the end.

    Returns:
        What it tells; None where that is not the range asked for, cut at the object's end and no sooner.
    """
    told = content_range(field)
    if told is None:
        return None
    first, stop, size = told
    wanted = min((limit for limit in (end, size) if limit is not None), default=stop)
    return told if (first, stop) == (start, wanted) else None
