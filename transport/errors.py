"""Errors of transfers, below the shared ones: what failed, and whether asking again can help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, KvwireError, StorageError

if TYPE_CHECKING:
    from kvwire.types import SegmentInfo


class ReplacedError(StorageError):
    """The object was replaced or deleted while being read: open it again."""


class StalledError(StorageError):
    """The other side stopped sending, or never began."""


class BusyError(StorageError):
    """The other side asks to come back later.

    Attributes:
        retry_after_s: Seconds to wait, where it says when; 0 otherwise.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """Keep the message and the wait that was asked for."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RejectedError(StorageError):
    """The other side refused the request for good: asking again changes nothing."""


class SegmentError(KvwireError):
    """One segment could not be fetched; the others are not concerned."""

    def __init__(self, segment: SegmentInfo, attempts: int, cause: KvwireError) -> None:
        """Name the chunk and the level, and keep the cause of the last attempt.

        Args:
            segment: What was wanted.
            attempts: How many failed.
            cause: Of the last.
        """
        super().__init__(
            f"chunk {segment.chunk}, level {segment.level}: given up after {attempts} attempts ({cause}); "
            "recompute the chunk or use a lower level"
        )
        self.segment = segment
        self.attempts = attempts
        self.__cause__ = cause


class SegmentStorageError(SegmentError, StorageError):
    """The segment did not arrive."""


class SegmentCorruptError(SegmentError, CorruptError):
    """The segment arrived, but not as it was written."""


def segment_error(segment: SegmentInfo, attempts: int, cause: KvwireError) -> SegmentError:
    """Make the error for a segment, by its cause."""
    kind = SegmentCorruptError if isinstance(cause, CorruptError) else SegmentStorageError
    return kind(segment, attempts, cause)
