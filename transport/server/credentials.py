"""What credentials allow, and the file that lists tenants' tokens.

The file holds a JSON list: ``{"tenant": name or "namespace": 32 hexadecimal digits, "token_sha256": 64 hexadecimal
digits, "write": bool, "expires": Unix seconds}``; ``write`` and ``expires`` may be left out. Tokens themselves are
nowhere: a token of 256 random bits cannot be found from its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

from kvwire._json import strict_json
from kvwire.errors import ArgumentError
from kvwire.store import tenant_hash

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOKEN_BYTES = 32
_FAR_FUTURE = 1e12
_FIELDS = frozenset({"tenant", "namespace", "token_sha256", "write", "expires"})


@dataclass(frozen=True, slots=True)
class Rights:
    """What a request may touch.

    Attributes:
        client: Names the bucket that its requests are counted in; secret enough to stay out of logs.
        prefix: Keys must start with it.
        key: The one key; None for all that start with ``prefix``.
        write: Also writing.
        full: Also metrics.
    """

    client: str
    prefix: str = ""
    key: str | None = None
    write: bool = False
    full: bool = False

    def sees(self, key: str) -> bool:
        """Whether the key exists at all for these credentials."""
        return key.startswith(self.prefix) and (self.key is None or key == self.key)


@dataclass(frozen=True, slots=True)
class _Entry:
    token_sha256: bytes
    rights: Rights
    expires: float


class TenantTokens:
    """Tokens of tenants, looked up by a hash that no client can steer.

    The table's slots are a keyed hash of the token's hash, under a key of this process: how long a look-up takes tells
    nothing about which tokens exist.
    """

    def __init__(self, entries: list[_Entry]) -> None:
        """Build the table."""
        self._blind = secrets.token_bytes(32)
        self._slots = {self._slot(entry.token_sha256): entry for entry in entries}
        self._nobody = _Entry(secrets.token_bytes(32), Rights(""), 0.0)

    @classmethod
    def parse(cls, data: bytes) -> TenantTokens:
        """Read the file strictly.

        Args:
            data: The file's content, a JSON list.

        Returns:
            The table.

        Raises:
            ArgumentError: The content cannot be used; the message names the entry but quotes nothing of it.
        """
        listed = strict_json(data)
        if not isinstance(listed, list):
            msg = "a tenants file holds a JSON list"
            raise ArgumentError(msg)
        entries = [_entry(fields, number) for number, fields in enumerate(listed, 1)]
        if len({entry.token_sha256 for entry in entries}) != len(entries):
            msg = "two entries have the same token_sha256: give each its own token"
            raise ArgumentError(msg)
        return cls(entries)

    def find(self, token: bytes, now: float) -> Rights | None:
        """Look a token up.

        Args:
            token: As the client sent it.
            now: Unix seconds.

        Returns:
            Its rights; None where it is unknown or has expired.
        """
        digest = hashlib.sha256(token).digest()
        entry = self._slots.get(self._slot(digest), self._nobody)
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


def namespace_prefix(namespace: object) -> str:
    """What all keys of a namespace start with."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        msg = "a namespace is 32 lower-case hexadecimal digits (kvwire.store.tenant_hash)"
        raise ArgumentError(msg)
    return f"v1/{namespace}/"


def _entry(fields: Any, number: int) -> _Entry:  # noqa: ANN401 - JSON
    try:
        return _checked(fields)
    except ArgumentError as error:
        msg = f"entry {number}: {error}"
        raise ArgumentError(msg) from None


def _checked(fields: Any) -> _Entry:  # noqa: ANN401 - JSON
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        msg = f"an entry is an object with the names {', '.join(sorted(_FIELDS))} and no others"
        raise ArgumentError(msg)
    if ("tenant" in fields) == ("namespace" in fields):
        msg = "give either the tenant's name or its namespace"
        raise ArgumentError(msg)
    digest, write, expires = fields.get("token_sha256"), fields.get("write", False), fields.get("expires")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        msg = "token_sha256 is 64 lower-case hexadecimal digits"
        raise ArgumentError(msg)
    if not isinstance(write, bool):
        msg = "write is true or false"
        raise ArgumentError(msg)
    if expires is not None and (type(expires) not in (int, float) or not 0 <= expires < _FAR_FUTURE):
        msg = "expires is a number of Unix seconds"
        raise ArgumentError(msg)
    if "tenant" in fields and not isinstance(fields["tenant"], str):
        msg = "a tenant's name is text"
        raise ArgumentError(msg)
    namespace = tenant_hash(fields["tenant"]) if "tenant" in fields else fields["namespace"]
    rights = Rights(f"token {digest}", namespace_prefix(namespace), write=write)
    return _Entry(bytes.fromhex(digest), rights, math.inf if expires is None else float(expires))
