"""Stores around a store: every call goes through one function, which a subclass makes slow, faulty or counted."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar, cast

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.store import Addressed, Snapshots, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvwire.store import Data, HttpAddress, Listed, ObjectReader, ObjectStat

    StorePlan = Callable[[int, str, str], "StoreFault | None"]


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
        assert isinstance(inner, Snapshots)
        return _Reader(self, key, self._do(Request("snapshot", key), lambda _: inner.snapshot(key)))

    def _http_address(self, key: str, *, renew: bool = False) -> HttpAddress:
        inner = self.inner
        assert isinstance(inner, Addressed)
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
        return self._wrapper._do(Request("read", self._key), lambda _: self._inner.read(start, end))

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Tally:
    """Number of calls, failed ones included, and of payload bytes that they brought or took along."""

    requests: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.requests + other.requests, self.bytes + other.bytes)


class CountingStore(StoreWrapper):
    """Counts calls and bytes by method and key. ``keys`` counts as ``scan``; a scan's key is its prefix."""

    def __init__(self, inner: Store) -> None:
        """Take over the inner store, and start from nothing."""
        super().__init__(inner)
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], Tally] = {}

    def tallies(self) -> dict[tuple[str, str], Tally]:
        """What was counted, by method and key."""
        with self._lock:
            return dict(self._tallies)

    def tally(self, method: str | None = None, key: str | None = None) -> Tally:
        """The sum over one method or all, and one key or all."""
        wanted = [
            one
            for (a_method, a_key), one in self.tallies().items()
            if method in (None, a_method) and key in (None, a_key)
        ]
        return sum(wanted, Tally())

    def reset(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self._tallies.clear()

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        moved = memoryview(request.data).nbytes
        try:
            result = call(request.data)
            moved += len(result) if isinstance(result, bytes) else 0
            return result
        finally:
            name = request.method, request.key
            with self._lock:
                self._tallies[name] = self._tallies.get(name, Tally()) + Tally(1, moved)


class SlowStore(StoreWrapper):
    """Every call waits for a round trip, and its bytes wait for their turn on a link that all threads share.

    latency_s: seconds of each call. bandwidth: bytes/s of payload in both directions together. sleep, clock: seconds;
    for tests that do not want to wait.
    """

    def __init__(
        self,
        inner: Store,
        *,
        latency_s: float = 0.0,
        bandwidth: float = math.inf,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over the inner store. Raises ArgumentError where nothing would ever arrive."""
        if not (latency_s >= 0 and bandwidth > 0):
            raise ArgumentError(f"latency_s must be 0 or more and bandwidth above 0, got {latency_s} and {bandwidth}")
        super().__init__(inner)
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        self._wait(self._latency_s, memoryview(request.data).nbytes)
        result = call(request.data)
        if isinstance(result, bytes):
            self._wait(0.0, len(result))
        return result

    def _wait(self, latency_s: float, size: int) -> None:
        now = self._clock()
        with self._lock:
            self._free_at = max(now, self._free_at) + size / self._bandwidth if size else self._free_at
            until = max(now, self._free_at) if size else now
        pause_s = until - now + latency_s
        if pause_s > 0:
            self._sleep(pause_s)


class StoreFault(Enum):
    """How a call goes wrong. A kind that a method cannot meet does nothing there."""

    ERROR = "error"
    """Any method: StorageError, and nothing is done."""
    LOST_ANSWER = "lost answer"
    """Any method: it is done, and then StorageError."""
    VANISH = "vanish"
    """get, stat, snapshot, read, http_address: NotFoundError."""
    TRUNCATE = "truncate"
    """get, read: half of the bytes. put, create: half of the bytes are written, without a word."""
    FLIP = "flip"
    """get, read: one bit is wrong. put, create: one bit is written wrong, without a word."""
    FULL = "full"
    """put, create: StorageError, as of a full disk."""


_READING = frozenset({"get", "read"})
_WRITING = frozenset({"put", "create"})
_ANY = _READING | _WRITING | {"stat", "delete", "delete_many", "scan", "snapshot", "http_address"}
_MEETS: dict[StoreFault, frozenset[str]] = {
    StoreFault.ERROR: _ANY,
    StoreFault.LOST_ANSWER: _ANY,
    StoreFault.VANISH: _READING | {"stat", "snapshot", "http_address"},
    StoreFault.TRUNCATE: _READING | _WRITING,
    StoreFault.FLIP: _READING | _WRITING,
    StoreFault.FULL: _WRITING,
}


class FaultyStore(StoreWrapper):
    """Hands calls on, some of them with a fault.

    plan: chooses by the call's number (from 0), method and key; ``read`` is the method of open readers. rates:
    probability of each fault, for calls that can meet it, drawn from ``seed``. A plan goes first.
    ``faults`` counts what was done.
    """

    def __init__(
        self,
        inner: Store,
        plan: StorePlan | None = None,
        *,
        rates: Mapping[StoreFault, float] | None = None,
        seed: int = 0,
    ) -> None:
        """Take over the inner store. Raises ArgumentError where the rates are no probabilities."""
        rates = dict(rates or {})
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1:
            raise ArgumentError(f"rates of faults must be 0 or more and at most 1 together, got {list(rates.values())}")
        super().__init__(inner)
        self._plan = plan
        self._rates = rates
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._calls = 0
        self._faults: Counter[StoreFault] = Counter()

    @property
    def faults(self) -> Counter[StoreFault]:
        """How often each fault happened."""
        with self._lock:
            return Counter(self._faults)

    def _do(self, request: Request, call: Callable[[Data], T]) -> T:
        fault, spot = self._choose(request)
        what = f"{request.key or request.method} in {self.url}"
        if fault is StoreFault.ERROR:
            raise StorageError(f"{what}: a fault was asked for; try again")
        if fault is StoreFault.VANISH:
            raise NotFoundError(f"{what} is not there: a fault was asked for")
        if fault is StoreFault.FULL:
            raise StorageError(f"cannot write {what}: the disk is full (a fault was asked for): free space")
        result = call(_damaged(bytes(request.data), fault, spot) if request.data and fault else request.data)
        if fault is StoreFault.LOST_ANSWER:
            raise StorageError(f"{what}: a fault was asked for after the work was done; try again")
        return cast("T", _damaged(result, fault, spot)) if isinstance(result, bytes) and fault else result

    def _choose(self, request: Request) -> tuple[StoreFault | None, float]:
        with self._lock:
            number, self._calls = self._calls, self._calls + 1
            fault = self._plan(number, request.method, request.key) if self._plan else None
            draw, spot = self._rng.random(), self._rng.random()
            for kind, rate in self._rates.items():
                if fault is None and draw < rate:
                    fault = kind
                draw -= rate
            if fault is None or request.method not in _MEETS[fault]:
                return None, 0.0
            self._faults[fault] += 1
            return fault, spot


def _damaged(data: bytes, fault: StoreFault, spot: float) -> bytes:
    if fault is StoreFault.TRUNCATE:
        return data[: len(data) // 2]
    if fault is StoreFault.FLIP and data:
        at = int(spot * len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data
