"""A store that goes wrong as planned, or at random from a seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, cast

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.store.testing.wrapping import Request, StoreWrapper, T

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvwire.store import Data, Store

    StorePlan = Callable[[int, str, str], "StoreFault | None"]


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
        self._rng = random.Random(seed)  # noqa: S311 - repeatable faults, guards nothing
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
