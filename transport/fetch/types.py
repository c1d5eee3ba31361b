"""What a fetch gives, how it is set, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.transport.errors import BusyError
from kvwire.transport.sources.base import ReadTimeouts

if TYPE_CHECKING:
    from kvwire.errors import KvwireError
    from kvwire.types import SegmentInfo


@dataclass(slots=True, eq=False)
class FetchedSegment:
    """One segment, checked against its CRC-32.

    All four are 0 where it came along with the blob's header.

    Attributes:
        elapsed_s: From sending the request that brought it to its last byte.
        first_byte_s: Of that request.
        wire_bytes: Received for its sake: gaps before it and failed attempts included.
        attempts: Requests for it.
    """

    segment: SegmentInfo
    data: bytes
    elapsed_s: float = 0.0
    first_byte_s: float = 0.0
    wire_bytes: int = 0
    attempts: int = 0


@dataclass(frozen=True)
class FetchSettings:
    """How a blob is fetched.

    Attributes:
        header_bytes: Asked for speculatively when a blob is opened.
        max_head_bytes: Longest header that is read.
        gap_bytes: See ``ranges.coalesce``.
        max_bytes: See ``ranges.coalesce``.
        concurrency: Requests at a time.
        retries: Further attempts for a segment after the first.
        backoff_s: Pause before the first retry, in seconds, doubled for each next one.
        max_backoff_s: Longest pause.
        max_retry_after_s: A server that says when to come back is obeyed up to here; where all attempts would come too
            early, none is made.
        buffer_bytes: No new request starts while more than this waits to be taken.
        hedge_factor: A request that takes this many times longer than usual, and hedge_least_s at least, gets a second
            one beside it, and whichever is first wins; 0 never does.
        hedge_share: Most such requests, of all.
    """

    header_bytes: int = 64 * 1024
    max_head_bytes: int = 64 * 1024 * 1024
    gap_bytes: int = 32 * 1024
    max_bytes: int = 8 * 1024 * 1024
    concurrency: int = 4
    retries: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 30.0
    buffer_bytes: int = 256 * 1024 * 1024
    hedge_factor: float = 4.0
    hedge_least_s: float = 0.1
    hedge_share: float = 0.05
    patience: ReadTimeouts = field(default_factory=ReadTimeouts)

    def __post_init__(self) -> None:
        """Refuse settings with which nothing would ever be fetched."""
        if min(self.header_bytes, self.max_head_bytes, self.concurrency, self.buffer_bytes, self.max_bytes) < 1:
            msg = "header_bytes, max_head_bytes, max_bytes, concurrency and buffer_bytes must be 1 or more"
            raise ArgumentError(msg)
        waits = (self.backoff_s, self.max_backoff_s, self.max_retry_after_s, self.hedge_factor, self.hedge_least_s)
        if min(self.retries, self.gap_bytes, self.hedge_share, *waits) < 0:
            raise ArgumentError("retries, gap_bytes, pauses and the settings of hedging must be 0 or more")

    def backoff(self, attempt: int, jitter: float, error: KvwireError | None = None) -> float:
        """Pause before an attempt.

        Args:
            attempt: Its number; 1 is the first retry.
            jitter: 0 to 1, of the upper half.
            error: What happened; a server that says when to come back is obeyed.

        Returns:
            Seconds to wait.
        """
        full_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))
        told_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        return max(full_s * (0.5 + 0.5 * jitter), min(told_s, self.max_retry_after_s))

    def is_over(self, failed: int, error: KvwireError) -> bool:
        """Whether no attempt is left that could succeed.

        Args:
            failed: How many failed.
            error: Of the last.

        Returns:
            Whether there is none, or the server will come back later than all of them.
        """
        left, pause_s = self.retries + 1 - failed, max(self.max_retry_after_s, self.max_backoff_s)
        return left < 1 or (isinstance(error, BusyError) and error.retry_after_s > left * pause_s)


@dataclass
class FetchCounts:
    """What a fetcher did: for operators and for tests.

    Attributes:
        requests: Sent.
        retried: Segments asked for again.
        hedges: Second requests beside slow ones.
        hedges_won: Those of them that were first.
        corrupt: Segments with a wrong checksum.
        stalled: Requests given up because nothing came.
        late: Segments that missed the deadline.
        given_up: Segments that never came.
        wire_bytes: Received over the link.
        local_bytes: Received from copies on this side of it.
        used_bytes: Of both, in segments that were handed over.
    """

    requests: int = 0
    retried: int = 0
    hedges: int = 0
    hedges_won: int = 0
    corrupt: int = 0
    stalled: int = 0
    late: int = 0
    given_up: int = 0
    wire_bytes: int = 0
    local_bytes: int = 0
    used_bytes: int = 0
