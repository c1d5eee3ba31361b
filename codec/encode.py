"""``encode``: a cache to a blob."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.container import MAX_CHUNK_TOKENS, Coded, Draft, Level, pack_blob
from kvwire.codec.fit import identity_profile
from kvwire.codec.prediction import Text
from kvwire.codec.quantiser import Ladder, ladder_for, quantise, split_levels
from kvwire.codec.segment import MAX_CHUNK_SYMBOLS, ChunkState, encode_segment
from kvwire.codec.tables import column_classes
from kvwire.codec.transform import analyse, energy_of
from kvwire.errors import ArgumentError
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.profile import Profile
    from kvwire.types import CacheMeta, KVCache

CHUNK_TOKENS = 256
"""The grain of the controller's decisions: some tens of kilobytes on the wire, some milliseconds to decode."""


def encode(
    cache: KVCache,
    profile: Profile | None = None,
    levels: Ladder | int | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    hidden: Tensor | None = None,
) -> bytes:
    """Encode a document's cache into a layered blob.

    cache: any float dtype and device; positions on or off. profile: from ``fit_profile`` on caches of the same model;
    None derives means, scales and tables from this cache and carries them inside the blob. levels: a Ladder, the number
    of levels of the default ladder, or None for all of them. chunk_tokens: tokens in a chunk, 1 to 4096.
    The same input gives the same bytes. Raises ArgumentError on an empty cache, CacheValueError, MismatchError.
    """
    ladder = ladder_for(levels)
    if not cache.tokens:
        msg = "the cache holds no tokens; leave empty documents out"
        raise ArgumentError(msg)
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        msg = f"chunk_tokens must be 1 to {MAX_CHUNK_TOKENS}, got {chunk_tokens}"
        raise ArgumentError(msg)
    used = identity_profile(cache, ladder) if profile is None else profile
    used.check_fits(cache.meta)
    if min(cache.tokens, chunk_tokens) * used.rank > MAX_CHUNK_SYMBOLS:
        msg = f"a chunk may hold {MAX_CHUNK_SYMBOLS // used.rank} tokens of a model this wide, got {chunk_tokens}"
        raise ArgumentError(msg)
    text = Text(used, cache.tokens, cache.token_ids, hidden)
    starts = range(0, cache.tokens, chunk_tokens)
    named = zip(ladder.names, ladder.steps, ladder.shifts, strict=True)
    return pack_blob(
        Draft(
            meta=_named(cache),
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=chunk_tokens,
            levels=tuple(Level(name, step, shift) for name, step, shift in named),
            profile_digest="" if profile is None else used.digest,
            profile_bytes=used.data if profile is None else b"",
            segments=[_encode_chunk(cache, text, ladder, at, min(at + chunk_tokens, cache.tokens)) for at in starts],
        )
    )


def _encode_chunk(cache: KVCache, text: Text, ladder: Ladder, start: int, stop: int) -> list[Coded]:
    profile = text.profile
    coefficients, energy = analyse(cache, text, start, stop)
    values, refinements = split_levels(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
    unit = column_classes(coefficients)
    kept = energy_of(coefficients)
    dropped = max(0.0, energy - kept)
    state = ChunkState(stop - start, profile.spread, profile.tables)
    segments = []
    for level, (shift, step) in enumerate(zip(ladder.shifts, ladder.steps, strict=True)):
        refinement = refinements[level - 1] if level else None
        data, symbols = encode_segment(state, shift, unit - shift, values[level], refinement)
        error = energy_of(coefficients - np.float32(step) * values[level]) + dropped
        segments.append(Coded(data, symbols, error / (kept + dropped) if error else 0.0, kept + dropped))
    return segments


def _named(cache: KVCache) -> CacheMeta:
    """The cache's meta with the digest of its token ids, where they are known."""
    ids = cache.token_ids
    return cache.meta if ids is None else replace(cache.meta, token_digest=digest_tokens(ids))
