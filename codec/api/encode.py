"""``encode``: a cache to a blob."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from kvwire.codec.backend import Backend, uses_triton
from kvwire.codec.entropy import kernels
from kvwire.codec.entropy.tables import column_classes
from kvwire.codec.fitting.fit import identity_profile
from kvwire.codec.format.container import (
    CODEC_CACHEGEN,
    CODEC_LOSSLESS,
    MAX_CHUNK_TOKENS,
    Coded,
    Draft,
    Level,
    pack_blob,
)
from kvwire.codec.format.segment import MAX_CHUNK_SYMBOLS, SegmentState, encode_segment
from kvwire.codec.kinds.cachegen import CacheGenProfile, decode_cachegen, encode_cachegen
from kvwire.codec.kinds.lossless_streams import encode_lossless
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.analysis import analyse, energy_of, gather
from kvwire.codec.transform.quantiser import Ladder, ladder_for, quantise, split_levels
from kvwire.codec.workers import each, one_core
from kvwire.errors import ArgumentError
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvwire.codec.profile.profile import Profile
    from kvwire.types import CacheMeta, KVCache

CHUNK_TOKENS = 256
"""The grain of the controller's decisions: some tens of kilobytes on the wire, some milliseconds to decode."""


def encode(
    cache: KVCache,
    profile: Profile | CacheGenProfile | None = None,
    levels: Ladder | int | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    lossless: bool = False,
    hidden: Tensor | None = None,
    threads: int | None = None,
    backend: Backend = "auto",
) -> bytes:
    """Encode a document's cache into a layered blob.

    cache: any float dtype and device; positions on or off. profile: from ``fit_profile`` on caches of the same model;
    None derives means, scales and tables from this cache and carries them inside the blob. A CacheGenProfile encodes in
    that method's own levels. levels: a Ladder, the number of levels of the default ladder, or None for all of them; 0
    for none but the lossless one. chunk_tokens: tokens in a chunk, 1 to 4096. lossless: add a level that holds the
    stored numbers bit for bit, as a stream of its own. hidden: ``engine.prefix_states`` of the document, where the
    profile was fitted with one. threads: chunks encoded at a time, None for one on every core. backend: with
    ``triton``, and with ``auto`` where the cache lies on a GPU, layered levels of a given profile are encoded on the
    cache's device; all else is encoded on the processor. On one machine the same input gives the same bytes, whatever
    ``threads`` is; a rare value differs by one between backends. Raises ArgumentError on an empty cache,
    CacheValueError, MismatchError.
    """
    if not cache.tokens:
        msg = "the cache holds no tokens; leave empty documents out"
        raise ArgumentError(msg)
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        msg = f"chunk_tokens must be 1 to {MAX_CHUNK_TOKENS}, got {chunk_tokens}"
        raise ArgumentError(msg)
    on_device = uses_triton(backend, _device_of(cache))
    coder: _Coder
    if type(levels) is int and levels == 0:
        coder = _Nothing(lossless=lossless)
    elif isinstance(profile, CacheGenProfile):
        coder = _CacheGen(cache, profile, levels)
    else:
        kind = _LayeredOnDevice if on_device and profile is not None else _Layered
        coder = kind(cache, profile, ladder_for(levels), min(cache.tokens, chunk_tokens), hidden)
    spans = [(start, min(start + chunk_tokens, cache.tokens)) for start in range(0, cache.tokens, chunk_tokens)]
    segments = coder.encode_all(spans, threads)
    if lossless:
        exact = each(lambda span: Coded(*encode_lossless(cache, *span), 0.0, 0.0), spans, threads)
        segments = [[*coded, last] for coded, last in zip(segments, exact, strict=True)]
    return pack_blob(
        Draft(
            meta=_named(cache),
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=chunk_tokens,
            levels=(*coder.levels, Level("lossless", codec=CODEC_LOSSLESS)) if lossless else coder.levels,
            profile_digest=coder.digest,
            profile_bytes=coder.inside,
            segments=segments,
            prefix_layers=coder.prefix_layers,
            error_to_kl=coder.error_to_kl,
            kept=cache.kept,
        )
    )


class _Coder:
    """One way of coding chunks: its levels and the profile that readers need. This one codes nothing."""

    levels: tuple[Level, ...] = ()
    digest = ""
    inside = b""
    prefix_layers = 0
    error_to_kl: tuple[float, float] | None = None

    def encode(self, start: int, stop: int) -> list[Coded]:
        """Segments of the chunk of tokens ``start`` to ``stop``, level by level."""
        raise NotImplementedError

    def encode_all(self, spans: list[tuple[int, int]], threads: int | None) -> list[list[Coded]]:
        """``encode`` for every chunk of the cache, in order."""
        return each(lambda span: self.encode(*span), spans, threads)


class _Nothing(_Coder):
    def __init__(self, *, lossless: bool) -> None:
        if not lossless:
            msg = "levels=0 leaves nothing to encode; ask for lossless=True or for levels"
            raise ArgumentError(msg)

    def encode(self, start: int, stop: int) -> list[Coded]:  # noqa: ARG002 - nothing of any chunk
        return []


class _CacheGen(_Coder):
    def __init__(self, cache: KVCache, profile: CacheGenProfile, levels: Ladder | int | None) -> None:
        profile.check_fits(cache.meta)
        known = levels is None or (type(levels) is int and 1 <= levels <= len(profile.level_names))
        if not known:
            msg = f"a CacheGen profile has levels of its own, {len(profile.level_names)}; give their number or None"
            raise ArgumentError(msg)
        names = profile.level_names[: cast("int | None", levels)]
        self.levels = tuple(Level(name, codec=CODEC_CACHEGEN) for name in names)
        self.digest = profile.digest
        self._cache, self._profile = cache, profile

    def encode(self, start: int, stop: int) -> list[Coded]:
        """Each level by itself; its error is of plain elements, keys un-rotated, about the chunk's means."""
        out = []
        blocks = [gather(self._cache, b.side, (b.layer,), start, stop) for b in self._profile.blocks]
        energy = sum(float((block - block.mean(0)).square().sum()) for block in blocks)
        for level in range(len(self.levels)):
            data, symbols = encode_cachegen(self._cache, self._profile, level, start, stop)
            decoded = decode_cachegen(data, self._profile, level, stop - start)
            error = sum(float((a - b).square().sum()) for a, b in zip(blocks, decoded, strict=True))
            out.append(Coded(data, symbols, error / energy if energy else 0.0, 1.0))
        return out


class _Layered(_Coder):
    def __init__(
        self, cache: KVCache, profile: Profile | None, ladder: Ladder, chunk_tokens: int, hidden: Tensor | None
    ) -> None:
        with one_core():  # whose sums do not depend on the number of threads
            used = identity_profile(cache, ladder) if profile is None else profile
        used.check_fits(cache.meta)
        if chunk_tokens * used.rank > MAX_CHUNK_SYMBOLS:
            most = MAX_CHUNK_SYMBOLS // used.rank
            msg = f"a chunk may hold {most} tokens of a model this wide, got {chunk_tokens}"
            raise ArgumentError(msg)
        named = zip(ladder.names, ladder.steps, ladder.shifts, strict=True)
        self.levels = tuple(Level(name, step, shift) for name, step, shift in named)
        self.digest = "" if profile is None else used.digest
        self.inside = used.data if profile is None else b""
        self.prefix_layers, self.error_to_kl = used.prefix_layers, used.error_to_kl
        self._cache, self._ladder = cache, ladder
        self._text = TextPredictor(used, cache.tokens, cache.token_ids, hidden)

    def encode_all(self, spans: list[tuple[int, int]], threads: int | None) -> list[list[Coded]]:
        """As of every coder; what workers share is made before they ask for it."""
        for group in self._text.profile.groups:
            _ = group.analysis if group.rows is None else group.halved_analysis
        return super().encode_all(spans, threads)

    def encode(self, start: int, stop: int) -> list[Coded]:
        """Every level of the ladder, each refining the one before."""
        ladder, profile = self._ladder, self._text.profile
        coefficients, dropped = analyse(self._cache, self._text, start, stop, ladder.steps[-1])
        values, refinements = split_levels(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
        unit = column_classes(coefficients)
        energy = energy_of(coefficients) + dropped
        state = SegmentState(stop - start, profile.spread, profile.tables)
        elements = (stop - start) * sum(group.width for group in profile.groups)
        segments = []
        for level, (shift, step) in enumerate(zip(ladder.shifts, ladder.steps, strict=True)):
            refinement = refinements[level - 1] if level else None
            data, symbols = encode_segment(state, shift, unit - shift, values[level], refinement)
            sizes = profile.tables.sizes[state.classes]
            missed = np.zeros(profile.rank, np.float32)
            kernels.squared_error(coefficients, values[level], sizes, step, missed)
            error = float(missed.sum(dtype=np.float64)) + dropped
            segments.append(Coded(data, symbols, error / elements, energy / elements))
        return segments


class _LayeredOnDevice(_Layered):
    """The same on the cache's device, many chunks at a time."""

    def encode(self, start: int, stop: int) -> list[Coded]:
        return self.encode_all([(start, stop)], 1)[0]

    def encode_all(self, spans: list[tuple[int, int]], threads: int | None) -> list[list[Coded]]:
        from kvwire.codec.gpu.encode import DeviceEncoder  # Triton is optional

        return DeviceEncoder(self._cache, self._text, self._ladder, _device_of(self._cache)).encode(spans, threads)


def _device_of(cache: KVCache) -> torch.device:
    """Device of the first layer that holds something."""
    return next(tensor.device for tensor in (*cache.keys, *cache.values) if tensor.numel())


def _named(cache: KVCache) -> CacheMeta:
    """The cache's meta with the digest of its token ids, where they are known."""
    ids = cache.token_ids
    return cache.meta if ids is None else replace(cache.meta, token_digest=digest_tokens(ids))
