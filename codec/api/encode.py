"""``encode``: a cache to a blob, or a trial of a few chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from kvwire.codec.backend import Backend, uses_triton
from kvwire.codec.format.codecs import CODEC_LAYERED, CODEC_LOSSLESS, MAX_LEVELS
from kvwire.codec.format.header import MAX_CHUNK_TOKENS
from kvwire.codec.format.metadata_json import prefix_from_json
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
"""The grain of the controller's decisions: some tens of kilobytes on the wire, some milliseconds to decode."""


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

    On one machine the same input gives the same bytes, whatever ``threads`` is; a rare value differs by one between
    backends.

    Args:
        cache: Any float dtype and device; positions on or off.
        profile: From ``fit_profile`` on caches of the same model. None derives means, scales and tables from this cache
            and carries them inside the blob. A profile of another kind (``CacheGenProfile``) encodes in that kind's own
            levels.
        levels: A Ladder, the number of levels of the default ladder, or None for all of them; 0 for none but the
            lossless one.
        chunk_tokens: Tokens in a chunk, 1 to 4096.
        lossless: Whether to add a level that holds the stored numbers bit for bit, as a stream of its own.
        hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the profile was
            fitted with one.
        threads: Chunks encoded at a time, None for one on every core.
        backend: With ``triton``, and with ``auto`` where the cache lies on a GPU, layered levels of a given profile are
            encoded on the cache's device; all else is encoded on the processor.
        deviation: How far the document's tokens move behind other documents, to be stored with it.
        neutral_prefix: Token ids that stood before the document when the cache was computed, and are not part of it:
            recomputing its tokens needs them.
        soft_tokens: Which soft tokens those of the cache's token ids are that no vocabulary has.
        prefix: What of the document stands before the cache's tokens, where the cache is a part of one that grows:
            readers need the parts before it. None: the cache is of the whole document.
        opening: How many of ``neutral_prefix``, the first ones, the tokenizer puts in front of any text, such as BOS.
        beginning: The first token alone, at position 0 and behind nothing, for prompts that begin with a document that
            was computed behind a neutral prefix: models that gather attention there (sinks) need it, of others nothing
            is stored.
        context_level: The coarsest level of tokens that rows were computed over, or decoded from; None: rows are as the
            model computes them from text.

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
        msg = "a beginning is one token at position 0, of a whole document behind a neutral prefix that is not pruned"
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
            meta=_named(cache, lossless=lossless),
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
            prefix=_checked(prefix, cache),
            sinks=encoders[0].sinks,
            opening=opening,
            beginning=encoders[0].beginning,
            context_level=context_level,
        )
    )


def _checked(prefix: BlobPrefix | None, cache: KVCache) -> BlobPrefix | None:
    """The prefix; raises ArgumentError where it cannot be the cache's."""
    if prefix is None:
        return None
    if cache.kept is not None or cache.token_ids is None:
        msg = "a part of a document needs its token ids, and is not pruned: encode the whole document anew"
        raise ArgumentError(msg)
    try:
        return prefix_from_json([prefix.tokens, prefix.token_digest, prefix.document])
    except ValueError as error:
        raise ArgumentError(f"{error}, got {prefix}") from error


def _codecs(profile: AnyProfile | None, levels: Ladder | int | None, *, lossless: bool) -> list[int]:
    """Level kinds in the blob's order: one lossy kind first, the lossless one last."""
    lossy = not (type(levels) is int and levels == 0)
    chosen = [CODEC_LAYERED if profile is None else profile.codec] if lossy else []
    chosen += [CODEC_LOSSLESS] if lossless else []
    if not chosen:
        raise ArgumentError("levels=0 leaves nothing to encode; ask for lossless=True or for levels")
    return chosen


def _named(cache: KVCache, *, lossless: bool) -> CacheMeta:
    """The cache's meta with the digest of its token ids, where they are known.

    A lossless level holds the numbers of the tensors, all of one dtype, which readers take from the meta.
    """
    meta, ids = cache.meta, cache.token_ids
    if lossless:
        stored = next(tensor.dtype for tensor in (*cache.keys, *cache.values) if tensor.numel())
        meta = replace(meta, dtype=str(stored).removeprefix("torch."))
    return meta if ids is None else replace(meta, token_digest=digest_tokens(ids))


def trial_blob(cache: KVCache, profile: AnyProfile | None = None, *, hidden: Tensor | None = None) -> bytes:
    """Make a blob of one chunk that takes as long to decode as real ones do, for timing and for warming up.

    With a layered profile its content is random, as wide as the profile expects: what only encoders solve of a profile,
    seconds for a large model, is neither read nor solved. With another profile, or none, the cache is encoded.

    Args:
        cache: Of the model; its layout, length and token ids are used.
        profile: To decode with; None: the blob carries its own.
        hidden: As for ``encode``.

    Returns:
        The blob.

    Raises:
        ArgumentError: As ``encode`` says.
        MismatchError: The profile is of another model.
    """
    if profile is None or profile.codec != CODEC_LAYERED:
        return encode(cache, profile, chunk_tokens=cache.tokens, hidden=hidden)
    from kvwire.codec.kinds.layered import TrialEncoder  # not needed without a profile

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
