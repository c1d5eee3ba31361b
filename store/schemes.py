"""``open_store``: any address to a store, by one table of schemes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store.base import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SECRETS = re.compile(r"(?<=//)[^/?#]*@|[?#].*")  # a password, and whatever a query holds


def open_store(
    url: str,
    *,
    token: str | None = None,
    cache: str | None = None,
    cache_size: str = "10GB",
    memory_size: str | None = None,
) -> Store:
    """Open ``file:///path``, ``s3://bucket/prefix``, ``http(s)://host:port`` or ``memory:``; a plain path is a folder.

    s3: ``?endpoint=http://host:port&region=...&profile=...`` may follow; credentials come from where boto3 finds them.
    http: what ``kvwire serve`` offers, or any server of files, which is then read-only. memory: a fresh store at every
    call.

    Args:
        url: The address, or the path of a folder.
        token: Bearer token for http stores.
        cache: Folder of a local cache before the store.
        cache_size: Size of the cache folder, such as ``10GB``.
        memory_size: Size of a cache in memory; None for none. Everything else about caches: ``open_tiers``.

    Returns:
        The store, behind its caches where any are asked for.

    Raises:
        ArgumentError: The address is of no known scheme, or is malformed; the message names those that are known.
    """
    remote = _open(url, token)
    if cache is None and memory_size is None:
        return remote
    from kvwire.store.cache.tiered import open_tiers, parse_size

    folder_bytes = parse_size(cache_size) if cache else 0
    memory_bytes = parse_size(memory_size) if memory_size else 0
    return open_tiers(remote, memory_bytes=memory_bytes, folder=cache, folder_bytes=folder_bytes)


def _open(url: str, token: str | None) -> Store:
    if not url.strip():  # of an unset variable; as a path it would be the working directory
        raise ArgumentError("the store's address is empty: name a folder, or an address such as file:///srv/caches")
    found = _SCHEME.match(url)
    if not found:
        return _folder(Path(url).expanduser().resolve().as_uri(), None)
    opener = SCHEMES.get(found[1].lower())
    if opener is None:
        known = ", ".join(sorted(SCHEMES))
        msg = f"cannot open {_SECRETS.sub('', url)!r} as a store: the schemes known are {known}; or name a folder"
        raise ArgumentError(msg)
    return opener(url, token)


def _memory(url: str, token: str | None) -> Store:  # noqa: ARG001 - every opener gets the same
    from kvwire.store.backends.memory import MemoryStore

    if url.lower() != "memory:":
        msg = f"{url!r} names a memory store, but these have no names: use 'memory:' and pass the store around"
        raise ArgumentError(msg)
    return MemoryStore()


def _folder(url: str, token: str | None) -> Store:  # noqa: ARG001 - every opener gets the same
    from kvwire.store.backends.folder.store import FolderStore

    parts = urlsplit(url)
    path = unquote(parts.path)
    as_files = parts.query == "catalog=files"
    is_local = parts.netloc in ("", "localhost") and path.startswith("/")
    if not is_local or (parts.query and not as_files) or parts.fragment:
        raise ArgumentError(
            f"{url!r} is not the address of a folder on this machine: write file:///absolute/path, "
            "or file:///absolute/path?catalog=files for a folder that web servers read"
        )
    if "\0" in path:
        raise ArgumentError("a folder's path cannot hold a zero character")
    return FolderStore(path, catalog="files" if as_files else "rows")


def _s3(url: str, token: str | None) -> Store:  # noqa: ARG001 - every opener gets the same
    from kvwire.store.backends.s3.store import S3Store  # boto3 is slow to import

    return S3Store(url)


def _http(url: str, token: str | None) -> Store:
    from kvwire.store.backends.http.store import HttpStore

    return HttpStore(url, token=token)


SCHEMES: dict[str, Callable[[str, str | None], Store]] = {
    "file": _folder,
    "http": _http,
    "https": _http,
    "memory": _memory,
    "s3": _s3,
}
"""Openers by scheme: each takes the whole address and a bearer token, and imports its backend when it is called."""
