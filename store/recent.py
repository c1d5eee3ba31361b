"""A cache of what was used last (LRU), in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire._forks import lock_of_process

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key; beyond ``most``, by number or weight, the least recently used go. For any number of threads."""

    def __init__(self, most: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        """Start empty."""
        self._most, self._weigh = most, weigh
        self._lock = lock_of_process()
        self._values: OrderedDict[K, V] = OrderedDict()
        self._weight = 0

    def get(self, key: K) -> V | None:
        """Look a value up, which uses it."""
        with self._lock:
            if (value := self._values.get(key)) is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Keep a value, however heavy it is alone."""
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self._weight += self._weigh(value)
            while self._weight > self._most and len(self._values) > 1:
                self._drop(next(iter(self._values)))
        return value

    def forget(self, key: K) -> None:
        """Drop a value, if there is one."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._values.clear()
            self._weight = 0

    def _drop(self, key: K) -> None:
        if (value := self._values.pop(key, None)) is not None:
            self._weight -= self._weigh(value)
