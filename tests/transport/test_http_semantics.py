"""Ranges and preconditions, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.store.backends.http.semantics import HttpAnswer, answer, strong_etag, unsatisfied_size

TAG = "abc"


@pytest.mark.parametrize(
    ("wanted", "result"),
    [
        ("bytes=0-0", HttpAnswer(206, 0, 1)),
        ("bytes=0-9", HttpAnswer(206, 0, 10)),
        ("bytes=0-", HttpAnswer(206, 0, 10)),
        ("bytes=3-5", HttpAnswer(206, 3, 6)),
        ("bytes=3-99", HttpAnswer(206, 3, 10)),
        ("bytes=9-", HttpAnswer(206, 9, 10)),
        ("bytes=-3", HttpAnswer(206, 7, 10)),
        ("bytes=-10", HttpAnswer(206, 0, 10)),
        ("bytes=-99", HttpAnswer(206, 0, 10)),
        ("bytes= 3-5 ", HttpAnswer(206, 3, 6)),
        ("BYTES=3-5", HttpAnswer(206, 3, 6)),
        ("bytes=000003-00000000000000000000005", HttpAnswer(206, 3, 6)),
        ("bytes=3-" + "9" * 5000, HttpAnswer(206, 3, 10)),
        ("bytes=10-", HttpAnswer(416)),
        ("bytes=10-20", HttpAnswer(416)),
        ("bytes=-0", HttpAnswer(416)),
        ("bytes=" + "9" * 5000 + "-", HttpAnswer(416)),
        # Ignored, hence the whole: several, malformed, backwards, of another unit.
        ("bytes=0-1,4-5", HttpAnswer(200, 0, 10)),
        ("bytes=5-3", HttpAnswer(200, 0, 10)),
        ("bytes=", HttpAnswer(200, 0, 10)),
        ("bytes=-", HttpAnswer(200, 0, 10)),
        ("bytes=a-b", HttpAnswer(200, 0, 10)),
        ("bytes=+1-2", HttpAnswer(200, 0, 10)),
        ("bytes=1 - 2", HttpAnswer(200, 0, 10)),
        ("bytes=\u0661-2", HttpAnswer(200, 0, 10)),
        ("items=0-1", HttpAnswer(200, 0, 10)),
        ("nonsense", HttpAnswer(200, 0, 10)),
        ("", HttpAnswer(200, 0, 10)),
    ],
)
def test_ranges(wanted, result):
    assert answer("GET", {"Range": wanted}, 10, TAG) == result


@pytest.mark.parametrize(
    ("wanted", "result"), [("bytes=0-", HttpAnswer(416)), ("bytes=0-0", HttpAnswer(416)), ("bytes=-5", HttpAnswer(200))]
)
def test_ranges_of_an_empty_object(wanted, result):
    assert answer("GET", {"Range": wanted}, 0, TAG) == result


def test_head_ignores_ranges():
    assert answer("HEAD", {"Range": "bytes=0-1"}, 10, TAG) == HttpAnswer(200, 0, 10)


PART, WHOLE = HttpAnswer(206, 0, 1), HttpAnswer(200, 0, 10)


@pytest.mark.parametrize(
    ("headers", "result"),
    [
        *(({"If-Match": '"abc"'}, PART), ({"If-Match": '"x", "abc"'}, PART), ({"If-Match": "*"}, PART)),
        *(({"If-Match": '"x"'}, HttpAnswer(412)), ({"If-Match": 'W/"abc"'}, HttpAnswer(412))),
        *(({"If-Match": "abc"}, HttpAnswer(412)), ({"If-Match": ""}, HttpAnswer(412))),
        *(({"If-None-Match": '"abc"'}, HttpAnswer(304)), ({"If-None-Match": 'W/"abc"'}, HttpAnswer(304))),
        *(({"If-None-Match": '"x",W/"abc"'}, HttpAnswer(304)), ({"If-None-Match": "*"}, HttpAnswer(304))),
        *(({"If-None-Match": '"x"'}, PART), ({"If-Match": '"x"', "If-None-Match": '"abc"'}, HttpAnswer(412))),
        *(({"If-Match": '"abc"', "If-None-Match": '"abc"'}, HttpAnswer(304)), ({"If-Range": '"abc"'}, PART)),
        *(({"If-Range": '"x"'}, WHOLE), ({"If-Range": 'W/"abc"'}, WHOLE)),
        ({"If-Range": "Wed, 21 Oct 2015 07:28:00 GMT"}, WHOLE),
    ],
)
def test_preconditions_come_before_ranges(headers, result):
    assert answer("GET", {"Range": "bytes=0-0"} | headers, 10, TAG) == result


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_any_plain_range_is_a_slice_or_unsatisfiable(size, start, length):
    result = answer("GET", {"Range": f"bytes={start}-{start + length}"}, size, TAG)
    data = bytes(range(size))
    wanted = data[start : start + length + 1]
    assert data[result.start : result.end] == wanted
    assert result.status == (206 if wanted else 416)


@given(st.text(max_size=40))
def test_any_text_gets_an_answer(text):
    for name in ("Range", "If-Range", "If-Match", "If-None-Match"):
        assert answer("GET", {name: text}, 10, TAG).status in (200, 206, 304, 412, 416)


def test_small_fields():
    assert unsatisfied_size("bytes */10") == 10
    assert unsatisfied_size("bytes 0-1/2") is None
    assert strong_etag('"x"') == '"x"'
    assert [strong_etag(bad) for bad in ('W/"x"', "x", "", None, '"a"b"')] == [None] * 5
