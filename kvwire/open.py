"""``open_store``: any address to a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.store import open_store as _open_local
from kvwire.store import open_tiers, parse_size
from kvwire.transport import HttpStore

if TYPE_CHECKING:
    from kvwire.store import Store

_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


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
    http: what ``kvwire serve`` offers, or any server of files, which is then read-only. token: its bearer token.
    cache, cache_size: folder and size of a local cache before the store; memory_size: of one in memory. Everything else
    about tiers: ``kvwire.store.open_tiers``.
    Raises ArgumentError naming the addresses known.
    """
    remote = _remote(url, token)
    if cache is None and memory_size is None:
        return remote
    folder_bytes = parse_size(cache_size) if cache else 0
    memory_bytes = parse_size(memory_size) if memory_size else 0
    return open_tiers(remote, memory_bytes=memory_bytes, folder=cache, folder_bytes=folder_bytes)


def _remote(url: str, token: str | None) -> Store:
    scheme = url.partition("://")[0].lower()
    if scheme in ("http", "https"):
        return HttpStore(url, token=token)
    if _HAS_SCHEME.match(url):
        return _open_local(url)
    return _open_local(Path(url).expanduser().resolve().as_uri())
