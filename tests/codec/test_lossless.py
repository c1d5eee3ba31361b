"""Lossless segments: every bit comes back, in fewer bytes than simpler ways take, and damage is refused or decodes."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvwire.codec import KVCache, decode, encode
from kvwire.codec.entropy import exponent_kernels
from kvwire.codec.kinds import lossless_grid, lossless_streams, lossless_survey
from kvwire.codec.kinds.lossless_grid import FORMATS
from kvwire.codec.kinds.lossless_streams import decode_lossless, encode_lossless
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import CacheMeta, LayerSpec

SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(list(FORMATS))
FEW = settings(max_examples=60)


def tensor_of(bits, dtype):
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8).copy()).view(dtype)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def any_bits(rng, dtype, shape):
    """Every pattern is as likely: NaN payloads, infinities, subnormals, both zeros."""
    return tensor_of(
        np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), np.uint8).reshape(*shape[:-1], -1), dtype
    )


def normal(rng, dtype, shape):
    """Columns of scales and means of their own, as caches have them."""
    scale = np.exp2(rng.normal(0, 2, (shape[0], 1, shape[2])))
    mean = rng.normal(0, 1, (shape[0], 1, shape[2]))
    return torch.from_numpy((rng.normal(mean, 1, shape) * scale).astype(np.float32)).to(dtype)


def sparse(rng, dtype, shape):
    """Mostly one number, some of any bits."""
    return torch.where(
        torch.from_numpy(rng.random(shape) < 0.9), torch.zeros(()), any_bits(rng, dtype, shape).float()
    ).to(dtype)


def repeated(rng, dtype, shape):
    """Few distinct rows, as in the values of the first layer."""
    return normal(rng, dtype, (shape[0], 5, shape[2])).float()[:, rng.integers(0, 5, shape[1])].to(dtype)


FILLS = {fill.__name__: fill for fill in (any_bits, normal, sparse, repeated)}


def make(tokens, layers, dtype, fill, seed=0):
    rng = np.random.default_rng(seed)
    keys, values = [], []
    for spec in layers:
        rows = 0 if spec.kind == "none" else tokens
        keys.append(fill(rng, dtype, (spec.kv_heads, rows, spec.key_dim)) if rows else torch.empty(0, dtype=dtype))
        values.append(fill(rng, dtype, (spec.kv_heads, rows, spec.value_dim)) if rows else torch.empty(0, dtype=dtype))
    return KVCache.from_tensors(keys, values, CacheMeta(layers=layers))


def of_tensors(*tensors):
    return KVCache.from_tensors(list(tensors), list(tensors))


def assert_same(cache, start, stop, decoded):
    assert len(decoded) == len(cache.keys)
    for spec, pair, *wanted in zip(cache.meta.layers, decoded, cache.keys, cache.values, strict=True):
        for got, tensor, dim in zip(pair, wanted, (spec.key_dim, spec.value_dim), strict=True):
            assert got.dtype == tensor.dtype
            assert got.is_contiguous()
            if spec.kind == "none":
                assert got.shape == (spec.kv_heads, 0, dim)
            else:
                assert got.shape == (spec.kv_heads, stop - start, dim)
                assert bytes_of(got) == bytes_of(tensor[:, start:stop])


def check(cache, start=0, stop=None):
    """Encode, decode, compare; returns the segment."""
    stop = cache.tokens if stop is None else stop
    data, symbols = encode_lossless(cache, start, stop)
    assert 0 <= symbols <= (stop - start) * cache.meta.elements_per_token
    dtype = next(key.dtype for key, spec in zip(cache.keys, cache.meta.layers, strict=True) if spec.kind != "none")
    assert_same(cache, start, stop, decode_lossless(data, stop - start, cache.meta.layers, dtype))
    return data


LAYERS = st.lists(
    st.one_of(
        st.builds(LayerSpec, st.integers(1, 3), st.integers(1, 33), st.integers(1, 33)),
        st.just(LayerSpec(2, 4, 4, kind="none")),
    ),
    min_size=1,
    max_size=4,
).map(lambda layers: (LayerSpec(1, 1, 2), *layers))


@FEW
@given(LAYERS, DTYPES, st.sampled_from(list(FILLS.values())), st.integers(1, 300), SEEDS)
@example((LayerSpec(1, 1, 1),), torch.bfloat16, any_bits, 1, 0)
@example((LayerSpec(2, 64, 64),) * 3, torch.float32, normal, 300, 1)
@example((LayerSpec(2, 64, 64),) * 3, torch.bfloat16, repeated, 300, 2)
def test_every_bit_comes_back(layers, dtype, fill, tokens, seed):
    cache = make(tokens, layers, dtype, fill, seed)
    start = tokens // 3
    data = check(cache, start)
    assert data == encode_lossless(cache, start, tokens)[0]
    assert data == encode_lossless(cache.slice(start, tokens), 0, tokens - start)[0]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -3.0, float("nan"), float("inf"), 2.0**-14], ids=str)
def test_constants_take_next_to_nothing(dtype, number):
    tensor = torch.full((2, 500, 16), number).to(dtype)
    assert len(check(of_tensors(tensor, tensor))) < 250
    tensor = tensor.clone()
    tensor[:, ::3] = torch.ones(()).to(dtype)
    check(of_tensors(tensor))


@pytest.mark.parametrize("dtype", [dtype for dtype in FORMATS if dtype.itemsize <= 2], ids=str)
def test_every_number_of_a_dtype_in_one_column(dtype):
    numbers = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    check(of_tensors(*(tensor_of(column.reshape(1, -1, 1), dtype) for column in (numbers, numbers[::-1]))))


def test_numbers_far_below_a_columns_largest():
    octaves = torch.arange(-149, 128, dtype=torch.float64).exp2().float().reshape(1, -1, 1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(of_tensors(torch.cat([octaves, -octaves, octaves.flip(1)], 2).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_blob_tells_the_dtype_of_the_tensors_whatever_the_meta_says(dtype):
    """A meta that names the layers alone says float32 by default; readers take the dtype from the blob."""
    meta = CacheMeta(layers=(LayerSpec(2, 8, 8),))
    tensor = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    blob = encode(KVCache.from_tensors([tensor], [tensor], meta), levels=0, lossless=True)
    cache = decode(blob)
    assert cache.meta.dtype == str(dtype).removeprefix("torch.")
    assert cache.keys[0].dtype == dtype
    assert torch.equal(cache.keys[0].view(torch.uint8), tensor.view(torch.uint8))


def test_no_tokens_have_no_bytes():
    cache = make(5, (LayerSpec(2, 4, 3), LayerSpec(2, 4, 4, kind="none")), torch.bfloat16, normal)
    assert check(cache, 3, 3) == b""
    with pytest.raises(CorruptError):
        decode_lossless(b"\0", 0, cache.meta.layers, torch.bfloat16)


def test_tensors_that_are_not_contiguous():
    whole = normal(np.random.default_rng(1), torch.float16, (2, 50, 24))
    check(of_tensors(whole[:, ::2, 1::2], whole.transpose(0, 1).contiguous().transpose(0, 1)[:, 25:, :12]))


# Rates


def bits_per_number(cache, data):
    return 8 * len(data) / (cache.tokens * cache.meta.elements_per_token)


def entropy(counts):
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def exponent_coded(cache):
    """Zeroth-order entropy of the exponents of each tensor, and 8 raw bits for each number."""
    total = 0.0
    for tensor in (*cache.keys, *cache.values):
        exponents = np.frombuffer(bytes_of(tensor), "<u2") >> 7 & 255
        total += entropy(np.bincount(exponents)) + 8 * exponents.size
    return total / (cache.tokens * cache.meta.elements_per_token)


def shuffled(cache):
    """zstd at its best of all numbers' first bytes, then all their second bytes, and so on."""
    width = cache.keys[0].element_size()
    pairs = zip(cache.keys, cache.values, strict=True)
    numbers = np.concatenate([np.frombuffer(bytes_of(t), np.uint8).reshape(-1, width) for pair in pairs for t in pair])
    return bits_per_number(cache, zstandard.ZstdCompressor(level=19).compress(numbers.T.tobytes()))


def test_a_models_caches_take_less_than_their_exponents_coded_or_shuffled_and_compressed(demo_model):
    from kvwire import open_engine

    engine = open_engine(demo_model, dtype=torch.bfloat16)
    ids = np.random.default_rng(0).integers(5, 2000, 256).tolist()
    cache = engine.prefill([ids])[0]
    rate = bits_per_number(cache, check(cache))
    assert rate < exponent_coded(cache) - 0.15
    assert rate < shuffled(cache) - 0.15


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_columns_of_their_own_scales_take_less_than_shuffled_and_compressed(dtype):
    cache = make(256, (LayerSpec(4, 64, 64),) * 2, dtype, normal)
    assert bits_per_number(cache, check(cache)) < 0.97 * shuffled(cache)


def test_rows_that_repeat_are_stored_once():
    layers = (LayerSpec(2, 64, 64), LayerSpec(2, 64, 64))
    cache = make(256, layers, torch.bfloat16, normal)
    index = torch.from_numpy(np.random.default_rng(1).integers(0, 128, 256))
    again = KVCache.from_tensors(cache.keys, [cache.values[0][:, index], cache.values[1]])
    distinct = len(index.unique())
    assert encode_lossless(again, 0, 256)[1] == 256 * 3 * 128 + distinct * 128
    assert len(check(again)) < (1 - 0.8 * (256 - distinct) / 256 / 4) * len(check(cache))


def test_a_hash_that_collides_changes_nothing(monkeypatch):
    monkeypatch.setattr(lossless_survey, "_codes", lambda bits: np.minimum(np.arange(bits.shape[1]), 1))
    cache = make(40, (LayerSpec(2, 8, 8),), torch.bfloat16, normal)
    check(cache)
    assert encode_lossless(cache, 0, 40)[1] == 40 * 32


def test_mantissas_that_were_rounded_cost_nothing_more_when_widened():
    cache = make(256, (LayerSpec(2, 64, 64),) * 2, torch.bfloat16, normal)
    for dtype in (torch.float32, torch.float64):
        wide = KVCache.from_tensors([k.to(dtype) for k in cache.keys], [v.to(dtype) for v in cache.values])
        assert len(check(wide)) < 1.01 * len(check(cache))


# Kernels against their naive twins


def naive_split(bits, fields, references, flips):
    """Symbols ``[tokens, columns]`` and raw bits, one by one, in the order of ``bits``."""
    heads, tokens, dim = bits.shape
    sign, exponent, mantissa = naive_parts(bits.astype(object), fields)
    side = [side.reshape(heads, 1, dim).astype(object) for side in (references, flips)]
    distance = np.minimum((side[0] - exponent) % 2**fields.exponent, 2**fields.distance - 1)
    high = 7 - fields.distance
    symbols = (sign ^ side[1]) * 128 + distance * 2**high + mantissa // 2**fields.low
    rest = mantissa % 2**fields.low // 2**fields.spare
    raw = [number >> bit & 1 for number in rest.ravel() for bit in range(fields.raw)]
    return symbols.astype(np.uint8).transpose(1, 0, 2).reshape(tokens, heads * dim), raw


def naive_parts(numbers, fields):
    sign = numbers // 2 ** (fields.width - 1)
    return sign, numbers // 2**fields.mantissa % 2**fields.exponent, numbers % 2**fields.mantissa


def unpacked(words, start, count):
    return np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[start : start + count].tolist()


@settings(max_examples=40)
@given(
    DTYPES,
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40)),
    st.integers(0, 130),
    st.booleans(),
    SEEDS,
)
def test_split_and_join_do_as_their_naive_twins(dtype, shape, at, spared, seed):
    rng = np.random.default_rng(seed)
    fields = FORMATS[dtype]
    fields = fields._replace(spare=int(rng.integers(fields.low + 1)) if spared else 0)
    kind = np.dtype(f"u{dtype.itemsize}")
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()
    bits = bits >> kind.type(fields.spare) << kind.type(fields.spare)
    columns, before = shape[0] * shape[2], int(rng.integers(3))
    references = rng.integers(0, 2**fields.exponent, columns).astype(np.uint16)
    flips = rng.integers(0, 2, columns).astype(np.uint8)
    symbols = np.full((shape[1], before + columns + 1), 77, np.uint8)
    raw = np.zeros((at + bits.size * fields.raw) // 64 + 2, np.uint64)
    exponent_kernels.split(bits, fields, references, flips, symbols, before, raw, at)
    wanted, wanted_raw = naive_split(bits, fields, references, flips)
    assert np.array_equal(symbols[:, before:-1], wanted)
    assert (symbols[:, :before] == 77).all()
    assert (symbols[:, -1] == 77).all()
    assert unpacked(raw, at, bits.size * fields.raw) == wanted_raw
    assert not any(unpacked(raw, 0, at))

    exponents = (bits >> kind.type(fields.mantissa)).astype(np.int64) & fields.top
    escaped = (symbols[:, before:-1] >> 7 - fields.distance) % 2**fields.distance == fields.escape
    escaped = escaped.reshape(shape[1], shape[0], shape[2]).transpose(1, 0, 2) & (fields.exponent > fields.distance)
    back = np.full(shape, 77, kind)
    exponent_kernels.join(symbols, before, fields, references, flips, raw, at, back)
    assert np.array_equal(back[~escaped], bits[~escaped])
    unknown = kind.type(fields.top << fields.mantissa)
    assert np.array_equal(back[escaped] | unknown, bits[escaped] | unknown)
    far = (references.reshape(shape[0], 1, -1) - exponents) % 2**fields.exponent >= fields.escape
    assert np.array_equal(escaped, far & (fields.exponent > fields.distance))


@FEW
@given(DTYPES, st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40)), SEEDS)
def test_survey_does_as_numpy(dtype, shape, seed):
    fields = FORMATS[dtype]
    kind = np.dtype(f"u{dtype.itemsize}")
    bits = (
        np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * kind.itemsize), kind)
        .reshape(shape)
        .copy()
    )
    columns = shape[0] * shape[2]
    references, negatives, union = np.zeros(columns, np.uint16), np.zeros(columns, np.uint32), np.zeros(1, np.uint64)
    exponent_kernels.survey(bits, fields, references, negatives, union)
    sign, exponent, _ = naive_parts(bits.astype(object), fields)
    assert negatives.tolist() == sign.sum(1).ravel().tolist()
    assert references.tolist() == np.where(exponent < fields.top, exponent, 0).max(1).ravel().tolist()
    assert union[0] == np.bitwise_or.reduce(bits, axis=None)


@pytest.mark.parametrize("shape", [(1, 1), (9, 63), (100, 65), (3, 200), (5, 0)], ids=str)
def test_histogram_does_as_numpy(shape):
    symbols = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    counts = np.zeros((shape[1], 256), np.uint32)
    exponent_kernels.histogram(symbols, counts)
    assert np.array_equal(counts, [np.bincount(column, minlength=256) for column in symbols.T] or counts)


def test_class_tables_look_up_what_they_count():
    base = np.zeros((3, 256), np.uint16)
    base[0, 200], base[1, [3, 7]], base[2, :16] = 4096, (4095, 1), 256
    lookup = lossless_grid.ClassTables.of(base).lookup.reshape(3, 4096)
    for row, frequencies in zip(lookup, base, strict=True):
        slots = np.repeat(np.arange(256), frequencies)
        starts = np.cumsum(frequencies, dtype=np.int64) - frequencies
        wanted = slots << 24 | np.arange(4096) - starts[slots] << 12 | frequencies[slots].astype(int) - 1
        assert np.array_equal(row, wanted)


# Damage

TARGETS = [
    make(70, (LayerSpec(2, 6, 4), LayerSpec(1, 1, 1, kind="none"), LayerSpec(1, 5, 3)), dtype, fill, 3)
    for dtype, fill in [
        (torch.bfloat16, repeated),
        (torch.bfloat16, any_bits),
        (torch.float32, sparse),
        (torch.float16, normal),
        (torch.float8_e4m3fn, normal),
    ]
]
SEGMENTS = [encode_lossless(cache, 0, 70)[0] for cache in TARGETS]


def refused_or_decoded(data, cache):
    """Whether the bytes decode; if they do, then to the right shapes."""
    try:
        decoded = decode_lossless(data, cache.tokens, cache.meta.layers, cache.keys[0].dtype)
    except CorruptError:
        return False
    for spec, pair in zip(cache.meta.layers, decoded, strict=True):
        for tensor, dim in zip(pair, (spec.key_dim, spec.value_dim), strict=True):
            assert tensor.shape == (spec.kv_heads, 0 if spec.kind == "none" else cache.tokens, dim)
    return True


@settings(max_examples=600)
@given(st.data())
def test_mutants_are_refused_or_decode_to_something(data):
    which = data.draw(st.integers(0, len(TARGETS) - 1))
    mutant = bytearray(SEGMENTS[which])
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the damage hits the header and the first lists: the rest is mostly noise.
        at = data.draw(st.one_of(st.integers(0, min(120, len(mutant) - 1)), st.integers(0, len(mutant) - 1)))
        mutant[at] = data.draw(st.integers(0, 255))
    refused_or_decoded(bytes(mutant), TARGETS[which])


@pytest.mark.parametrize("which", range(len(TARGETS)))
def test_what_is_cut_off_or_appended_is_refused(which):
    data, cache = SEGMENTS[which], TARGETS[which]
    assert refused_or_decoded(data, cache)
    for length in range(0, len(data), 7):
        assert not refused_or_decoded(data[:length], cache)
    assert not refused_or_decoded(data + b"\0", cache)
    assert not refused_or_decoded(data, cache.slice(0, 69))


def relisted(data, name, change):
    """The segment with another content of one list."""
    fixed = list(lossless_streams._HEADER.unpack_from(data))
    index = lossless_streams._LISTS.index(name)
    at = lossless_streams._HEADER.size + sum(fixed[:index])
    packed = data[at : at + fixed[index]]
    raw = bytearray(zstandard.ZstdDecompressor().decompress(packed) if packed else b"")
    packed = zstandard.ZstdCompressor().compress(bytes(change(raw)))
    rest = data[at + fixed[index] :]
    fixed[index] = len(packed)
    return lossless_streams._HEADER.pack(*fixed) + data[lossless_streams._HEADER.size : at] + packed + rest


def setting(index, value):
    def change(raw):
        raw[index] = value
        return raw

    return change


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("table", setting(0, 7), "add up to 4096"),
        ("class", setting(0, 31), "no table"),
        ("reference", setting(-1, 255), "exponent"),
        ("escape", setting(-1, 255), "exponent"),
        ("block", setting(0, 127), "spares"),
        ("row", setting(0, 1), "rows"),
        *[(name, lambda raw: raw + b"\0", "another length") for name in lossless_streams._LISTS],
    ],
)
def test_lists_are_checked(name, change, match):
    which = 1 if name == "escape" else 0
    data, cache = SEGMENTS[which], TARGETS[which]
    assert refused_or_decoded(relisted(data, name, lambda raw: raw), cache)
    with pytest.raises(CorruptError, match=match):
        decode_lossless(relisted(data, name, change), cache.tokens, cache.meta.layers, cache.keys[0].dtype)


@pytest.mark.parametrize(
    ("field", "value"), [(0, 2**32 - 1), (6, 2**32 - 1), (7, 1), (8, 0), (8, 65535), (10, 0), (10, 33)]
)
def test_headers_are_checked(field, value):
    fixed = list(lossless_streams._HEADER.unpack_from(SEGMENTS[0]))
    fixed[field] = value
    assert not refused_or_decoded(
        lossless_streams._HEADER.pack(*fixed) + SEGMENTS[0][lossless_streams._HEADER.size :], TARGETS[0]
    )


def test_a_stream_needs_columns():
    """The second stream of a segment in which no rows repeat cannot hold lanes."""
    data, cache = SEGMENTS[3], TARGETS[3]
    fixed = list(lossless_streams._HEADER.unpack_from(data))
    at = lossless_streams._HEADER.size + sum(fixed[:6]) + 6 * fixed[8] + 2 * fixed[6]
    fixed[9] = 1
    lane = struct.pack("<IH", 65536, 0)
    assert not refused_or_decoded(
        lossless_streams._HEADER.pack(*fixed) + data[lossless_streams._HEADER.size : at] + lane + data[at:], cache
    )


def test_a_frame_that_claims_much_is_refused_before_memory_is_taken():
    data, cache = SEGMENTS[0], TARGETS[0]
    bombs = [relisted(data, name, lambda _: b"\0" * (1 << 26)) for name in lossless_streams._LISTS]
    refused_or_decoded(data, cache)
    tracemalloc.start()
    try:
        assert not any(refused_or_decoded(bomb, cache) for bomb in bombs)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


# Arguments


def test_what_a_segment_cannot_hold():
    cache = make(6, (LayerSpec(1, 2, 2),), torch.bfloat16, normal)
    for start, stop in ((-1, 3), (3, 2), (0, 7)):
        with pytest.raises(ArgumentError, match="not within"):
            encode_lossless(cache, start, stop)
    with pytest.raises(ArgumentError, match="one dtype"):
        encode_lossless(KVCache.from_tensors(cache.keys, [v.float() for v in cache.values]), 0, 6)
    with pytest.raises(ArgumentError, match="cannot hold"):
        encode_lossless(of_tensors(torch.zeros(1, 2, 3, dtype=torch.int64)), 0, 2)
    with pytest.raises(ArgumentError, match="cannot hold"):
        decode_lossless(b"", 2, cache.meta.layers, torch.int32)
    with pytest.raises(ArgumentError, match="fewer tokens"):
        decode_lossless(b"", 1 << 30, cache.meta.layers, torch.float32)
    with pytest.raises(ArgumentError, match="fewer tokens"):
        encode_lossless(of_tensors(torch.zeros(1, 1, 1).expand(1, 1 << 30, 1)), 0, 1 << 30)
