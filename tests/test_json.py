"""The strict reader of JSON: what it refuses, and that it quotes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire._json import json_field, json_object, strict_json
from kvwire.errors import ArgumentError, CorruptError

BAD = {
    "twice": b'{"a": 1, "a": 1}',
    "twice, deep": b'[{"b": {"a": 1, "a": 2}}]',
    "NaN": b"[NaN]",
    "Infinity": b'{"a": -Infinity}',
    "overflow": b"[1e999]",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "long number": b"9" * 100_000,
    "no UTF-8": b'"\xff"',
    "byte-order mark": b"\xef\xbb\xbf{}",
    "nothing": b"",
    "secret": b'{"secret": hunter2}',
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_is_no_strict_json_is_refused_and_not_quoted(data):
    with pytest.raises(ArgumentError) as found:
        strict_json(data)
    assert "hunter2" not in str(found.value)
    with pytest.raises(CorruptError, match="a list is not valid JSON"):
        json_object(data, "a list", 1 << 20)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_what_json_writes_is_read(value):
    assert strict_json(json.dumps(value)) == strict_json(json.dumps(value).encode()) == value


def test_an_object_is_asked_for():
    assert json_object(b'{"a": 1}', "it", 8) == {"a": 1}
    with pytest.raises(CorruptError, match="longer than 7 bytes"):
        json_object(b'{"a": 1}', "it", 7)
    with pytest.raises(CorruptError, match="a JSON object, got list"):
        json_object(b"[]", "it", 8)


@pytest.mark.parametrize(("kind", "fits"), [(int, False), (bool, True), (str, False)])
def test_a_field_is_of_exactly_its_type(kind, fits):
    fields = {"a": True}
    if fits:
        assert json_field(fields, "a", kind, "it") is True
        return
    with pytest.raises(CorruptError, match=f"it's a must be of type {kind.__name__}, got bool"):
        json_field(fields, "a", kind, "it")
