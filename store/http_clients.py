"""What every client that asks a server over HTTP agrees on: whom it trusts, which proxy it takes, where it is led."""

from __future__ import annotations

import os
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from kvwire.errors import ArgumentError, StorageError

if TYPE_CHECKING:
    from urllib.parse import SplitResult

MAX_REDIRECTS = 5
"""More in a row lead nowhere."""
PROXY_ADVICE = "check the proxy and its password in HTTP_PROXY or HTTPS_PROXY, or name the server in NO_PROXY"
TRUST_ADVICE = "name a file with its authority's certificate in SSL_CERT_FILE (AWS_CA_BUNDLE for s3)"
WRONG_ADDRESS = "asking again changes nothing: check the store's address and what answers there"
PERMANENT = (301, 308)
"""Redirects that hold for later requests, too."""
_READS = ("GET", "HEAD")
_REDIRECTS = (301, 302, 303, 307, 308)
_KEEP_METHOD = (307, 308)  # the others may turn a PUT into a GET
_PORTS = {"http": 80, "https": 443}


def client_tls(cafile: str | None = None) -> ssl.SSLContext:
    """Make a context for connections to servers. Not every Python refuses old versions by itself."""
    more = None if cafile else os.environ.get("REQUESTS_CA_BUNDLE")
    try:
        context = ssl.create_default_context(cafile=cafile)
        if more:
            is_folder = os.path.isdir(more)  # noqa: PTH112 - as OpenSSL takes it
            context.load_verify_locations(**{"capath" if is_folder else "cafile": more})
    except OSError as error:
        msg = (
            "the certificates that AWS_CA_BUNDLE (or ca_bundle in the profile), REQUESTS_CA_BUNDLE or SSL_CERT_FILE "
            "names cannot be read: name a readable file of certificates"
        )
        raise ArgumentError(msg) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a connection failed because nobody who is trusted vouches for the server's certificate."""
    return isinstance(error, ssl.SSLCertVerificationError)


@dataclass(frozen=True)
class Proxy:
    """A forward proxy.

    Attributes:
        url: Without credentials.
        headers: To send to the proxy alone; secret.
    """

    url: str
    headers: dict[str, str] = field(repr=False)


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


def redirected(url: str, status: int, location: str | None, method: str = "GET") -> str | None:
    """Where an answer leads, the same for every client."""
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
        msg = f"{where} redirects without saying where to (status {status}): check the server"
        raise StorageError(msg) from None
    if here.scheme == "https" != parts.scheme:
        msg = f"{where} redirects to plain http (status {status}), which is not followed: let it redirect to https"
        raise StorageError(msg)
    return None if parts.path == f"{here.path}/" else there


def keeps_credentials(url: str, further: str) -> bool:
    """Whether a redirect's target may see the token: the same server, or its https."""
    here, there = urlsplit(url), urlsplit(further)
    if here.hostname != there.hostname:
        return False
    is_upgrade = (here.scheme, there.scheme, _port(here), _port(there)) == ("http", "https", 80, 443)
    return is_upgrade or (here.scheme, _port(here)) == (there.scheme, _port(there))


def too_many_redirects(where: str) -> StorageError:
    """The error for a server that leads in circles, or too far."""
    return StorageError(f"{where}: more than {MAX_REDIRECTS} redirects in a row: name the address that they lead to")


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]
