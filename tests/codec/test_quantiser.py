"""The layered quantiser and the ladder of levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import Ladder
from kvwire.codec.entropy.tables import LARGEST
from kvwire.codec.transform.levels import ladder_for, quantise, split_levels
from kvwire.errors import ArgumentError, CacheValueError

from .naive_coding import split_levels_naive


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from([3, 1000, LARGEST - 1]))
def test_levels_split_as_the_naive_twin_splits_them(seed, levels, largest):
    finest = np.random.default_rng(seed).integers(-largest, largest + 1, (5, 9)).astype(np.int32)
    values, symbols = split_levels(finest, levels)
    naive_values, naive_symbols = split_levels_naive(finest, levels)
    assert len(values) == levels
    assert len(symbols) == levels - 1
    assert all(np.array_equal(a, b) for a, b in zip(values, naive_values, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(symbols, naive_symbols, strict=True))


def test_quantising_rounds_to_the_nearest_step():
    values = np.array([[0.0, 0.26, -0.26, 1.0, -7.4]], np.float32)
    assert quantise(values, 0.5).tolist() == [[0, 1, -1, 2, -15]]
    assert quantise(np.zeros((0, 3), np.float32), 0.5).shape == (0, 3)


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan, float(LARGEST)])
def test_what_exceeds_28_bits_is_refused(value):
    with pytest.raises(CacheValueError, match="too large"):
        quantise(np.array([[1.0, -value]], np.float32), 1.0)


def test_a_ladder_divides_its_step_by_three():
    ladder = Ladder(9.0, ("a", "b", "c"))
    assert ladder.steps == (9.0, 3.0, 1.0)
    assert ladder.shifts == (12, 6, 0)
    for step in (0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30):
        with pytest.raises(ArgumentError):
            Ladder(step)
    for names in ((), tuple("abcdefghi")):
        with pytest.raises(ArgumentError):
            Ladder(1.0, names)


def test_levels_may_be_counted():
    assert ladder_for(None) == Ladder()
    assert ladder_for(2).names == ("coarse", "standard")
    assert ladder_for(7).names[-2:] == ("level5", "level6")
    assert ladder_for(Ladder(1.0, ("x",))).names == ("x",)
    for wrong in (0, 9):
        with pytest.raises(ArgumentError, match="1 to 8"):
            ladder_for(wrong)
