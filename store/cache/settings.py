"""How the tiers are set, beyond their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError

_MIB = 1 << 20


@dataclass(frozen=True)
class TierSettings:
    """Limits of the tiers; the defaults suit a machine with a local SSD.

    admit_after: an object is kept from its n-th use on, 1 to 255; opening it is a use, and so is each ``get``.
    flight_bytes: longest range asked of the remote at once, and so the longest extent. stall_s: longest wait for the
    next bytes of what another reader streams, and for a file of the disk tier; answer_s: for what another reads as a
    whole. dirty_bytes: content that may wait to be written to the disk; more is not kept there. load_threads: that read
    files of the disk tier. retry_s: how long the disk is left alone after a write that failed, or a read that failed
    or took too long. prefetch_threads, prefetch_bytes: at a time, and of one request; prefetch_hints: that may wait.
    upload_threads, backoff_s, max_backoff_s: of uploads in the background. put_s: longest wait of a put for room in the
    pending area or for its turn. close_s: longest wait for each thing that closing would like to finish.
    """

    admit_after: int = 1
    flight_bytes: int = 8 * _MIB
    stall_s: float = 10.0
    answer_s: float = 60.0
    dirty_bytes: int = 64 * _MIB
    load_threads: int = 4
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
        counts = (self.flight_bytes, self.prefetch_bytes, self.prefetch_threads, self.upload_threads, self.load_threads)
        if min(counts) < 1 or not 1 <= self.admit_after <= 255:  # noqa: PLR2004 - the sketch counts in bytes
            msg = "flight_bytes, prefetch_bytes, threads must be 1 or more, admit_after 1 to 255"
            raise ArgumentError(msg)
        if min(self.stall_s, self.answer_s) <= 0 or min(self.dirty_bytes, self.prefetch_hints) < 0:
            msg = "stall_s and answer_s must be over 0, dirty_bytes and prefetch_hints 0 or more"
            raise ArgumentError(msg)
        if min(self.retry_s, self.backoff_s, self.max_backoff_s, self.put_s, self.close_s) < 0:
            msg = "retry_s, backoff_s, max_backoff_s, put_s and close_s must be 0 or more"
            raise ArgumentError(msg)
