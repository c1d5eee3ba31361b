"""Content-Range and Range headers, as tables."""

import pytest

from kvwire.store import range_header, range_told
from kvwire.store.http_clients import content_range


@pytest.mark.parametrize(
    ("field", "result"),
    [
        *(("bytes 0-9/10", (0, 10, 10)), ("bytes 5-5/*", (5, 6, None)), ("bytes 5-4/10", None)),
        *(("bytes 5-10/10", None), ("bytes */10", None), ("bytes 0-9/10 ", None), ("", None), (None, None)),
        ("bytes 0-" + "9" * 30 + "/*", None),
    ],
)
def test_content_range(field, result):
    assert content_range(field) == result


SAME = [("10", 2, 6), ("6", 2, 6), ("6", 2, 99), ("6", 2, None), ("*", 2, 6), ("*", 2, None)]


@pytest.mark.parametrize(("size", "start", "end"), SAME)
def test_a_range_as_it_was_asked_for(size, start, end):
    field = f"bytes 2-5/{size}"
    assert range_told(field, start, end) == content_range(field)


@pytest.mark.parametrize(
    ("field", "start", "end"),
    [
        *((f"bytes {told}/10", 2, 6) for told in ("3-5", "2-6", "2-4")),
        *(("bytes 2-5/10", 2, None), ("bytes 2-5/10", 2, 99), ("bytes 2-5/*", 2, 99), ("bytes 2-5", 2, 6)),
        (None, 0, 1),
    ],
)
def test_another_range_is_none(field, start, end):
    assert range_told(field, start, end) is None


def test_range_headers():
    assert range_header(0, 1) == "bytes=0-0"
    assert range_header(5, None) == "bytes=5-"
