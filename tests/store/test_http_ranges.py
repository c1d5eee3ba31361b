"""Content-Range and Range headers, as tables."""

import pytest

from kvwire.store import range_header, range_told
from kvwire.store.http_ranges import content_range


@pytest.mark.parametrize(
    ("field", "result"),
    [
        ("bytes 0-9/10", (0, 10, 10)),
        ("bytes 5-5/*", (5, 6, None)),
        ("bytes 5-4/10", None),
        ("bytes 5-10/10", None),
        ("bytes */10", None),
        ("bytes 0-9/10 ", None),
        ("", None),
        (None, None),
        ("bytes 0-" + "9" * 30 + "/*", None),
    ],
)
def test_content_range(field, result):
    assert content_range(field) == result


@pytest.mark.parametrize(
    ("field", "start", "end"),
    [
        ("bytes 2-5/10", 2, 6),
        ("bytes 2-5/6", 2, 6),
        ("bytes 2-5/6", 2, 99),
        ("bytes 2-5/6", 2, None),
        ("bytes 2-5/*", 2, 6),
        ("bytes 2-5/*", 2, None),
    ],
)
def test_a_range_as_it_was_asked_for(field, start, end):
    assert range_told(field, start, end) == content_range(field)


@pytest.mark.parametrize(
    ("field", "start", "end"),
    [
        ("bytes 3-5/10", 2, 6),
        ("bytes 2-6/10", 2, 6),
        ("bytes 2-4/10", 2, 6),
        ("bytes 2-5/10", 2, None),
        ("bytes 2-5/10", 2, 99),
        ("bytes 2-5/*", 2, 99),
        ("bytes 2-5", 2, 6),
        (None, 0, 1),
    ],
)
def test_another_range_is_none(field, start, end):
    assert range_told(field, start, end) is None


def test_range_headers():
    assert range_header(0, 1) == "bytes=0-0"
    assert range_header(5, None) == "bytes=5-"
