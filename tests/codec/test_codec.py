"""Caches to blobs and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import (  # fmt: skip
    BlobDecoder,
    KVCache,
    Ladder,
    decode,
    encode,
    fit_profile,
    inspect,
    level_index,
    read_header,
)
from kvwire.codec.transform import analysis  # fmt: skip
from kvwire.errors import ArgumentError, CacheValueError, MismatchError, RopeRegimeError

from .conftest import LADDER
from .measures import measured
from .synthetic import GQA, MIXED, MIXED_ROPES, ROPE, make_cache, make_statistics


def largest_error(cache, decoded):
    pairs = zip((*cache.keys, *cache.values), (*decoded.keys, *decoded.values), strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize("inside", [True, False])
def test_every_level_is_closer_than_the_one_below(cache, blob, own_blob, profile, inside):
    data, used = (own_blob, None) if inside else (blob, profile)
    errors = [largest_error(cache, decode(data, level, used)) for level in range(4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5
    stated = [level.measured_error for level in inspect(data).levels]
    assert stated == sorted(stated, reverse=True)
    assert stated[-1] < 0.003


def test_stated_errors_are_those_of_the_decoded_tensors(cache, blob, profile):
    for index, level in enumerate(inspect(blob).levels):
        actual = measured(cache, decode(blob, index, profile), profile)
        assert level.measured_error == pytest.approx(actual, rel=0.03, abs=2e-5)


def test_every_byte_is_counted(blob, own_blob):
    for data in (blob, own_blob):
        info = inspect(data)
        assert info.file_bytes == len(data)
        assert info.header_bytes + sum(level.bytes for level in info.levels) == len(data)
        assert info.levels[-1].cumulative_bytes == len(data)
        assert info.levels[0].cumulative_bytes == info.header_bytes + info.levels[0].bytes
        assert info.levels[-1].bits_per_element == 8 * len(data) / (info.tokens * 128)
        assert sum(info.chunk_bytes(chunk, 3) for chunk in range(info.chunks)) == len(data) - info.header_bytes
    data = encode(make_cache(50, layers=MIXED, ropes=MIXED_ROPES))  # one of whose layers has no cache
    assert inspect(data).levels[-1].bits_per_element == 8 * len(data) / (50 * (2 * 12 + 20 + 3 * 16))


def test_chunks_fetched_by_range_decode_as_the_whole_does(blob, profile):
    info = read_header(blob[: inspect(blob).header_bytes])
    for level in range(4):
        whole = decode(blob, level, profile)
        decoder = BlobDecoder(blob[: info.header_bytes], profile)
        for chunk in (2, 0, 1):
            row = info.segments[chunk][: level + 1]
            span = blob[row[0].offset : row[-1].end]
            assert len(span) == info.chunk_bytes(chunk, level)
            decoder.decode_chunk(chunk, [span[s.offset - row[0].offset :][: s.stored] for s in row])
        assert largest_error(whole, decoder.cache) == 0.0


def test_chunks_decode_at_levels_of_their_own_into_a_given_cache(blob, profile):
    info = inspect(blob)
    prompt = BlobDecoder(blob, profile, offset=10).cache
    out = replace(prompt, keys=[torch.full_like(k, 9.0) for k in prompt.keys])
    decoder = BlobDecoder(blob, profile, offset=10, out=out)
    decoder.decode_chunk(1, [blob[s.offset : s.end] for s in info.segments[1][:2]])
    expected = decode(blob, 1, profile, offset=10)
    assert torch.equal(out.keys[0][:, 32:64], expected.keys[0][:, 32:64])
    assert (out.keys[0][:, :32] == 9.0).all()
    with pytest.raises(ArgumentError, match="room for"):
        BlobDecoder(blob, profile, out=out.slice(0, 5))
    with pytest.raises(ArgumentError, match="layout"):
        BlobDecoder(blob, profile, out=make_cache(76, layers=GQA[:1]))


def test_positions_out_of_reach_are_refused_before_any_work(profile):
    short = replace(ROPE, max_positions=100)
    data = encode(make_cache(76, ropes=(short,)), chunk_tokens=32)
    decode(data, offset=24)
    for decoder in (decode, BlobDecoder):
        with pytest.raises(RopeRegimeError):
            decoder(data, offset=25)


def test_outliers_travel_as_escapes(profile):
    cache = make_cache(40)
    cache.values[1][0, 3, 2] = 40_000.0
    for used in (None, profile):
        decoded = decode(encode(cache, used), None, used)
        assert decoded.values[1][0, 3, 2].item() == pytest.approx(40_000.0, rel=0.02)


@pytest.mark.parametrize("scale", [1e-12, 1e12, 1e30])
def test_any_scale_is_coded_but_for_values_far_beyond_the_profile(profile, scale):
    cache = make_cache(40, scale=scale)
    assert inspect(encode(cache)).levels[-1].measured_error < 0.003
    assert largest_error(cache, decode(encode(cache))) < 0.5 * scale
    if scale > 1:
        with pytest.raises(CacheValueError, match="too large to quantise"):
            encode(cache, profile)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_constant_caches_cost_next_to_nothing(value):
    tensor = torch.full((2, 300, 8), value)
    cache = KVCache.from_tensors([tensor], [tensor])
    data = encode(cache)
    assert torch.equal(decode(data).keys[0], tensor)
    assert not any(level.measured_error for level in inspect(data).levels)
    assert sum(level.bytes for level in inspect(data).levels) < 400


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_is_not_finite_is_refused_by_layer(profile, value, side):
    cache = make_cache(20)
    (cache.keys if side == "key" else cache.values)[2][1, 5, 3] = value
    for used in (None, profile):
        with pytest.raises(CacheValueError, match=f"layer 2's {side}s hold NaN or infinity"):
            encode(cache, used)


def test_bad_arguments_are_refused(cache, blob, profile):
    with pytest.raises(ArgumentError, match="no tokens"):
        encode(cache.slice(0, 0), profile)
    for chunk in (0, -1, 4097):
        with pytest.raises(ArgumentError, match="chunk_tokens"):
            encode(cache, profile, chunk_tokens=chunk)
    for level in (4, -5, "best"):
        with pytest.raises(ArgumentError, match=r"0 \(coarse\)"):
            decode(blob, level, profile)
    with pytest.raises(ArgumentError, match="token ids"):
        encode(KVCache(cache.keys, cache.values, cache.meta, (-1,) * 76))
    decoder = BlobDecoder(blob, profile)
    for chunk, segments in ((3, [b""]), (-1, [b""]), (0, []), (0, [b""] * 5)):
        with pytest.raises(ArgumentError, match="segments for level"):
            decoder.decode_chunk(chunk, segments)


def test_levels_are_named_or_counted_and_ladders_of_any_length(cache, blob, profile):
    info = inspect(blob)
    assert [level_index(info, level) for level in (None, 0, -1, "standard", "finest")] == [3, 0, 3, 1, 3]
    one = encode(cache, profile, Ladder(0.5, ("only",)))
    assert [level.name for level in inspect(one).levels] == ["only"]
    longer = Ladder(30.0, tuple("abcdefgh"))  # its finest step is a third of the default's: rows must be that precise
    fitted = fit_profile([make_cache(512, seed) for seed in (1, 2)], make_statistics(words=True), ladder=longer)
    eight = encode(cache, fitted, longer)
    errors = [level.measured_error for level in inspect(eight).levels]
    assert errors == sorted(errors, reverse=True)
    assert largest_error(cache, decode(eight, "h", fitted)) < 0.3
    assert len(inspect(encode(cache, profile, 2)).levels) == 2


def test_levels_cost_little_more_than_the_finest_alone(profile):
    cache = make_cache(512, 9)
    finest = Ladder().steps[-1]
    layered, single = encode(cache, profile), encode(cache, profile, Ladder(finest, ("only",)))
    payload = [len(data) - inspect(data).header_bytes for data in (layered, single)]
    assert payload[0] < 1.05 * payload[1]


def test_the_wrong_profile_is_named(blob, own_blob, profile):
    with pytest.raises(MismatchError, match="none was given"):
        decode(blob)
    other = replace(profile, notes={"other": 1})
    with pytest.raises(MismatchError, match=other.digest[:12]):
        decode(blob, None, other)
    assert decode(own_blob, None, other).tokens == 76


@pytest.mark.parametrize("ids", [None, (0,) * 76, tuple(range(300, 376)), (2**32 - 1,) * 76])
def test_token_ids_of_any_width(cache, plain_profile, ids):
    data = encode(KVCache.from_tensors(cache.keys, cache.values, cache.meta, ids), plain_profile)
    assert inspect(data).token_ids == ids


def test_products_in_bfloat16_cost_next_to_nothing(monkeypatch, cache, profile):
    """On processors that are faster so: the same rate and error to a per cent, and any decoder reads the blob."""
    infos, errors = [], []
    for fast in (False, True):
        monkeypatch.setattr(analysis, "fast_bfloat16", lambda fast=fast: fast)
        blob = encode(cache, profile, LADDER)
        infos.append(inspect(blob))
        errors.append(measured(cache, decode(blob, None, profile), profile))
    assert infos[1].file_bytes == pytest.approx(infos[0].file_bytes, rel=0.02)
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    assert infos[1].levels[-1].measured_error == pytest.approx(errors[1], rel=0.1, abs=1e-4)


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_groups_that_code_nothing_are_what_is_expected_of_them(plain_profile, backend):
    """A profile may spend no coefficient on some layers."""
    (group,) = plain_profile.groups
    width = sum(8 * 2 for _ in group.planes[:2])
    empty = replace(group, planes=group.planes[:2], mean=group.mean[:width], rows=group.rows[:0, :width],
                    spread=group.spread[:0], metric=group.metric[:2])  # fmt: skip
    rest = replace(group, planes=group.planes[2:], mean=group.mean[width:], rows=group.rows[:4, width:].contiguous(),
                   spread=group.spread[:4], metric=group.metric[2:])  # fmt: skip
    profile = replace(plain_profile, groups=(empty, rest))
    cache = make_cache(7, 3)
    blob = encode(cache, profile, LADDER, backend=backend)
    decoded = decode(blob, 3, profile, offset=None, backend=backend)
    side, layer = group.planes[0]
    found = (decoded.keys if side == "key" else decoded.values)[layer].permute(1, 0, 2).flatten(1)
    assert torch.allclose(found, torch.from_numpy(group.mean[:16]).expand(7, 16), rtol=1e-6)
