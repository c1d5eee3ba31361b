"""Frequency tables by class."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec.entropy.rans import decode_base, encode_base
from kvwire.codec.entropy.tables import (
    ALPHABET,
    CLASSES,
    CONTEXTS,
    ESCAPE,
    FINEST_SCALE,
    class_of,
    clip_class,
    fit_tables,
)
from kvwire.errors import CorruptError

PURE = fit_tables(np.zeros((CLASSES, 256)), np.zeros((CLASSES, CONTEXTS, 3)))


def assert_decodable(tables):
    tables.check()
    assert (tables.base.sum(1) == 4096).all()
    assert (tables.ternary.sum(2) == 4096).all()
    assert tables.base[:, ESCAPE].all()
    assert tables.ternary.all()


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0, 1e3, 1e12]), st.floats(0, 1))
def test_any_counts_make_tables_that_decode(seed, size, share):
    rng = np.random.default_rng(seed)
    base = rng.exponential(size, (CLASSES, 256)) * (rng.random((CLASSES, 256)) < share)
    assert_decodable(fit_tables(base, rng.exponential(size, (CLASSES, CONTEXTS, 3))))


def test_counted_symbols_always_have_a_place():
    counts = np.zeros((CLASSES, 256))
    counts[0, :] = 1.0
    counts[0, 128] = 1e9
    assert fit_tables(counts, np.zeros((CLASSES, CONTEXTS, 3))).base[0].all()


def test_all_bytes_that_a_table_holds_come_back():
    for cls in (1, 20, CLASSES):
        held = np.flatnonzero(PURE.base[cls - 1]).astype(np.uint8)
        assert ESCAPE in held
        symbols = np.tile(held, 3)[:, None]
        coded = encode_base(symbols, np.array([cls]), PURE, 1)
        assert np.array_equal(decode_base(coded, np.array([cls]), PURE, len(symbols)), symbols)


def test_lookups_and_sizes_agree_with_frequencies_and_points():
    lookup = PURE.lookup.reshape(CLASSES, 4096)
    for row in (0, 17, CLASSES - 1):
        assert np.array_equal(np.bincount(lookup[row] >> 24, minlength=ALPHABET), PURE.base[row])
    assert (np.diff(PURE.base[:, 128].astype(int)) <= 0).all()  # wider classes have wider tables
    assert PURE.sizes[0].tolist() == [0, 1, 2]
    assert np.array_equal(PURE.sizes[1:, 0], np.zeros(CLASSES))
    np.testing.assert_allclose(PURE.sizes[1:, 1:], np.array([1, 2]) - PURE.points / 65536, rtol=1e-6)


def test_classes_follow_the_grid():
    scales = FINEST_SCALE * 3.0 ** (np.arange(-3, 50) / 6)
    assert np.array_equal(class_of(scales), np.arange(-2, 51))
    assert np.array_equal(class_of(scales * 3), class_of(scales) + 6)
    assert clip_class(class_of(np.array([0.0, 1e9]))).tolist() == [1, CLASSES]


@pytest.mark.parametrize("damage", ["sum", "escape", "ternary", "shape"])
def test_damaged_tables_are_refused(damage):
    base, ternary = PURE.base.copy(), PURE.ternary.copy()
    if damage == "sum":
        base[3, 128] += 1
    elif damage == "escape":
        base[3, 128] += base[3, ESCAPE]
        base[3, ESCAPE] = 0
    elif damage == "ternary":
        ternary[2, 1] = (4096, 0, 0)
    else:
        base = base[:-1]
    with pytest.raises(CorruptError, match="tables"):
        dataclasses.replace(PURE, base=base, ternary=ternary).check()


def test_points_lie_where_values_crowd():
    """Uncounted, a Laplacian's: near half a step where it falls steeply, nearly none where it is flat; then counted."""
    assert (np.diff(PURE.points[:, 0].astype(int)) <= 0).all()
    assert (PURE.points[:, 0] == PURE.points[:, 1]).all()
    assert PURE.points[0, 0] > 0.45 * 65536
    assert PURE.points[-1, 0] < 0.01 * 65536
    excess = np.zeros((CLASSES, 2, 2))
    excess[4, 0], excess[4, 1] = (1e9, 0.3e9), (1e9, -0.2e9)
    fitted = fit_tables(np.zeros((CLASSES, 256)), np.zeros((CLASSES, CONTEXTS, 3)), excess)
    assert fitted.points[4].tolist() == [round(0.3 * 65536), 0]
    assert np.array_equal(np.delete(fitted.points, 4, 0), np.delete(PURE.points, 4, 0))


def test_points_are_the_means_of_laplacian_values():
    """Against sums over a fine grid: the density's mean in the bins of 1 and 2."""
    grid = np.linspace(0.5, 1.5, 200_001)
    for row in (0, 11, 23, CLASSES - 1):
        weight = np.exp(-np.sqrt(2) / (FINEST_SCALE * 3.0 ** (row / 6)) * (grid - 0.5))
        assert PURE.points[row, 0] / 65536 == pytest.approx(1 - (grid * weight).sum() / weight.sum(), abs=2e-5)
