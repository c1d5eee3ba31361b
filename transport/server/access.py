"""Access: one token with full rights, tenants' tokens, signed URLs, a token for metrics, and rate limits."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from kvwire.store.backends.http.store import check_token

from .credentials import SigningKeys, TenantTokens, WatchedFile, is_signed
from .exchange import CHALLENGE, RefusedError, Rights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


_MAX_BUCKETS = 16384
_MIN_TOKEN_CHARS = 16
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{0,5})?")


@dataclass(frozen=True)
class AccessSettings:
    """Credentials that a server takes; none of them: everybody who can reach it may do everything.

    Attributes:
        token: Gives full rights. Tokens have visible ASCII characters only.
        tenants: File of tenants' tokens, read again when it changes.
        signing_keys: File of keys for signed URLs, read again likewise.
        metrics_token: For /metrics alone.
    """

    token: str | None = field(default=None, repr=False)
    tenants: Path | None = None
    signing_keys: Path | None = None
    metrics_token: str | None = field(default=None, repr=False)

    @property
    def guarded(self) -> bool:
        """Whether objects are kept from those without credentials."""
        return bool(self.token or self.tenants or self.signing_keys)


class Access:
    """Decides on requests; holds the files' current content."""

    def __init__(self, settings: AccessSettings) -> None:
        """Read the files."""
        for token in (settings.token, settings.metrics_token):
            if token is not None:
                check_token(token)
        self._settings = settings
        self._tenants = WatchedFile(settings.tenants, TenantTokens.parse) if settings.tenants else None
        self._keys = (
            WatchedFile(settings.signing_keys, SigningKeys.parse, private=True) if settings.signing_keys else None
        )

    @property
    def guarded(self) -> bool:
        """Whether objects are kept from those without credentials."""
        return self._settings.guarded

    @property
    def guessable(self) -> bool:
        """Whether the token with full rights is so short that it could be guessed."""
        return 0 < len(self._settings.token or "") < _MIN_TOKEN_CHARS

    def refresh(self, *, force: bool = False) -> None:
        """Read files again that have changed."""
        for watched in (self._tenants, self._keys):
            if watched is not None:
                watched.refresh(force=force)

    def rights(self, method: str, path: str, query: str, headers: Mapping[str, str], address: str) -> Rights:
        """Decide on a request. Beside a signed URL, a name and a password, which browsers send, count as absent."""
        if not self.guarded:
            self.check_host(headers)
            if method not in ("GET", "HEAD") and "Origin" in headers:
                raise RefusedError(403, "a web page may not write to a server without credentials")
            return Rights(f"address {address}", write=True, full=True)
        given = headers.get("Authorization")
        if self._keys and is_signed(query) and (given is None or _is_basic(given)):
            return self._keys.value.rights(method, path, query, time.time())
        rights = self._bearer(given)
        if rights is None:
            wanted = "a valid token or signed URL" if self._keys else "a valid bearer token"
            raise RefusedError(401, f"{wanted} is needed", CHALLENGE, reason="credentials")
        return rights

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse requests that do not name this machine, where the server has no credentials."""
        # Any web page can have its own name lead to 127.0.0.1, and browsers would let it read the answers.
        if self.guarded:
            return
        match = _HOST.fullmatch(headers.get("Host", ""))
        if match is None or not is_loopback((match[1] or match[2]).lower()):
            raise RefusedError(403, "a server without credentials is asked for as 127.0.0.1, [::1] or localhost")

    def may_see_metrics(self, headers: Mapping[str, str]) -> bool:
        """Decide on a request for metrics; a token may come as the password of any name, which browsers ask for."""
        if not self.guarded and not self._settings.metrics_token:
            return True
        given = _as_bearer(headers.get("Authorization"))
        if self._settings.metrics_token and _same(_token(given), self._settings.metrics_token):
            return True
        rights = self._bearer(given)
        return rights is not None and rights.full

    def _bearer(self, given: str | None) -> Rights | None:
        token = _token(given)
        if not token:
            return None
        if self._settings.token and _same(token, self._settings.token):
            return Rights("token", write=True, full=True)
        return self._tenants.value.find(token, time.time()) if self._tenants else None


class RateLimiter:
    """A token bucket for each client, in bounded memory: the bucket that was used longest ago is forgotten first."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no buckets; a client that is not known has a full one."""
        self._rate = rate
        self._burst = max(1.0, burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, at which time

    def take(self, client: str) -> float:
        """Take one token."""
        if not self._rate:
            return 0.0
        now = self._clock()
        left = self._left(client, now)
        wait_s = self._wait_s(left)
        self._buckets[client] = (left if wait_s else left - 1, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait_s

    def look(self, client: str) -> float:
        """What ``take`` would give, without taking."""
        return self._wait_s(self._left(client, self._clock())) if self._rate else 0.0

    def _left(self, client: str, now: float) -> float:
        left, since = self._buckets.get(client, (self._burst, now))
        return min(self._burst, left + (now - since) * self._rate)

    def _wait_s(self, left: float) -> float:
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def __len__(self) -> int:
        """Buckets kept."""
        return len(self._buckets)


@lru_cache(256)  # each request names its host
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than ``localhost`` counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(given: str | None) -> bytes:
    scheme, _, token = (given or "").partition(" ")
    return token.strip().encode(errors="replace") if scheme.lower() == "bearer" else b""


def _is_basic(given: str) -> bool:
    return given.partition(" ")[0].lower() == "basic"


def _as_bearer(given: str | None) -> str | None:
    """A header with a name and a password as one with a token; others as they are."""
    if given is None or not _is_basic(given):
        return given
    coded = given.partition(" ")[2]
    try:
        _, _, password = base64.b64decode(coded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return None
    return f"Bearer {password}"


def _same(token: bytes, wanted: str) -> bool:
    """Compare hashes, so that not even the length can be measured."""
    return hmac.compare_digest(hashlib.sha256(token).digest(), hashlib.sha256(wanted.encode()).digest())
