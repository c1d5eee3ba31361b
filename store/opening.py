"""From an address to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvwire.errors import ArgumentError
from kvwire.store.folder import FolderStore
from kvwire.store.memory import MemoryStore

if TYPE_CHECKING:
    from kvwire.store.base import Store

_KNOWN = "memory: and file:///path"


def open_store(url: str) -> Store:
    """Open ``memory:`` (a fresh store at every call) or ``file:///path``.

    Raises ArgumentError for any other address. Stores behind http(s) are opened by ``kvwire.open_store``.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return _memory(url)
    if parts.scheme == "file":
        return _folder(url)
    if parts.scheme == "s3":
        msg = f"s3:// stores are not available in this version: use {_KNOWN}, or serve a folder over http"
        raise ArgumentError(msg)
    msg = f"cannot open {url!r} as a store: the addresses known here are {_KNOWN}"
    raise ArgumentError(msg)


def _memory(url: str) -> MemoryStore:
    if url != "memory:":
        msg = f"{url!r} names a memory store, but these have no names: use 'memory:' and pass the store around"
        raise ArgumentError(msg)
    return MemoryStore()


def _folder(url: str) -> FolderStore:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        msg = f"{url!r} is not the address of a folder on this machine: write file:///absolute/path"
        raise ArgumentError(msg)
    if "\0" in path:
        msg = "a folder's path cannot hold a zero character"
        raise ArgumentError(msg)
    return FolderStore(path)
