"""URLs that carry their own permission: an HMAC over method, path, expiry and key id.

The signing keys' file holds a JSON object: ``{"key id": {"secret": base64 of 32 bytes or more, "namespace": 32
hexadecimal digits}}``; ``namespace`` may be left out. Whoever holds a secret can sign for all keys of its namespace, so
only the file's owner may be able to read it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.store import check_key
from kvwire.transport.server.credentials import Rights, namespace_prefix
from kvwire.transport.server.files import read_parsed
from kvwire.transport.server.http_errors import CHALLENGE, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS = frozenset({"kid", "exp", "sig"})
SIGNED_METHODS = ("GET", "PUT", "DELETE")
MIN_SECRET_BYTES = 32
_PURPOSE = "kvwire-url-1"  # keeps signatures of another scheme, under the same secret, from being taken for these
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_EXPIRY = re.compile(r"[0-9]{1,12}")
_MAX_PARAMETERS = 16


@dataclass(frozen=True)
class SigningKey:
    """A key that signs URLs.

    Attributes:
        secret: Its secret.
        prefix: What all keys of objects that it may sign for start with.
    """

    secret: bytes = field(repr=False)
    prefix: str = ""


class SigningKeys:
    """Signing keys by their ids."""

    def __init__(self, keys: dict[str, SigningKey]) -> None:
        """Keep the keys."""
        self._keys = keys
        self._nobody = SigningKey(secrets.token_bytes(MIN_SECRET_BYTES))

    @classmethod
    def parse(cls, data: bytes) -> SigningKeys:
        """Read the file strictly.

        Args:
            data: The file's content, a JSON object.

        Returns:
            The keys.

        Raises:
            ArgumentError: The content cannot be used; the message quotes no secret.
        """
        listed = strict_json(data)
        if not isinstance(listed, dict):
            msg = "a signing keys' file holds a JSON object"
            raise ArgumentError(msg)
        return cls({_key_id(name): _signing_key(name, fields) for name, fields in listed.items()})

    @classmethod
    def read(cls, path: Path) -> SigningKeys:
        """Read the file.

        Args:
            path: Of the file.

        Returns:
            The keys.

        Raises:
            StorageError: The file cannot be read.
            ArgumentError: Its content cannot be used.
            AuthError: Others than its owner may read it.
        """
        return read_parsed(path, cls.parse, private=True)

    def secret(self, key_id: str) -> bytes:
        """Secret of a key.

        Args:
            key_id: The key's id.

        Returns:
            The secret.

        Raises:
            NotFoundError: There is no key of that id.
        """
        if key_id not in self._keys:
            msg = f"the signing keys' file has no key {key_id[:64]!r}: check --key-id"
            raise NotFoundError(msg)
        return self._keys[key_id].secret

    def rights(self, method: str, path: str, query: str, now: float | None = None) -> Rights:
        """Rights that a signed URL gives: for one key and method.

        Args:
            method: Of the request.
            path: Of the URL.
            query: Of the URL, with the signature.
            now: Unix seconds; None for the system's clock.

        Returns:
            The rights.

        Raises:
            RefusedError: The URL gives none.
        """
        fields = _parameters(query)
        key_id, expiry, signature = fields["kid"], fields["exp"], fields["sig"]
        key = self._keys.get(key_id, self._nobody)
        wanted = _signature(key.secret, method, path, expiry, key_id)
        if not hmac.compare_digest(wanted.encode(), signature.encode(errors="replace")):
            raise RefusedError(401, "the URL's signature does not fit", CHALLENGE, reason="credentials")
        if int(expiry) <= (time.time() if now is None else now):
            raise RefusedError(401, "the signed URL has expired: ask for a new one", CHALLENGE, reason="credentials")
        return Rights(f"key {key_id}", key.prefix, key=path.removeprefix("/"), write=method in ("PUT", "DELETE"))


def sign_url(base_url: str, key: str, *, secret: bytes, key_id: str, expires_at: float, method: str = "GET") -> str:
    """Make a URL with which anyone may do ``method`` on one object for some time.

    Args:
        base_url: The server's address, with the path that a proxy in front of it takes off, if any.
        key: The object's.
        secret: At least 32 bytes, as in the server's signing keys.
        key_id: The id of the secret there.
        expires_at: Until when, in Unix seconds.
        method: ``GET`` (covers HEAD), ``PUT`` or ``DELETE``.

    Returns:
        The URL, which is a secret itself until it expires.

    Raises:
        ArgumentError: An argument cannot be used.
    """
    _check_secret(secret)
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        msg = "a base URL looks like https://host:port or https://host/prefix"
        raise ArgumentError(msg)
    if method.upper() not in (*SIGNED_METHODS, "HEAD"):
        msg = f"only {', '.join(SIGNED_METHODS)} can be signed, not {method[:20]!r}"
        raise ArgumentError(msg)
    expiry, path = str(int(expires_at)), f"/{check_key(key)}"
    if not _EXPIRY.fullmatch(expiry):
        msg = "an expiry is given in Unix seconds, from 0 to 12 digits"
        raise ArgumentError(msg)
    signature = _signature(secret, method.upper(), path, expiry, _key_id(key_id))
    return f"{base_url.rstrip('/')}{path}?{urlencode({'kid': key_id, 'exp': expiry, 'sig': signature})}"


def is_signed(query: str) -> bool:
    """Whether a query holds a signature, sound or not."""
    return any(part.partition("=")[0] in PARAMETERS for part in query.split("&"))


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        pairs = []
    fields = {name: value for name, value in pairs if name in PARAMETERS}
    names = [name for name, _ in pairs if name in PARAMETERS]
    if sorted(names) != sorted(PARAMETERS) or not _EXPIRY.fullmatch(fields["exp"]):
        raise RefusedError(401, "a signed URL has one kid, one exp and one sig", CHALLENGE, reason="credentials")
    return fields


def _signature(secret: bytes, method: str, path: str, expiry: str, key_id: str) -> str:
    method = "GET" if method == "HEAD" else method
    message = f"{_PURPOSE}\n{method}\n{path}\n{expiry}\n{key_id}"
    digest = hmac.digest(secret, message.encode(errors="surrogatepass"), "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _key_id(name: str) -> str:
    if not _KEY_ID.fullmatch(name):
        msg = "a key id has 1 to 64 letters, digits, dots, underscores and hyphens"
        raise ArgumentError(msg)
    return name


def _check_secret(secret: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        msg = f"a signing secret needs at least {MIN_SECRET_BYTES} bytes, got {len(secret)}"
        raise ArgumentError(msg)
    return secret


def _signing_key(name: str, fields: Any) -> SigningKey:  # noqa: ANN401 - JSON
    if not isinstance(fields, dict) or not fields.keys() <= {"secret", "namespace"} or "secret" not in fields:
        msg = f"signing key {name}: an object with the names secret and, where wanted, namespace"
        raise ArgumentError(msg)
    try:
        secret = _check_secret(base64.b64decode(fields["secret"], validate=True))
        prefix = namespace_prefix(fields["namespace"]) if "namespace" in fields else ""
    except (TypeError, ValueError, binascii.Error) as error:
        problem = error if isinstance(error, ArgumentError) else "the secret is not base64"
        msg = f"signing key {name}: {problem}"
        raise ArgumentError(msg) from None
    return SigningKey(secret, prefix)
