"""boto3, opened once for a store, and the addresses that it signs. Only the modules of this package know it."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import threading
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import boto3
import botocore.loaders
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError
from botocore.httpsession import get_cert_path

from kvwire._forks import OwnProcess
from kvwire.errors import ArgumentError, AuthError, KvwireError
from kvwire.store.backends.s3.errors import s3_errors
from kvwire.store.http_clients import HttpAddress, client_tls, proxy_for
from kvwire.store.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mypy_boto3_s3 import S3Client as BotoClient

    from kvwire.store.backends.s3.address import S3Address, S3Settings

_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_REFUSED = (400, 401, 403)
_NOT_OLD = ("AccessDenied", "400", "403")  # of credentials that the server knows; of HEAD, which GET follows
_ELSEWHERE = (301, 302, 307, 400)
_JUST_S = 60.0  # requests that began before credentials were renewed are refused within this time
_RENEW_AT = 0.75  # of an address's life: the rest is for transfers that begin with it
_LEAST_LIFE_S = 1


class S3Client:
    """One boto3 client for all threads. What it trusts (``tls``) and goes through (``proxy``) holds for addresses."""

    def __init__(self, address: S3Address, settings: S3Settings) -> None:
        """Find credentials and settings where boto3 does; nothing is asked of the S3 server yet."""
        self._address, self._settings = address, settings
        self._signed: Recent[str, tuple[float, HttpAddress]] = Recent(settings.addresses)  # by name: renew at, address
        self._connect()

    def _connect(self) -> None:
        address, settings, self._process = self._address, self._settings, OwnProcess("connections")
        self._slots = threading.BoundedSemaphore(settings.connections)
        self._answers = threading.local()  # boto3 calls back in the thread that asks
        self._lock = threading.Lock()
        self._left: list[BotoClient] = []  # of regions that the bucket is not in
        self._region: str | None = None
        self._renewed_at = -math.inf
        with s3_errors(address.url), _arguments():
            self._session = _session(address)
            self._credentials: Any = self._session.get_credentials()  # refreshes itself where it is temporary
            self._boto = self._open(address.region)
            endpoint = self._boto.meta.endpoint_url
            self.tls = (
                client_tls(_bundle(self._session) or get_cert_path(True)) if endpoint.startswith("https:") else None
            )
            self.proxy = proxy_for(endpoint)

    @property
    def is_anonymous(self) -> bool:
        """Whether no credentials were found: requests are then not signed, as public buckets take them."""
        return self._credentials is None

    @contextmanager
    def asking(self, what: str = "") -> Iterator[BotoClient]:
        """boto3's client, for one request and its answer. Errors inside become kvwire's."""
        self._stay_in_process()
        what = f"{what} in {self._address.url}" if what else self._address.url
        try:
            with self._slots, s3_errors(what):
                try:
                    yield self._here()
                finally:
                    body = self._answers.__dict__.pop("body", None)  # boto3 drops that of an answer it cannot parse
                    if body is not None:
                        body.close()
        except AuthError:
            if not self.is_anonymous:
                raise
            raise AuthError(
                f"{what}: no credentials were found, and the server refuses requests without them: set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile"
            ) from None

    def _open(self, region: str | None) -> BotoClient:
        address = self._address
        config = _config(self._settings, path_style=address.endpoint is not None, is_anonymous=self.is_anonymous)
        boto: BotoClient = self._session.client(
            "s3",
            region_name=region,
            endpoint_url=address.endpoint,
            config=config,
            verify=_bundle(self._session) or None,
        )
        boto.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        boto.meta.events.register("before-parse.s3.GetObject", self._keep_body)
        boto.meta.events.register("needs-retry.s3", self._learn)  # type: ignore[arg-type]  # it returns a pause
        return boto

    def _here(self) -> BotoClient:
        """The client for the bucket's region, as soon as an answer has told it."""
        with self._lock:
            if self._region not in (None, self._boto.meta.region_name):
                self._left.append(self._boto)
                self._boto = self._open(self._region)
            return self._boto

    def _learn(self, response: Any, attempts: int, **_: object) -> int | None:  # noqa: ANN401 - botocore's
        """Note where the bucket is, for signing; 0, which repeats the request, where other credentials lie ready."""
        status, error = (0, {}) if response is None else (response[0].status_code, response[1].get("Error", {}))
        if status in _ELSEWHERE:
            region = response[0].headers.get("x-amz-bucket-region") or error.get("Region")
            if self._region is None and isinstance(region, str) and _REGION.fullmatch(region):
                self._region = region
        may_be_old = status in _REFUSED and error.get("Code") not in _NOT_OLD and attempts <= self._settings.attempts
        return 0 if may_be_old and self._has_new_credentials() else None

    def _has_new_credentials(self) -> bool:
        """Look again where lasting credentials came from, such as a file that is written anew before they expire."""
        held: Any = self._credentials
        if type(held) is not Credentials:  # those that refresh themselves, or none
            return False
        with self._lock, s3_errors(self._address.url):
            found = _session(self._address).get_credentials()
            fresh: Any = found.get_frozen_credentials() if found else held.get_frozen_credentials()
            if held.get_frozen_credentials() != fresh:
                held.access_key, held.secret_key, held.token = fresh.access_key, fresh.secret_key, fresh.token
                self._renewed_at = time.monotonic()
        return time.monotonic() < self._renewed_at + _JUST_S

    def _stay_in_process(self) -> None:
        if not self._process.is_here:  # the parent process goes on with the connections that it had
            self._connect()

    def _keep_body(self, response_dict: dict[str, Any], **_: object) -> None:
        body = response_dict.get("body")
        self._answers.body = body if hasattr(body, "close") else None  # bytes, where S3 refused

    def presigned(self, name: str, *, renew: bool) -> HttpAddress:
        """An address for reading an object, signed without asking the server; the most recent ones are remembered."""
        if not renew and (known := self._known(name)):
            return known
        self._stay_in_process()
        now, wanted = time.time(), {"Bucket": self._address.bucket, "Key": name}
        with s3_errors(f"{name} in {self._address.url}"):
            left_s = self._credentials_expire_at() - now  # an address dies with what signed it
            life_s = max(_LEAST_LIFE_S, math.floor(min(self._settings.address_s, left_s)))
            url = self._here().generate_presigned_url("get_object", Params=wanted, ExpiresIn=life_s)
        if not renew and (known := self._known(name)):  # another thread signed it meanwhile: all use the same
            return known
        began = math.floor(now)  # lives are counted in whole seconds
        address = HttpAddress(url, (), began + life_s, self.tls, self.proxy, redirects=False)
        self._signed.put(name, (began + _RENEW_AT * life_s, address))
        return address

    def _known(self, name: str) -> HttpAddress | None:
        signed = self._signed.get(name)
        return signed[1] if signed and time.time() < signed[0] else None

    def _credentials_expire_at(self) -> float:
        """When the credentials end. Renews what is due."""
        if self._credentials is None:
            return math.inf
        self._credentials.get_frozen_credentials()
        expiry = getattr(self._credentials, "_expiry_time", None)  # botocore tells it in no other way
        return expiry.timestamp() if expiry else math.inf

    def close(self) -> None:
        """Close the connections, and forget the signed addresses."""
        self._signed.clear()
        for boto in (self._boto, *self._left):
            boto.close()


def _session(address: S3Address) -> Any:  # noqa: ANN401 - boto3's session has no type of its own
    session = boto3.session.Session(profile_name=address.profile, region_name=address.region)
    inner = session._session  # noqa: SLF001 - boto3 has no other way
    inner.register_component("data_loader", _descriptions(inner.get_config_variable("data_path")))
    return session


@cache
def _descriptions(data_path: str | None) -> Any:  # noqa: ANN401 - botocore has no types
    """Botocore's descriptions of services, which are large: each session would read them anew."""
    return botocore.loaders.create_loader(data_path)


def _bundle(session: Any) -> str:  # noqa: ANN401 - as above
    """The bundle of certificates that boto3's or OpenSSL's settings name; empty: boto3's own."""
    told = session._session.get_config_variable("ca_bundle")  # noqa: SLF001 - AWS_CA_BUNDLE or the profile's
    return str(told or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or "")


@contextmanager
def _arguments() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if isinstance(error, KvwireError | BotoCoreError):
            raise
        msg = "boto3 takes no such endpoint or region: check the address, and AWS_ENDPOINT_URL where it is set"
        raise ArgumentError(msg) from None  # the cause quotes the endpoint, which may hold a password


def _config(settings: S3Settings, *, path_style: bool, is_anonymous: bool) -> Config:
    # Checksum trailers, boto3's default, fail on older servers. Path style is what servers without DNS names need;
    # boto3's own choice is the same for an endpoint that comes from the environment.
    return Config(
        signature_version=UNSIGNED if is_anonymous else "s3v4",
        s3={"addressing_style": "path" if path_style else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=settings.connections,
        connect_timeout=settings.connect_s,
        read_timeout=settings.stall_s,
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
    )


def _add_md5(request: Any, **_: object) -> None:  # noqa: ANN401 - botocore's request
    """Servers from before 2022 want a Content-MD5 with lists of deletions and know none of the newer checksums."""
    digest = hashlib.md5(request.body, usedforsecurity=False).digest()
    del request.headers["Content-MD5"]  # a second attempt signs the same request again
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()
