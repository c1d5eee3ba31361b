"""What the tiers are set to, and what they count."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwire.errors import ArgumentError

_MIB = 1 << 20


@dataclass(frozen=True)
class TierSettings:
    """Limits of the tiers; the defaults suit a machine with a local SSD.

    Attributes:
        flight_bytes: Longest range asked of the remote at once, and so the longest extent.
        stall_s: Longest wait for the next bytes of what another reader streams, and for a file of the disk tier.
        answer_s: Longest wait for what another reader fetches as a whole.
        dirty_bytes: Content that may wait to be written to the disk; more is not kept there.
        retry_s: How long the disk is left alone after a write that failed, or a read that failed or took too long.
        prefetch_threads: Prefetch requests at a time.
        prefetch_bytes: Of one prefetch request.
        prefetch_hints: Hints that may wait.
        upload_threads: Uploads at a time, with write-back.
        backoff_s: First pause before an upload is tried again; it doubles.
        max_backoff_s: Longest pause.
        put_s: Longest wait of a put for room in the pending folder or for its turn.
        close_s: Longest wait for each thing that closing would like to finish.
    """

    flight_bytes: int = 8 * _MIB
    stall_s: float = 10.0
    answer_s: float = 60.0
    dirty_bytes: int = 64 * _MIB
    retry_s: float = 30.0
    prefetch_threads: int = 2
    prefetch_bytes: int = _MIB
    prefetch_hints: int = 1024
    upload_threads: int = 2
    backoff_s: float = 0.5
    max_backoff_s: float = 60.0
    put_s: float = 60.0
    close_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse settings with which nothing would ever move."""
        counts = (self.flight_bytes, self.prefetch_bytes, self.prefetch_threads, self.upload_threads)
        if min(counts) < 1:
            raise ArgumentError("flight_bytes, prefetch_bytes and threads must be 1 or more")
        if min(self.stall_s, self.answer_s) <= 0 or min(self.dirty_bytes, self.prefetch_hints) < 0:
            raise ArgumentError("stall_s and answer_s must be over 0, dirty_bytes and prefetch_hints 0 or more")
        if min(self.retry_s, self.backoff_s, self.max_backoff_s, self.put_s, self.close_s) < 0:
            raise ArgumentError("retry_s, backoff_s, max_backoff_s, put_s and close_s must be 0 or more")


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
