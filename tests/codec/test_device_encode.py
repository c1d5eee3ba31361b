"""Encoding on the device: kernels write what the naive twins write, blobs are those of the processor."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import Ladder, decode, encode, fit_profile, positions_on, read_header
from kvwire.codec.entropy.rans import encode_base
from kvwire.codec.entropy.tables import CLASSES, CONTEXTS, Tables, column_classes, fit_tables
from kvwire.codec.fitting.fit import identity_profile
from kvwire.codec.format.segment import SegmentState
from kvwire.codec.gpu import analysis as gpu_analysis
from kvwire.codec.gpu import encode as device_encode
from kvwire.codec.gpu import encode_kernels as kernels
from kvwire.codec.gpu.analysis import Transform
from kvwire.codec.gpu.encode import DeviceEncoder, encode_batch, encode_streams, split_values
from kvwire.codec.gpu.profile import DeviceProfile, on_device, packed_tables
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.profile.group import Group
from kvwire.codec.profile.profile import Profile
from kvwire.codec.transform import analysis
from kvwire.codec.transform.levels import quantise, split_levels
from kvwire.errors import CacheValueError
from kvwire.types import KVCache

from .compiling import compile_for
from .measures import drawn, measured
from .naive_coding import encode_lanes, encode_segment, encode_ternary, energy_of, squared_error
from .synthetic import GQA, LATENT, MIXED, MIXED_ROPES, ROPE, make_cache, make_hidden, make_statistics
from .write_golden import quantised

CPU = torch.device("cpu")
LADDER = Ladder(3.6, ("coarse", "standard", "fine"))
FITTED = fit_tables(np.zeros((CLASSES, 256)), np.zeros((CLASSES, CONTEXTS, 3)))


def with_certain_symbols(tables):
    """Tables of which the first and the last class know but one symbol."""
    base, ternary = tables.base.copy(), tables.ternary.copy()
    for row, symbol in ((0, 0), (CLASSES - 1, 200)):
        base[row] = np.eye(256, dtype=np.uint16)[symbol] * 4096
        ternary[row] = np.eye(3, dtype=np.uint16)[symbol % 3] * 4096
    return Tables(base, ternary, tables.points)


TABLES = with_certain_symbols(FITTED)


class Stream:
    """Random symbols of one stream, with the class and context of each."""

    def __init__(self, seed, tokens, columns, lanes, *, base):
        rng = np.random.default_rng(seed)
        self.lanes, self.base = lanes, base
        self.classes = rng.choice([1, 2, 20, CLASSES - 1, CLASSES], columns)
        self.contexts = rng.integers(0, CONTEXTS, (tokens, columns)).astype(np.uint8)
        if base:
            self.symbols = drawn(rng, np.broadcast_to(TABLES.base[self.classes - 1], (tokens, columns, 256)))
        else:
            self.symbols = drawn(rng, TABLES.ternary[self.classes[None, :] - 1, self.contexts])

    def naive(self):
        if self.base:
            return encode_lanes(
                self.symbols, np.broadcast_to(self.classes - 1, self.symbols.shape), TABLES.base, self.lanes
            )
        rows = (self.classes[None, :] - 1) * CONTEXTS + self.contexts
        return encode_lanes(self.symbols, rows, TABLES.ternary.reshape(-1, 3), self.lanes)

    def numba(self):
        if self.base:
            return encode_base(self.symbols, self.classes, TABLES, self.lanes)
        return encode_ternary(self.symbols, self.contexts, self.classes, TABLES, self.lanes)

    @property
    def bytes_(self):
        return self.symbols if self.base else 3 * self.contexts + self.symbols

    @property
    def rows(self):
        return (self.classes - 1) * 256 if self.base else CLASSES * 256 + (self.classes - 1) * 9


def on_device_streams(streams):
    """All of them in one launch, side by side in one matrix of symbols whose rows have a gap at their end."""
    width = sum(stream.symbols.shape[1] for stream in streams) + 3
    matrix = np.full((max(len(stream.symbols) for stream in streams), width), 255, np.uint8)
    described, columns, rows, lanes, room = [], [], [], 0, 0
    for stream in streams:
        (tokens, count), at = stream.symbols.shape, len(columns)
        # The matrix begins at the stream's first column, but its columns are counted from the matrix' second row on.
        matrix[:tokens, at : at + count] = stream.bytes_
        described.append([at, tokens, at, count, stream.lanes, lanes, room])
        columns += range(count)
        rows += stream.rows.tolist()
        lanes += stream.lanes
        room += stream.lanes * tokens * -(-count // stream.lanes)
    return encode_streams(
        torch.from_numpy(matrix), width, np.array(described, np.int64), torch.tensor(columns, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32), torch.from_numpy(packed_tables(TABLES)),
    )  # fmt: skip


def assert_all_the_same(streams):
    for stream, made in zip(streams, on_device_streams(streams), strict=True):
        states, words = stream.naive()
        fast = stream.numba()
        assert made.states.tolist() == fast.states.tolist() == states
        assert made.counts.tolist() == fast.counts.tolist() == [len(lane) for lane in words]
        assert made.words.tolist() == fast.words.tolist() == [word for lane in words for word in lane]


@settings(max_examples=5)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 20), st.integers(1, 300), st.booleans()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_lanes_are_coded_as_the_naive_twin_and_numba_code_them(shapes):
    assert_all_the_same([Stream(*shape, base=base) for *shape, base in shapes])


def test_63_100_and_1000_symbols_on_1_to_300_lanes_in_one_launch():
    shapes = [(7, 9, 1), (7, 9, 300), (10, 10, 1), (10, 10, 64), (25, 40, 3), (25, 40, 7), (25, 40, 300), (5, 0, 2)]
    assert_all_the_same([Stream(n, *shape, base=base) for n, shape in enumerate(shapes) for base in (True, False)])


def profile_of(tables, spread):
    """A profile without a transform: what the entropy coder asks for."""
    width = len(spread)
    layers = (replace(GQA[0], kv_heads=1, key_dim=width, value_dim=0, rope=None),)
    group = Group(
        (("key", 0),), np.zeros(width, np.float32), spread.astype(np.int16), row_scale=np.ones(width, np.float32)
    )
    return Profile("", "", layers, (group,), tables)


def random_values(rng, shape):
    """Columns of all widths, some of them zero, some beyond the alphabet or the largest class."""
    widths = rng.choice([0, 0.2, 1.0, 10.0, 300.0, 3e4, 2e8], shape[1])
    return np.clip(np.rint(rng.laplace(0, 1, shape) * widths), 1 - 2**28, 2**28 - 1).astype(np.int32)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 14))
def test_equal_values_and_classes_give_equal_bytes(seed, lengths, columns):
    rng = np.random.default_rng(seed)
    bounds = (0, *np.cumsum(lengths).tolist())
    values, unit = random_values(rng, (bounds[-1], columns)), rng.integers(-20, 70, (len(lengths), columns))
    profile = profile_of(FITTED, rng.integers(-10, 60, columns))
    levels = int(rng.integers(1, 5))
    shifts = Ladder(3.6, tuple("abcde"[:levels])).shifts
    known = DeviceProfile(profile, CPU)
    batch = split_values(torch.from_numpy(values), torch.from_numpy(unit), bounds, shifts, known)
    made = encode_batch(batch, known, 1)
    for chunk, (start, stop) in enumerate(pairwise(bounds)):
        by_level, refinements = split_levels(values[start:stop], levels)
        state = SegmentState(stop - start, profile.spread, FITTED)
        for level, shift in enumerate(shifts):
            refinement = refinements[level - 1] if level else None
            expected = encode_segment(state, shift, unit[chunk] - shift, by_level[level], refinement)
            assert made[chunk][level] == expected
            assert np.array_equal(batch.classes[chunk, level].numpy(), state.classes)


def test_equal_coefficients_give_equal_classes_and_errors():
    rng = np.random.default_rng(4)
    bounds, steps = (0, 9, 40, 41), Ladder().steps
    coefficients = (rng.laplace(0, 1, (41, 30)) * np.logspace(-3, 2, 30)).astype(np.float32)
    unit, squares = device_encode.measure_columns(torch.from_numpy(coefficients), bounds)
    profile = profile_of(FITTED, np.zeros(30))
    known = DeviceProfile(profile, CPU)
    values, largest = device_encode.quantise_on_device(torch.from_numpy(coefficients), steps[-1])
    assert np.array_equal(values.numpy(), quantise(coefficients, steps[-1]))
    assert float(largest) == pytest.approx(abs(coefficients).max() / steps[-1], rel=1e-6)
    batch = split_values(values, unit, bounds, Ladder().shifts, known)
    missed = device_encode.squared_errors(torch.from_numpy(coefficients), batch, steps, known)
    for chunk, (start, stop) in enumerate(pairwise(bounds)):
        part = coefficients[start:stop]
        assert np.array_equal(unit[chunk].numpy(), column_classes(part))
        assert float(squares[chunk].sum()) == pytest.approx(energy_of(part), rel=1e-5)
        by_level, _ = split_levels(values.numpy()[start:stop], len(steps))
        for level, step in enumerate(steps):
            sizes = FITTED.sizes_of(batch.classes[chunk, level].numpy())
            wanted = squared_error(part, by_level[level], sizes, step)
            assert float(missed[chunk, level]) == pytest.approx(wanted, rel=1e-4)


NARROW = GQA[:1]
FINE = Ladder(0.01, ("only",))
"""So fine that all processors project in float32."""


def encoded_twice(cache, profile, ladder=LADDER, chunk_tokens=4, **more):
    """The blobs of both backends."""
    given = {"chunk_tokens": chunk_tokens, "threads": 1, **more}
    return encode(cache, profile, ladder, backend="numba", **given), encode(
        cache, profile, ladder, backend="triton", **given
    )


def assert_alike(ours, theirs, profile, ladder=LADDER):
    """Blobs whose quantised values differ rarely, by one, and whose errors are the same up to float noise."""
    finest = len(ladder.names) - 1
    mine, other = quantised(ours, profile, finest), quantised(theirs, profile, finest)
    difference = abs(mine.astype(np.int64) - other)
    assert difference.max(initial=0) <= 1
    assert (difference > 0).sum() <= 2 + difference.size // 500
    a, b = read_header(ours), read_header(theirs)
    assert [row[0].chunk for row in a.segments] == [row[0].chunk for row in b.segments]
    for left, right in zip(a.levels, b.levels, strict=True):
        assert left.measured_error == pytest.approx(right.measured_error, rel=1e-2)


def pruned(cache):
    """Without about half of its entries, and with all of one layer's."""
    shape, generator = (2, cache.tokens), torch.Generator().manual_seed(3)
    kept = [*(torch.rand(shape, generator=generator) < 0.5 for _ in cache.keys[1:]), None]
    return KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=kept)


@pytest.mark.parametrize("step", [0.9, 0.01], ids=["halved where that is fast", "float32"])
def test_coefficients_of_long_chunks_are_the_processors(profile, step):
    """Chunks long enough for their energies to be sampled; two in a thousand values differ, by one step."""
    cache, spans = make_cache(300, 3), [(0, 100), (100, 200), (200, 300)]
    text = TextPredictor(profile, 300, cache.token_ids)
    known = DeviceProfile(profile, CPU)
    made = Transform(cache, text, known, step).analyse(spans)
    values, _ = device_encode.quantise_on_device(made.coefficients, step)
    assert torch.isfinite(made.sums).all()
    for chunk, (start, stop) in enumerate(spans):
        exact, dropped = analysis.analyse(cache, text, start, stop, step)
        difference = abs(values[start:stop].numpy() - quantise(exact, step))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 2e-3
        assert float(made.dropped[chunk]) == pytest.approx(dropped, rel=1e-2, abs=1e-3)


def test_a_blob_predicted_from_the_text(profile):
    cache = make_cache(13, 3)
    ours, theirs = encoded_twice(cache, profile)
    assert_alike(ours, theirs, profile)
    for level, stated in enumerate(read_header(theirs).levels):
        assert measured(cache, decode(theirs, level, profile), profile) < 1.1 * stated.measured_error + 1e-6


@pytest.fixture(scope="module")
def narrow_profile():
    """32 numbers a token."""
    return fitted(NARROW)


def fitted(layers, ropes=(ROPE,), *, words=False, **more):
    caches = [make_cache(300, seed, layers=layers, ropes=ropes) for seed in (1, 2)]
    return fit_profile(caches, make_statistics(layers, ropes, words=words), **more)


@pytest.mark.parametrize(
    ("layers", "ropes", "ladder", "more"),
    [
        (NARROW, (ROPE,), LADDER, {}),
        (NARROW, (ROPE,), FINE, {}),
        (MIXED, MIXED_ROPES, LADDER, {"group_width": 40}),
        (LATENT, (ROPE,), LADDER, {"words": True}),
        (NARROW, (ROPE,), LADDER, None),
    ],
    ids=["coarse", "fine", "shapes", "latent", "without a transform"],
)
def test_blobs_of_layouts_steps_and_profiles(layers, ropes, ladder, more):
    cache = positions_on(make_cache(10, 3, layers=layers, ropes=ropes, dtype=torch.bfloat16), 11)
    profile = identity_profile(cache, ladder) if more is None else fitted(layers, ropes, **more)
    assert_alike(*encoded_twice(cache, profile, ladder), profile, ladder)


def test_a_head_start_and_a_pruned_cache(profile, head_profile):
    cache = make_cache(10, 3)
    assert_alike(*encoded_twice(cache, head_profile, hidden=make_hidden(cache)), head_profile)
    ours, theirs = encoded_twice(pruned(cache), profile)
    assert_alike(ours, theirs, profile)
    for mine, other in zip(decode(ours, None, profile).kept, decode(theirs, None, profile).kept, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


@pytest.mark.parametrize("fast", [False, True])
def test_products_in_bfloat16_repeat_tokens_with_large_coefficients(monkeypatch, narrow_profile, fast):
    """Both ways run on every processor."""
    monkeypatch.setattr(analysis, "fast_bfloat16", lambda: fast)
    monkeypatch.setattr(gpu_analysis, "_multiplies_bfloat16", lambda _: fast)
    cache = make_cache(8, 3, layers=NARROW)
    for tensor in (*cache.keys, *cache.values):
        tensor[:, [2, 6]] *= 3000
    ladder = Ladder(0.3, ("a", "b"))
    ours, theirs = encoded_twice(cache, narrow_profile, ladder)
    assert_alike(ours, theirs, narrow_profile, ladder)
    assert abs(quantised(ours, narrow_profile, 1)).max() > 10_000


def test_values_far_beyond_the_alphabet_escape(narrow_profile):
    cache = make_cache(6, 3, layers=NARROW, scale=3e4)
    ours, theirs = encoded_twice(cache, narrow_profile)
    assert abs(quantised(ours, narrow_profile, 0)).max() > 1000
    mine, other = decode(ours, None, narrow_profile), decode(theirs, None, narrow_profile)
    for left, right in zip(mine.keys, other.keys, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=2.0)


@pytest.mark.parametrize("working_bytes", [0, 110_000, 1 << 30], ids=["a chunk", "some chunks", "all chunks"])
def test_batches_change_no_more_than_float_noise(profile, working_bytes):
    cache = make_cache(37, 3)
    ladder = Ladder(3.6, ("one", "two"))
    spans = [(start, min(start + 8, 37)) for start in range(0, 37, 8)]
    encoder = DeviceEncoder(cache, TextPredictor(profile, 37, cache.token_ids), ladder, CPU, working_bytes)
    sizes = {0: [1] * 5, 110_000: [2, 2, 1], 1 << 30: [5]}[working_bytes]
    assert [len(batch) for batch in encoder._batches(spans)] == sizes
    segments = encoder.encode(spans, 2)
    blob = encode(cache, profile, ladder, chunk_tokens=8, backend="numba")
    for row, coded in zip(read_header(blob).segments, segments, strict=True):
        for segment, made in zip(row, coded, strict=True):
            assert made.symbols == segment.raw
            assert made.error == pytest.approx(segment.error, rel=1e-3)
            assert made.data == blob[segment.offset : segment.end]


def test_the_lossless_level_and_profiles_inside_are_the_processors(narrow_profile):
    cache = make_cache(10, 3, layers=NARROW, dtype=torch.bfloat16)
    ours, theirs = encoded_twice(cache, None, 2)
    assert ours == theirs
    ours, theirs = encoded_twice(cache, narrow_profile, Ladder(3.6, ("one",)), lossless=True)
    assert [row[-1].crc32 for row in read_header(ours).segments] == [
        row[-1].crc32 for row in read_header(theirs).segments
    ]
    assert torch.equal(decode(ours, "lossless", narrow_profile).values[0], cache.values[0])


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "layer 2's values hold NaN"), (1e15, "too large")])
def test_what_cannot_be_coded_is_refused_with_the_same_words(plain_profile, value, message):
    cache = make_cache(20, 3)
    cache.values[2][1, 18, 3] = value
    for backend in ("numba", "triton"):
        with pytest.raises(CacheValueError, match=message):
            encode(cache, plain_profile, LADDER, chunk_tokens=16, backend=backend)


def test_a_profile_is_copied_to_a_device_once_and_goes_with_it(plain_profile):
    copy = replace(plain_profile)
    known = weakref.ref(on_device(copy, CPU))
    assert on_device(copy, CPU) is known()
    del copy
    gc.collect()
    assert known() is None


COLUMNS = {"BLOCK": device_encode.COLUMN_BLOCK}
TILES = {"ROWS": device_encode.ROW_BLOCK, **COLUMNS}
WHOLE = {"columns": "i32", "bounds": "*i64"}
KERNELS = {
    "measure": (WHOLE | {"coefficients": "*fp32", "magnitudes": "*fp32", "squares": "*fp32"}, COLUMNS, 4),
    "split": (WHOLE | {"values": "*i32", "symbols": "*u8", "widest": "*i32"}, TILES | {"LEVELS": 5}, 4),
    "escape": (
        WHOLE | {"symbols": "*u8", "rows": "*i32", "packed": "*i32", "escapes": "*i32", "levels": "i32"}, TILES, 4
    ),
    "squared_errors": (
        WHOLE | {"coefficients": "*fp32", "values": "*i32", "classes": "*u8", "sizes": "*fp32", "steps": "*fp32"}
        | {"missed": "*fp32"}, TILES | {"LEVELS": 5}, 4
    ),
    "encode_lanes": (
        {"symbols": "*u8", "stride": "i32", "streams": "*i64", "stream_of": "*i32", "columns": "*i32", "rows": "*i32"}
        | {"packed": "*i32", "words": "*i16", "states": "*i32", "begins": "*i64", "counts": "*i32", "lanes": "i32"},
        {"BLOCK": device_encode._LANE_BLOCK}, 2
    ),
    "gather_words": (
        {"words": "*i16", "begins": "*i64", "counts": "*i32", "targets": "*i64", "out": "*i16"},
        {"BLOCK": device_encode._WORD_BLOCK}, 4
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_and_keep_to_their_registers(name, arch):
    signature, constexprs, warps = KERNELS[name]
    warps = warps // 2 if arch == "gfx942" else warps
    report = compile_for(getattr(kernels, name), signature, constexprs, arch, warps)
    assert report.spilled == 0
    assert report.registers <= 128


def test_every_kernel_is_compiled():
    made = {name for name, kernel in vars(kernels).items() if hasattr(kernel, "fn") and not name.startswith("_")}
    assert made == set(KERNELS)
