"""What a fetch gives, and how it is set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.transport.sources import Patience

if TYPE_CHECKING:
    from kvwire.types import SegmentInfo


@dataclass(frozen=True)
class Arrival:
    """One segment, checked against its CRC-32.

    elapsed_s: from sending the request that brought it to its last byte. first_byte_s: of that request.
    wire_bytes: received for its sake: gaps before it and failed attempts included. attempts: requests for it.
    All four are 0 where it came along with the blob's head.
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

    head_bytes: asked for speculatively when a blob is opened. max_head_bytes: longest head that is read.
    gap_bytes, max_bytes: see ``ranges.coalesce``. concurrency: requests at a time. retries: further attempts for a
    segment after the first. backoff_s, max_backoff_s: pause before the first retry, doubled for each next one.
    buffer_bytes: no new request starts while more than this waits to be taken.
    """

    head_bytes: int = 64 * 1024
    max_head_bytes: int = 64 * 1024 * 1024
    gap_bytes: int = 32 * 1024
    max_bytes: int = 8 * 1024 * 1024
    concurrency: int = 4
    retries: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    buffer_bytes: int = 256 * 1024 * 1024
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        """Refuse settings with which nothing would ever be fetched."""
        if min(self.head_bytes, self.max_head_bytes, self.concurrency, self.buffer_bytes, self.max_bytes) < 1:
            msg = "head_bytes, max_head_bytes, max_bytes, concurrency and buffer_bytes must be 1 or more"
            raise ArgumentError(msg)
        if min(self.retries, self.gap_bytes, self.backoff_s, self.max_backoff_s) < 0:
            msg = "retries, gap_bytes, backoff_s and max_backoff_s must be 0 or more"
            raise ArgumentError(msg)

    def backoff(self, attempt: int, jitter: float) -> float:
        """Seconds before attempt number ``attempt`` (1 is the first retry); jitter: 0 to 1, of the upper half."""
        full_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))
        return full_s * (0.5 + 0.5 * jitter)
