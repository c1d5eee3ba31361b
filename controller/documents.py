"""The documents of a load, as far as planning needs to know them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import BlobInfo, LevelInfo

LARGEST = 10**13
"""Of any rate, time, error or size: no link, engine or chunk has it, and sums of such stay finite."""
EXACT = 1 << 10
"""A floor that no level is below the finest of."""
MAX_KL = 0.03
"""Nats of expected KL divergence that a document's levels may have by default: coarser ones are not fetched. About
what linked documents lose with 5 to 15 % of the rows repaired (SmolLM2, benchmarks/answers.py)."""
UNMEASURED = 0.1
"""Error of each level over that of the one before, where nobody measured."""


@dataclass(frozen=True)
class DocumentPlanInput:
    """One document: tokens of each chunk, and bytes and errors of each chunk's levels.

    Attributes:
        tokens: Of each chunk.
        fetch_bytes: ``[chunk][level]``: bytes of levels 0..level together; a chunk may end early where its finer
            segments are missing, and is empty where none is there. Empty without a blob.
        has_text: The token ids are known, so that chunks can be recomputed.
        errors: ``[chunk][level]``: measured error once decoded up to a level; empty where nobody measured it, which
            counts as a tenth for each level.
        layered: A finer level adds to the coarser ones, so that a chunk can be refined; otherwise each level is fetched
            on its own.
        prefix_share: Share of the document's forward pass that its reader computes before it can decode, 0 to 1; see
            ``fit_profile``.
        floor: The coarsest level to use where there is a choice, beside that of the goal.
    """

    tokens: tuple[int, ...]
    fetch_bytes: tuple[tuple[int, ...], ...] = ()
    has_text: bool = True
    errors: tuple[tuple[float, ...], ...] = ()
    layered: bool = True
    prefix_share: float = 0.0
    floor: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        if not self.tokens or min(self.tokens) < 1:
            raise ArgumentError("a document needs at least one chunk, and every chunk at least one token")
        if max(max(row, default=0) for row in (self.tokens, *self.fetch_bytes)) > LARGEST:
            raise ArgumentError(f"a chunk has at most {LARGEST} tokens and as many bytes")
        if self.fetch_bytes and len(self.fetch_bytes) != len(self.tokens):
            raise ArgumentError(f"{len(self.tokens)} chunks but bytes for {len(self.fetch_bytes)}")
        for sizes in self.fetch_bytes:
            if min(sizes, default=0) < 0 or list(sizes) != sorted(sizes):
                raise ArgumentError(f"bytes up to a level must be at least 0 and grow with the level, got {sizes}")
        if not 0 <= self.prefix_share <= 1:
            raise ArgumentError(f"a head start is a share of a forward pass, 0 to 1, got {self.prefix_share}")
        if self.floor < 0:
            raise ArgumentError(f"the floor of a document is a level from 0 on, got {self.floor}")
        self._check_errors()

    def _check_errors(self) -> None:
        if not self.errors:
            return
        if [len(row) for row in self.errors] != [len(row) for row in self.fetch_bytes]:
            raise ArgumentError("errors must be given for exactly the levels that bytes are given for")
        if any(not (isfinite(error) and error >= 0) for row in self.errors for error in row):
            raise ArgumentError("errors must be finite and at least 0")

    @classmethod
    def from_blob(
        cls, info: BlobInfo, *, has_text: bool | None = None, prefix_share: float = 0.0, exact: bool = False,
        max_kl: float | None = None,
    ) -> DocumentPlanInput:  # fmt: skip
        """Take a blob's index.

        Args:
            info: What the blob says of itself.
            has_text: Whether the text is known; None: whether the blob carries its token ids.
            prefix_share: Share of the forward pass that its reader computes.
            exact: Fetch its lossless level, or nothing of a blob that has none; with ``EXACT`` as the goal's floor.
            max_kl: Nats: the floor is the coarsest level of which the blob expects no greater KL divergence; None: 0.

        Returns:
            The document as planning takes it.
        """
        spans = [info.chunk_span(chunk) for chunk in range(info.chunks)]
        # Levels that stand alone may be shorter than coarser ones: planning counts the longest so far.
        planned = len(fetched_levels(info))
        if exact:
            planned = 1 + next((at for at, level in enumerate(info.levels) if level.lossless), -1)
        levels = range(planned)
        sizes = tuple(
            tuple(accumulate((info.chunk_bytes(chunk, level) for level in levels[: len(segments)]), max))
            for chunk, segments in enumerate(info.segments)
        )
        errors = tuple(tuple(segment.error for segment in segments[:planned]) for segments in info.segments)
        if exact:  # the levels below count as this one, so that none is cheaper
            sizes = tuple((row[-1],) * planned if 0 < planned <= len(row) else () for row in sizes) if planned else ()
            errors = tuple((0.0,) * len(row) for row in sizes)
        known = info.token_ids is not None if has_text is None else has_text
        layered = not (exact or any(info.levels[level].independent for level in levels))
        lengths = tuple(stop - start for start, stop in spans)
        floor = 0 if exact or max_kl is None else kl_floor(info, max_kl)
        return cls(lengths, sizes, known, errors, layered, prefix_share if sizes else 0.0, floor)

    def error(self, chunk: int, level: int | None) -> float:
        """Look up the error that a chunk counts with."""
        row = self.fetch_bytes[chunk] if self.has_blob else ()
        if not row:
            return 0.0
        at = len(row) - 1 if level is None else level
        return self.errors[chunk][at] if self.errors else UNMEASURED ** (1 + at)

    @property
    def has_blob(self) -> bool:
        """Whether there is a blob at all."""
        return bool(self.fetch_bytes)

    @property
    def finest(self) -> int:
        """The finest level that any of its chunks has; -1 without a blob."""
        return max((len(sizes) for sizes in self.fetch_bytes), default=0) - 1


def fetched_levels(info: BlobInfo) -> tuple[LevelInfo, ...]:
    """Levels of a blob that loads choose from.

    A lossless level is many times larger and helps no answer: it is one of them only where there is nothing else.

    Args:
        info: What the blob says of itself.
    """
    return tuple(level for level in info.levels if not level.lossless) or info.levels


def kl_floor(info: BlobInfo, max_kl: float) -> int:
    """Find the coarsest level of a blob that differs little enough from exact caches.

    Args:
        info: What the blob says of itself.
        max_kl: The greatest KL divergence to expect, in nats.

    Returns:
        Its number: the finest lossy one where none is good enough, and 0 where a level has no prediction.
    """
    levels = fetched_levels(info)
    known = [level.predicted_kl for level in levels if level.predicted_kl is not None]
    if len(known) < len(levels):
        return 0
    return next((number for number, kl in enumerate(known) if kl <= max_kl), max(len(known) - 1, 0))
