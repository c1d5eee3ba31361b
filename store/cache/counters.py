"""What the tiers count."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TierCounters:
    """One tier.

    Attributes:
        hits: Extents that were read from it, not calls.
        misses: Looks that found nothing, not calls.
        hit_bytes: Bytes as they were served.
        held_bytes: With what an extent costs beyond its content: the header of a file, the objects in memory.
        objects: Objects that it holds something of.
        extents: Extents that it holds.
        fills: Extents taken in.
        evictions: Extents given up for room.
        refused: Extents not taken in: too large, or the disk is off or behind.
        corrupt: Files that were not what was written; they were dropped.
        write_errors: Times that the disk failed.
    """

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    held_bytes: int = 0
    objects: int = 0
    extents: int = 0
    fills: int = 0
    evictions: int = 0
    refused: int = 0
    corrupt: int = 0
    write_errors: int = 0


@dataclass
class RemoteCounters:
    """Reads of content from the remote store.

    Attributes:
        requests: Ranges asked for.
        bytes: Bytes that came.
        failures: Requests that failed.
        waits: Times that a reader waited for bytes that another was fetching.
        takeovers: Times that a reader stopped waiting, because nothing came.
    """

    requests: int = 0
    bytes: int = 0
    failures: int = 0
    waits: int = 0
    takeovers: int = 0


@dataclass
class UploadCounters:
    """Writes that are acknowledged but not on the remote yet.

    Attributes:
        pending: Writes that wait or are under way now.
        pending_bytes: Their content.
        uploaded: Writes that have arrived.
        failures: Attempts that failed; each is tried again.
        damaged: Pending files that were not what was written, entries that may have named them, and entries whose
            content was deleted from the remote: lost.
        direct: Writes that went to the remote at once, because the pending area could not take them.
    """

    pending: int = 0
    pending_bytes: int = 0
    uploaded: int = 0
    failures: int = 0
    damaged: int = 0
    direct: int = 0


@dataclass
class PrefetchCounters:
    """Hints.

    Attributes:
        taken: Hints that were queued.
        dropped: Hints that found the queue full or foreground reads without a pause.
    """

    taken: int = 0
    dropped: int = 0


@dataclass
class Counters:
    """All of a tiered store, at one moment.

    Attributes:
        memory: The memory tier.
        disk: The disk tier.
        remote: Reads from the remote.
        uploads: Writes on their way to the remote.
        prefetch: Hints.
    """

    memory: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    remote: RemoteCounters = field(default_factory=RemoteCounters)
    uploads: UploadCounters = field(default_factory=UploadCounters)
    prefetch: PrefetchCounters = field(default_factory=PrefetchCounters)
