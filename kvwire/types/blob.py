"""Contents of a blob's header: levels, segments, and what a reader needs to plan."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types.cache import CacheMeta


@dataclass(frozen=True)
class LevelInfo:
    """One quality level of a blob.

    Attributes:
        name: The level's name.
        step: Quantiser step, in units of the profile's normalised coefficients.
        bytes: This refinement alone.
        cumulative_bytes: All bytes that a reader of this level fetches, header and index included.
        bits_per_element: Cumulative, per element of the original tensors.
        measured_error: Squared error, measured when encoding; ``kvwire.codec.error_of_method`` names the quantity.
        independent: Whether the level decodes without lower levels.
        lossless: Whether decoding is bit-exact.
        predicted_kl: Mean KL divergence of the next token, in nats, expected from the error; None if the profile was
            not calibrated.
    """

    name: str
    step: float
    bytes: int
    cumulative_bytes: int
    bits_per_element: float
    measured_error: float
    independent: bool = False
    lossless: bool = False
    predicted_kl: float | None = None


@dataclass(frozen=True)
class SegmentInfo:
    """One segment of the grid [chunk][level]: its place and checksum.

    Attributes:
        chunk: Number of the chunk.
        level: Number of the level.
        offset: First byte in the blob.
        stored: Bytes in the blob.
        raw: Number of symbols.
        crc32: Of the stored bytes.
        codec: Number of the entropy coder, see docs/format.md.
        error: The chunk's measured error once decoded up to this level.
    """

    chunk: int
    level: int
    offset: int
    stored: int
    raw: int
    crc32: int
    codec: int
    error: float

    @property
    def end(self) -> int:
        """First byte after the segment."""
        return self.offset + self.stored


@dataclass(frozen=True)
class BlockDeviation:
    """How much a document's keys and values change behind other documents, measured when encoding.

    A deviation is the squared distance of a token's keys and values from those of the document alone, over their mean
    square; mean over layers and neighbours. Codes are logarithmic, a step is 6 %.

    Attributes:
        block: Tokens of each block but the last.
        codes: One byte per block; 0: no change, else the deviation is ``2 ** ((code - 192) / 12)``.
    """

    block: int
    codes: bytes

    @classmethod
    def of(cls, values: Sequence[float], block: int) -> BlockDeviation:
        """Encode deviations, each to 3 % if between 2e-5 and 38.

        Args:
            values: One for each block, at least 0.
            block: Tokens of a block.

        Returns:
            The record.
        """
        return cls(block, bytes(_code(value) for value in values))

    @property
    def values(self) -> tuple[float, ...]:
        """One deviation per block."""
        return tuple(2 ** ((code - 192) / 12) if code else 0.0 for code in self.codes)


@dataclass(frozen=True)
class BlobPrefix:
    """The tokens of a document before one of its parts; see ``BlobInfo.prefix``.

    Attributes:
        tokens: Their number.
        token_digest: Their SHA-256, see ``digest_tokens``.
        document: Name of the document, from which a lost catalog is rebuilt; may be empty.
    """

    tokens: int
    token_digest: str
    document: str = ""


def _code(value: float) -> int:
    return min(255, max(1, round(192 + 12 * log2(value)))) if value > 0 else 0


@dataclass(frozen=True)
class SoftTokensName:
    """Soft tokens inside a document's cache: trained embeddings, needed only to recompute tokens.

    Attributes:
        digest: SHA-256 of the file of soft tokens, see ``kvwire.reuse.SoftTokens.digest``.
        first: Token id of soft token 0: the size of the model's vocabulary.
        count: Number of soft tokens.
    """

    digest: str
    first: int
    count: int


@dataclass(frozen=True)
class BlobInfo:
    """Everything in a blob's header: model, layout, levels, chunks and the token ids.

    Attributes:
        version: Format version.
        meta: Metadata of the cache.
        tokens: Length of the document.
        chunk_tokens: Length of each chunk but the last.
        header_bytes: Length of header, metadata, index and token ids.
        file_bytes: Size of the whole blob.
        profile_digest: SHA-256 of the profile that decoding needs; empty if the blob carries its own.
        levels: Coarsest first.
        segments: ``[chunk][level]``; levels 0..k of a chunk decode to quality k and are contiguous, except for
            independent levels: see ``reads``.
        token_ids: None if the encoder did not get them.
        method: ``kvwire`` or ``cachegen``.
        prefix_layers: Layers that the reader computes before decoding, see ``fit_profile``.
        deviation: How much tokens change behind other documents; None if not measured.
        neutral_prefix: Token ids before the document when it was computed, dropped from its cache; recomputing tokens
            needs them.
        soft_tokens: The file of its soft tokens; None if it has none.
        prefix: Earlier tokens of the document, on which the blob's numbers depend: the blob is one part of a document
            that grew. None: the blob is a whole document.
        chunk_starts: First token of each chunk if their lengths differ, as in a document of several parts; empty: all
            but the last hold ``chunk_tokens``.
        sinks: Attention sinks, nearly exact at every level.
        opening: How many of ``neutral_prefix``, from the first on, are the tokenizer's opening tokens, such as BOS.
        can_begin: Whether the blob also has the first token as computed without the prefix.
        context_level: Coarsest level of tokens that some rows were computed on, or coded again from; ``predicted_kl``
            includes it. None: all rows were computed from text.
    """

    version: tuple[int, int]
    meta: CacheMeta
    tokens: int
    chunk_tokens: int
    header_bytes: int
    file_bytes: int
    profile_digest: str
    levels: tuple[LevelInfo, ...]
    segments: tuple[tuple[SegmentInfo, ...], ...]
    token_ids: tuple[int, ...] | None
    method: str = "kvwire"
    prefix_layers: int = 0
    deviation: BlockDeviation | None = None
    neutral_prefix: tuple[int, ...] = ()
    soft_tokens: SoftTokensName | None = None
    prefix: BlobPrefix | None = None
    chunk_starts: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    opening: int = 0
    can_begin: bool = False
    context_level: int | None = None

    @property
    def chunks(self) -> int:
        """Number of token chunks."""
        return len(self.segments)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """First token of a chunk, and the first token after it."""
        if self.chunk_starts:
            return (*self.chunk_starts, self.tokens)[chunk : chunk + 2]  # type: ignore[return-value]
        start = chunk * self.chunk_tokens
        return start, min(start + self.chunk_tokens, self.tokens)

    def chunks_of(self, start: int, stop: int) -> range:
        """Numbers of the chunks that contain a span of tokens.

        Args:
            start: The first of the tokens.
            stop: The token after the last.

        Returns:
            The chunks; empty for an empty span.
        """
        if stop <= start:
            return range(0)
        if self.chunk_starts:
            return range(bisect_right(self.chunk_starts, start) - 1, bisect_right(self.chunk_starts, stop - 1))
        return range(start // self.chunk_tokens, -(-stop // self.chunk_tokens))

    def reads(self, chunk: int, level: int) -> tuple[SegmentInfo, ...]:
        """Segments that a reader of a chunk at a level needs, in payload order.

        Args:
            chunk: Number of the chunk.
            level: The level.

        Returns:
            Segments in payload order.
        """
        row = self.segments[chunk]
        return row[level : level + 1] if self.levels[level].independent else row[: level + 1]

    def chunk_bytes(self, chunk: int, level: int) -> int:
        """Bytes that a reader of a chunk at a level fetches.

        Args:
            chunk: Number of the chunk.
            level: The level.

        Returns:
            Bytes.
        """
        return sum(segment.stored for segment in self.reads(chunk, level))
