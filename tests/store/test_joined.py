"""Ranges of a document of several blobs."""

from hypothesis import given
from hypothesis import strategies as st

from kvwire.store.crypto.joined import Extents
from kvwire.store.records import BlobPart

PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(parts=PARTS, start=st.integers(0, 130), length=st.integers(0, 130), to_end=st.booleans())
def test_pieces_are_what_slicing_the_joined_object_gives(parts, start, length, to_end):
    blobs = [bytes([number]) * (header + payload) for number, (header, payload) in enumerate(parts)]
    blobs = [bytes((number * 40 + at) % 256 for at in range(len(blob))) for number, blob in enumerate(blobs)]
    joined = b"".join(blob[:header] for blob, (header, _) in zip(blobs, parts, strict=True))
    joined += b"".join(blob[header:] for blob, (header, _) in zip(blobs, parts, strict=True))
    extents = Extents([BlobPart("", header + payload, header, 1, "") for header, payload in parts])
    end = None if to_end else start + length
    found = b"".join(blobs[part][first:last] for part, first, last in extents.pieces(start, end))
    assert extents.size == len(joined)
    assert found == joined[start:end]
