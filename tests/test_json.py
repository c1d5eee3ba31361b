"""The strict reader of JSON: what it refuses, and that it quotes nothing."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire._json import check_version, json_object, record, strict_json
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError

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
    with pytest.raises(ArgumentError, match="the schema is not valid JSON") as found:
        strict_json(data, "the schema")
    assert "hunter2" not in str(found.value)
    with pytest.raises(CorruptError, match=r"a list is not valid JSON.*; write it again"):
        json_object(data, "a list", 1 << 20, "write it again")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_what_json_writes_is_read(value):
    assert strict_json(json.dumps(value)) == strict_json(json.dumps(value).encode()) == value


def test_an_object_is_asked_for():
    assert json_object(b'{"a": 1}', "it", 8, "") == {"a": 1}
    with pytest.raises(CorruptError, match="longer than 7 bytes: write"):
        json_object(b'{"a": 1}', "it", 7, "write it again")
    with pytest.raises(CorruptError, match="a JSON object, got list: write"):
        json_object(b"[]", "it", 8, "write it again")


@pytest.mark.parametrize(("kind", "fits"), [(int, False), (bool, True), (str, False)])
def test_a_field_is_of_exactly_its_type(kind, fits):
    made = msgspec.defstruct("It", [("a", kind)])
    if fits:
        assert record({"a": True, "unknown": 1}, made, "it", "ask again") == made(True)
        return
    with pytest.raises(CorruptError, match=rf"it is damaged \(Expected `{kind.__name__}`, got `bool`.*: ask again"):
        record({"a": True}, made, "it", "ask again")


def test_a_later_version_is_told_from_damage():
    assert check_version({"version": 1}, 1, "it") == {"version": 1}
    with pytest.raises(FormatVersionError, match="of version 2"):
        check_version({"version": 2}, 1, "it")
    with pytest.raises(CorruptError):
        check_version({"version": True}, 1, "it")
