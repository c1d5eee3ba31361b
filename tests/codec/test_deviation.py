"""Deviations in a blob's header: written, read, left out, and refused where they are impossible."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import decode, encode, inspect
from kvwire.codec.format.pack import Draft, pack_blob
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import BlockDeviation

from . import surgery as cut
from .measures import apart
from .synthetic import make_cache

RECORD = BlockDeviation.of([0.0, 1e-4, 0.5, 3.0], 16)


@given(st.floats(2e-5, 38.0))
def test_a_value_is_kept_to_three_percent(value):
    assert BlockDeviation.of([value], 1).values[0] == pytest.approx(value, rel=0.03)


@given(st.lists(st.floats(0.0, 1e30), max_size=20))
def test_order_is_kept_and_only_zero_is_zero(values):
    kept = BlockDeviation.of(values, 4).values
    assert [value > 0 for value in values] == [value > 0 for value in kept]
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(kept[a] <= kept[b] for a, b in pairwise(order))
    assert BlockDeviation.of(kept, 4).values == kept


def test_a_blob_says_them_and_decodes_as_without():
    cache = make_cache(50, 3)
    told, plain = encode(cache, levels=1, deviation=RECORD), encode(cache, levels=1)
    assert inspect(told).deviation == RECORD
    assert cut.metadata(told)["deviation"] == [16, base64.b64encode(RECORD.codes).decode()]
    assert inspect(plain).deviation is None
    assert "deviation" not in cut.metadata(plain)
    assert not apart(decode(told), decode(plain))
    assert inspect(cut.with_metadata(told, cut.metadata(told) | {"deviation": None})).deviation is None


@pytest.mark.parametrize(
    "to",
    [
        5, [], "ab", [16], [16, "AAAA", 1], [0, "AAAAAA=="], [-1, ""], [16.0, "AAAAAA=="], [True, "AAAAAA=="], [16, 4],
        [16, None], [16, "AAAA"], [16, "?"], [16, "AAAAAAA="], [8, "AAAAAA=="], {"16": "AAAAAA=="},
        [1 << 34, "AQ=="], [10**30, "AQ=="], [False, "AQ=="],
    ],
)  # fmt: skip
def test_impossible_ones_are_refused(to):
    blob = encode(make_cache(50, 3), levels=1, deviation=RECORD)
    with pytest.raises(CorruptError, match="deviation"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"deviation": to}))


def test_what_readers_would_not_take_is_not_written():
    cache, tokens = make_cache(50, 3), 1 << 20
    record = BlockDeviation(1, bytes(tokens))
    with pytest.raises(ArgumentError, match="larger blocks"):
        pack_blob(Draft(cache.meta, None, tokens, 256, (), "", b"", (), deviation=record))
    with pytest.raises(ArgumentError, match="deviations"):
        encode(cache, levels=1, deviation=BlockDeviation(16, b"1"))
