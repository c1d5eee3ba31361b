"""Locks and owners that survive a fork: the child has its parent's memory, but none of its other threads.

A lock held by such a thread would stay locked in the child for ever, and a connection or lease would be shared. So
long-lived locks are made here, and owners of connections or threads check their process.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# No weak dictionary: its callbacks run Python code when an owner dies, which can swallow a signal's SystemExit.
_owners: list[tuple[weakref.ref[Any], Callable[[Any], object]]] = []
_registering = threading.Lock()
_sweep_at = 64


def in_child(owner: T, renew: Callable[[T], object]) -> T:
    """Call ``renew`` in every forked child while the owner lives."""
    global _owners, _sweep_at  # noqa: PLW0603 - one list for the process
    with _registering:
        if len(_owners) >= _sweep_at:
            _owners = [each for each in _owners if each[0]() is not None]
            _sweep_at = 64 + 2 * len(_owners)
        _owners.append((weakref.ref(owner), renew))
    return owner


def lock_of_process() -> threading.Lock:
    """A lock that is free in a forked child."""
    return in_child(threading.Lock(), _free)


def reentrant_lock_of_process() -> threading.RLock:
    """The same, reentrant."""
    return in_child(threading.RLock(), _free)


def _free(lock: Any) -> None:  # noqa: ANN401 - either kind
    lock._at_fork_reinit()  # noqa: SLF001 - what Python's own modules do with their locks


class OwnProcess:
    """The process that created an object."""

    def __init__(self, what: str) -> None:
        """Record the current process."""
        self._what, self._number = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process is that one."""
        return self._number == os.getpid()

    def check(self) -> None:
        """Refuse to work in another process."""
        if not self.is_here:
            msg = (
                f"{self._what} of process {self._number} do not work in process {os.getpid()}, which was forked from "
                "it: their threads and connections stayed there; open another one in this process, after the fork"
            )
            raise ArgumentError(msg)


def _after_fork() -> None:
    _free(_registering)
    for reference, renew in tuple(_owners):
        if (owner := reference()) is not None:
            renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
