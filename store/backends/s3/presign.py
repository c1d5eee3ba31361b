"""Presigned addresses: one for each object, shared by all ranges and threads, renewed in time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvwire._forks import lock_of_process
from kvwire.store.base import HttpAddress

if TYPE_CHECKING:
    from kvwire.store.backends.s3.client import S3Client
    from kvwire.store.backends.s3.settings import S3Settings

_RENEW_AT = 0.75  # of an address's life: the rest is for transfers that begin with it
_LEAST_LIFE_S = 1


class Presigner:
    """Signs GET addresses, without asking the server, and remembers the most recent ones."""

    def __init__(self, client: S3Client, bucket: str, settings: S3Settings) -> None:
        """Keep the client, whose credentials sign."""
        self._client = client
        self._bucket = bucket
        self._settings = settings
        self._lock = lock_of_process()
        self._known: OrderedDict[str, tuple[float, HttpAddress]] = OrderedDict()  # by key: renew at, address

    def address(self, name: str, *, renew: bool) -> HttpAddress:
        """The address of an object."""
        if not renew and (known := self._fresh(name)):
            return known
        now = time.time()
        life_s, address = self._sign(name, now)
        if not renew and (known := self._fresh(name)):  # another thread signed it meanwhile: all use the same
            return known
        with self._lock:
            self._known[name] = (math.floor(now) + _RENEW_AT * life_s, address)  # lives are counted in whole seconds
            self._known.move_to_end(name)
            while len(self._known) > self._settings.addresses:
                self._known.popitem(last=False)
        return address

    def forget(self) -> None:
        """Drop all addresses."""
        with self._lock:
            self._known.clear()

    def _fresh(self, name: str) -> HttpAddress | None:
        with self._lock:
            renew_at, address = self._known.get(name, (-math.inf, None))
            if address is None or time.time() >= renew_at:
                return None
            self._known.move_to_end(name)
            return address

    def _sign(self, name: str, now: float) -> tuple[int, HttpAddress]:
        with self._client.signing(name) as boto:
            life_s = self._life_s(now)
            wanted = {"Bucket": self._bucket, "Key": name}
            url = boto.generate_presigned_url("get_object", Params=wanted, ExpiresIn=life_s)
        client, expires_at = self._client, math.floor(now) + life_s
        return life_s, HttpAddress(url, (), expires_at, client.tls, client.proxy, redirects=False)

    def _life_s(self, now: float) -> int:
        """Whole seconds; an address dies with the temporary credentials that signed it."""
        left_s = self._client.credentials_expire_at() - now
        return max(_LEAST_LIFE_S, math.floor(min(self._settings.address_s, left_s)))
