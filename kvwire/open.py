"""``open_store``: any address to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvwire.errors import ArgumentError
from kvwire.store import open_store as _open_local
from kvwire.transport import HttpStore

if TYPE_CHECKING:
    from kvwire.store import Store


def open_store(url: str, *, token: str | None = None) -> Store:
    """Open ``memory:``, ``file:///path`` or ``http(s)://host:port`` (what ``kvwire serve`` offers; read-only).

    A plain path means a folder. token: bearer token for http. Raises ArgumentError naming the addresses known.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return HttpStore(url, token=token)
    if scheme not in ("", "file", "memory", "s3"):
        msg = f"cannot open {url!r} as a store; the addresses known are file:///path, http(s)://host:port and memory:"
        raise ArgumentError(msg)
    if not scheme:
        from pathlib import Path

        return _open_local(Path(url).expanduser().resolve().as_uri())
    return _open_local(url)
