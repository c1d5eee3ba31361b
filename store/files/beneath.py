"""Files below a root, reached without following a link: each folder is opened from the one before it.

The root itself may be reached through links. Below it a link is as if nothing were there, whoever put it in.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvwire.store.files.writer import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# A folder that is only passed through takes the right to search it, not the right to list it.
_ROOT_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_PASS_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(root: Path, parts: Sequence[str], flags: int) -> int:
    """Open a file."""
    folder = os.open(root, _ROOT_FLAGS)
    try:
        for part in parts[:-1]:
            below = os.open(part, _PASS_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)


def open_folder(root: Path, parts: Sequence[str]) -> int:
    """Open a folder for listing what is in it."""
    if parts:
        return open_file(root, parts, _LIST_FLAGS)
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_subfolder(folder: int, name: str) -> int:
    """Open a folder in an open one, for listing what is in it."""
    return os.open(name, _LIST_FLAGS, dir_fd=folder)


@dataclass(frozen=True)
class Obstacle:
    """What lies where something else is needed.

    Attributes:
        name: The way to it, relative to the root.
        kind: A link anywhere, a file in a folder's place, or a folder in the file's.
    """

    name: str
    kind: Literal["link", "file", "folder"]


def obstacle(root: Path, parts: Sequence[str]) -> Obstacle | None:
    """Find out why a way cannot be gone, for a message."""
    path = root
    for count, part in enumerate(parts, 1):
        path /= part
        name = "/".join(parts[:count])
        if path.is_symlink():
            return Obstacle(name, "link")
        if path.is_dir() == (count == len(parts)) and path.exists():
            return Obstacle(name, "folder" if count == len(parts) else "file")
    return None


@contextlib.contextmanager
def folders(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
    """Hold every folder of a way open."""
    held = [os.open(root, _ROOT_FLAGS)]
    try:
        for part in parts:
            held.append(_made(held[-1], part) if make else os.open(part, _PASS_FLAGS, dir_fd=held[-1]))
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)


def _made(folder: int, name: str) -> int:
    try:
        return os.open(name, _PASS_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another writer was faster
            os.mkdir(name, dir_fd=folder)
        sync_folder(".", folder)
        return os.open(name, _PASS_FLAGS, dir_fd=folder)
