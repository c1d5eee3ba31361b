"""Small kernels against what numpy says in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvwire.codec.entropy import kernels, value_kernels
from kvwire.codec.entropy.tables import CLASSES, CONTEXTS, POINTS

from .naive_coding import squared_error


@pytest.fixture(params=[(1, 1), (7, 30), (40, 3), (5, 0)], ids=str)
def values(request):
    return np.random.default_rng(3).integers(-400, 400, request.param).astype(np.int32)


@pytest.fixture
def columns(values):
    return np.arange(0, values.shape[1], 2, dtype=np.uint32)


def symbols_for(values, columns, largest):
    return np.random.default_rng(4).integers(0, largest + 1, (len(values), len(columns))).astype(np.uint8)


def test_contexts(values, columns):
    out = np.full((len(values), len(columns)), 77, np.uint8)
    kernels.contexts_of(values, columns, out)
    assert np.array_equal(out, np.minimum(np.abs(values[:, columns]), 2))
    lowest = np.full((1, 1), 77, np.uint8)
    kernels.contexts_of(np.full((1, 1), -(2**31), np.int32), np.zeros(1, np.uint32), lowest)
    assert lowest[0, 0] <= 2


@pytest.mark.parametrize(("kernel", "largest"), [(kernels.refine, 2), (kernels.place, 255)])
def test_symbols_are_taken_in(values, columns, kernel, largest):
    symbols, expected = symbols_for(values, columns, largest), values.copy()
    placed = symbols.astype(int) - 128
    refined = 3 * values[:, columns] + np.where(values[:, columns] < 0, -1, 1) * (symbols.astype(int) - 1)
    expected[:, columns] = refined if kernel is kernels.refine else placed
    kernel(values, columns, symbols)
    assert np.array_equal(values, expected)


def sizes_for(values):
    """Sizes of values 0, 1 and 2 of each column, as points make them."""
    rng = np.random.default_rng(5)
    return (np.arange(3)[:, None] - rng.uniform(0, 0.5, (3, values.shape[1])) * [[0], [1], [1]]).astype(np.float32)


def dequantised(values, sizes, step):
    """One by one."""
    out = np.empty(values.shape, np.float32)
    for (token, column), value in np.ndenumerate(values):
        size = sizes[abs(value), column] if abs(value) <= 2 else np.float32(abs(value))
        out[token, column] = np.float32(step) * np.float32(np.copysign(size, value))
    return out


@pytest.fixture
def small(values):
    """Values of which many have points of their own."""
    return np.where(values > 0, values % 7 - 3, values).astype(np.int32)


def test_dequantise(small):
    out, sizes = np.full(small.shape, np.nan, np.float32), sizes_for(small)
    value_kernels.dequantise(small, sizes, 0.3, out)
    assert np.array_equal(out, dequantised(small, sizes, 0.3))


def test_squared_error(small):
    sizes = sizes_for(small)
    # The encoder's values have their coefficients' signs; a zero has none.
    noise = np.random.default_rng(6).uniform(-0.15, 0.15, small.shape)
    exact = np.where(small == 0, noise, np.copysign(abs(0.3 * small + noise), small)).astype(np.float32)
    expected = np.square(exact.astype(np.float64) - dequantised(small, sizes, 0.3)).sum()
    assert squared_error(exact, small, sizes, 0.3) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("largest", [1, 3, 7, 8, 65536, 2**28 - 1])
def test_to_bytes(largest):
    values = np.random.default_rng(largest).integers(-largest, largest + 1, (50, 9)).astype(np.int32)
    values[0, 0], sizes = -largest, sizes_for(values)
    out = np.empty(values.shape, np.int8)
    value_kernels.to_bytes(values, sizes, 7, 16, out)
    sizes_met = dequantised(np.where(abs(values) <= 7, values, 0), sizes, 1.0)
    assert np.array_equal(out, np.copysign(np.floor(abs(sizes_met) * 16 + 0.5), sizes_met))


def test_products_are_added_by_their_steps():
    rng = np.random.default_rng(3)
    product, steps = rng.integers(-(2**24), 2**24, (7, 33)).astype(np.int32), rng.random(33).astype(np.float32)
    out = rng.standard_normal((7, 33)).astype(np.float32)
    expected = out + steps * product.astype(np.float32)
    value_kernels.add_product(product, steps, out)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("dense", [0, 4, 9])
@pytest.mark.parametrize("expand", [False, True], ids=["float32 rows", "bfloat16 rows"])
def test_listed_values_add_their_rows(dense, expand):
    rng = np.random.default_rng(dense)
    values = (rng.integers(-300, 301, (50, 9)) * (rng.random((50, 9)) < 0.2)).astype(np.int32)
    rows, sizes = torch.from_numpy(rng.standard_normal((9, 40))).bfloat16(), sizes_for(values)
    nonzero, beyond = np.empty(9, np.uint32), np.empty(9, np.uint32)
    value_kernels.count_values(values, 256, nonzero, beyond)
    assert nonzero.tolist() == (values != 0).sum(0).tolist()
    assert beyond.tolist() == (abs(values) > 256).sum(0).tolist()
    counts = np.concatenate((beyond[:dense], nonzero[dense:])).astype(np.int64)
    ends = np.cumsum(counts) - counts
    tokens, listed = np.empty(counts.sum(), np.uint32), np.empty(counts.sum(), np.float32)
    value_kernels.list_values(values, sizes, dense, 256, ends, tokens, listed)
    assert np.array_equal(ends, np.cumsum(counts))
    out = rng.standard_normal((50, 25)).astype(np.float32)
    within = np.where((abs(values) <= 256) & (np.arange(9) < dense), 0, values)
    expected = out + dequantised(within, sizes, 1.0) @ rows.float().numpy()[:, 10:35]
    given = rows.view(torch.uint16).numpy() if expand else rows.float().numpy()
    value_kernels.add_listed(ends, tokens, listed, given, expand, 10, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-3)


def test_points_are_counted(small):
    classes = (np.arange(small.shape[1]) % 3).astype(np.int32) * 20
    exact = (0.3 * small + np.random.default_rng(6).uniform(-0.15, 0.15, small.shape)).astype(np.float32)
    counts, expected = np.zeros((CLASSES, POINTS, 2)), np.zeros((CLASSES, POINTS, 2))
    for (token, column), value in np.ndenumerate(small):
        if classes[column] and 1 <= abs(value) <= 2:
            short = abs(value) - abs(float(exact[token, column])) / 0.3
            expected[classes[column] - 1, abs(value) - 1] += (1, short)
    kernels.count_points(exact, small, classes, 0.3, counts)
    np.testing.assert_allclose(counts, expected, atol=1e-5)


def test_counts(values):
    classes = (np.arange(values.shape[1]) % (CLASSES + 1)).astype(np.int32)
    used = classes > 0
    base, expected = np.zeros((CLASSES, 256), np.int64), np.zeros((CLASSES, 256), np.int64)
    bytes_ = np.where(np.abs(values) < 128, values + 128, 0)
    np.add.at(expected, ((classes - 1)[used], bytes_[:, used]), 1)
    kernels.count_base(values, classes, base)
    assert np.array_equal(base, expected)

    symbols = symbols_for(values, classes, 2)
    ternary, expected = np.zeros((CLASSES, CONTEXTS, 3), np.int64), np.zeros((CLASSES, CONTEXTS, 3), np.int64)
    context = np.minimum(np.abs(values), 2)
    np.add.at(expected, ((classes - 1)[used], context[:, used], symbols[:, used]), 1)
    kernels.count_ternary(values, symbols, classes, ternary)
    assert np.array_equal(ternary, expected)
