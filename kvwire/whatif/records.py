"""What a plan is told of documents, and what it tells: plain records."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log10

from kvwire import controller as ctl


@dataclass(frozen=True, kw_only=True)
class Details:
    """What planning itself need not know of the documents.

    Attributes:
        level_names: For tables; level 0 first.
        level_kl: Of each document, the KL divergence in nats that its blob predicts for each level; empty where
            not known.
        header_bytes: Of all headers, which are read before anything is decided.
        raw_token_bytes: Of one token's uncompressed cache; 0 where that is not to be compared.
        raw_decode: What decoding an uncompressed cache costs.
    """

    level_names: tuple[str, ...] = ()
    level_kl: tuple[tuple[float, ...], ...] = ()
    header_bytes: int = 0
    raw_token_bytes: int = 0
    raw_decode: ctl.DecodeCost = field(default_factory=lambda: ctl.DecodeCost(0.0, 0.0))


@dataclass(frozen=True)
class PlannedChunk:
    """What becomes of one chunk.

    Attributes:
        document: Its number in the prompt.
        chunk: Its number in the document.
        tokens: Its length.
        level: In the end; None: recomputed.
        first_level: By the first plan; None: recomputed.
        reason: Of the decision, in words.
        bytes: To fetch for it.
        error: Of the cache that it gets.
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
    """What would come of a policy, in seconds from the asking; the parts overlap.

    Attributes:
        name: Of the policy.
        ttft_s: To the first token.
        headers_s: Until all headers are read.
        fetch_s: While chunks are being fetched.
        decode_s: Decoding chunks.
        prefill_s: Recomputing chunks.
        closing_s: From the last chunk to the first token.
        bytes: Of chunks over the link, in vain or not.
        error: Mean over tokens.
        kl: Mean over tokens of the predicted KL divergence, in nats; None where blobs do not tell.
        levels: Tokens at each level.
        recomputed: Tokens that are recomputed.
        in_time: Whether the first token comes by the deadline, if there is one.
        played: In the simulator; a load too long for that is as the policy expects.
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
        """Error in decibels, higher is better; infinite for none."""
        return -10 * log10(self.error) if self.error > 0 else inf
