"""Where an S3 store is, and its limits: ``s3://bucket/prefix?endpoint=http://host:port&region=...&profile=...``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from kvwire.errors import ArgumentError
from kvwire.store.keys import check_key

_FORM = "s3://bucket/prefix?endpoint=https://host:port&region=...&profile=..."
_OPTIONS = ("endpoint", "region", "profile")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")  # as wide as S3-compatible servers go
_NAME = re.compile(r"[\w .@+=,-]{1,128}")
_MAX_PREFIX_CHARS = 500  # S3's keys have 1024 bytes, kvwire's up to 512
_MIB = 1 << 20
_LEAST_PART_BYTES = 5 * _MIB  # S3's rule for all parts but the last
_LONGEST_ADDRESS_S = 7 * 24 * 3600  # the longest life that Signature Version 4 allows
_MOST_PAGE_KEYS = 1000  # S3's page


@dataclass(frozen=True)
class S3Address:
    """Where an S3 store is; nothing secret. prefix: without slashes at its ends; None: what the environment says."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Address:
        """Read an address."""
        try:
            parts = urlsplit(url)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=9)
        except ValueError:
            _refuse("it is malformed")
        if "@" in parts.netloc:
            _refuse("it holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or name a profile")
        if parts.scheme != "s3" or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
            _refuse("it does not name a bucket")
        return cls(parts.netloc, _prefix(parts.path), **_options(pairs))

    @property
    def root(self) -> str:
        """What all keys of the store start with in the bucket."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def url(self) -> str:
        """The address as text, which ``parse`` reads back."""
        path = f"/{self.prefix}" if self.prefix else ""
        options = [(name, value) for name in _OPTIONS if (value := getattr(self, name)) is not None]
        query = f"?{urlencode(options, quote_via=quote, safe='/:')}" if options else ""
        return f"s3://{self.bucket}{path}{query}"


def _prefix(path: str) -> str:
    prefix = path.strip("/")
    if prefix and len(check_key(prefix)) > _MAX_PREFIX_CHARS:
        _refuse(f"its prefix has more than {_MAX_PREFIX_CHARS} characters")
    return prefix


def _options(pairs: list[tuple[str, str]]) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in _OPTIONS:
            _refuse(f"{name[:40]!r} is no option; the options are {', '.join(_OPTIONS)}")
        if name in options:
            _refuse(f"it names the {name} twice")
        if name != "endpoint" and not _NAME.fullmatch(value):
            _refuse(f"its {name} is empty or malformed")
        options[name] = _endpoint(value) if name == "endpoint" else value
    return options


def _endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment:
        _refuse("its endpoint is not like https://host:port")
    if "@" in parts.netloc:
        _refuse("its endpoint holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    return value.rstrip("/")


def _refuse(why: str) -> NoReturn:
    msg = f"cannot open this S3 address: {why}. Write {_FORM}, where all behind the bucket is optional"
    raise ArgumentError(msg) from None  # what urllib says may quote a secret


@dataclass(frozen=True)
class S3Settings:
    """Limits of an S3 store.

    Attributes:
        connections: Requests at a time, of all threads together.
        connect_s: Longest wait for the connection, in seconds.
        stall_s: Longest wait for the next bytes, in seconds.
        total_s: Longest time of one read.
        attempts: Of each request, in all.
        multipart_bytes: Larger objects are uploaded in parts.
        part_bytes: Least size of a part.
        address_s: Life of a presigned address, in seconds.
        addresses: How many are remembered.
        page_keys: Keys of one page of a listing.
    """

    connections: int = 32
    connect_s: float = 5.0
    stall_s: float = 30.0
    total_s: float = 600.0
    attempts: int = 3
    multipart_bytes: int = 64 * _MIB
    part_bytes: int = 16 * _MIB
    address_s: int = 3600
    addresses: int = 65_536
    page_keys: int = _MOST_PAGE_KEYS

    def __post_init__(self) -> None:
        """Refuse what no S3 server takes."""
        least = min(self.connections, self.attempts, self.multipart_bytes, self.addresses)
        if least < 1 or min(self.connect_s, self.stall_s, self.total_s) <= 0:
            raise ArgumentError("an S3 store's limits and waits must be positive")
        if self.part_bytes < _LEAST_PART_BYTES:
            raise ArgumentError(f"parts of an S3 upload have at least {_LEAST_PART_BYTES} bytes, got {self.part_bytes}")
        if not 1 <= self.address_s <= _LONGEST_ADDRESS_S or not 1 <= self.page_keys <= _MOST_PAGE_KEYS:
            msg = f"S3 addresses live 1 to {_LONGEST_ADDRESS_S} s, and its pages hold 1 to {_MOST_PAGE_KEYS} keys"
            raise ArgumentError(msg)
