"""The fast way from caches to segments against the readable one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import CacheMeta, KVCache, Ladder
from kvwire.codec.entropy.tables import CLASSES, CONTEXTS, LARGEST, fit_tables
from kvwire.codec.profile.group import Group
from kvwire.codec.transform.analysis import (
    FIRST_TOKENS,
    centre_planes,
    gather_planes,
    left_out,
    metric_energies,
    sample,
)
from kvwire.codec.transform.levels import ChunkLevels
from kvwire.errors import CacheValueError

from .naive_coding import chunk_levels_naive, energy_of
from .test_place import LAYERS, PLANES, ROPES

COUNTS = np.random.default_rng(0)
EXCESS = np.stack([np.full((CLASSES, 2), 1e6), COUNTS.uniform(0, 5e5, (CLASSES, 2))], axis=2)
TABLES = fit_tables(COUNTS.integers(0, 9, (CLASSES, 256)), COUNTS.integers(0, 99, (CLASSES, CONTEXTS, 3)), EXCESS)
SMALL = settings(max_examples=40)


@SMALL
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 30),
    st.integers(2, 700),
    st.integers(1, 8),
    st.sampled_from([1.0, 300.0, 2e4]),
)
def test_levels_are_those_of_the_naive_twin(seed, tokens, columns, levels, largest):
    rng = np.random.default_rng(seed)
    ladder = Ladder(3.6, tuple("abcdefgh"[:levels]))
    scales = np.exp(rng.uniform(np.log(1e-4), np.log(largest), columns)) * (rng.random(columns) < 0.8)
    coefficients = (rng.laplace(0, 0.2, (tokens, columns)) * scales).astype(np.float32)
    spread = rng.integers(-5, 60, columns)
    chunk = ChunkLevels(coefficients, ladder, spread, TABLES)
    assert [chunk.encode(level) for level in range(levels)] == chunk_levels_naive(coefficients, ladder, spread, TABLES)
    assert chunk.energy == pytest.approx(energy_of(coefficients), rel=1e-12)


@SMALL
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([(1, 4), (2, 4), (3, 5), (6,)]), min_size=1, max_size=6))
def test_the_metric_of_many_planes_is_that_of_each(seed, shapes):
    rng = np.random.default_rng(seed)
    metric = tuple(
        rng.standard_normal((*shape, shape[-1])[: 2 * len(shape) - 1]).astype(np.float32) for shape in shapes
    )
    width = sum(int(np.prod(shape)) for shape in shapes)
    group = Group((), np.zeros(width, np.float32), np.zeros(2, np.int16), metric=metric)
    elements = rng.standard_normal((7, width)).astype(np.float32)
    total, at = np.zeros(7), 0
    for shape, block in zip(shapes, metric, strict=True):
        part = elements[:, at : at + int(np.prod(shape))].astype(np.float64).reshape(7, *shape)
        total += (
            np.einsum("td,d,td->t", part, block, part)
            if block.ndim == 1
            else np.einsum("thd,hde,the->t", part, block, part)
        )
        at += int(np.prod(shape))
    assert metric_energies(torch.from_numpy(elements), group).numpy() == pytest.approx(total, rel=1e-4, abs=1e-3)


@SMALL
@given(st.integers(0, 2**32 - 1))
def test_what_has_no_coefficients_is_told_from_what_has(seed):
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((2, 6, 6))
    metric = (np.eye(6) + 0.1 * factor @ factor.transpose(0, 2, 1)).astype(np.float32)
    rows = torch.from_numpy(rng.standard_normal((4, 12))).bfloat16()  # far from orthonormal
    group = Group((), np.zeros(12, np.float32), np.zeros(4, np.int16), rows=rows, metric=(metric,))
    elements = torch.from_numpy(10 * rng.standard_normal((9, 4))).float() @ rows.float()
    elements += torch.from_numpy(rng.standard_normal((9, 12))).float()
    coefficients = elements @ group.analysis
    rest = (elements - coefficients @ rows.float()).double().view(9, 2, 6)
    naive = torch.einsum("thd,hde,the->t", rest, torch.from_numpy(metric).double(), rest)
    assert left_out(elements, coefficients, group).numpy() == pytest.approx(naive.numpy(), rel=1e-3)


def test_rounded_products_leave_no_more_out_than_they_round():
    """The energy of rounded coefficients differs by more than all that has none."""
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(np.linalg.qr(rng.standard_normal((12, 12)))[0][:10]).bfloat16()
    group = Group((), np.zeros(12, np.float32), np.zeros(10, np.int16), rows=rows, metric=(np.ones(12, np.float32),))
    elements = torch.from_numpy(100 * rng.standard_normal((500, 10))).float() @ rows.float()
    elements += 0.1 * torch.from_numpy(rng.standard_normal((500, 12))).float()
    exact, rounded = elements @ group.analysis, (elements.bfloat16() @ group.halved_analysis).float()
    energy = float(left_out(elements, exact, group).sum())
    assert energy == pytest.approx(500 * 2 * 0.1**2, rel=0.2)
    noise = float((rounded - exact).square().sum())
    assert float(left_out(elements, rounded, group).sum()) == pytest.approx(energy + noise, rel=0.05)


@given(st.integers(0, 600), st.integers(1, 300))
def test_measured_tokens_stand_for_all_and_first_ones_for_themselves(start, tokens):
    index, weights = sample(start, start + tokens)
    assert index.tolist() == sorted(set(index.tolist()))
    assert int(index[0]) >= 0
    assert int(index[-1]) < tokens
    assert float(weights.sum()) == pytest.approx(tokens)
    alone = tokens if tokens < 64 else FIRST_TOKENS if not start else 0
    assert index[:alone].tolist() == list(range(alone))
    assert bool((weights[:alone] == 1).all())


def test_a_chunk_of_zeros_has_no_symbols():
    chunk = ChunkLevels(np.zeros((3, 4), np.float32), Ladder(), np.zeros(4, np.int64), TABLES)
    coded = [chunk.encode(level) for level in range(5)]
    assert coded == chunk_levels_naive(np.zeros((3, 4), np.float32), Ladder(), np.zeros(4, np.int64), TABLES)
    assert all(symbols == 0 for _, symbols, _ in coded)


def drawn(seed, dtype, offset, *, strided):
    """A cache of nine tokens; strided: a slice of a longer one, with heads and tokens in another order in memory."""
    made = torch.Generator().manual_seed(seed)

    def tensor(heads, dim):
        whole = torch.randn(14, heads, dim, generator=made).to(dtype).transpose(0, 1)[:, 2:11]
        return whole if strided else whole.contiguous()

    place = {} if offset is None else {"positions": "on", "offset": offset}
    meta = CacheMeta(layers=LAYERS, ropes=ROPES, dtype=str(dtype).removeprefix("torch."), **place)
    keys = [tensor(spec.kv_heads, spec.key_dim) for spec in LAYERS]
    return KVCache.from_tensors(keys, [tensor(spec.kv_heads, spec.value_dim) for spec in LAYERS], meta)


@SMALL
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([None, 0, 1000]),
    st.booleans(),
    st.integers(1, 4),
)
def test_planes_are_centred_as_they_are_gathered_and_then_centred(seed, dtype, offset, strided, rows):
    cache = drawn(seed, dtype, offset, strided=strided)
    rng = np.random.default_rng(seed)
    expected = torch.from_numpy(rng.standard_normal((rows, cache.meta.elements_per_token))).float()
    of_token = rng.integers(0, rows, 6).astype(np.uint32)
    fast = centre_planes(cache, PLANES, 2, 8, (expected, of_token))
    plain = gather_planes(cache, PLANES, 2, 8) - expected[torch.from_numpy(of_token.astype(np.int64))]
    # Where a product and a sum are one operation, and where not, decides the processor.
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan, float(LARGEST)])
def test_what_exceeds_28_bits_is_refused_and_what_is_not_finite_named(value):
    with pytest.raises(CacheValueError, match="too large"):
        ChunkLevels(np.array([[1.0, -value], [0.0, 1.0]], np.float32), Ladder(1.0, ("x",)), np.zeros(2, int), TABLES)
    if not np.isfinite(value):
        cache = drawn(0, torch.float32, 5, strided=False)
        cache.values[2][1, 4, 3] = value
        nothing = torch.zeros(1, cache.meta.elements_per_token), np.zeros(9, np.uint32)
        with pytest.raises(CacheValueError, match="layer 2's values"):
            centre_planes(cache, PLANES, 0, 9, nothing)
