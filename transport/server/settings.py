"""Limits of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_GIB = 1 << 30


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server; the defaults suit one that other machines of the same owner use.

    piece_bytes: read and sent at a time where the store is not a folder; it grows to max_piece_bytes while one answer
    goes on. threads: of reading and writing the store. max_requests: answered at a time. max_connections: open at a
    time. header_bytes: of one header line; header_s: for a whole header. keepalive_s: an idle connection is kept.
    send_s: longest wait for a client to take a piece. shutdown_s: given to running answers when the server stops.
    max_upload_bytes: of one upload; max_spool_bytes: of all that are running. upload_idle_s: longest wait for more of
    an upload; upload_s: for all of it. spool_folder: where uploads lie meanwhile; None: inside a folder store's own
    folder, else the system's temporary folder. requests_per_s: of one credential, or of one address without any (0: no
    limit); burst: so many at once. read_only: nobody may write.
    """

    piece_bytes: int = 256 * 1024
    max_piece_bytes: int = 2 * 1024 * 1024
    threads: int = 16
    max_requests: int = 512
    max_connections: int = 1024
    header_bytes: int = 8190
    header_s: float = 10.0
    keepalive_s: float = 75.0
    send_s: float = 60.0
    shutdown_s: float = 5.0
    max_upload_bytes: int = 16 * _GIB
    max_spool_bytes: int = 64 * _GIB
    upload_idle_s: float = 30.0
    upload_s: float = 3600.0
    spool_folder: Path | None = None
    requests_per_s: float = 0.0
    burst: int = 100
    read_only: bool = False
