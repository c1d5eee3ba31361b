"""The documents of a load, as far as planning needs to know them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import BlobInfo


@dataclass(frozen=True)
class DocumentPlanInput:
    """One document: tokens of each chunk, and bytes of each chunk's levels.

    tokens[chunk]: tokens. fetch_bytes[chunk][level]: bytes of levels 0..level together; a chunk may end early where
    its finer segments are missing, and is empty where none is there. fetch_bytes is empty without a blob.
    has_text: the token ids are known, so that chunks can be recomputed.
    """

    tokens: tuple[int, ...]
    fetch_bytes: tuple[tuple[int, ...], ...] = ()
    has_text: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        if not self.tokens or min(self.tokens) < 1:
            msg = "a document needs at least one chunk, and every chunk at least one token"
            raise ArgumentError(msg)
        if self.fetch_bytes and len(self.fetch_bytes) != len(self.tokens):
            msg = f"{len(self.tokens)} chunks but bytes for {len(self.fetch_bytes)}"
            raise ArgumentError(msg)
        for sizes in self.fetch_bytes:
            if min(sizes, default=0) < 0 or list(sizes) != sorted(sizes):
                msg = f"bytes up to a level must be at least 0 and grow with the level, got {sizes}"
                raise ArgumentError(msg)

    @classmethod
    def from_blob(cls, info: BlobInfo, *, has_text: bool | None = None) -> DocumentPlanInput:
        """Take a blob's index. ``has_text`` defaults to whether the blob carries its token ids."""
        spans = [info.chunk_span(chunk) for chunk in range(info.chunks)]
        # A lossless level is many times larger and helps no answer: it is planned only where there is nothing else.
        # Levels that stand alone may be shorter than coarser ones: planning counts the longest so far.
        planned = sum(not level.lossless for level in info.levels) or len(info.levels)
        sizes = tuple(
            tuple(accumulate((info.chunk_bytes(chunk, level) for level in range(min(planned, len(segments)))), max))
            for chunk, segments in enumerate(info.segments)
        )
        known = info.token_ids is not None if has_text is None else has_text
        return cls(tuple(stop - start for start, stop in spans), sizes, known)

    @property
    def has_blob(self) -> bool:
        """Whether there is a blob at all."""
        return bool(self.fetch_bytes)

    @property
    def finest(self) -> int:
        """The finest level that any of its chunks has; -1 without a blob."""
        return max((len(sizes) for sizes in self.fetch_bytes), default=0) - 1
