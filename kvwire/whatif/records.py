"""Records that go into a plan and come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log10

from kvwire import controller as ctl


@dataclass(frozen=True, kw_only=True)
class Details:
    """Facts about documents that only reports need."""

    level_names: tuple[str, ...] = ()  # level 0 first
    # for each document, the KL divergence in nats predicted for each level; empty if not known
    level_kl: tuple[tuple[float, ...], ...] = ()
    header_bytes: int = 0  # bytes of all headers, which are read before planning
    raw_token_bytes: int = 0  # uncompressed bytes of one token's cache; 0 leaves out that comparison
    # cost of decoding an uncompressed cache
    raw_decode: ctl.DecodeCost = field(default_factory=lambda: ctl.DecodeCost(0.0, 0.0))


@dataclass(frozen=True)
class PlannedChunk:
    """The treatment of one chunk."""

    document: int  # its number in the prompt
    chunk: int  # its number in the document
    tokens: int  # its length
    level: int | None  # final level; None: recomputed
    first_level: int | None  # level in the first plan; None: recomputed
    reason: str  # the decision's reason in words
    bytes: int  # bytes to fetch
    error: float  # error of the resulting cache


@dataclass(frozen=True)
class Prediction:
    """Predicted outcome of a load, in seconds from the request; the parts overlap."""

    name: str  # the policy or alternative
    ttft_s: float  # time to first token
    headers_s: float  # until all headers are read
    fetch_s: float  # while chunks are being fetched
    decode_s: float  # decoding chunks
    prefill_s: float  # recomputing chunks
    closing_s: float  # from the last chunk to the first token
    bytes: int  # bytes of chunks fetched, including wasted ones
    error: float  # mean over tokens
    kl: float | None  # mean over tokens of the predicted KL divergence, in nats; None if a blob has no prediction
    levels: tuple[int, ...]  # tokens at each level
    recomputed: int  # number of recomputed tokens
    in_time: bool  # whether the first token meets the deadline, if there is one
    played: bool  # whether the simulator ran the load; else (too long) these are the policy's estimates

    @property
    def quality_db(self) -> float:
        """Error in decibels, higher is better; infinite without error."""
        return -10 * log10(self.error) if self.error > 0 else inf
