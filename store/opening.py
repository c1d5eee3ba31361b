"""From an address to a store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvwire.errors import ArgumentError
from kvwire.store.folder import FolderStore
from kvwire.store.memory import MemoryStore

if TYPE_CHECKING:
    from kvwire.store.base import Store

_KNOWN = "memory:, file:///path, s3://bucket/prefix and, by kvwire.open_store, http(s)://host:port"
_SECRETS = re.compile(r"(?<=//)[^/?#]*@|[?#].*")  # a password, and whatever a query holds


def open_store(url: str) -> Store:
    """Open ``memory:`` (a fresh store at every call), ``file:///path`` or an S3 bucket.

    S3: ``s3://bucket/prefix?endpoint=http://host:port&region=...&profile=...``, all behind the bucket optional; what is
    left out, and the credentials, come from where boto3 finds them. Raises ArgumentError for any other address. Stores
    behind http(s) are opened by ``kvwire.open_store``.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "memory":
        return _memory(url)
    if scheme == "file":
        return _folder(url)
    if scheme == "s3":
        from kvwire.store.s3 import S3Store  # boto3 is slow to import

        return S3Store(url)
    msg = f"cannot open {_SECRETS.sub('', url)!r} as a store: the addresses known are {_KNOWN}"
    raise ArgumentError(msg)


def _memory(url: str) -> MemoryStore:
    if url != "memory:":
        msg = f"{url!r} names a memory store, but these have no names: use 'memory:' and pass the store around"
        raise ArgumentError(msg)
    return MemoryStore()


def _folder(url: str) -> FolderStore:
    parts = urlsplit(url)
    path = unquote(parts.path)
    as_files = parts.query == "catalog=files"
    is_local = parts.netloc in ("", "localhost") and path.startswith("/")
    if not is_local or (parts.query and not as_files) or parts.fragment:
        msg = (
            f"{url!r} is not the address of a folder on this machine: write file:///absolute/path, "
            "or file:///absolute/path?catalog=files for a folder that web servers read"
        )
        raise ArgumentError(msg)
    if "\0" in path:
        msg = "a folder's path cannot hold a zero character"
        raise ArgumentError(msg)
    return FolderStore(path, catalog="files" if as_files else "rows")
