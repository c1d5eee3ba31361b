"""Small files in the user's cache folder, shared by processes: bounded reads, atomic writes."""

from __future__ import annotations

import contextlib
import os
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_MODE = 0o600
"""Mode of such a file and its temporary files."""
_FOLDER_MODE = 0o700
_ROOT, _OTHERS_WRITE = 0, 0o022


@contextmanager
def file_errors(trouble: str, advice: str) -> Iterator[None]:
    """Translate what the system says of a user's file; trouble: such as ``a.txt cannot be read``."""
    try:
        yield
    except KvwireError:
        raise
    except OSError as error:
        raise StorageError(f"{trouble} ({error.strerror or error}); {advice}") from error


def user_file(environment: Mapping[str, str], variable: str, name: str) -> Path | None:
    """Path of a file; None if the variable says ``off`` or the user has no home."""
    named = environment.get(variable, "")
    if named.lower() == "off":
        return None
    try:
        return Path(named).expanduser() if named else _caches(environment) / "kvwire" / name
    except RuntimeError:  # the user has no home
        return None


def check_owner(path: Path, variable: str) -> None:
    """Refuse a file that others could have written."""
    about = path.stat()
    is_theirs = about.st_uid not in (os.geteuid(), _ROOT)
    if is_theirs or about.st_mode & _OTHERS_WRITE:
        why = "it belongs to another user" if is_theirs else "others may write it"
        msg = f"{why}, so it is not trusted (make it yours alone, or name it in {variable})"
        raise ValueError(msg)


def read_at_most(path: Path, most: int) -> bytes:
    """Read a file, at most one byte more than ``most``."""
    if path.exists() and not path.is_file():
        msg = "not a regular file"
        raise ValueError(msg)
    with path.open("rb") as file:
        return file.read(most + 1)


def writable_place(path: Path) -> Path:
    """Create the file's folder; returns the real path."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    return place


def replace_unflushed(place: Path, content: bytes) -> None:
    """Write atomically, without flushing: a lost file only costs measuring again."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        temporary.touch(FILE_MODE, exist_ok=False)
        temporary.write_bytes(content)
        temporary.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _caches(environment: Mapping[str, str]) -> Path:
    """The XDG cache folder; the specification says to ignore relative paths."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"
