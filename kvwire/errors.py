"""Every error that kvwire raises on purpose.

The classes are coarse: two errors differ only if a caller would act differently. Each message says what to do next.
``exit_code`` is what the command line returns.
"""

from __future__ import annotations

from typing import ClassVar


class KvwireError(Exception):
    """Base of every kvwire error."""

    exit_code: ClassVar[int] = 1


class ArgumentError(KvwireError, ValueError):
    """The caller passed an argument that can never work."""

    exit_code = 2


class NotFoundError(KvwireError, LookupError):
    """A document, blob, profile, model or tokenizer does not exist."""

    exit_code = 3


class CorruptError(KvwireError):
    """The bytes are complete, but not what was written."""

    exit_code = 4


class TruncatedError(CorruptError):
    """The bytes end earlier than the format says.

    Attributes:
        needed: Number of bytes from the start of the blob without which reading cannot continue.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        """Keep the message and the number of bytes needed from the start of the blob.

        Args:
            message: What to do next.
            needed: Bytes from the start of the blob without which reading cannot continue.
        """
        super().__init__(message)
        self.needed = needed


class NotSealedError(CorruptError):
    """Plain bytes in a sealed store: written without the key, or by an attacker."""


class FormatVersionError(KvwireError):
    """The bytes use a format version or feature that this reader does not know."""

    exit_code = 4


class AuthError(KvwireError):
    """The other side refused the credentials, or a public address was requested without any."""

    exit_code = 5


class DeadlineError(KvwireError, TimeoutError):
    """A deadline passed before the work was done."""

    exit_code = 6


class OverloadedError(DeadlineError):
    """The work was refused at once: it could not finish by its deadline.

    Attributes:
        retry_after_s: Seconds until a retry may succeed.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """Keep the message and the time to wait.

        Args:
            message: What to do next.
            retry_after_s: Seconds until a retry may succeed.
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageError(KvwireError, OSError):
    """A disk, folder or server failed: full, read-only, dead, or interrupted."""

    exit_code = 7


class ConflictError(StorageError):
    """The store holds something else than the write expects: a retry fails, too; inspect it first."""


class MismatchError(KvwireError):
    """Two valid things that do not belong together: a blob and another model, profile or tokenizer."""

    exit_code = 8


class RopeRegimeError(MismatchError):
    """Keys cannot be rotated to these positions under their rotary embedding."""


class PartialError(KvwireError):
    """Part of what was asked for failed, the rest is done; each failure was reported."""

    exit_code = 9


class LinkBoundError(KvwireError):
    """Linking would lose, or lost, more than the allowed bound; nothing was answered."""

    exit_code = 10


class CacheValueError(KvwireError, ValueError):
    """A cache holds NaN or infinity, or numbers too large to quantise."""

    exit_code = 2
