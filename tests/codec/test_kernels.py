"""Small kernels against what numpy says in one line."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.codec import _kernels
from kvwire.codec.tables import CLASSES, CONTEXTS


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
    _kernels.contexts_of(values, columns, out)
    assert np.array_equal(out, np.minimum(np.abs(values[:, columns]), 2))


def test_contexts_of_the_most_negative_number_stay_in_range():
    out = np.full((1, 1), 77, np.uint8)
    _kernels.contexts_of(np.full((1, 1), -(2**31), np.int32), np.zeros(1, np.uint32), out)
    assert out[0, 0] <= 2


def test_refine(values, columns):
    symbols = symbols_for(values, columns, 2)
    expected = values.copy()
    expected[:, columns] = 3 * values[:, columns] + np.where(values[:, columns] < 0, -1, 1) * (symbols.astype(int) - 1)
    _kernels.refine(values, columns, symbols)
    assert np.array_equal(values, expected)


def test_place(values, columns):
    symbols = symbols_for(values, columns, 255)
    expected = values.copy()
    expected[:, columns] = symbols.astype(int) - 128
    _kernels.place(values, columns, symbols)
    assert np.array_equal(values, expected)


def test_dequantise(values):
    out = np.full(values.shape, np.nan, np.float32)
    _kernels.dequantise(values, 0.3, out)
    assert np.array_equal(out, (values * 0.3).astype(np.float32))


def test_counts(values):
    classes = (np.arange(values.shape[1]) % (CLASSES + 1)).astype(np.int32)
    used = classes > 0
    base, expected = np.zeros((CLASSES, 256), np.int64), np.zeros((CLASSES, 256), np.int64)
    bytes_ = np.where(np.abs(values) < 128, values + 128, 0)
    np.add.at(expected, ((classes - 1)[used], bytes_[:, used]), 1)
    _kernels.count_base(values, classes, base)
    assert np.array_equal(base, expected)

    symbols = symbols_for(values, classes, 2)
    ternary, expected = np.zeros((CLASSES, CONTEXTS, 3), np.int64), np.zeros((CLASSES, CONTEXTS, 3), np.int64)
    context = np.minimum(np.abs(values), 2)
    np.add.at(expected, ((classes - 1)[used], context[:, used], symbols[:, used]), 1)
    _kernels.count_ternary(values, symbols, classes, ternary)
    assert np.array_equal(ternary, expected)
