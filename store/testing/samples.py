"""Objects that every store takes, and what a suite must know of the store that it tests."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvwire.store import CatalogEntry, KeySpace, tenant_hash

if TYPE_CHECKING:
    from kvwire.store import Store


SPACE = KeySpace.of(tenant_hash("conformance"), "0" * 64)

BAD_KEYS = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../secret",
    "a/../b",
    "a//b",
    "a/",
    ".hidden",
    "a/.tmp-1-2",
    "a\\b",
    "a b",
    "a\0b",
    "a\n",
    "a%2fb",
    "a%20b",
    "a#b",
    "a&b",
    "ä",
    "a?b",
    "x" * 201,
    "/".join(["x" * 100] * 6),
    "C:/x",
)
BAD_PREFIXES = ("/", "..", "a/../b", ".", "a//", "a/.t", "a*", "a%", "a b")

ODD_KEYS = ("a+b", "a@b", "a=b", "a~b", "-a", "a.b.", "~a/+b/=c/@d", "a...b", "x" * 200, "/".join(["y" * 127] * 4))
"""Proper keys at the edges of what is one, the longest part and the longest key included."""
RAW_HINT = "a class that inherits the suite says how to look behind its store: raw_get, raw_set and raw_delete"


def noise(size: int, seed: int = 0) -> bytes:
    """Incompressible bytes; the same for the same arguments."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - test data


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def blob(seed: int, size: int = 1000) -> tuple[str, bytes]:
    """A content-addressed key and its bytes."""
    data = noise(size, seed)
    return SPACE.blob(digest(data)), data


def catalog_entry(document_id: str, seed: int = 0, levels: int = 1) -> tuple[str, bytes]:
    """A catalog key and an entry that belongs to it."""
    key, data = blob(seed)
    entry = CatalogEntry(
        document_id=document_id,
        blob_key=key,
        sha256=digest(data),
        size=len(data),
        header_bytes=10,
        tokens=7,
        token_digest="",
        profile_digest="",
        levels=tuple((f"level {number}", len(data)) for number in range(levels)),
    )
    return SPACE.document(document_id), entry.to_json()


class Hooks:
    """Fixture, raw access and flags; a subclass overrides what its store needs."""

    has_snapshots: ClassVar[bool] = True
    """False: an object held open while it is replaced or deleted may fail with StorageError instead of staying."""

    notices_changes: ClassVar[bool] = True
    """False: the store keeps copies, and may give these after the original was changed behind its back."""

    tag_is_the_digest: ClassVar[bool] = True
    """False: tags are the server's own. They still change with the bytes."""

    clock_is_ours: ClassVar[bool] = True
    """False: ``modified`` comes from a clock that may differ from this machine's by any amount, or is unknown."""

    foreign_names: ClassVar[tuple[str, ...]] = (".tmp-1-00", "has space", "a/.hidden/x", "ä", "a/100%")
    """Names of things that can lie beside the objects without being keys; empty where nothing else can lie there."""

    large_bytes: ClassVar[int] = 9 << 20
    """Size of a large object: above the size at which the store writes or reads in parts."""

    many_keys: ClassVar[int] = 120
    """Number of keys of a long listing: above the store's page size, for instance 1001 for S3."""

    rounds: ClassVar[int] = 20
    """How often the tests of concurrency repeat themselves; fewer for slow stores."""

    @pytest.fixture
    def store(self) -> Store:
        """Give an empty store of its own to each test."""
        raise NotImplementedError

    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Bytes that lie behind ``key``, read without the store; None where there is nothing."""
        raise NotImplementedError(RAW_HINT)

    def raw_set(self, store: Store, key: str, data: bytes) -> None:
        """Put bytes where the store would look for ``key``, without the store."""
        raise NotImplementedError(RAW_HINT)

    def raw_delete(self, store: Store, key: str) -> None:
        """Remove what lies behind ``key``, without the store."""
        raise NotImplementedError(RAW_HINT)
