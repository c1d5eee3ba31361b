"""Decoding by Triton's kernels, in its interpreter: the processor's symbols, and its tensors but for rounding."""

from __future__ import annotations

import gc
import weakref
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import BlobDecoder, Ladder, Profile, decode, encode, fit_profile, inspect
from kvwire.codec.entropy.rans import Lanes, encode_base
from kvwire.codec.entropy.tables import ALPHABET, CLASSES, CONTEXTS, Tables, fit_tables
from kvwire.codec.format import segment
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.segment import ChunkSegments, SegmentParts, SegmentState, decode_segment
from kvwire.codec.gpu import decode_kernels as kernels
from kvwire.codec.gpu import staging
from kvwire.codec.gpu import streams as queues
from kvwire.codec.gpu.batch import Workspace
from kvwire.codec.gpu.decode import _bytes
from kvwire.codec.gpu.profile import on_device
from kvwire.codec.gpu.staging import BLOCK, describe_chunk, parse_chunk, stage
from kvwire.codec.profile.group import Group
from kvwire.codec.transform import levels
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import KVCache, LayerSpec, PagedKVCache, RopeRegime

from . import surgery as cut
from .measures import drawn
from .naive_coding import decode_lanes, encode_ternary
from .synthetic import LATENT, MIXED, MIXED_ROPES, ROPE, make_cache, make_hidden, make_statistics

TABLES = fit_tables(np.zeros((CLASSES, ALPHABET)), np.zeros((CLASSES, CONTEXTS, 3)))
LADDER = Ladder(3.6, ("coarse", "standard", "fine"))
SMALL = (LayerSpec(1, 8, 8, rope=0), LayerSpec(1, 8, 8, rope=0))
HALF = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 2e-6}
"""Largest difference against the largest element: the processor rounds products where the GPU does not."""
FEW = settings(max_examples=8)


@pytest.fixture(autouse=True)
def _many_lanes(monkeypatch):
    """The interpreter takes a step for a symbol of every lane: short lanes are fast."""
    real = levels.lanes_for
    monkeypatch.setattr(levels, "lanes_for", lambda symbols: real(symbols, 16))


def fitted(layers=SMALL, ropes=(ROPE,), **more):
    caches = [make_cache(256, seed, layers=layers, ropes=ropes) for seed in (1, 2)]
    if "prefix_layers" in more:
        more["hidden"] = [make_hidden(cache) for cache in caches]
    return fit_profile(caches, make_statistics(layers, ropes, words=more.pop("words", True)), **more)


@pytest.fixture(scope="module")
def small():
    """A profile that predicts from the text, of two layers."""
    return fitted()


@pytest.fixture(scope="module")
def document():
    """A document of two whole chunks of twelve tokens and a short one."""
    return make_cache(29, 3, layers=SMALL)


def apart(one, other):
    """Largest difference of two caches against the largest element."""
    pairs = list(zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True))
    most = max(float(a.double().abs().max()) for a, _ in pairs if a.numel())
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()) / most


def on_processor(blob, profile, level, chunk=0):
    """Quantised values ``[tokens, columns]`` as numba's kernels decode them."""
    info = inspect(blob)
    header = parse_header(blob)
    start, stop = info.chunk_span(chunk)
    state = SegmentState(stop - start, profile.spread, profile.tables)
    for s in info.reads(chunk, level):
        decode_segment(state, s.level, header.levels[s.level].shift, blob[s.offset : s.end])
    return state


def on_gpu(blob, profile, level, chunks=(0,)):
    """The same by Triton's: values of each chunk, and its classes."""
    info = inspect(blob)
    decoder = BlobDecoder(blob, profile, backend="triton")._lossy.device
    pieces = [ChunkSegments(c, level, [blob[s.offset : s.end] for s in info.reads(c, level)]) for c in chunks]
    decoder._room = 1 << 30
    (staged,) = decoder.batches(pieces)
    batch = decoder.upload(staged, Workspace())
    decoder.entropy(batch)
    out, at = [], 0
    for parsed in staged.pieces:
        values = batch.values[at : at + parsed.values].view(parsed.tokens, parsed.width).int().numpy()
        at += parsed.values
        whole = np.zeros((parsed.tokens, profile.rank), np.int32)
        coded = np.flatnonzero(parsed.classes[-1])
        whole[:, coded] = values[:, parsed.slots[coded]]
        out.append((whole, parsed.classes[-1]))
    return out, batch


# The kernels, stream by stream.


def launched(tokens, columns, tables, streams, coded=None):
    """Decode streams of the levels of one chunk: pairs of lanes and classes ``[columns]``; values and flag."""
    coded = columns if coded is None else coded
    spec = LayerSpec(1, columns, 1)
    group = Group((("key", 0), ("value", 0)), np.zeros(columns + 1, np.float32), np.zeros(columns + 1, np.int16),
                  row_scale=np.ones(columns + 1, np.float32))  # fmt: skip
    profile = Profile("", "", (spec,), (group,), tables)
    classes = np.array([[*row, 0] for _, row in streams], np.uint8)
    width = -(-coded // 16) * 16
    parts = [SegmentParts(b"", b"", lanes.states, lanes.counts, lanes.words) for lanes, _ in streams]
    parsed = describe_chunk(
        ChunkSegments(0, len(streams) - 1, []), 0, tokens, parts, classes, np.zeros(0, np.int32), profile
    )
    header = SimpleNamespace(levels=[SimpleNamespace(step=1.0)] * len(streams), info=SimpleNamespace(token_ids=None))
    staged = stage([parsed], header, rows=16)
    loaded = on_device(profile, torch.device("cpu"))
    progress, flags = torch.zeros(1 + staged.streams, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    values = torch.full((tokens * width + 64,), 77, dtype=torch.int16)
    peaks = torch.zeros(staged.slots, dtype=torch.int32)
    named = [staged.of(staged.buffer, name) for name in ("streams", "items", "words16", "words32", "entries")]
    kernels.decode_streams[staged.items,](
        *named[:2],
        progress,
        flags,
        *named[2:],
        loaded.lookup,
        loaded.thresholds,
        values,
        peaks,
        10,
        CHECK=True,
        BLOCK=BLOCK,
    )
    assert (values[tokens * width :] == 77).all()
    out = values[: tokens * width].view(tokens, width)
    assert (out[:, coded:] == 77).all()
    assert torch.equal(peaks[:coded], out[:, :coded].int().abs().amax(0))
    return out[:, :coded].int().numpy(), int(flags[0])


@pytest.mark.parametrize(
    ("tokens", "columns", "lanes"),
    [(63, 1, 1), (7, 9, 2), (9, 7, 300), (10, 10, 1), (10, 10, 64), (4, 25, 65), (20, 50, 300), (2, 500, 64)],
)
def test_streams_of_some_symbols_and_lanes(tokens, columns, lanes):
    rng = np.random.default_rng(tokens * 1000 + lanes)
    classes = rng.integers(1, CLASSES - 5, columns)
    symbols = drawn(rng, np.broadcast_to(TABLES.base[classes - 1], (tokens, columns, 256)))
    symbols[symbols == 0] = 128  # which every table has
    base = encode_base(symbols, classes, TABLES, lanes)
    q = symbols.astype(np.int32) - 128
    contexts = np.minimum(np.abs(q), 2).astype(np.uint8)
    finer = drawn(rng, TABLES.ternary[classes[None, :] + 5, contexts])
    refined = encode_ternary(finer, contexts, classes + 6, TABLES, max(1, lanes // 2))
    got, flag = launched(tokens, columns, TABLES, [(base, classes)])
    assert not flag
    assert np.array_equal(got, q)
    index = np.broadcast_to(classes - 1, symbols.shape)
    words = np.split(base.words, np.cumsum(base.counts)[:-1])
    assert np.array_equal(decode_lanes(base.states.tolist(), [w.tolist() for w in words], index, TABLES.base), symbols)
    got, flag = launched(tokens, columns, TABLES, [(base, classes), (refined, classes + 6)])
    r = finer.astype(np.int32) - 1
    assert not flag
    assert np.array_equal(got, 3 * q + np.where(q < 0, -r, r))


def test_a_table_of_one_symbol_and_a_stream_without_words():
    base = TABLES.base.copy()
    base[4] = 0
    base[4, 131] = 4096
    single = Tables(base, TABLES.ternary, TABLES.points)
    symbols = np.full((5, 3), 131, np.uint8)
    lanes = encode_base(symbols, np.full(3, 5), single, 2)
    assert not len(lanes.words)
    got, flag = launched(5, 3, single, [(lanes, np.full(3, 5))])
    assert not flag
    assert (got == 3).all()


def test_a_stream_without_columns():
    nothing = Lanes(np.full(70, 65536, np.uint32), np.zeros(70, np.uint16), np.zeros(0, np.uint16))
    got, flag = launched(3, 5, TABLES, [(nothing, np.zeros(5, int))], coded=0)
    assert not flag
    assert not got.size


def test_a_damaged_lane_is_flagged():
    classes = np.full(4, 20)
    symbols = drawn(np.random.default_rng(1), np.broadcast_to(TABLES.base[classes - 1], (20, 4, 256)))
    symbols[symbols == 0] = 128  # which every table has
    lanes = encode_base(symbols, classes, TABLES, 3)
    for damaged in (
        replace(lanes, states=lanes.states ^ np.uint32(1 << 9)),
        replace(lanes, words=lanes.words[::-1].copy()),
        replace(lanes, words=np.zeros_like(lanes.words), states=np.zeros_like(lanes.states)),
    ):
        assert launched(20, 4, TABLES, [(damaged, classes)])[1] == queues.DAMAGED


def test_a_level_that_never_comes_is_given_up():
    classes = np.full(4, 20)
    symbols = np.full((2, 4), 128, np.uint8)
    lanes = encode_base(symbols, classes, TABLES, 1)
    spare = launched(2, 4, TABLES, [(lanes, classes)])
    assert spare[1] == 0
    progress = torch.tensor([1, 0, 0], dtype=torch.int32)  # the first ticket is taken, and its holder gone
    assert stalled(progress, lanes, classes) == queues.STALLED


def stalled(progress, lanes, classes):
    contexts = np.zeros((2, 4), np.uint8)
    refined = encode_ternary(np.ones((2, 4), np.uint8), contexts, classes + 6, TABLES, 1)
    fields = [
        [0, len(lanes.words) - 1, 0, 1, 1, 4, 0, 0, 16, 2, 1, 0, 0, 0, 0],
        [0, max(0, len(refined.words) - 1), 0, 1, 1, 4, 0, 0, 16, 2, 0, 1, 0, 0, 0],
    ]
    streams, items = torch.tensor(fields), torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    words32 = torch.from_numpy(np.array([*refined.states, 0, len(refined.words)], np.uint32))
    words16 = torch.from_numpy(np.array([*refined.words, 0], np.uint16))
    flags, values = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int16)
    entries = torch.from_numpy(np.arange(4, dtype=np.uint32) | np.uint32(25 << 23))
    lookup, thresholds = torch.from_numpy(TABLES.lookup), torch.from_numpy(TABLES.thresholds)
    kernels.decode_streams[1,](
        streams, items, progress, flags, words16, words32, entries, lookup, thresholds, values,
        torch.zeros(16, dtype=torch.int32), 5, CHECK=True, BLOCK=BLOCK,
    )  # fmt: skip
    return int(flags[0])


# Whole blobs.


@FEW
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 13), st.integers(1, 5), st.integers(1, 6), st.sampled_from([1.0, 30, 3e4])
)
def test_values_equal_the_processors(seed, tokens, keys, values, scale):
    """Identity profiles, with columns that enter late, and escapes where the scale is large."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.uniform(-4, 2, (1, 1, keys + values))) * rng.choice([1.0, scale], (1, tokens, 1), p=[0.7, 0.3])
    made = torch.from_numpy(rng.standard_normal((1, tokens, keys + values)) * spread).float()
    cache = KVCache.from_tensors([made[..., :keys]], [made[..., keys:]])
    blob = encode(cache, None, LADDER, chunk_tokens=8)
    profile = Profile.from_bytes(parse_header(blob).profile_bytes)
    chunks = range(inspect(blob).chunks)
    for level in (0, 2):
        got, batch = on_gpu(blob, profile, level, chunks)
        for chunk, (whole, classes) in enumerate(got):
            state = on_processor(blob, profile, level, chunk)
            assert np.array_equal(classes, state.classes)
            assert np.array_equal(whole, state.values)
        assert not batch.flags.any()
    assert apart(decode(blob, 2, backend="numba"), decode(blob, 2, backend="triton")) < 1e-6


def both_ways(blob, level, profile=None, **how):
    """A level as Triton's kernels and as numba's decode it."""
    return tuple(decode(blob, level, profile, backend=each, **how) for each in ("triton", "numba"))


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        (0, torch.float32), (1, torch.bfloat16), (1, torch.float16), (2, torch.float32), (2, torch.bfloat16),
        (2, torch.float64), (0, torch.float8_e4m3fn), (0, torch.float8_e5m2),
    ],
)  # fmt: skip
def test_tensors_equal_the_processors(small, document, level, dtype):
    blob = encode(document, small, LADDER, chunk_tokens=12)
    ours, theirs = both_ways(blob, level, small, dtype=dtype, offset=7)
    assert ours.meta == theirs.meta
    assert ours.keys[0].dtype == dtype
    assert apart(theirs, ours) < HALF.get(dtype, 0.13)  # a step of float8


@pytest.mark.parametrize(
    ("layers", "ropes", "more"),
    [
        (MIXED, MIXED_ROPES, {}),
        (LATENT, (ROPE,), {}),
        (SMALL, (ROPE,), {"prefix_layers": 1, "words": False}),
        (SMALL, (ROPE,), {"prefix_layers": 1}),
        (SMALL, (ROPE,), {"words": False}),
        (SMALL, (ROPE,), {"group_width": 16}),
    ],
)
@pytest.mark.parametrize("offset", [None, 0, 1000])
def test_layouts_and_profiles(layers, ropes, more, offset):
    profile = fitted(layers, ropes, **more)
    cache = make_cache(11, 4, layers=layers, ropes=ropes)
    hidden = make_hidden(cache) if "prefix_layers" in more else None
    blob = encode(cache, profile, 1, chunk_tokens=8, hidden=hidden)
    ours, theirs = both_ways(blob, 0, profile, offset=offset, hidden=hidden)
    assert apart(theirs, ours) < 2e-6


@pytest.mark.parametrize(
    "layers",
    [
        (LayerSpec(1, 32, 48, rope=0),),  # everything lies at multiples of eight
        (LayerSpec(1, 150, 136, rope=0), LayerSpec(1, 134, 129)),  # more pairs than a tile has
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_heads(layers, dtype):
    ropes = (RopeRegime(tuple(10000.0 ** (-j / 16) for j in range(layers[0].key_dim // 2))),)
    profile = fitted(layers, ropes, words=False, rank_cut=0.3)
    cache = make_cache(5, 4, layers=layers, ropes=ropes)
    blob = encode(cache, profile, 1)
    ours, theirs = both_ways(blob, 0, profile, dtype=dtype, offset=9)
    assert apart(theirs, ours) < HALF[dtype]
    tiles = BlobDecoder(blob, profile, dtype=dtype, backend="triton")._lossy.device._tiles
    assert tiles.aligned == (layers[0].key_dim == 32)
    assert (len(layers) > 1) == (len(tiles.table) > 2)


def test_without_a_profile():
    blob = encode(make_cache(9, 1, layers=SMALL), None, 2)
    assert apart(*both_ways(blob, 1)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_values_and_escapes(small, dtype):
    cache = make_cache(12, 5, layers=SMALL)
    cache.values[1][0, 2] *= 4000
    cache.keys[0][0, 0] *= 300
    blob = encode(cache, small, Ladder(0.01, ("a", "b")), chunk_tokens=12)
    ours, theirs = both_ways(blob, 1, small, dtype=dtype)
    assert apart(theirs, ours) < HALF[dtype]
    rest = [0, 1, *range(3, 12)]
    for a, b in zip(ours.values, theirs.values, strict=True):
        close = (a[:, rest].float() - b[:, rest].float()).abs().max()
        assert close <= 0.02 * b[:, rest].float().abs().max()


def test_many_refinements_need_wide_values(small):
    blob = encode(make_cache(6, 5, layers=SMALL), small, Ladder(10.0, tuple("abcdefgh")), chunk_tokens=8)
    ((whole, _),), batch = on_gpu(blob, small, 7)
    assert batch.values.dtype == torch.int32
    assert np.array_equal(whole, on_processor(blob, small, 7).values)


def test_pruned_caches(small):
    cache = make_cache(10, 6, layers=SMALL)
    kept = torch.rand(1, 10, generator=torch.Generator().manual_seed(1)) < 0.6
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=[kept, None])
    blob = encode(pruned, small, 1, chunk_tokens=8)
    ours, theirs = both_ways(blob, 0, small)
    assert not ours.keys[0][0, ~kept[0]].any()
    assert apart(theirs, ours) < 2e-6
    pages = paged(cache.meta, 10, dtype=torch.float32)
    decoder = BlobDecoder(blob, small, out=pages, backend="triton")
    for chunk in range(2):
        decoder.decode_chunk(chunk, pieces_of(blob, chunk, 0))
    assert apart(theirs, pages.read()) < 2e-6


# Where it goes.


def pieces_of(blob, chunk, level):
    return [blob[s.offset : s.end] for s in inspect(blob).reads(chunk, level)]


def paged(meta, tokens, *, dtype=torch.bfloat16, start=3, page=4, spare=3):
    """A document's place in scattered pages of an engine whose tensors hold sevens."""
    needed = -(-(start + tokens) // page)
    order = torch.randperm(needed + spare, generator=torch.Generator().manual_seed(2))[:needed].int()
    blocks = [
        torch.full((needed + spare, 2, page, spec.kv_heads, spec.key_dim), 7.0, dtype=dtype) for spec in meta.layers
    ]
    return PagedKVCache.from_blocks(blocks, order, tokens, meta, start)


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pages(small, document, backend, dtype):
    blob = encode(document, small, LADDER, chunk_tokens=12)
    expected = decode(blob, 1, small, dtype=dtype, backend="numba", offset=50)
    pages = paged(document.meta, 29, dtype=dtype)
    decoder = BlobDecoder(blob, small, out=pages, offset=50, backend=backend)
    for chunk in (2, 0, 1):
        decoder.decode_chunk(chunk, pieces_of(blob, chunk, 1))
    assert apart(expected, decoder.cache) < HALF[dtype]
    for tensor in (*pages.keys, *pages.values):  # nothing but the document's own tokens was written
        mine = torch.zeros(tensor.shape[:2], dtype=torch.bool)
        mine[pages._where(0, 29)] = True
        assert (tensor[~mine] == 7).all()


def test_a_page_table_may_be_a_column_of_a_larger_one(small, document):
    blob = encode(document, small, 1, chunk_tokens=32)
    pages = paged(document.meta, 29, dtype=torch.float32)
    strided = torch.stack([pages.page_table, torch.zeros_like(pages.page_table)], 1)[:, 0]
    assert not strided.is_contiguous()
    strange = replace(pages, page_table=strided)
    BlobDecoder(blob, small, out=strange, backend="triton").decode_chunk(0, pieces_of(blob, 0, 0))
    assert apart(decode(blob, 0, small, backend="numba"), strange.read()) < 2e-6


def test_an_output_lies_on_one_device(small, document):
    pages = paged(document.meta, 29)
    with pytest.raises(ArgumentError, match="keep them together"):
        replace(pages, page_table=pages.page_table.to("meta"))
    out = KVCache([document.keys[0], document.keys[1].to("meta")], document.values, document.meta)
    with pytest.raises(ArgumentError, match="onto one device"):
        BlobDecoder(encode(document, small, 1), small, out=out, backend="triton")


@pytest.mark.parametrize("odd", [False, True])
def test_a_slice_of_a_prompt_and_nothing_beside_it(small, document, odd):
    blob = encode(document, small, LADDER, chunk_tokens=12)
    expected = decode(blob, 1, small, dtype=torch.bfloat16, backend="numba", offset=4)
    shape = (1, 40, 8 + odd)
    wide = [[torch.full(shape, 7.0, dtype=torch.bfloat16) for _ in SMALL] for _ in range(2)]
    out = KVCache(*([t[:, 4:33, :8] for t in side] for side in wide), document.meta)
    decoder = BlobDecoder(blob, small, out=out, offset=4, backend="triton")
    for chunk in range(3):
        decoder.decode_chunk(chunk, pieces_of(blob, chunk, 1))
    assert apart(expected, out) < HALF[torch.bfloat16]
    for tensor in (*wide[0], *wide[1]):
        assert (tensor[:, :4] == 7).all()
        assert (tensor[:, 33:] == 7).all()
        assert (tensor[..., 8:] == 7).all()


@pytest.mark.parametrize("fits", [False, True])
def test_batches_take_turns_in_little_memory(small, document, fits):
    """Two halves of a workspace where a chunk fits one, else one chunk after the other."""
    blob = encode(document, small, LADDER, chunk_tokens=4)
    expected = decode(blob, 1, small, backend="numba")
    largest = max(_bytes([opened_of(blob, small, chunk, 1)]) for chunk in range(8))
    decoder = BlobDecoder(blob, small, backend="triton", workspace_bytes=2 * (largest + 1) if fits else largest)
    pending = decoder.submit([(chunk, pieces_of(blob, chunk, 1), 1) for chunk in range(8)])
    pending.wait()
    assert len(pending._flags) == 8
    assert len(pending.layers) == 2
    assert [space._memory is not None for space in decoder._lossy.device._spaces] == [True, fits]
    assert apart(expected, decoder.cache) < 2e-6


def opened_of(blob, profile, chunk, level):
    return parse_chunk(
        ChunkSegments(chunk, level, pieces_of(blob, chunk, level)), parse_header(blob), profile, check=True
    )


def test_levels_may_differ_from_chunk_to_chunk(small, document):
    blob = encode(document, small, LADDER, chunk_tokens=12)
    ours, theirs = (BlobDecoder(blob, small, backend=each) for each in ("triton", "numba"))
    for decoder in (ours, theirs):
        decoder.submit([(chunk, pieces_of(blob, chunk, level), level) for chunk, level in ((0, 2), (1, 0), (2, 1))])
    assert apart(theirs.cache, ours.cache) < 2e-6


# What goes wrong.


def damaged_stream(blob, cell, flip=0x5A):
    """The same segment with another state of its first lane, under a right checksum."""
    data, fields = bytearray(cut.segment(blob, cell)), cut.SEGMENT_FIELDS
    data[16 + cut.get(data, fields, "class_bytes") + cut.get(data, fields, "escape_bytes")] ^= flip
    return bytes(data)


@pytest.mark.parametrize("cell", [1, 3, 4])
def test_a_damaged_stream_raises_as_on_the_processor_and_writes_nothing(small, document, cell):
    blob = encode(document, small, 2, chunk_tokens=12)
    damaged = cut.with_segment(blob, cell, damaged_stream(blob, cell))
    assert zlib.crc32(cut.segment(damaged, cell)) != zlib.crc32(cut.segment(blob, cell))
    chunk = cell // 2
    messages = []
    for backend in ("numba", "triton"):
        out = KVCache.from_tensors([torch.full_like(k, 5) for k in document.keys],
                                   [torch.full_like(v, 5) for v in document.values], document.meta)  # fmt: skip
        decoder = BlobDecoder(damaged, small, out=out, backend=backend)
        with pytest.raises(CorruptError) as caught:
            decoder.decode_chunk(chunk, pieces_of(damaged, chunk, 1))
        messages.append(str(caught.value))
        assert all((tensor == 5).all() for tensor in (*out.keys, *out.values))
    assert messages[0] == messages[1]


def test_a_damaged_chunk_leaves_the_others_of_its_batch_alone(small, document):
    blob = encode(document, small, 1, chunk_tokens=12)
    damaged = cut.with_segment(blob, 1, damaged_stream(blob, 1))
    decoder = BlobDecoder(damaged, small, backend="triton")
    decoder._lossy.device._room = 1 << 30
    pending = decoder.submit([(chunk, pieces_of(damaged, chunk, 0), 0) for chunk in range(3)])
    with pytest.raises(CorruptError):
        pending.wait()
    expected = decode(blob, 0, small, backend="numba")
    for ours, theirs in zip(
        (*decoder.cache.keys, *decoder.cache.values), (*expected.keys, *expected.values), strict=True
    ):
        assert torch.allclose(ours[:, :12], theirs[:, :12], atol=1e-4)
        assert not ours[:, 12:24].any()
        assert torch.allclose(ours[:, 24:], theirs[:, 24:], atol=1e-4)


def test_unchecked_decoding_lets_a_damaged_stream_pass(small, document):
    blob = encode(document, small, 1, chunk_tokens=12)
    damaged = cut.with_segment(blob, 1, damaged_stream(blob, 1, 0x01))
    assert apart(*both_ways(damaged, 0, small, check=False)) < 2e-6


def escaping(profile):
    """A chunk of twelve tokens at a fine step, some of whose values are far beyond the alphabet."""
    cache = make_cache(12, 5, layers=SMALL)
    cache.values[1][0, 2] *= 4000
    return encode(cache, profile, Ladder(0.01, ("a",)), chunk_tokens=12)


@pytest.mark.parametrize(
    ("listed", "match"), [(True, "escape list decompresses to another length"), (False, "escape list")]
)
def test_escapes_that_do_not_match_their_list(small, listed, match):
    blob = escaping(small)
    data, at = cut.segment(blob, 0), cut.SEGMENT_FIELDS
    begin, size = 16 + cut.get(data, at, "class_bytes"), cut.get(data, at, "escape_bytes")
    numbers = segment._list(data[begin : begin + size], 4 * counted_escapes(blob, small), "escape")
    packed = cut.frame(numbers[:-4]) if listed else b""
    other = cut.put(data[:begin] + packed + data[begin + size :], at, "escape_bytes", len(packed))
    damaged = cut.with_segment(blob, 0, bytes(other))
    for backend in ("numba", "triton"):
        with pytest.raises(CorruptError, match=match):
            decode(damaged, 0, small, backend=backend)


@pytest.mark.parametrize(
    ("is_escaping", "limits"), [(False, {"_LONGEST_LANE": 3}), (True, {"_FREE_ESCAPES": 4, "_MOST_UNPACKED": 1})]
)
def test_what_would_hold_a_gpu_up_goes_to_the_processor(small, document, monkeypatch, is_escaping, limits):
    blob = escaping(small) if is_escaping else encode(document, small, 1, chunk_tokens=12)
    for name, value in limits.items():
        monkeypatch.setattr(staging, name, value)
    decoder = BlobDecoder(blob, small, backend="triton")
    assert not decoder.submit([(0, pieces_of(blob, 0, 0), 0)])._flags
    first = decode(blob, 0, small, backend="numba")
    assert torch.equal(decoder.cache.keys[0][:, :12], first.keys[0][:, :12])


@pytest.mark.parametrize("room", [1, 1 << 30])
def test_chunks_before_a_damaged_header_are_complete(small, document, room):
    blob = encode(document, small, 1, chunk_tokens=12)
    data = bytearray(cut.segment(blob, 1))
    cut.put(data, cut.SEGMENT_FIELDS, "words", 60000)
    damaged = cut.with_segment(blob, 1, bytes(cut.put(data, cut.SEGMENT_FIELDS, "words", 60000)))
    decoder = BlobDecoder(damaged, small, backend="triton")
    decoder._lossy.device._room = room
    with pytest.raises(CorruptError, match="do not add up"):
        decoder.submit([(chunk, pieces_of(damaged, chunk, 0), 0) for chunk in range(3)])
    expected = decode(blob, 0, small, backend="numba")
    assert torch.allclose(decoder.cache.keys[1][:, :12], expected.keys[1][:, :12], atol=1e-4)
    assert not decoder.cache.keys[1][:, 12:].any()


def test_a_decoder_serves_inside_and_outside_of_inference_mode(small, document):
    blob = encode(document, small, 1, chunk_tokens=12)
    out = KVCache.zeros(document.meta, document.tokens, dtype=torch.float32)
    decoder = BlobDecoder(blob, small, out=out, backend="triton")
    with torch.inference_mode():
        decoder.decode_chunk(0, pieces_of(blob, 0, 0))
        decoder.decode_chunk(1, pieces_of(blob, 1, 0))
    decoder.decode_chunk(2, pieces_of(blob, 2, 0))
    assert apart(decode(blob, 0, small, backend="numba"), out) < 2e-6


def counted_escapes(blob, profile):
    state = on_processor(blob, profile, 0)
    values = state.values[:, state.classes > 0]
    classes = state.classes[state.classes > 0]
    symbols = np.where(np.abs(values) < 128, values + 128, 0)
    return int((symbols == 0).sum() + (profile.tables.base[classes[None] - 1, symbols] == 0)[symbols > 0].sum())


def test_a_profile_leaves_the_device_when_it_is_dropped(document):
    profile = fitted(words=False)
    blob = encode(document, profile, 1)
    decode(blob, 0, profile, backend="triton")
    loaded = weakref.ref(on_device(profile, torch.device("cpu")))
    assert loaded() is not None
    assert loaded().bytes > profile.groups[0].rows.nbytes
    del profile
    gc.collect()
    assert loaded() is None


def test_layers_are_ready_once_nothing_writes_to_them_any_more():
    """Interleaved and plain rotations of one group take two launches; the first layers come first."""
    profile = fitted(MIXED, MIXED_ROPES, words=False, group_width=30)
    cache = make_cache(6, 4, layers=MIXED, ropes=MIXED_ROPES)
    decoder = BlobDecoder(encode(cache, profile, 1), profile, backend="triton")._lossy.device
    plans, last = decoder._tiles.plans, decoder._last_launch
    assert {plan.stride for plan in plans} == {1, 2}
    assert last[1] == -1  # it has no cache
    for layer in (0, 2, 3):
        writing = {
            number for number, plan in enumerate(plans)
            if any(layer == at for group in plan.groups for _, at in profile.groups[group].planes)
        }  # fmt: skip
        assert last[layer] == max(writing)
    assert last[0] < last[3]


def test_nothing_to_decode_is_nothing_to_wait_for(small, document):
    blob = encode(document, small, 1)
    BlobDecoder(blob, small, backend="triton").submit([]).wait()
