"""Small files that a running server reads again when they change: tenants, signing keys."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.errors import ArgumentError, AuthError, KvwireError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_BYTES = 64 << 20
_Identity = tuple[int, int, int, int]


class WatchedFile(Generic[_T]):
    """A parsed file. A new version that cannot be read or parsed is logged, and the old one stays in force.

    Attributes:
        value: What the file was parsed to.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], _T], *, private: bool = False) -> None:
        """Read the file."""
        self._path = path
        self._parse = parse
        self._private = private
        self._seen: _Identity | None = _identity(path)
        self.value = self._load()

    def refresh(self, *, force: bool = False) -> None:
        """Read the file again where its time, size or inode differ."""
        seen = None
        try:
            seen = _identity(self._path)
            if seen == self._seen and not force:
                return
            self.value = self._load()
        except KvwireError as error:
            if force or seen != self._seen:  # told once, not at every look
                _log.error("%s; the version read before stays in force", error)
        else:
            _log.info("%s was read again", self._path)
        self._seen = seen  # as it was before it was read: what is written meanwhile differs at the next look

    def _load(self) -> _T:
        return read_parsed(self._path, self._parse, private=self._private)


def read_parsed(path: Path, parse: Callable[[bytes], _T], *, private: bool = False) -> _T:
    """Read and parse a file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if private and mode & 0o077:
        msg = f"{path} holds secrets and is open to others than its owner: chmod 600 it"
        raise AuthError(msg)
    if len(data) > _MAX_BYTES:
        msg = f"{path} is longer than {_MAX_BYTES} bytes: is it the right file?"
        raise ArgumentError(msg)
    try:
        return parse(data)
    except ArgumentError as error:
        msg = f"{path}: {error}"
        raise ArgumentError(msg) from None


def _identity(path: Path) -> _Identity:
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino  # the second: permissions, too


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be read ({error.strerror}): check the path and its permissions")
