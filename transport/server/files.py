"""Small files that a running server reads again when they change: tenants, signing keys."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvwire.errors import ArgumentError, KvwireError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_BYTES = 64 << 20
_Identity = tuple[int, int, int]


class WatchedFile(Generic[_T]):
    """A parsed file. A new version that cannot be read or parsed is logged, and the old one stays in force."""

    def __init__(self, path: Path, parse: Callable[[bytes], _T]) -> None:
        """Read the file. Raises StorageError where it cannot be read, ArgumentError where it cannot be parsed."""
        self._path = path
        self._parse = parse
        self._seen: _Identity | None = _identity(path)
        self.value = self._load()

    def refresh(self, *, force: bool = False) -> None:
        """Read the file again where its time, size or inode differ; ``force``: in any case."""
        try:
            seen = _identity(self._path)
            if seen == self._seen and not force:
                return
            self._seen = seen
            self.value = self._load()
        except KvwireError as error:
            if force or self._seen is not None:  # told once, not at every look
                _log.error("%s; the version read before stays in force", error)
                self._seen = _identity_or_none(self._path)
            return
        _log.info("%s was read again", self._path)

    def _load(self) -> _T:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        if len(data) > _MAX_BYTES:
            msg = f"{self._path} is longer than {_MAX_BYTES} bytes: is it the right file?"
            raise ArgumentError(msg)
        try:
            return self._parse(data)
        except ArgumentError as error:
            msg = f"{self._path}: {error}"
            raise ArgumentError(msg) from None


def strict_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON; ArgumentError, which quotes nothing of the content, where it is none or a name appears twice."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        msg = f"not valid JSON at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        msg = "not valid JSON: it must be UTF-8, hardly nested, and name nothing twice in one object"
    raise ArgumentError(msg)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError
    return fields


def _no_constant(_: str) -> None:
    raise ValueError  # NaN and Infinity are no JSON


def _identity(path: Path) -> _Identity:
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return about.st_mtime_ns, about.st_size, about.st_ino


def _identity_or_none(path: Path) -> _Identity | None:
    try:
        return _identity(path)
    except StorageError:
        return None


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be read ({error.strerror}): check the path and its permissions")
