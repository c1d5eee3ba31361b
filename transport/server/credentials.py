"""What credentials allow, and the files of them, which a running server reads again when they change.

A tenants file holds a JSON list: ``{"tenant": name or "namespace": 32 hexadecimal digits, "token_sha256": 64
hexadecimal digits, "write": bool, "expires": Unix seconds}``; ``write`` and ``expires`` may be left out. A token of 256
random bits cannot be found from its hash.

A signing keys' file holds a JSON object: ``{"key id": {"secret": base64 of 32 bytes or more, "namespace": 32
hexadecimal digits}}``; ``namespace`` may be left out. A secret signs for all keys of its namespace: only the file's
owner may read it. A signature is an HMAC over method, path, expiry and key id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from msgspec import Meta, Struct

from kvwire._json import Sha256, strict_json
from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import check_key, tenant_hash

from .exchange import CHALLENGE, RefusedError, Rights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_BYTES = 64 << 20
_Namespace = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_TOKEN_BYTES = 32
_FAR_FUTURE = 1e12
PARAMETERS = frozenset({"kid", "exp", "sig"})
SIGNED_METHODS = ("GET", "PUT", "DELETE")
MIN_SECRET_BYTES = 32
_PURPOSE = "kvwire-url-1"  # keeps signatures of another scheme, under the same secret, from being taken for these
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_EXPIRY = re.compile(r"[0-9]{1,12}")
_MAX_PARAMETERS = 16


class WatchedFile(Generic[_T]):
    """A file, parsed to ``value``. A new version that cannot be read is logged, and the old one stays in force."""

    def __init__(self, path: Path, parse: Callable[[bytes], _T], *, private: bool = False) -> None:
        """Read the file."""
        self._path = path
        self._parse = parse
        self._private = private
        self._seen: tuple[int, ...] | None = _identity(path)
        self.value = self._load()

    def refresh(self, *, force: bool = False) -> None:
        """Read the file again where its time, size or inode differ."""
        seen = None
        try:
            seen = _identity(self._path)
            if seen == self._seen and not force:
                return
            self.value = self._load()
        except KvwireError as error:
            if force or seen != self._seen:  # told once, not at every look
                _log.error("%s; the version read before stays in force", error)
        else:
            _log.info("%s was read again", self._path)
        self._seen = seen  # as it was before it was read: what is written meanwhile differs at the next look

    def _load(self) -> _T:
        return read_parsed(self._path, self._parse, private=self._private)


def read_parsed(path: Path, parse: Callable[[bytes], _T], *, private: bool = False) -> _T:
    """Read and parse a file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if private and mode & 0o077:
        raise AuthError(f"{path} holds secrets and is open to others than its owner: chmod 600 it")
    if len(data) > _MAX_BYTES:
        raise ArgumentError(f"{path} is longer than {_MAX_BYTES} bytes: is it the right file?")
    try:
        return parse(data)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _identity(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino  # the second: permissions, too


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be read ({error.strerror}): check the path and its permissions")


@dataclass(frozen=True, slots=True)
class _Entry:
    token_sha256: bytes
    rights: Rights
    expires: float


class TenantTokens:
    """Tokens of tenants, by a keyed hash of this process: how long a look-up takes does not tell which tokens exist."""

    def __init__(self, entries: list[_Entry]) -> None:
        """Build the table."""
        self._blind = secrets.token_bytes(32)
        self._slots = {self._slot(entry.token_sha256): entry for entry in entries}
        self._no_match = _Entry(secrets.token_bytes(32), Rights(""), 0.0)

    @classmethod
    def parse(cls, data: bytes) -> TenantTokens:
        """Read the file strictly."""
        listed = strict_json(data)
        if not isinstance(listed, list):
            raise ArgumentError("a tenants file holds a JSON list")
        entries = [_entry(fields, number) for number, fields in enumerate(listed, 1)]
        if len({entry.token_sha256 for entry in entries}) != len(entries):
            raise ArgumentError("two entries have the same token_sha256: give each its own token")
        return cls(entries)

    def find(self, token: bytes, now: float) -> Rights | None:
        """Look a token up."""
        digest = hashlib.sha256(token).digest()
        entry = self._slots.get(self._slot(digest), self._no_match)
        fits = hmac.compare_digest(entry.token_sha256, digest)
        return entry.rights if fits and now < entry.expires else None

    def _slot(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")


def new_token() -> tuple[str, str]:
    """Make a random bearer token of 256 bits.

    Returns:
        The token, and its SHA-256 in hexadecimal for a tenants file.
    """
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()


class _TokenFields(Struct, forbid_unknown_fields=True):
    token_sha256: Sha256
    tenant: Annotated[str, Meta(min_length=1)] | None = None
    namespace: _Namespace | None = None
    write: bool = False
    expires: Annotated[float, Meta(ge=0, lt=_FAR_FUTURE)] | None = None


class _KeyFields(Struct, forbid_unknown_fields=True):
    secret: str
    namespace: _Namespace | None = None


def _convert(fields: Any, kind: type[_T], what: str) -> _T:  # noqa: ANN401 - JSON
    """Make a record of JSON; nothing is passed over."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
    except UnicodeEncodeError:
        problem = "a field's name is no proper text"
    raise ArgumentError(f"{what}: {problem}: docs/serving.md tells the fields")


def _entry(fields: Any, number: int) -> _Entry:  # noqa: ANN401 - JSON
    told = _convert(fields, _TokenFields, f"entry {number}")
    if (told.tenant is None) == (told.namespace is None):
        raise ArgumentError(f"entry {number}: give either the tenant's name or its namespace")
    namespace = told.namespace if told.tenant is None else tenant_hash(told.tenant)
    rights = Rights(f"token {told.token_sha256}", f"v1/{namespace}/", write=told.write)
    return _Entry(bytes.fromhex(told.token_sha256), rights, math.inf if told.expires is None else told.expires)


@dataclass(frozen=True)
class SigningKey:
    """A key that signs URLs, for keys of objects that start with ``prefix``."""

    secret: bytes = field(repr=False)
    prefix: str = ""


class SigningKeys:
    """Signing keys by their ids."""

    def __init__(self, keys: dict[str, SigningKey]) -> None:
        """Keep the keys."""
        self._keys = keys
        self._no_match = SigningKey(secrets.token_bytes(MIN_SECRET_BYTES))

    @classmethod
    def parse(cls, data: bytes) -> SigningKeys:
        """Read the file strictly."""
        listed = strict_json(data)
        if not isinstance(listed, dict):
            raise ArgumentError("a signing keys' file holds a JSON object")
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
            raise NotFoundError(f"the signing keys' file has no key {key_id[:64]!r}: check --key-id")
        return self._keys[key_id].secret

    def rights(self, method: str, path: str, query: str, now: float | None = None) -> Rights:
        """Rights that a signed URL gives: for one key and method."""
        fields = _parameters(query)
        key_id, expiry, signature = fields["kid"], fields["exp"], fields["sig"]
        key = self._keys.get(key_id, self._no_match)
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
        raise ArgumentError("a base URL looks like https://host:port or https://host/prefix")
    if method.upper() not in (*SIGNED_METHODS, "HEAD"):
        raise ArgumentError(f"only {', '.join(SIGNED_METHODS)} can be signed, not {method[:20]!r}")
    expiry, path = str(int(expires_at)), f"/{check_key(key)}"
    if not _EXPIRY.fullmatch(expiry):
        raise ArgumentError("an expiry is given in Unix seconds, from 0 to 12 digits")
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
        raise ArgumentError("a key id has 1 to 64 letters, digits, dots, underscores and hyphens")
    return name


def _check_secret(secret: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ArgumentError(f"a signing secret needs at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
    return secret


def _signing_key(name: str, fields: Any) -> SigningKey:  # noqa: ANN401 - JSON
    told = _convert(fields, _KeyFields, f"signing key {name}")
    try:
        secret = _check_secret(base64.b64decode(told.secret, validate=True))
    except ValueError as error:
        problem = error if isinstance(error, ArgumentError) else "the secret is not base64"
        raise ArgumentError(f"signing key {name}: {problem}") from None
    return SigningKey(secret, f"v1/{told.namespace}/" if told.namespace else "")
