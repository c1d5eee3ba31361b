"""The planner of ranges and the cutter of answers, against naive ones."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError
from kvwire.transport import Range, WantedRange, coalesce
from kvwire.transport.fetch.ranges import Cutter


def naive(pieces, gap_bytes, max_bytes):
    """Longest legal prefix, again and again, each candidate judged as a whole."""

    def legal(run):
        pairs = list(pairwise(run))
        span = run[-1].offset + run[-1].length - run[0].offset
        near = all(a.offset + a.length <= b.offset <= a.offset + a.length + gap_bytes for a, b in pairs)
        return len(run) == 1 or (near and span <= max_bytes)

    ranges = []
    while pieces:
        count = 1
        while count < len(pieces) and legal(pieces[: count + 1]):
            count += 1
        run, pieces = pieces[:count], pieces[count:]
        ranges.append(Range(run[0].offset, run[-1].offset + run[-1].length, tuple(run)))
    return ranges


pieces_anywhere = st.lists(st.builds(WantedRange, st.integers(0, 200), st.integers(0, 30), st.integers()), max_size=12)


@st.composite
def pieces_in_a_row(draw):
    position, pieces = 0, []
    for tag in range(draw(st.integers(0, 12))):
        position += draw(st.sampled_from([0, 0, 0, 1, 5, 40]))
        length = draw(st.integers(0, 30))
        pieces.append(WantedRange(position, length, tag))
        position += length
    return pieces


@given(pieces_anywhere | pieces_in_a_row(), st.integers(0, 50), st.integers(1, 120))
def test_it_agrees_with_the_naive_planner(pieces, gap_bytes, max_bytes):
    ranges = coalesce(pieces, gap_bytes=gap_bytes, max_bytes=max_bytes)
    assert ranges == naive(pieces, gap_bytes, max_bytes)
    assert [piece for wanted in ranges for piece in wanted.pieces] == pieces


@pytest.mark.parametrize(("gap", "limit"), [(-1, 1), (0, 0)])
def test_bad_knobs(gap, limit):
    with pytest.raises(ArgumentError):
        coalesce([], gap_bytes=gap, max_bytes=limit)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1)])
def test_bad_pieces(offset, length):
    with pytest.raises(ArgumentError):
        coalesce([WantedRange(offset, length, None)], gap_bytes=0, max_bytes=1)


@given(pieces_in_a_row(), st.lists(st.integers(1, 40), max_size=40))
def test_the_cutter_gives_each_piece_with_its_last_byte(pieces, sizes):
    data = bytes(n % 251 for n in range(1000))
    for wanted in coalesce(pieces, gap_bytes=100, max_bytes=10_000):
        cutter, position, seen = Cutter(wanted), wanted.start, []
        for size in [*sizes, 1000]:
            step = data[position : min(wanted.end, position + size)]
            position += len(step)
            for piece, body in cutter.feed(step):
                assert body == data[piece.offset : piece.end]
                assert piece.end <= position
                seen.append(piece)
            assert all(piece.end > position for piece in cutter.pending)
        assert seen == list(wanted.pieces)
