"""Remembers revisions of large models, so that weights are hashed once.

One small file for all models; on any problem with it, weights are hashed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from hashlib import sha256
from typing import TYPE_CHECKING

from kvwire._user_file import check_owner, read_at_most, replace_unflushed, user_file, writable_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

VARIABLE = "KVWIRE_REVISIONS"
"""Environment variable: path of the file, or ``off``."""
_VERSION = 2  # version 1 held digests of whole folders
_MOST_ENTRIES = 256
_MOST_BYTES = 1 << 18
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RevisionsFile:
    """Model revisions by fingerprint of the model's files. Methods never raise for a bad file."""

    def __init__(self, path: Path | None, *, is_named: bool = True) -> None:
        """Use a file; None: remember nothing."""
        self._path, self._is_named = path, is_named

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> RevisionsFile:
        """Use the file of the environment."""
        return cls(user_file(environment, VARIABLE, "revisions.json"), is_named=bool(environment.get(VARIABLE)))

    def recall(self, key: str) -> str | None:
        """Look a revision up."""
        return self._read().get(key)

    def remember(self, key: str, revision: str) -> None:
        """Store a revision; the oldest are dropped if there are too many."""
        if self._path is None or (self._path.exists() and not self._path.is_file()):
            return
        entries = {name: value for name, value in self._read().items() if name != key} | {key: revision}
        entries_to_write = dict(list(entries.items())[-_MOST_ENTRIES:])
        with contextlib.suppress(OSError):
            content = json.dumps({"version": _VERSION, "revisions": entries_to_write}).encode()
            replace_unflushed(writable_place(self._path), content)

    def _read(self) -> dict[str, str]:
        """Entries, oldest first; empty if the file is invalid."""
        if self._path is None:
            return {}
        try:
            if not self._is_named:
                check_owner(self._path, VARIABLE)
            content = read_at_most(self._path, _MOST_BYTES)
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
    """Digest of files' metadata, which changes when any of them is written."""
    facts = []
    for path in paths:
        found = path.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        facts.append((path.name, os.path.realpath(path), found.st_size, *times, found.st_ino, found.st_dev))
    return sha256(json.dumps(facts).encode()).hexdigest()
