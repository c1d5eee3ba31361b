"""Records that go into a plan and come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log10

from kvwire import controller as ctl


@dataclass(frozen=True, kw_only=True)
class Details:
    """Facts about documents that only reports need.

    Attributes:
        level_names: Level 0 first.
        level_kl: For each document, the KL divergence in nats predicted for each level; empty if not known.
        header_bytes: Bytes of all headers, which are read before planning.
        raw_token_bytes: Uncompressed bytes of one token's cache; 0 leaves out that comparison.
        raw_decode: Cost of decoding an uncompressed cache.
    """

    level_names: tuple[str, ...] = ()
    level_kl: tuple[tuple[float, ...], ...] = ()
    header_bytes: int = 0
    raw_token_bytes: int = 0
    raw_decode: ctl.DecodeCost = field(default_factory=lambda: ctl.DecodeCost(0.0, 0.0))


@dataclass(frozen=True)
class PlannedChunk:
    """The treatment of one chunk.

    Attributes:
        document: Its number in the prompt.
        chunk: Its number in the document.
        tokens: Its length.
        level: Final level; None: recomputed.
        first_level: Level in the first plan; None: recomputed.
        reason: The decision's reason in words.
        bytes: Bytes to fetch.
        error: Error of the resulting cache.
    """

    document: int
    chunk: int
    tokens: int
    level: int | None
    first_level: int | None
    reason: str
    bytes: int
    error: float


@dataclass(frozen=True)
class Prediction:
    """Predicted outcome of a load, in seconds from the request; the parts overlap.

    Attributes:
        name: The policy or alternative.
        ttft_s: Time to first token.
        headers_s: Until all headers are read.
        fetch_s: While chunks are being fetched.
        decode_s: Decoding chunks.
        prefill_s: Recomputing chunks.
        closing_s: From the last chunk to the first token.
        bytes: Bytes of chunks fetched, including wasted ones.
        error: Mean over tokens.
        kl: Mean over tokens of the predicted KL divergence, in nats; None if a blob has no prediction.
        levels: Tokens at each level.
        recomputed: Number of recomputed tokens.
        in_time: Whether the first token meets the deadline, if there is one.
        played: Whether the simulator ran the load; else (too long) these are the policy's estimates.
    """

    name: str
    ttft_s: float
    headers_s: float
    fetch_s: float
    decode_s: float
    prefill_s: float
    closing_s: float
    bytes: int
    error: float
    kl: float | None
    levels: tuple[int, ...]
    recomputed: int
    in_time: bool
    played: bool

    @property
    def quality_db(self) -> float:
        """Error in decibels, higher is better; infinite without error."""
        return -10 * log10(self.error) if self.error > 0 else inf
