"""boto3, opened once for a store. Only the modules of this package know it."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.loaders import JSONFileLoader

from kvwire.errors import ArgumentError, KvwireError
from kvwire.store.backends.s3.errors import s3_errors
from kvwire.store.client_tls import client_tls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from mypy_boto3_s3 import S3Client as BotoClient

    from kvwire.store.backends.s3.address import S3Address
    from kvwire.store.backends.s3.settings import S3Settings


class S3Client:
    """One boto3 client for all threads, no more requests at a time than it keeps connections."""

    def __init__(self, address: S3Address, settings: S3Settings) -> None:
        """Find credentials and settings where boto3 does; nothing is asked of the S3 server yet.

        Args:
            address: Of the bucket.
            settings: Limits and waits.
        """
        self._address = address
        self._slots = threading.BoundedSemaphore(settings.connections)
        with s3_errors(address.url), _arguments():
            session = boto3.session.Session(profile_name=address.profile, region_name=address.region)
            session._session.get_component("data_loader").file_loader = _FILES  # noqa: SLF001 - boto3 has no other way
            config = _config(settings, path_style=address.endpoint is not None)
            self._boto: BotoClient = session.client("s3", endpoint_url=address.endpoint, config=config)
            self._credentials: Any = session.get_credentials()  # refreshes itself where it is temporary
            self.tls = _tls(session, self._boto.meta.endpoint_url)
        self._boto.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        self._answers = threading.local()  # boto3 calls back in the thread that asks
        self._boto.meta.events.register("before-parse.s3.GetObject", self._keep_body)

    @contextmanager
    def asking(self, what: str = "") -> Iterator[BotoClient]:
        """boto3's client, for one request and its answer. Errors inside become kvwire's.

        Whatever is left of the answer at the end is closed: boto3 itself drops the body of one that it cannot parse.

        Args:
            what: Names the object in messages.

        Yields:
            The client.
        """
        url = self._address.url
        with self._slots, s3_errors(f"{what} in {url}" if what else url):
            try:
                yield self._boto
            finally:
                body = self._answers.__dict__.pop("body", None)
                if body is not None:
                    body.close()

    def _keep_body(self, response_dict: dict[str, Any], **_: object) -> None:
        body = response_dict.get("body")
        self._answers.body = body if hasattr(body, "close") else None  # bytes, where S3 refused

    @contextmanager
    def signing(self, what: str) -> Iterator[BotoClient]:
        """boto3's client, for work that asks nothing of the server.

        Args:
            what: Names the object in messages.

        Yields:
            The client.
        """
        with s3_errors(f"{what} in {self._address.url}"):
            yield self._boto

    def credentials_expire_at(self) -> float:
        """When the credentials end. Renews what is due.

        Returns:
            Unix seconds; infinite for lasting credentials, and where their end is not known.
        """
        if self._credentials is None:
            return math.inf  # signing tells that there are none
        self._credentials.get_frozen_credentials()
        expiry = getattr(self._credentials, "_expiry_time", None)  # botocore tells it in no other way
        return expiry.timestamp() if expiry else math.inf

    def close(self) -> None:
        """Close the connections."""
        self._boto.close()


class _Files(JSONFileLoader):
    """botocore's descriptions of services, which are large, each read once: a session of its own would read them anew.

    Sessions may merge a description's extras into it; that gives the same again.
    """

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}

    def load_file(self, file_path: str) -> Any:  # noqa: ANN401 - as it is in the file
        if file_path not in self._read and (found := super().load_file(file_path)) is not None:
            self._read[file_path] = found
        return self._read.get(file_path)


_FILES = _Files()


@contextmanager
def _arguments() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if isinstance(error, KvwireError | BotoCoreError):
            raise
        msg = "boto3 takes no such endpoint or region: check the address, and AWS_ENDPOINT_URL where it is set"
        raise ArgumentError(msg) from None  # the cause quotes the endpoint, which may hold a password


def _config(settings: S3Settings, *, path_style: bool) -> Config:
    # Checksum trailers, boto3's default, fail on older servers. Path style is what servers without DNS names need;
    # boto3's own choice is the same for an endpoint that comes from the environment.
    return Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if path_style else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=settings.connections,
        connect_timeout=settings.connect_s,
        read_timeout=settings.stall_s,
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
    )


def _tls(session: Any, endpoint: str) -> ssl.SSLContext | None:  # noqa: ANN401 - boto3's session has no type of its own
    """Trust in the certificates that boto3 is told to trust; None for the system's."""
    bundle = session._session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")  # noqa: SLF001
    if not bundle or not endpoint.startswith("https:"):
        return None
    try:
        if Path(bundle).is_dir():
            return client_tls(capath=bundle)
        return client_tls(cafile=bundle)
    except OSError as error:
        msg = "the certificates named by AWS_CA_BUNDLE (or ca_bundle in the profile) cannot be read: check the path"
        raise ArgumentError(msg) from error


def _add_md5(request: Any, **_: object) -> None:  # noqa: ANN401 - botocore's request
    """Servers from before 2022 want a Content-MD5 with lists of deletions and know none of the newer checksums."""
    digest = hashlib.md5(request.body, usedforsecurity=False).digest()
    del request.headers["Content-MD5"]  # a second attempt signs the same request again
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()
