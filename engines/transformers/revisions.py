"""Revisions of large models that were worked out before, so that their weights are hashed once.

One small file for all models. It is a convenience: whatever is wrong with it, weights are hashed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE = "KVWIRE_REVISIONS"
"""Environment variable: path of the file, or ``off``."""
_VERSION = 1
_MOST_ENTRIES = 256
_MOST_BYTES = 1 << 18
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RevisionsFile:
    """Model revisions by what the file system says of a model's files. No method raises for what is wrong with it."""

    def __init__(self, path: Path | None) -> None:
        """Keep them in a file.

        Args:
            path: The file; None: remember nothing.
        """
        self._path = path

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> RevisionsFile:
        """Find the file.

        Args:
            environment: Environment variables.

        Returns:
            What ``KVWIRE_REVISIONS`` names, or ``kvwire/revisions.json`` among the user's caches.
        """
        named = environment.get(VARIABLE, "")
        if named.lower() == "off":
            return cls(None)
        try:
            return cls(Path(named).expanduser() if named else _caches(environment) / "kvwire" / "revisions.json")
        except RuntimeError:  # this user has no home
            return cls(None)

    def recall(self, key: str) -> str | None:
        """Look a revision up.

        Args:
            key: From ``fingerprint``.

        Returns:
            The revision of the files with this key; None where nothing is known.
        """
        return self._read().get(key)

    def remember(self, key: str, revision: str) -> None:
        """Write down a revision; the oldest go where there are too many.

        Args:
            key: From ``fingerprint``.
            revision: Hexadecimal SHA-256.
        """
        if self._path is None or (self._path.exists() and not self._path.is_file()):
            return
        entries = {name: value for name, value in self._read().items() if name != key} | {key: revision}
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        with contextlib.suppress(OSError):
            path = Path(os.path.realpath(self._path))
            path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            _replace(path, json.dumps({"version": _VERSION, "revisions": kept}).encode())

    def _read(self) -> dict[str, str]:
        """Entries, oldest first; none where the file holds anything else."""
        try:
            if self._path is None or not self._path.is_file():
                return {}
            with self._path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            whole = json.loads(content) if len(content) <= _MOST_BYTES else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(whole, dict) or whole.get("version") != _VERSION:
            return {}
        found = whole.get("revisions")
        if not isinstance(found, dict) or len(found) > _MOST_ENTRIES:
            return {}
        sound = all(
            _DIGEST.fullmatch(key) and isinstance(value, str) and _DIGEST.fullmatch(value)
            for key, value in found.items()
        )
        return found if sound else {}


def fingerprint(paths: Sequence[Path]) -> str:
    """Digest of what the file system says of files, which changes when any of them is written.

    Args:
        paths: The files; symbolic links are followed.

    Returns:
        SHA-256, hexadecimal, over each file's name, real path, size, times of change, inode and device.
    """
    facts = []
    for path in paths:
        found = path.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        facts.append((path.name, os.path.realpath(path), found.st_size, *times, found.st_ino, found.st_dev))
    return sha256(json.dumps(facts).encode()).hexdigest()


def _caches(environment: Mapping[str, str]) -> Path:
    """The user's folder of caches, by the XDG base directory specification, which ignores relative paths."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        temporary.touch(_FILE_MODE, exist_ok=False)
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
