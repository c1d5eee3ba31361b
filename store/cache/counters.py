"""What the tiers count."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TierCounters:
    """One tier. Hits and misses are counted by extent, not by call; bytes as they were served."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    held_bytes: int = 0
    """With what an extent costs beyond its content: the header of a file, the objects in memory."""
    objects: int = 0
    extents: int = 0
    fills: int = 0
    """Extents taken in."""
    evictions: int = 0
    """Extents given up for room."""
    refused: int = 0
    """Extents not taken in: too large, or the disk is off or behind."""
    corrupt: int = 0
    """Files that were not what was written; they were dropped."""
    write_errors: int = 0


@dataclass
class RemoteCounters:
    """Reads of content from the remote store."""

    requests: int = 0
    bytes: int = 0
    failures: int = 0
    waits: int = 0
    """Times that a reader waited for bytes that another was fetching."""
    takeovers: int = 0
    """Times that a reader stopped waiting, because nothing came."""


@dataclass
class UploadCounters:
    """Writes that are acknowledged but not on the remote yet."""

    pending: int = 0
    pending_bytes: int = 0
    uploaded: int = 0
    failures: int = 0
    """Attempts that failed; each is tried again."""
    damaged: int = 0
    """Pending files that were not what was written, entries that may have named them, and entries whose content was
    deleted from the remote: lost."""
    direct: int = 0
    """Writes that went to the remote at once, because the pending area could not take them."""


@dataclass
class PrefetchCounters:
    """Hints."""

    taken: int = 0
    dropped: int = 0
    """Hints that found the queue full or foreground reads without a pause."""


@dataclass
class Counters:
    """All of a tiered store, at one moment."""

    memory: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    remote: RemoteCounters = field(default_factory=RemoteCounters)
    uploads: UploadCounters = field(default_factory=UploadCounters)
    prefetch: PrefetchCounters = field(default_factory=PrefetchCounters)
