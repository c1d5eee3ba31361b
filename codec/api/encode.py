"""Encode a cache into a blob, or make a trial blob for timing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from kvwire.codec.backend import Backend, uses_triton
from kvwire.codec.format.codecs import CODEC_LAYERED, CODEC_LOSSLESS, MAX_LEVELS
from kvwire.codec.format.header import MAX_CHUNK_TOKENS
from kvwire.codec.format.metadata_json import PrefixName
from kvwire.codec.format.pack import Draft, pack_blob
from kvwire.codec.kinds.base import kind_of
from kvwire.codec.kinds.outputs import device_of
from kvwire.codec.kinds.requests import EncodeRequest
from kvwire.errors import ArgumentError
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.kinds.requests import AnyProfile
    from kvwire.codec.transform.levels import Ladder
    from kvwire.types import BlobPrefix, BlockDeviation, CacheMeta, KVCache, SoftTokensName


CHUNK_TOKENS = 256
"""Tokens: the unit of the controller's decisions, some tens of kilobytes on the wire, milliseconds to decode."""


def encode(  # noqa: PLR0913 - what a blob may hold
    cache: KVCache,
    profile: AnyProfile | None = None,
    levels: Ladder | int | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    lossless: bool = False,
    hidden: Tensor | None = None,
    threads: int | None = None,
    backend: Backend = "auto",
    deviation: BlockDeviation | None = None,
    neutral_prefix: Sequence[int] = (),
    soft_tokens: SoftTokensName | None = None,
    prefix: BlobPrefix | None = None,
    opening: int = 0,
    beginning: KVCache | None = None,
    context_level: int | None = None,
) -> bytes:
    """Encode a document's cache into a blob.

    On one machine the same input gives the same bytes for any ``threads``. Between backends a rare value differs by
    one.

    Args:
        cache: Any float dtype and device; positions on or off.
        profile: From ``fit_profile`` on caches of the same model. None derives means, scales and tables from this cache
            and stores them in the blob. A profile of another kind (``CacheGenProfile``) encodes that kind's levels.
        levels: A Ladder, the number of levels of the default ladder, or None for all of them; 0 for no lossy level.
        chunk_tokens: Tokens in a chunk, 1 to 4096.
        lossless: Whether to add a separate level that holds the stored numbers bit for bit.
        hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the profile was
            fitted with one.
        threads: Chunks encoded at a time, None for one per core.
        backend: With ``triton``, and with ``auto`` for a cache on a GPU, layered levels of a given profile are encoded
            on the cache's device, everything else on the processor.
        deviation: How far the document's tokens move behind other documents, to be stored with it.
        neutral_prefix: Token ids that stood before the document when the cache was computed and are not part of it;
            recomputing its tokens needs them.
        soft_tokens: Names the soft tokens among the cache's token ids, which are in no vocabulary.
        prefix: The earlier tokens of a growing document of which the cache is one part; readers need the parts
            before it. None where the cache is the whole document.
        opening: How many tokens at the start of ``neutral_prefix`` the tokenizer puts before any text, such as BOS.
        beginning: The first token alone, computed at position 0 with nothing before it, for a document that was
            computed behind a neutral prefix and may begin a prompt. Stored only for models with attention sinks.
        context_level: The coarsest level among the tokens that the rows were computed over or decoded from; None where
            the model computed them from text.

    Returns:
        The blob.

    Raises:
        ArgumentError: The cache is empty, or an argument is out of range.
        CacheValueError: The cache holds NaN, infinity, or numbers that are too large.
        MismatchError: The profile is of another model.
    """
    if not cache.tokens:
        raise ArgumentError("the cache holds no tokens; leave empty documents out")
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ArgumentError(f"chunk_tokens must be 1 to {MAX_CHUNK_TOKENS}, got {chunk_tokens}")
    on_device = uses_triton(backend, device_of(cache))
    if soft_tokens is not None and max(cache.token_ids or (1 << 32,)) >= soft_tokens.first + soft_tokens.count:
        raise ArgumentError("a cache with soft tokens comes with its token ids, of which none lies beyond them")
    if beginning is not None and (
        beginning.tokens != 1 or beginning.meta.offset or not neutral_prefix or prefix is not None or cache.kept
    ):
        msg = "beginning must be one token at position 0, and the cache unpruned, whole and behind a neutral prefix"
        raise ArgumentError(msg)
    if context_level is not None and not 0 <= context_level < MAX_LEVELS:
        msg = f"context_level is the number of a level, 0 to {MAX_LEVELS - 1}, or None; got {context_level}"
        raise ArgumentError(msg)
    request = EncodeRequest(cache, profile, levels, min(cache.tokens, chunk_tokens), hidden, on_device, beginning)
    encoders = [kind_of(number).encoder(request) for number in _codecs(profile, levels, lossless=lossless)]
    spans = [(start, min(start + chunk_tokens, cache.tokens)) for start in range(0, cache.tokens, chunk_tokens)]
    coded = [encoder.encode_all(spans, threads) for encoder in encoders]
    return pack_blob(
        Draft(
            meta=_stored_meta(cache, lossless=lossless),
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=chunk_tokens,
            levels=tuple(chain.from_iterable(encoder.levels for encoder in encoders)),
            profile_digest=encoders[0].profile_digest,
            profile_bytes=encoders[0].profile_bytes,
            segments=[list(chain.from_iterable(of_kinds)) for of_kinds in zip(*coded, strict=True)],
            prefix_layers=encoders[0].prefix_layers,
            error_to_kl=encoders[0].error_to_kl,
            kept=cache.kept,
            deviation=deviation,
            neutral_prefix=tuple(neutral_prefix),
            soft_tokens=soft_tokens,
            prefix=_checked_prefix(prefix, cache),
            sinks=encoders[0].sinks,
            opening=opening,
            beginning=encoders[0].beginning,
            context_level=context_level,
        )
    )


def _checked_prefix(prefix: BlobPrefix | None, cache: KVCache) -> BlobPrefix | None:
    """Return the prefix; raises ArgumentError where it cannot be the cache's."""
    if prefix is None:
        return None
    if cache.kept is not None or cache.token_ids is None:
        msg = "a part of a document needs its token ids, and is not pruned: encode the whole document anew"
        raise ArgumentError(msg)
    try:
        msgspec.convert((prefix.tokens, prefix.token_digest, prefix.document), PrefixName)
    except msgspec.ValidationError as error:
        msg = f"the prefix of a part is a number of tokens, their SHA-256 and a document's name, got {prefix}"
        raise ArgumentError(msg) from error
    return prefix


def _codecs(profile: AnyProfile | None, levels: Ladder | int | None, *, lossless: bool) -> list[int]:
    """Return the codecs in the blob's order: a lossy one first, the lossless one last."""
    lossy = not (type(levels) is int and levels == 0)
    chosen = [CODEC_LAYERED if profile is None else profile.codec] if lossy else []
    chosen += [CODEC_LOSSLESS] if lossless else []
    if not chosen:
        raise ArgumentError("levels=0 leaves nothing to encode; ask for lossless=True or for levels")
    return chosen


def _stored_meta(cache: KVCache, *, lossless: bool) -> CacheMeta:
    """Return the cache's meta with the digest of its token ids, and for a lossless level with the tensors' dtype."""
    meta, ids = cache.meta, cache.token_ids
    if lossless:
        stored = next(tensor.dtype for tensor in (*cache.keys, *cache.values) if tensor.numel())
        meta = replace(meta, dtype=str(stored).removeprefix("torch."))
    return meta if ids is None else replace(meta, token_digest=digest_tokens(ids))


def trial_blob(cache: KVCache, profile: AnyProfile | None = None, *, hidden: Tensor | None = None) -> bytes:
    """Make a blob of one chunk that decodes as slowly as a real one, for timing and warm-up.

    With a layered profile the coefficients are random with the profile's scales: solving for real ones takes seconds
    for a large model. With another profile, or none, the cache is encoded.

    Args:
        cache: A cache of the model; its layout, length and token ids are used.
        profile: The profile to decode with; None for one inside the blob.
        hidden: As for ``encode``.

    Returns:
        The blob.

    Raises:
        ArgumentError: As for ``encode``.
        MismatchError: The profile is of another model.
    """
    if profile is None or profile.codec != CODEC_LAYERED:
        return encode(cache, profile, chunk_tokens=cache.tokens, hidden=hidden)
    from kvwire.codec.kinds.layered import TrialEncoder  # needed only with a layered profile

    encoder = TrialEncoder(EncodeRequest(cache, profile, None, cache.tokens, hidden, on_device=False))
    segments = encoder.encode_all([(0, cache.tokens)], 1)
    digest = "" if cache.token_ids is None else digest_tokens(cache.token_ids)
    return pack_blob(
        Draft(
            meta=replace(cache.meta, token_digest=digest),
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=cache.tokens,
            levels=tuple(encoder.levels),
            profile_digest=encoder.profile_digest,
            profile_bytes=b"",
            segments=segments,
            prefix_layers=encoder.prefix_layers,
            error_to_kl=encoder.error_to_kl,
        )
    )
