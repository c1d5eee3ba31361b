"""Every error that kvwire raises on purpose.

The classes are coarse: two errors differ only where a caller would act differently. Each message says what to do
next. ``exit_code`` is what the command line returns for that class.
"""

from __future__ import annotations

from typing import ClassVar


class KvwireError(Exception):
    """Base of every kvwire error."""

    exit_code: ClassVar[int] = 1


class ArgumentError(KvwireError, ValueError):
    """The caller passed something that cannot work, whatever the state of the world."""

    exit_code = 2


class NotFoundError(KvwireError, LookupError):
    """A document, blob, profile, model or tokenizer is not where it was asked for."""

    exit_code = 3


class CorruptError(KvwireError):
    """The bytes are all there, but they are not what was written."""

    exit_code = 4


class TruncatedError(CorruptError):
    """The bytes end before the format says that they do.

    Attributes:
        needed: Number of bytes, counted from the start of the blob, without which reading cannot go on.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        """Keep the message and the number of bytes needed from the start of the blob.

        Args:
            message: What to do next.
            needed: Bytes from the start of the blob without which reading cannot go on.
        """
        super().__init__(message)
        self.needed = needed


class NotSealedError(CorruptError):
    """Readable bytes where sealed ones should be: written without the key, or by an intruder."""


class FormatVersionError(KvwireError):
    """The bytes are of a format version, or use a feature, that this reader does not know."""

    exit_code = 4


class AuthError(KvwireError):
    """The other side refused the credentials, or a public address was asked for without any."""

    exit_code = 5


class DeadlineError(KvwireError, TimeoutError):
    """A deadline passed before the work was done."""

    exit_code = 6


class OverloadedError(DeadlineError):
    """The work was refused at once: by its deadline it could not be done.

    Attributes:
        retry_after_s: Seconds after which asking again may be of use.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """Keep the message and the time to wait.

        Args:
            message: What to do next.
            retry_after_s: Seconds after which asking again may be of use.
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageError(KvwireError, OSError):
    """A disk, folder or server failed: full, read-only, dead, or gone in the middle."""

    exit_code = 7


class ConflictError(StorageError):
    """Something else lies there than the write is for: the same again fails, too; look at what is there first."""


class MismatchError(KvwireError):
    """Two sound things that do not belong together: a blob and another model, profile or tokenizer."""

    exit_code = 8


class RopeRegimeError(MismatchError):
    """Keys cannot be moved to the positions asked for under their rotary embedding."""


class PartialError(KvwireError):
    """Some of many documents failed and the others are done; each failure was told."""

    exit_code = 9


class LinkBoundError(KvwireError):
    """Linked documents would lose, or lost, more of what they tell a model than was asked for; nothing was answered."""

    exit_code = 10


class CacheValueError(KvwireError, ValueError):
    """A cache holds NaN or infinity, or numbers too large to quantise."""

    exit_code = 2
