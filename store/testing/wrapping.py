"""A store around a store: every call goes through one function, which a subclass makes slow, faulty or counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvwire.store import Addressed, Snapshots, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvwire.store import Data, HttpAddress, Listed, ObjectReader, ObjectStat

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One call: the method's name (``read`` is that of an open reader), its key or prefix, and what it writes."""

    method: str
    key: str
    data: Data = b""


class StoreWrapper(Store):
    """Hands every call on to ``inner``; ``snapshot`` and ``http_address`` are there where the inner store has them.

    A subclass overrides ``_do``. Bytes read over an HTTP address do not come through the wrapper.
    """

    def __init__(self, inner: Store) -> None:
        """Take over the inner store: closing this closes it."""
        self.inner = inner
        if isinstance(inner, Snapshots):
            self.snapshot = self._snapshot  # on the instance, where isinstance() looks for protocols
        if isinstance(inner, Addressed):
            self.http_address = self._http_address

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        """Make the call; it takes the bytes to write."""
        return call(request.data)

    @property
    def url(self) -> str:
        """The inner store's address."""
        return self.inner.url

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object."""
        return self._do(Request("get", key), lambda _: self.inner.get(key, start, end))

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag."""
        return self._do(Request("stat", key), lambda _: self.inner.stat(key))

    def put(self, key: str, data: Data) -> None:
        """Write the object."""
        self._do(Request("put", key, data), lambda given: self.inner.put(key, given))

    def create(self, key: str, data: Data) -> bool:
        """Write where there is nothing of that size yet."""
        return self._do(Request("create", key, data), lambda given: self.inner.create(key, given))

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write where the version is still the one with this tag; a put for who counts calls."""
        return self._do(Request("put", key, data), lambda given: self.inner.replace(key, given, etag))

    def delete(self, key: str) -> None:
        """Remove the object."""
        self._do(Request("delete", key), lambda _: self.inner.delete(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects; one call, whose key is empty."""
        self._do(Request("delete_many", ""), lambda _: self.inner.delete_many(keys))

    def distrust(self, key: str, start: int = 0, end: int | None = None) -> None:
        """Tell the inner store; no call that a subclass sees."""
        self.inner.distrust(key, start, end)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """List objects; one call, however long the listing is."""
        return self._do(Request("scan", prefix), lambda _: self.inner.scan(prefix, after))

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _snapshot(self, key: str) -> ObjectReader:
        inner = self.inner
        assert isinstance(inner, Snapshots)  # noqa: S101 - only then is this method offered
        return _Reader(self, key, self._do(Request("snapshot", key), lambda _: inner.snapshot(key)))

    def _http_address(self, key: str, *, renew: bool = False) -> HttpAddress:
        inner = self.inner
        assert isinstance(inner, Addressed)  # noqa: S101 - only then is this method offered
        return self._do(Request("http_address", key), lambda _: inner.http_address(key, renew=renew))


class _Reader:
    """An open object whose reads go through the wrapper."""

    def __init__(self, wrapper: StoreWrapper, key: str, inner: ObjectReader) -> None:
        self._wrapper = wrapper
        self._key = key
        self._inner = inner

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def etag(self) -> str:
        return self._inner.etag

    def read(self, start: int, end: int) -> bytes:
        return self._wrapper._do(Request("read", self._key), lambda _: self._inner.read(start, end))  # noqa: SLF001

    def close(self) -> None:
        self._inner.close()
