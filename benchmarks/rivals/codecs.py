"""Every codec that is measured, as points of curves: kvwire's variants, and its rivals with their settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from cachegen import bins_of, encode_size_and_reconstruct
from rivals import bfloat16, kivi, kvtc, kvtc_one_step, kvtc_scaled, per_token

import kvwire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvwire import KVCache, TransformersEngine
    from kvwire.codec import AnyProfile

HEAD_START, PAPER = "kvwire, head start of 1 layer", "CacheGen, its paper"
RELEASED = "CacheGen, 256, as released"
KVTC, KVTC_SCALED, ONE_STEP = "KVTC-like", "KVTC, scales in stream", "PCA, one step, DEFLATE"
BUDGETS = (0.15, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SCALED_BUDGETS = (0.25, 0.5, 1.0, 2.0)
STEPS = (2.5, 1.6, 1.0, 0.6, 0.35, 0.2, 0.12)


@dataclass(frozen=True)
class Variant:
    """One way of using kvwire: a name for the tables, a profile, keyword arguments of ``kvwire.encode``."""

    name: str
    profile: AnyProfile | None
    encode: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """All that was learnt from one set of calibration windows."""

    engine: TransformersEngine
    variants: list[Variant]
    transforms: dict[str, dict[float, tuple[kvtc.Side, kvtc.Side]]]


@dataclass(frozen=True)
class Coding:
    """One codec's work on one cache. family: the curve that the codec is a point of."""

    codec: str
    family: str
    size: int
    cache: KVCache


def fit(engine: TransformersEngine, documents: list[list[int]]) -> Fitted:
    """Learn everything from the same windows."""
    caches = engine.prefill(documents)
    calibrated = kvtc.calibrate(caches)
    transforms = {
        KVTC: kvtc.fit(calibrated, BUDGETS),
        KVTC_SCALED: kvtc_scaled.fit(calibrated, SCALED_BUDGETS),
        ONE_STEP: kvtc_one_step.fit(calibrated, STEPS),
    }
    return Fitted(engine, kvwire_variants(engine, documents, caches), transforms)


def kvwire_variants(engine: TransformersEngine, documents: list[list[int]], caches: list[KVCache]) -> list[Variant]:
    """Every way of using kvwire that is measured: a line for each."""
    statistics = engine.statistics(documents)
    hidden = [engine.prefix_states(ids, 1) for ids in documents]
    return [
        Variant("kvwire", kvwire.fit_profile(caches, statistics)),
        Variant(HEAD_START, kvwire.fit_profile(caches, statistics, prefix_layers=1, hidden=hidden)),
        Variant("kvwire without text", kvwire.fit_profile(caches, statistics, text=False)),
        Variant(PAPER, kvwire.fit_cachegen_profile(caches)),
    ]


def fitted_codings(cache: KVCache, fitted: Fitted) -> Iterator[Coding]:
    """The codecs that were fitted."""
    for variant in fitted.variants:
        layers = getattr(variant.profile, "prefix_layers", 0)
        hidden = fitted.engine.prefix_states(cache.token_ids or (), layers) if layers else None
        blob = kvwire.encode(cache, variant.profile, hidden=hidden, **variant.encode)
        levels = kvwire.inspect(blob).levels
        assert levels[-1].independent or levels[-1].cumulative_bytes == len(blob), "a level must count the whole blob"
        for index, level in enumerate(levels):
            decoded = kvwire.decode(blob, index, variant.profile, dtype=torch.float32, hidden=hidden)
            yield Coding(f"{variant.name} {level.name}", variant.name, level.cumulative_bytes, decoded)
    for family, codings in fitted.transforms.items():
        for setting, sides in codings.items():
            stream, decoded = kvtc.roundtrip(cache, sides)
            yield Coding(f"{family} {setting:g}", family, len(stream), decoded)


def plain_codings(cache: KVCache, fitted: Fitted) -> Iterator[Coding]:
    """The codecs that are not fitted, and KVTC with the paper's raw tail."""
    for budget in (0.5, 1.0):
        stream, decoded = kvtc.roundtrip(cache, fitted.transforms[KVTC][budget], tail=128)
        yield Coding(f"{KVTC} {budget:g}, 128 raw", f"{KVTC}, 128 raw", len(stream), decoded)
    layers = len(cache.keys)
    for tokens, level in itertools.product((256, 1024), (None, 1, 2, 3)):
        if (level and bins_of(layers, level) == bins_of(layers)) or (tokens > 256 and cache.tokens <= 256):
            continue  # the same bytes under another name
        size, decoded = encode_size_and_reconstruct(cache, tokens, level)
        name = "as released" if level is None else f"level {level}"
        yield Coding(f"CacheGen, {tokens}, {name}", f"CacheGen, {tokens}", size, decoded)
    for bits, residual in itertools.product((2, 4), (0, 128)):
        stream, decoded = kivi.roundtrip(cache, bits, residual)
        family = "KIVI" if not residual else f"KIVI, {residual} raw"
        yield Coding(f"KIVI {bits}-bit, {residual} raw", family, len(stream), decoded)
    for bits in (4, 8):
        stream, decoded = per_token.roundtrip(cache, bits)
        yield Coding(f"int{bits}, zstd", "int4, int8, zstd", len(stream), decoded)
    stream, decoded = bfloat16.roundtrip(cache)
    yield Coding("bfloat16, zstd", "bfloat16, zstd", len(stream), decoded)
