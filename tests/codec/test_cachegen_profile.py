"""The CacheGen profile: the paper's arithmetic, bounds, exact coding, sizes, and damage."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.codec import KVCache
from kvwire.codec.entropy.range_coder import decode_rows, encode_rows, frequencies_of
from kvwire.codec.kinds.cachegen_coding import decode_cachegen, encode_cachegen, fit_cachegen_profile
from kvwire.codec.kinds.cachegen_profile import CacheGenProfile
from kvwire.codec.transform.analysis import gather
from kvwire.errors import (
    ArgumentError,
    CacheValueError,
    CorruptError,
    FormatVersionError,
    MismatchError,
    TruncatedError,
)
from kvwire.types import LayerSpec

from . import surgery as cut
from .streams_by_the_text import read_range
from .synthetic import GQA, MIXED, MIXED_ROPES, make_cache

DEFAULT = 1
LENGTHS = (1, 2, 9, 10, 11, 63, 100)
RELAXED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def plain():
    """Fitted on two documents, and a third document."""
    return fit_cachegen_profile([make_cache(400, seed) for seed in (1, 2)]), make_cache(100, 3)


@pytest.fixture(scope="module")
def mixed():
    """A layer without a cache, a sliding one, one without RoPE, key dims unlike value dims."""
    made = [make_cache(tokens, seed, layers=MIXED, ropes=MIXED_ROPES) for tokens, seed in ((300, 1), (100, 3))]
    return fit_cachegen_profile(made[:1]), made[1]


@pytest.fixture(params=["plain", "mixed"])
def fitted(request):
    return request.getfixturevalue(request.param)


def exact_elements(cache, profile, start, stop):
    return [gather(cache, block.side, (block.layer,), start, stop).numpy() for block in profile.blocks]


def coded_parts(cache, profile, level, start, stop):
    """Symbols and tables of a segment, quantised step by step as the format's text says."""
    parts, scales, escapes = [], [], []
    for block, width in zip(profile.blocks, profile.bins(level), strict=True):
        x = gather(cache, block.side, (block.layer,), start, stop).numpy()
        tokens = [i for i in range(len(x)) if i % 10]
        scale = np.array([np.float16(np.abs(row).max() / np.float64(127)) for row in x[::10]])
        scale = np.where(
            scale < np.abs(x[::10]).max(1) / np.float64(127), np.nextafter(scale, np.float16(np.inf)), scale
        )
        anchors = np.rint(x[::10] / scale.astype(np.float64)[:, None])
        decoded = (anchors * scale[:, None].astype(np.float64)).astype(np.float32)
        q = np.array([np.rint((x[i].astype(np.float64) - decoded[i // 10]) / width) for i in tokens])
        q = q.reshape(len(tokens), x.shape[1]).astype(np.int64).T
        parts.append(((anchors.T + 127).astype(np.uint8), profile.anchors[block.rows]))
        parts.append((np.where(abs(q) < 32, q + 32, 0).astype(np.uint8), profile.deltas[level, block.rows]))
        scales.append(scale)
        escapes += q[abs(q) > 31].tolist()
    return parts, scales, escapes


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("tokens", LENGTHS)
def test_round_trip_stays_within_half_a_bin(fitted, level, tokens):
    profile, cache = fitted
    data, symbols = encode_cachegen(cache, profile, level, 0, tokens)
    decoded = decode_cachegen(data, profile, level, tokens)
    assert symbols == tokens * cache.meta.elements_per_token
    wanted = exact_elements(cache, profile, 0, tokens)
    anchor = np.arange(tokens) % 10 == 0
    for got, x, width in zip(decoded, wanted, profile.bins(level), strict=True):
        assert got.dtype == torch.float32
        assert got.shape == x.shape
        error = np.abs(got.numpy() - x)
        slack = 1e-6 * np.abs(x).max()
        largest = np.abs(x[anchor]).max(1, keepdims=True)
        assert (error[anchor] <= largest / 127 / 2 * (1 + 2**-10) + slack).all()
        assert (error[~anchor] <= width / 2 + slack).all()


def test_blocks_are_all_keys_then_all_values_of_layers_with_a_cache(mixed):
    profile, _ = mixed
    assert [(b.side, b.layer, b.width) for b in profile.blocks] == [
        ("key", 0, 16),
        ("key", 2, 12),
        ("key", 3, 18),
        ("value", 0, 8),
        ("value", 2, 8),
        ("value", 3, 30),
    ]


@pytest.mark.parametrize("tokens", [1, 10, 11, 25])
@pytest.mark.parametrize("level", range(3))
def test_segments_are_what_the_format_says(fitted, level, tokens):
    """Header, scales, escapes and words against an independent reading of the specification."""
    profile, cache = fitted
    data, _ = encode_cachegen(cache, profile, level, 5, 5 + tokens)
    parts, scales, escapes = coded_parts(cache, profile, level, 5, 5 + tokens)
    escape_bytes, words = np.frombuffer(data, "<u4", 2).tolist()
    assert data[8:].startswith(np.concatenate(scales).astype("<f2").tobytes())
    assert (escape_bytes > 0) == bool(escapes)
    assert len(data) == 8 + 2 * len(profile.blocks) * -(-tokens // 10) + escape_bytes + 4 * words
    stream = np.frombuffer(data[len(data) - 4 * words :], "<u4").tolist()
    naive = list(read_range(stream, [(symbols.shape[1], tables) for symbols, tables in parts]))
    assert naive == [int(symbol) for symbols, _ in parts for symbol in symbols.ravel()]


@pytest.mark.parametrize(
    ("layers", "bins"),
    [
        (1, [0.5]),
        (2, [0.5, 1.0]),
        (3, [0.5, 1.0, 1.5]),
        (6, [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]),
        (32, [0.5] * 11 + [1.0] * 11 + [1.5] * 10),
    ],
)
def test_bins_grow_by_thirds_of_the_layers(layers, bins):
    specs = tuple(LayerSpec(1, 8, 2, rope=0) for _ in range(layers))
    profile = fit_cachegen_profile([make_cache(20, layers=specs)])
    assert profile.level_names[DEFAULT] == "default"
    assert (profile.bins(DEFAULT) / profile.units).tolist() == pytest.approx(bins + bins)
    assert (profile.bins(0) / profile.bins(DEFAULT)).tolist() == pytest.approx([2.0] * 2 * layers)
    assert (profile.bins(2) / profile.bins(DEFAULT)).tolist() == pytest.approx([0.5] * 2 * layers)


def test_the_unit_is_the_root_mean_square_of_deltas_and_ropes_do_not_matter_without_positions():
    cache = make_cache(200)
    profile = fit_cachegen_profile([cache])
    values = gather(cache, "value", (0,), 0, 200).numpy().reshape(20, 10, -1).astype(np.float64)
    spread = float(np.sqrt(np.square(values[:, 1:] - values[:, :1]).mean()))
    assert float(profile.units[4]) == pytest.approx(spread, rel=0.01)  # anchors are decoded ones: a little apart
    keys = [gather(cache, "key", (layer,), 0, 200).reshape(200, 2, 8).permute(1, 0, 2) for layer in range(4)]
    off = KVCache(keys, cache.values, replace(cache.meta, positions="off"))
    assert encode_cachegen(off, profile, 1, 0, 30) == encode_cachegen(cache, profile, 1, 0, 30)


@pytest.mark.parametrize("alphabet", [2, 64, 255])
@pytest.mark.parametrize("count", [0, 1, 7, 250])
def test_the_coder_is_exact_and_near_the_ideal_length(alphabet, count):
    rng = np.random.default_rng(alphabet + count)
    tables = frequencies_of(rng.dirichlet(np.full(alphabet, 0.2), 40))
    symbols = np.stack([rng.choice(alphabet, count, p=table / 65536) for table in tables]).astype(np.uint8)
    rare = np.stack([np.full(40, table.argmin()) for table in tables]).astype(np.uint8)
    data = encode_rows([(symbols, tables), (rare, tables)])
    got = decode_rows(data, [(count, tables), (40, tables)])
    assert np.array_equal(got[0], symbols)
    assert np.array_equal(got[1], rare)
    used = [(row, table) for part in (symbols, rare) for row, table in zip(part, tables, strict=True)]
    ideal = sum(float(-np.log2(table[row] / 65536).sum()) for row, table in used) / 8
    assert ideal - 1 < len(data) < 1.001 * ideal + 9


@given(st.integers(2, 255), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_frequencies_are_tables_whatever_the_counts(symbols, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 10 ** rng.integers(1, 12), (5, symbols)).astype(np.float64) + 1e-9
    counts[0] = 0
    counts[0, -1] = 1
    tables = frequencies_of(counts)
    assert (tables > 0).all()
    assert (tables.sum(1, dtype=np.int64) == 65536).all()


def test_values_beyond_the_alphabet_are_escaped_and_kept(plain):
    profile, cache = plain
    values = [value.clone() for value in cache.values]
    values[1][0, 7, 3], values[1][1, 15, 0], values[3][0, 99, 1] = 9000.0, -9000.0, 700.0
    odd = KVCache(cache.keys, values, cache.meta)
    for level in range(3):
        data, _ = encode_cachegen(odd, profile, level, 0, 100)
        decoded = decode_cachegen(data, profile, level, 100)
        first, last = decoded[len(cache.keys) + 1], decoded[len(cache.keys) + 3]
        for got, wanted, block in ((first[7, 3], 9000, 1), (first[15, 8], -9000, 1), (last[99, 1], 700, 3)):
            assert abs(float(got) - wanted) <= profile.bins(level)[len(cache.keys) + block] / 2 + 0.01


def test_an_anchor_beyond_everything_seen_costs_its_group_precision_and_nothing_else(plain):
    profile, cache = plain
    values = [value.clone() for value in cache.values]
    values[0][0, 10, 0] = 8.3e6
    odd = KVCache(cache.keys, values, cache.meta)
    decoded = decode_cachegen(encode_cachegen(odd, profile, 2, 0, 30)[0], profile, 2, 30)[len(cache.keys)].numpy()
    exact = gather(odd, "value", (0,), 0, 30).numpy()
    assert abs(decoded[10, 0] - 8.3e6) < 8.3e6 / 127
    others = np.arange(30) != 10
    assert np.abs(decoded - exact)[others].max() <= max(profile.bins(2)[len(cache.keys)], 1.0)
    values[0][0, 10, 0] = 8.4e6
    with pytest.raises(CacheValueError):
        encode_cachegen(odd, profile, 2, 0, 30)
    values[0][0, 10, 0], values[0][0, 11, 0] = 0, 3e38
    with pytest.raises(CacheValueError):
        encode_cachegen(odd, profile, 2, 0, 30)


def test_zeros_and_constants_are_kept():
    zero = make_cache(40, layers=GQA[:2], scale=0.0)
    profile = fit_cachegen_profile([zero])
    assert profile.units.tolist() == [1.0] * 4
    for decoded in decode_cachegen(encode_cachegen(zero, profile, 0, 0, 40)[0], profile, 0, 40):
        assert not decoded.any()
    tiny = make_cache(40, layers=GQA[:2], scale=1e-42)
    again = fit_cachegen_profile([tiny])
    assert CacheGenProfile.from_bytes(again.data).digest == again.digest
    decode_cachegen(encode_cachegen(tiny, again, 0, 0, 40)[0], again, 0, 40)


def test_stored_profiles_code_the_same(fitted):
    profile, cache = fitted
    again = CacheGenProfile.from_bytes(profile.data)
    assert again.digest == profile.digest
    assert (again.layers, again.level_names, again.blocks) == (profile.layers, profile.level_names, profile.blocks)
    for level in range(3):
        data, _ = encode_cachegen(cache, profile, level, 0, 100)
        assert encode_cachegen(cache, again, level, 0, 100)[0] == data
        first, second = (decode_cachegen(data, one, level, 100) for one in (profile, again))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    refitted = fit_cachegen_profile([make_cache(300, 1, layers=MIXED, ropes=MIXED_ROPES)])
    assert refitted.data == fit_cachegen_profile([make_cache(300, 1, layers=MIXED, ropes=MIXED_ROPES)]).data


def test_stored_profiles_keep_their_calibration(plain):
    profile, _ = plain
    assert CacheGenProfile.from_bytes(profile.data).error_to_kl is None
    calibrated = replace(profile, error_to_kl=(0.5, 1.25))
    assert CacheGenProfile.from_bytes(calibrated.data).error_to_kl == (0.5, 1.25)
    for wrong in ((0.0, 1.0), (1.0, 9.0), (1.0,), ("1", "2")):
        with pytest.raises(CorruptError, match="description is damaged"):
            CacheGenProfile.from_bytes(replace(profile, error_to_kl=wrong).data)


def test_profiles_know_their_model(plain):
    profile, cache = plain
    profile.check_fits(replace(cache.meta, model_revision=""))
    with pytest.raises(MismatchError, match="the CacheGen profile belongs to model"):
        profile.check_fits(replace(cache.meta, model_revision="r2"))
    other = make_cache(20, layers=MIXED, ropes=MIXED_ROPES)
    with pytest.raises(MismatchError, match=r"another cache layout.*kvwire\.fit_cachegen_profile"):
        encode_cachegen(other, profile, 0, 0, 20)
    with pytest.raises(MismatchError):
        fit_cachegen_profile([cache, other])


def test_impossible_arguments(plain):
    profile, cache = plain
    data, _ = encode_cachegen(cache, profile, 0, 0, 10)
    for level, start, stop in ((-1, 0, 10), (3, 0, 10), (0, 5, 5), (0, -1, 3), (0, 0, 101)):
        with pytest.raises(ArgumentError):
            encode_cachegen(cache, profile, level, start, stop)
    for level, tokens in ((-1, 10), (3, 10), (0, 0)):
        with pytest.raises(ArgumentError):
            decode_cachegen(data, profile, level, tokens)
    for few in ([], [make_cache(1)]):
        with pytest.raises(ArgumentError):
            fit_cachegen_profile(few)
    nan = make_cache(20)
    nan.values[0][0, 3, 0] = float("nan")
    with pytest.raises(CacheValueError):
        encode_cachegen(nan, profile, 0, 0, 10)


def damaged(draw, data):
    """One piece of the bytes replaced, dropped or doubled."""
    at = draw(st.integers(0, len(data) - 1))
    piece = draw(st.binary(max_size=12) | st.sampled_from([b"\0" * 8, b"\xff" * 8]))
    gone = draw(st.sampled_from([len(piece), 0, 1, 4, len(data)]))
    return data[:at] + piece + data[at + gone :]


def check_segment(data, profile, level, tokens):
    """CorruptError, or tensors of the right shape without infinity."""
    try:
        decoded = decode_cachegen(data, profile, level, tokens)
    except CorruptError:
        return "CorruptError"
    assert [tuple(part.shape) for part in decoded] == [(tokens, block.width) for block in profile.blocks]
    assert all(torch.isfinite(part).all() for part in decoded)
    return "tensors"


@given(st.data())
@RELAXED
def test_damaged_segments_give_errors_or_tensors(mixed, data):
    profile, cache = mixed
    level, tokens = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 10, 23]))
    values = [value.clone() for value in cache.values]
    values[0][0, 5, 0] = 5000.0  # escapes
    cache = KVCache(cache.keys, values, cache.meta)
    sound, _ = encode_cachegen(cache, profile, level, 0, tokens)
    check_segment(damaged(data.draw, sound), profile, data.draw(st.integers(0, 2)), tokens)
    check_segment(sound, profile, level, data.draw(st.integers(1, 60)))


@given(st.binary(max_size=400), st.integers(1, 30))
@RELAXED
def test_random_words_give_errors_or_tensors(mixed, words, tokens):
    """The header and the scales are sound, so that every example reaches the range decoder."""
    profile, _ = mixed
    words = words[: len(words) // 4 * 4]
    head = np.array([0, len(words) // 4], "<u4").tobytes() + b"\0" * 2 * len(profile.blocks) * -(-tokens // 10)
    check_segment(head + words, profile, 1, tokens)


def test_both_outcomes_of_damage_occur(mixed):
    profile, cache = mixed
    sound, _ = encode_cachegen(cache, profile, 1, 0, 20)
    flipped = [sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in range(len(sound))]
    assert {check_segment(data, profile, 1, 20) for data in flipped} == {"CorruptError", "tensors"}
    for size in range(len(sound)):
        assert check_segment(sound[:size], profile, 1, 20) == "CorruptError"
    words = int.from_bytes(sound[4:8], "little")
    longer = sound[:4] + (words + 2).to_bytes(4, "little") + sound[8:] + b"\1" * 8
    assert check_segment(longer, profile, 1, 20) == "CorruptError"
    negative = sound[:8] + np.float16(-1).tobytes() + sound[10:]
    assert check_segment(negative, profile, 1, 20) == "CorruptError"


@given(st.data())
@RELAXED
def test_damaged_profiles_give_errors_or_code(mixed, data):
    """Bytes damaged as they are, or resealed so that the damage reaches the fields behind the checksum."""
    profile, cache = mixed
    mutant = damaged(data.draw, profile.data)
    if data.draw(st.booleans()):
        mutant = cut.sealed_profile(mutant)
    try:
        read = CacheGenProfile.from_bytes(mutant)
    except (CorruptError, FormatVersionError):
        return
    try:
        segment, _ = encode_cachegen(cache, read, 0, 0, 10)
    except (MismatchError, CacheValueError):
        return
    check_segment(segment, read, 0, 10)


def test_impossible_profiles_are_refused(mixed):
    profile, _ = mixed

    def read(**changed):
        made = replace(profile, **changed)
        return CacheGenProfile.from_bytes(made.data)

    assert read().digest == profile.digest
    zero, short, large = profile.deltas.copy(), profile.deltas.copy(), profile.units.copy()
    zero[1, 4, 40], short[0, 0, 32], large[2] = 0, short[0, 0, 32] - 1, 3e38
    nan, negative = profile.units.copy(), profile.units.copy()
    nan[0], negative[0] = np.nan, -1
    wrong = [
        {"deltas": zero},
        {"deltas": short},
        {"deltas": profile.deltas[:2]},
        {"deltas": profile.deltas[:, :-1]},
        {"deltas": profile.deltas.astype(np.int16)},
        {"anchors": profile.anchors[:, :-1]},
        {"units": large},
        {"units": nan},
        {"units": negative},
        {"units": profile.units[:-1]},
        {"layers": profile.layers[:-1]},
        {"layers": (*profile.layers, profile.layers[0])},
        {"levels": ()},
        {"levels": (("a", 0.0), ("b", 1.0), ("c", 1.0))},
        {"levels": ((1, 1.0), ("b", 1.0), ("c", 1.0))},
        {"levels": (("a", True), ("b", 1.0), ("c", 1.0))},
        {"levels": (("a", 10**400), ("b", 1.0), ("c", 1.0))},
        {"notes": 3},
    ]
    for changed in wrong:
        with pytest.raises(CorruptError):
            read(**changed)
    for size in (0, 1, 7, 20, len(profile.data) - 1):
        with pytest.raises(CorruptError if size == 0 else TruncatedError):
            CacheGenProfile.from_bytes(profile.data[:size])
    with pytest.raises(FormatVersionError):
        CacheGenProfile.from_bytes(profile.data[:8] + b"\2" + profile.data[9:])


def test_damage_earns_no_memory(mixed):
    """Claims of the header and of the profile's shapes are compared with what is there before anything is allocated."""
    profile, cache = mixed
    sound, _ = encode_cachegen(cache, profile, 1, 0, 100)

    def peak(run):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before

    def refused(stored):
        with pytest.raises(CorruptError):
            CacheGenProfile.from_bytes(stored)

    meta, parts = cut.profile_parts(profile.data)
    wide = json.loads(json.dumps(meta))
    wide["head"]["layers"][0][1:4] = [2**20] * 3
    hostile = cut.sealed_profile(cut.profile_of(profile.data, wide, parts))
    claims = np.array([2**32 - 1, 2**31], "<u4").tobytes()
    tracemalloc.start()
    try:
        usual = peak(lambda: decode_cachegen(sound, profile, 1, 100))
        assert peak(lambda: check_segment(claims + sound[8:], profile, 1, 100)) < usual
        assert peak(lambda: check_segment(sound, profile, 1, 10**9)) < usual
        assert peak(lambda: refused(hostile)) < 10 * len(hostile)
    finally:
        tracemalloc.stop()
