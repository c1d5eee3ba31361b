from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller.simulator import parse_log_json, parse_mbit_lines
from kvwire.errors import CorruptError

ENTRY = {"duration_ms": 500, "bandwidth_kbps": 8000, "latency_ms": 20}


def test_lines_of_megabits_hold_until_the_next_line():
    trace = parse_mbit_lines("5.0 8\n\n6.0 0\n6.5\t16\n")
    assert trace.times == (0.0, 1.0, 1.5)
    assert trace.rates == (1e6, 0.0, 2e6)
    assert trace.period_s == 2.0  # the last line lasts as long as the one before


def test_one_line_is_a_constant_link():
    assert parse_mbit_lines("0 8").time_to(5e6, 0.5) == pytest.approx(5.5)


def test_entries_of_a_log_follow_each_other():
    trace = parse_log_json(json.dumps([ENTRY, {**ENTRY, "bandwidth_kbps": 0}]))
    assert trace.times == (0.0, 0.5)
    assert trace.rates == (1e6, 0.0)
    assert trace.period_s == 1.0


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "no line"),
        ("0 1\n1\n", "line 2"),
        ("0 1\n1 2 3\n", "line 2"),
        ("0 1\n\n0 2\n", "line 3"),
        ("0 1\n2 nan\n", "line 2"),
        ("0 inf", "line 1"),
        ("0 -1", "line 1"),
        ("-1 1", "line 1"),
        ("0 x", "line 1"),
        ("0 1e308\n1 1", "go together"),
        ("0 1\n" * 10_000_000, "characters"),
    ],
)
def test_broken_lines_are_named(text, where):
    with pytest.raises(CorruptError, match=where):
        parse_mbit_lines(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "not valid JSON at line 1"),
        ("[" * 100_000, "deeply nested"),
        ("[]", "not empty"),
        ("{}", "a list"),
        ("[1]", "entry 1"),
        (json.dumps([ENTRY, {"duration_ms": 1}]), "entry 2"),
        (json.dumps([{**ENTRY, "more": 1}]), "entry 1"),
        (json.dumps([{**ENTRY, "duration_ms": 0}]), "entry 1"),
        (json.dumps([{**ENTRY, "bandwidth_kbps": True}]), "entry 1"),
        (json.dumps([{**ENTRY, "bandwidth_kbps": -1}]), "entry 1"),
        (json.dumps([{**ENTRY, "latency_ms": "5"}]), "entry 1"),
        (json.dumps([{**ENTRY, "latency_ms": float("nan")}]), "finite numbers"),
        ('[{"duration_ms": 500, "duration_ms": 5, "bandwidth_kbps": 1, "latency_ms": 1}]', "no repeated names"),
        (json.dumps([ENTRY]).replace("8000", "1e999"), "finite numbers"),
        (json.dumps([{**ENTRY, "bandwidth_kbps": 10**400}]), "entry 1"),
        (json.dumps([{**ENTRY, "bandwidth_kbps": 10**308}]), "entry 1|go together"),
        (json.dumps([{**ENTRY, "bandwidth_kbps": 0}] * 200_001), "more than"),
    ],
)
def test_broken_logs_are_named(text, where):
    with pytest.raises(CorruptError, match=where):
        parse_log_json(text)


@given(st.text(), st.sampled_from([parse_mbit_lines, parse_log_json]))
def test_any_text_is_read_or_refused(text, parse):
    with suppress(CorruptError):
        assert parse(text).period_s > 0


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.just(ENTRY), st.lists, max_leaves=8))
def test_any_json_is_read_or_refused(value):
    with suppress(CorruptError):
        assert parse_log_json(json.dumps(value)).period_s > 0


def test_every_recorded_link_is_read_and_scaled(shared_dir):
    lines = [parse_mbit_lines(path.read_text()) for path in sorted((shared_dir / "traces").glob("*/*.txt"))]
    logs = [parse_log_json(path.read_text()) for path in sorted((shared_dir / "traces").glob("*/*.json"))]
    if not (lines and logs):
        pytest.skip("needs the recorded traces")
    for trace in [*lines, *logs]:
        assert 1e3 < trace.mean_bytes_s < 1e8
        fast = trace.scaled(5e9).stretched(0.01)
        assert fast.bytes_between(0, fast.period_s) == pytest.approx(5e9 * fast.period_s)
