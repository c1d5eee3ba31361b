"""What a store's author tells the suite: how to make the store, how to look behind it, what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

if TYPE_CHECKING:
    from kvwire.store import Store

RAW_HINT = "a class that inherits the suite says how to look behind its store: raw_get, raw_set and raw_delete"


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
