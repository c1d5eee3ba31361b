"""The lane coder: the numba kernels write and read exactly what the naive twin does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec.entropy import kernels
from kvwire.codec.entropy.rans import (
    MAX_LANES,
    Lanes,
    decode_base,
    decode_ternary,
    encode_base,
    lanes_for,
)
from kvwire.codec.entropy.tables import CLASSES, CONTEXTS, fit_tables
from kvwire.errors import CorruptError

from .measures import drawn
from .naive_coding import decode_lanes, encode_lanes, encode_ternary

TABLES = fit_tables(np.zeros((CLASSES, 256)), np.zeros((CLASSES, CONTEXTS, 3)))
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(1, 64), st.integers(0, 2**32 - 1))
# The naive twin takes microseconds a symbol: large shapes come as often as small ones, but not many of either.
FEW = settings(max_examples=12)


def naive_words(words):
    return np.array([word for lane in words for word in lane], np.uint16)


def assert_same_stream(lanes, states, words):
    assert lanes.states.tolist() == states
    assert lanes.counts.tolist() == [len(lane) for lane in words]
    assert np.array_equal(lanes.words, naive_words(words))


@given(st.integers(1, 9), st.integers(0, 40), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_few_lanes_are_decoded_four_at_a_time(tokens, columns, lanes, seed):
    rng = np.random.default_rng(seed)
    classes = rng.integers(1, CLASSES + 1, columns)
    symbols = drawn(rng, np.broadcast_to(TABLES.base[classes - 1], (tokens, columns, 256)))
    coded = encode_base(symbols, classes, TABLES, lanes)
    assert np.array_equal(decode_base(coded, classes, TABLES, tokens), symbols)
    damaged = Lanes(coded.states ^ np.uint32(4096), coded.counts, coded.words)
    if columns >= lanes:
        with pytest.raises(CorruptError, match="does not end"):
            decode_base(damaged, classes, TABLES, tokens)


@FEW
@given(SHAPES)
def test_base_symbols_are_coded_as_the_naive_twin_codes_them(shape):
    tokens, columns, lanes, seed = shape
    rng = np.random.default_rng(seed)
    classes = rng.integers(1, CLASSES + 1, columns)
    symbols = drawn(rng, np.broadcast_to(TABLES.base[classes - 1], (tokens, columns, 256)))
    index = np.broadcast_to(classes - 1, (tokens, columns))
    states, words = encode_lanes(symbols, index, TABLES.base, lanes)
    fast = encode_base(symbols, classes, TABLES, lanes)
    assert_same_stream(fast, states, words)
    assert np.array_equal(decode_base(fast, classes, TABLES, tokens), symbols)
    assert np.array_equal(decode_lanes(states, words, index, TABLES.base), symbols)


@FEW
@given(SHAPES)
def test_refinements_are_coded_as_the_naive_twin_codes_them(shape):
    tokens, columns, lanes, seed = shape
    rng = np.random.default_rng(seed)
    classes = rng.integers(1, CLASSES + 1, columns)
    contexts = rng.integers(0, CONTEXTS, (tokens, columns)).astype(np.uint8)
    symbols = drawn(rng, TABLES.ternary[classes[None, :] - 1, contexts])
    index = (classes[None, :] - 1) * CONTEXTS + contexts
    states, words = encode_lanes(symbols, index, TABLES.ternary.reshape(-1, 3), lanes)
    fast = encode_ternary(symbols, contexts, classes, TABLES, lanes)
    assert_same_stream(fast, states, words)
    assert np.array_equal(decode_ternary(fast, contexts, classes, TABLES), symbols)
    assert np.array_equal(decode_lanes(states, words, index, TABLES.ternary.reshape(-1, 3)), symbols)


def test_streams_are_as_long_as_their_information():
    rng = np.random.default_rng(1)
    classes = rng.integers(1, CLASSES + 1, 64)
    symbols = drawn(rng, np.broadcast_to(TABLES.base[classes - 1], (1024, 64, 256)))
    bits = -np.log2(TABLES.base[classes[None, :] - 1, symbols] / 4096).sum()
    coded = encode_base(symbols, classes, TABLES, 8)
    assert bits - 16 * 8 <= 16 * len(coded.words) <= 1.001 * bits


@pytest.mark.parametrize("lanes", [1, 5])
def test_no_columns_make_no_words(lanes):
    none = np.zeros((7, 0), np.uint8)
    fast = encode_base(none, np.zeros(0, np.int64), TABLES, lanes)
    assert fast.words.size == 0
    assert decode_base(fast, np.zeros(0, np.int64), TABLES, 7).shape == (7, 0)
    fast = encode_ternary(none, none, np.zeros(0, np.int64), TABLES, lanes)
    assert decode_ternary(fast, none, np.zeros(0, np.int64), TABLES).shape == (7, 0)


@FEW
@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_a_damaged_stream_is_refused_or_decodes_to_something(seed, words):
    """Random states and words end nowhere; without the check they give symbols, never a read past the words."""
    rng = np.random.default_rng(seed)
    states = rng.integers(0, 2**32, 3).astype(np.uint32)
    counts = np.array([words, 0, 0], np.uint16)
    lanes = Lanes(states, counts, rng.integers(0, 2**16, words).astype(np.uint16))
    classes = rng.integers(1, CLASSES + 1, 50)
    with pytest.raises(CorruptError, match="does not end"):
        decode_base(lanes, classes, TABLES, 60)
    assert decode_base(lanes, classes, TABLES, 60, check=False).shape == (60, 50)
    contexts = rng.integers(0, CONTEXTS, (60, 50)).astype(np.uint8)
    assert decode_ternary(lanes, contexts, classes, TABLES, check=False).max() <= 2


def test_the_naive_twin_refuses_damage():
    symbols, index = np.full((4, 4), 128, np.uint8), np.zeros((4, 4), np.int64)
    states, words = encode_lanes(symbols, index, TABLES.base, 2)
    with pytest.raises(CorruptError):
        decode_lanes([states[0] ^ 1, states[1]], words, index, TABLES.base)


@pytest.mark.parametrize(("symbols", "lanes"), [(0, 1), (1, 1), (8192 * 3, 4), (2**30, MAX_LANES)])
def test_lane_counts_are_powers_of_two_and_bounded(symbols, lanes):
    assert lanes_for(symbols) == lanes


def test_kernels_are_compiled_without_aliases():
    """The vector code of the lane loops hangs on it."""
    from numba.core.compiler import Flags

    for kernel in (kernels.decode_lookup, kernels.decode_ternary):
        assert kernel._compiler._customize_flags(Flags()).noalias
