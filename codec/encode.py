"""``encode``: a cache to a blob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.container import MAX_CHUNK_TOKENS, Draft, Level, pack_blob
from kvwire.codec.fit import identity_profile
from kvwire.codec.quantiser import Ladder, ladder_for, quantise, split_levels
from kvwire.codec.segment import ChunkState, encode_segment
from kvwire.codec.tables import class_of
from kvwire.codec.transform import analyse
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.profile import Profile
    from kvwire.types import KVCache

CHUNK_TOKENS = 256
"""The grain of the controller's decisions: some tens of kilobytes on the wire, some milliseconds to decode."""


def encode(
    cache: KVCache, profile: Profile | None = None, levels: Ladder | int | None = None, *, chunk_tokens: int = CHUNK_TOKENS
) -> bytes:
    """Encode a document's cache into a layered blob.

    cache: any float dtype and device; positions on or off. profile: from ``fit_profile`` on caches of the same model;
    None derives means, scales and tables from this cache and carries them inside the blob. levels: a Ladder, the number
    of levels of the default ladder, or None for all of them. chunk_tokens: tokens in a chunk, 1 to 4096.
    The same input gives the same bytes. Raises ArgumentError on an empty cache, CacheValueError on NaN or infinity,
    MismatchError on a profile of another model.
    """
    ladder = ladder_for(levels)
    if not cache.tokens:
        msg = "the cache holds no tokens; leave empty documents out"
        raise ArgumentError(msg)
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        msg = f"chunk_tokens must be 1 to {MAX_CHUNK_TOKENS}, got {chunk_tokens}"
        raise ArgumentError(msg)
    inside = profile is None
    used = identity_profile(cache, ladder) if profile is None else profile
    used.check_fits(cache.meta)
    starts = range(0, cache.tokens, chunk_tokens)
    segments = [_encode_chunk(cache, used, ladder, start, min(start + chunk_tokens, cache.tokens)) for start in starts]
    named = zip(ladder.names, ladder.steps, ladder.shifts, strict=True)
    return pack_blob(
        Draft(
            meta=cache.meta,
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=chunk_tokens,
            levels=tuple(Level(name, step, shift) for name, step, shift in named),
            profile_digest="" if inside else used.digest,
            profile_bytes=used.data if inside else b"",
            segments=segments,
        )
    )


def _encode_chunk(cache: KVCache, profile: Profile, ladder: Ladder, start: int, stop: int) -> list[tuple[bytes, int, float]]:
    coefficients = analyse(cache, profile, start, stop)
    unit = class_of(np.abs(coefficients).mean(0) * np.sqrt(2))
    values, _ = split_levels(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
    state = ChunkState(stop - start, profile.spread, profile.tables)
    segments = []
    for level, (shift, step) in enumerate(zip(ladder.shifts, ladder.steps, strict=True)):
        data, symbols = encode_segment(state, level, shift, unit - shift, values[level])
        segments.append((data, symbols, _error(coefficients, values[level], step, profile)))
    return segments


def _error(coefficients: NDArray[np.float32], values: NDArray[np.int32], step: float, profile: Profile) -> float:
    """Attention-weighted squared error over attention-weighted energy, the rank cut's share included."""
    dropped = sum(group.dropped for group in profile.groups) * len(coefficients)
    error = np.square(coefficients - np.float32(step) * values, dtype=np.float32).sum(dtype=np.float64) + dropped
    energy = np.square(coefficients, dtype=np.float32).sum(dtype=np.float64) + dropped
    return float(error / energy) if energy else 0.0
