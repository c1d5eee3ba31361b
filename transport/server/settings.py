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

    Attributes:
        piece_bytes: Read and sent at a time where the store is not a folder; it grows to max_piece_bytes while one
            answer goes on.
        threads: Of reading and writing the store.
        max_requests: Answered at a time.
        max_connections: Open at a time.
        header_bytes: Of one header line.
        header_s: For a whole header.
        keepalive_s: An idle connection is kept.
        send_s: Longest wait for a client to take a piece.
        shutdown_s: Given to running answers when the server stops.
        max_upload_bytes: Of one upload.
        max_spool_bytes: Of all that are running.
        upload_idle_s: Longest wait for more of an upload.
        upload_s: For all of it.
        spool_folder: Where uploads lie meanwhile; None: inside a folder store's own folder, else the system's temporary
            folder.
        requests_per_s: Of one credential, or of one address without any (0: no limit).
        burst: So many at once.
        read_only: Refuse writes.
        status: Show ``/status``, a page for people, to those who may see metrics.
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
    status: bool = False
