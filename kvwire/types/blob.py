"""What a blob says about itself: levels, segments and the plan that a reader needs."""

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
        name: Of the level.
        step: Quantiser step, in units of the profile's normalised coefficients.
        bytes: This refinement alone.
        cumulative_bytes: Everything that a reader of this level must fetch, header and index included.
        bits_per_element: Cumulative, per element of the original tensors.
        measured_error: Squared error, measured while encoding: of what, ``kvwire.codec.error_of_method`` says.
        independent: The level is a stream of its own, which needs no level below it.
        lossless: Bit for bit what was encoded.
        predicted_kl: Mean KL divergence of the next token, in nats, that the error is expected to cause; None where the
            profile was not calibrated.
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
    """One segment of the grid [chunk][level]: where it lies and what it must hash to.

    Attributes:
        chunk: Number of the chunk.
        level: Number of the level.
        offset: First byte in the blob.
        stored: Bytes in the blob.
        raw: Symbols that it decodes to.
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
    """How far a document's keys and values move once other documents stand before it, as measured at encode time.

    A deviation is the squared distance of a token's keys and values from those that it has alone, over their mean
    square, in the mean over layers and neighbours. Codes are logarithmic, a step is 6 %.

    Attributes:
        block: Tokens of each block but the last.
        codes: One byte for each block; 0: it does not move, else the deviation is ``2 ** ((code - 192) / 12)``.
    """

    block: int
    codes: bytes

    @classmethod
    def of(cls, values: Sequence[float], block: int) -> BlockDeviation:
        """Write deviations down, each to 3 % where it lies between 2e-5 and 38.

        Args:
            values: One for each block, at least 0.
            block: Tokens of a block.

        Returns:
            The record.
        """
        return cls(block, bytes(_code(value) for value in values))

    @property
    def values(self) -> tuple[float, ...]:
        """One for each block."""
        return tuple(2 ** ((code - 192) / 12) if code else 0.0 for code in self.codes)


@dataclass(frozen=True)
class BlobPrefix:
    """What of a document a part of it stands behind, see ``BlobInfo.prefix``.

    Attributes:
        tokens: How many tokens stand before the part's first.
        token_digest: Their SHA-256, see ``digest_tokens``.
        document: Name of the document in the catalog, from which a lost catalog is made anew; may be empty.
    """

    tokens: int
    token_digest: str
    document: str = ""


def _code(value: float) -> int:
    return min(255, max(1, round(192 + 12 * log2(value)))) if value > 0 else 0


@dataclass(frozen=True)
class SoftTokensName:
    """Soft tokens inside a document's cache: trained embeddings, which only who computes tokens anew needs.

    Attributes:
        digest: SHA-256 of the file of soft tokens, see ``kvwire.reuse.SoftTokens.digest``.
        first: The token id of soft token 0, which is the size of the model's vocabulary.
        count: How many there are.
    """

    digest: str
    first: int
    count: int


@dataclass(frozen=True)
class BlobInfo:
    """Everything in a blob's header: model, layout, levels, chunks and the token ids.

    Attributes:
        version: Of the format.
        meta: Of the cache.
        tokens: Of the document.
        chunk_tokens: Of each chunk but the last.
        header_bytes: Length of header, metadata, index and token ids.
        file_bytes: Of the whole blob.
        profile_digest: SHA-256 of the profile that decoding needs; the empty string where the blob carries its own.
            token_ids is None where the encoder was not told them.
        levels: From the coarsest on.
        segments: ``[chunk][level]``; levels 0..k of a chunk decode to quality k and lie next to each other, but for
            levels that decode alone: see ``reads``.
        token_ids: None where the encoder was not told them.
        method: ``kvwire`` or ``cachegen``.
        prefix_layers: Layers that the reader computes anew before it can decode, see ``fit_profile``.
        deviation: How far tokens move behind other documents; None where not measured.
        neutral_prefix: Token ids that stood before the document when it was computed, and were dropped;
            recomputing its tokens needs them.
        soft_tokens: Which soft tokens some of its token ids are; None where none is.
        prefix: Tokens of the same document that the blob's own stand behind, and that its numbers depend on: the blob
            is a part of a document that grew. None: the blob is a whole document.
        chunk_starts: First token of each chunk, where chunks are of several lengths, as in a document of several parts;
            empty: all but the last hold ``chunk_tokens``.
        sinks: Which tokens are attention sinks: those are nearly exact at every level.
        opening: How many of ``neutral_prefix``, the first ones, the tokenizer puts in front of any text, such as BOS.
        can_begin: Whether the blob has the first token as it is where nothing stands before the document, too.
        context_level: The coarsest level that tokens stood at which some rows were computed over, or coded again from;
            levels' ``predicted_kl`` counts it. None: all rows are as the model computes them from text.
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
        """Numbers of the chunks that hold some tokens.

        Args:
            start: The first of the tokens.
            stop: The token after the last.

        Returns:
            The chunks; none where there are no tokens.
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
