"""Writes that are acknowledged but not on the remote yet: files that survive a crash, in order, and how they go up.

One file for each write: a header with the key, then the bytes; written under a temporary name, flushed, renamed, and
the rename flushed too. File names count up, so the order survives as well. Beside an entry that was tried once lies
what the remote had before, so that a later attempt, by another process too, sees whether others wrote since.

While an entry waits, a collector of garbage sees content on the remote that no entry names. So the content is looked at
before the entry is uploaded, and once more after collectors have been waited for: see ``upkeep.collect``.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store.base import is_there
from kvwire.store.cache.local import FOLDER_MODE
from kvwire.store.catalog.announcements import wait_for_collectors
from kvwire.store.catalog.objects import refresh
from kvwire.store.files.files import make_folders, sync_folder
from kvwire.store.key_kinds import content_digest, kind_of
from kvwire.store.keys import MAX_KEY_CHARS, check_key, space_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.store.base import Data, Store

_MAGIC = b"kvwput1\n"
_FIELDS = struct.Struct("<8sHQ")  # magic, length of the key, length of the bytes
_CRC = struct.Struct("<I")  # of the fields, the key and the bytes
_HEADER_BYTES = _FIELDS.size + _CRC.size
_NAME = re.compile(r"([0-9]{16})\.put")
_TRIED = re.compile(r"([0-9]{16})\.tried")
_TEMPORARY = re.compile(r"[0-9]{16}\.tmp")
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(eq=False)
class PendingWrite:
    """One write. key: None where the file's header is damaged. size: bytes of content.

    found: the remote's entity tag before the first attempt, empty where nothing lay there; None: none was made.
    """

    number: int
    key: str | None
    size: int
    failures: int = 0
    not_before: float = 0.0
    is_running: bool = False
    written: float = 0.0
    is_checked: bool = False
    found: str | None = None
    is_content: bool = field(init=False)
    """Whether the bytes are known by their digest, so that nothing needs to come before them."""

    def __post_init__(self) -> None:
        """Look at the key once: queues ask often."""
        self.is_content = self.key is not None and content_digest(self.key) is not None


class PendingFolder:
    """The files. Writing is safe from several threads; all raise OSError where the disk fails."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet."""
        self._folder = folder
        self._lock = threading.Lock()
        self._next = 0

    def load(self) -> list[PendingWrite]:
        """What an earlier process left, in order; its temporary files are removed."""
        make_folders(self._folder, FOLDER_MODE)  # flushed, since what is acknowledged lies in it
        found = self.numbers()
        known = set(found)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                tried = _TRIED.fullmatch(entry.name)
                if _TEMPORARY.fullmatch(entry.name) or (tried and int(tried[1]) not in known):
                    (self._folder / entry.name).unlink()
        self._next = max(found, default=-1) + 1
        return [self._read_header(number) for number in found]

    def adopt(self, other: Path) -> list[PendingWrite]:
        """Take over what lies in the pending folder of a process that is gone, behind what is here."""
        adopted = []
        for number in PendingFolder(other).numbers():
            own = self._number()
            with suppress(FileNotFoundError):
                (other / _tried(number)).rename(self._folder / _tried(own))
            (other / _file(number)).rename(self._folder / _file(own))
            adopted.append(self._read_header(own))
        if adopted:
            sync_folder(self._folder)
            sync_folder(other)
        return adopted

    def numbers(self) -> list[int]:
        """Numbers of the files, in order."""
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            return sorted(int(match[1]) for entry in entries if (match := _NAME.fullmatch(entry.name)))

    def write(self, key: str, data: Data) -> PendingWrite:
        """Make a write durable."""
        number = self._number()
        name = key.encode()
        fields = _FIELDS.pack(_MAGIC, len(name), len(data)) + name
        header = fields[: _FIELDS.size] + _CRC.pack(crc32(data, crc32(fields))) + name
        path, temporary = self._folder / _file(number), self._folder / f"{number:016}.tmp"
        try:
            descriptor = os.open(temporary, _CREATE_FLAGS, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            temporary.rename(path)
            sync_folder(self._folder)
        except BaseException:
            for one in (temporary, path):
                with suppress(OSError):
                    one.unlink()
            raise
        return PendingWrite(number, key, len(data), written=path.stat().st_mtime)

    def read(self, pending: PendingWrite) -> bytes:
        """Read a write back."""
        whole = (self._folder / _file(pending.number)).read_bytes()
        if len(whole) >= _HEADER_BYTES and pending.key is not None:
            magic, key_bytes, size = _FIELDS.unpack_from(whole)
            (crc,) = _CRC.unpack_from(whole, _FIELDS.size)
            start = _HEADER_BYTES + key_bytes
            named = whole[_HEADER_BYTES:start]
            checked = crc32(memoryview(whole)[_HEADER_BYTES:], crc32(whole[: _FIELDS.size]))
            if magic == _MAGIC and len(whole) == start + size and crc == checked and named == pending.key.encode():
                pending.is_checked = True
                return whole[start:]
        raise _damaged(pending)

    def read_range(self, pending: PendingWrite, start: int, end: int) -> bytes:
        """Some of the bytes; all are checked, as ``read`` does it, the first time alone."""
        if not pending.is_checked:
            return self.read(pending)[start:end]
        with (self._folder / _file(pending.number)).open("rb") as file:
            file.seek(_HEADER_BYTES + len((pending.key or "").encode()) + start)
            data = file.read(end - start)
        if len(data) < end - start:
            raise _damaged(pending)
        return data

    def remove(self, pending: PendingWrite) -> None:
        """Forget a write; flushed, or an old entry could come back after a crash."""
        (self._folder / _file(pending.number)).unlink(missing_ok=True)
        if pending.found is not None:
            (self._folder / _tried(pending.number)).unlink(missing_ok=True)
        sync_folder(self._folder)

    def note_attempt(self, pending: PendingWrite, tag: str) -> None:
        """Keep what the remote has of a key before its first upload; a full disk does without."""
        pending.found = tag
        with suppress(OSError):
            (self._folder / _tried(pending.number)).write_text(f"{tag}\n", encoding="utf-8")

    def _found(self, number: int) -> str | None:
        """What ``note_attempt`` kept; None where nothing was, or not to its end, and then nothing was uploaded."""
        try:
            tag, end, _ = (self._folder / _tried(number)).read_text(encoding="utf-8").partition("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return tag if end else None

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    def _read_header(self, number: int) -> PendingWrite:
        """What a file's header says, without reading its content."""
        path = self._folder / _file(number)
        size = max(0, path.stat().st_size - _HEADER_BYTES)
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES + MAX_KEY_CHARS)
        try:
            _, key_bytes, size = _FIELDS.unpack_from(header)
            key = check_key(header[_HEADER_BYTES : _HEADER_BYTES + key_bytes].decode())
        except (struct.error, ValueError):
            return PendingWrite(number, None, size)
        about = path.stat()
        size = min(size, about.st_size)
        return PendingWrite(number, key, size, written=about.st_mtime, found=self._found(number))


def _damaged(pending: PendingWrite) -> CorruptError:
    return CorruptError(f"the pending write of {pending.key or 'an unknown key'} is damaged: encode the document again")


def _file(number: int) -> str:
    return f"{number:016}.put"


def _tried(number: int) -> str:
    return f"{number:016}.tried"


def upload_entry(remote: Store, key: str, data: bytes, was_there: Callable[[str], bool]) -> bool:
    """Write an entry, after content that a collector may take; False where the content ``was_there`` and is gone."""
    # What cannot be read, such as a sealed entry, is written as it is.
    named = _named(key, data)
    if not named:
        remote.put(key, data)
        return True
    needed, *others = named  # without the first, the entry leads nowhere; others may never have been there
    if not refresh(remote, needed):
        if was_there(needed):
            return False
        remote.put(key, data)
        return True
    for other in others:
        refresh(remote, other)
    remote.put(key, data)
    wait_for_collectors(remote, space_of(key), named)
    if is_there(remote, needed):
        return True
    with suppress(NotFoundError):
        if remote.get(key) == data:  # and not yet another's
            remote.delete(key)
    return False


def _named(key: str, data: bytes) -> list[str]:
    kind = kind_of(key)
    if kind is None or kind.names is None:
        return []
    try:
        return [named.key for named in kind.names(key, data)]
    except (ArgumentError, CorruptError):
        return []
