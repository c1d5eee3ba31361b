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
    """One tier."""

    hits: int = 0  # extents that were read from it, not calls
    misses: int = 0  # looks that found nothing, not calls
    hit_bytes: int = 0  # as they were served
    held_bytes: int = 0  # with what an extent costs beyond its content: the header of a file, the objects in memory
    objects: int = 0  # that it holds something of
    extents: int = 0  # that it holds
    fills: int = 0  # extents taken in
    evictions: int = 0  # extents given up for room
    refused: int = 0  # extents not taken in: too large, or the disk is off or behind
    corrupt: int = 0  # files that were not what was written; they were dropped
    write_errors: int = 0  # times that the disk failed


@dataclass
class RemoteCounters:
    """Reads of content from the remote store."""

    requests: int = 0  # ranges asked for
    bytes: int = 0
    failures: int = 0
    waits: int = 0  # times that a reader waited for bytes that another was fetching
    takeovers: int = 0  # times that a reader stopped waiting, because nothing came


@dataclass
class UploadCounters:
    """Writes that are acknowledged but not on the remote yet."""

    pending: int = 0  # that wait or are under way now
    pending_bytes: int = 0
    uploaded: int = 0
    failures: int = 0  # attempts; each is repeated
    damaged: int = 0  # lost: pending files that were damaged, entries that may name them, entries whose content is gone
    direct: int = 0  # that went to the remote at once, because the pending area could not take them


@dataclass
class PrefetchCounters:
    """Hints."""

    taken: int = 0
    dropped: int = 0  # that found the queue full, or foreground reads without a pause


@dataclass
class Counters:
    """All of a tiered store, at one moment."""

    memory: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    remote: RemoteCounters = field(default_factory=RemoteCounters)
    uploads: UploadCounters = field(default_factory=UploadCounters)
    prefetch: PrefetchCounters = field(default_factory=PrefetchCounters)
