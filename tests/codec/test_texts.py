"""Texts on their own: what is packed is read, and anything else is refused."""

import contextlib
import struct
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import pack_text, read_text, read_text_documents
from kvwire.codec.format.texts import MAX_TEXT_TOKENS
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, TruncatedError

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300) | st.lists(
    st.integers(0, 3), min_size=1, max_size=3000
)


def built(tokens, bits, body, *, stored=None, version=(1, 0), flags=0):
    """A file by docs/format.md alone, its checksum right."""
    head = b"\x89KVT\r\n\x1a\n" + struct.pack(
        "<HHIIIIB3x", *version, flags, 0, tokens, len(body) if stored is None else stored, bits
    )
    data = bytearray(head + body)
    data[16:20] = struct.pack("<I", zlib.crc32(data))
    return bytes(data)


@given(IDS, st.lists(st.text(min_size=1).filter(lambda name: name.isprintable()), max_size=5))
def test_what_is_packed_is_read_and_names_of_documents_change_no_id(ids, names):
    assert read_text(pack_text(ids)) == tuple(ids)
    data = pack_text(ids, names)
    assert read_text(data) == tuple(ids)
    assert read_text_documents(data) == tuple(dict.fromkeys(names))
    assert pack_text(ids, []) == pack_text(ids)


def test_a_file_by_the_text_of_the_format_is_read():
    assert read_text(built(3, 9, bytes([0xFF, 0x03, 0x00, 0x00]))) == (511, 1, 0)
    assert read_text(built(1000, 8, zstandard.compress(b"\7" * 1000))) == (7,) * 1000
    assert pack_text([511, 1, 0]) == built(3, 9, bytes([0xFF, 0x03, 0x00, 0x00]))
    assert read_text(built(1, 8, b"x", version=(1, 7))) == (120,)
    data = named(b'["a","b c"]')
    assert read_text(data) == (120,)
    assert read_text_documents(data) == ("a", "b c")
    assert pack_text([120], ["a", "b c"]) == data
    assert read_text_documents(built(1, 8, b"x")) == ()


def named(names, count=None):
    """One token and the names of documents behind it."""
    length = len(names) if count is None else count
    return built(1, 8, b"x" + struct.pack("<I", length) + names, stored=1, flags=1)


def test_the_golden_file_is_read_and_written():
    data = (Path(__file__).parent / "golden" / "v1.0-documents.kvt").read_bytes()
    assert read_text(data) == (511, 1, 0, 70000)
    assert read_text_documents(data) == ("a letter", "Brief für 母")
    assert pack_text(read_text(data), read_text_documents(data)) == data


def test_of_too_many_names_the_last_stay():
    names = [f"{number:04000}" for number in range(600)]
    kept = read_text_documents(pack_text([1], names))
    assert kept == tuple(names[-len(kept) :])
    assert len(kept) >= 100


@pytest.mark.parametrize("names", [b"", b"{}", b"[]", b"[1]", b'[""]', b'["a"', b"\xff"])
def test_names_that_are_none_are_corrupt(names):
    for read in (read_text, read_text_documents):
        with pytest.raises(CorruptError):
            read(named(names))
        with pytest.raises(CorruptError, match="names"):
            read(named(b"", (1 << 20) + 1))


@pytest.mark.parametrize("ids", [[], [-1], [2**32], [0] * (MAX_TEXT_TOKENS + 1)])
def test_what_cannot_be_packed_is_refused(ids):
    with pytest.raises(ArgumentError):
        pack_text(ids)


@given(IDS, st.lists(st.sampled_from("abc"), max_size=3), st.data())
def test_cut_and_changed_files_are_refused(ids, names, data):
    good = pack_text(ids, names)
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(TruncatedError) as caught:
        read_text(good[:cut])
    assert cut < caught.value.needed <= len(good)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((CorruptError, FormatVersionError)):
        read_text(bytes(bad))
    with pytest.raises(CorruptError):
        read_text(good + b"x")


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=60), st.booleans())
def test_any_claims_are_read_or_refused(tokens, bits, body, packed):
    with contextlib.suppress(CorruptError):
        ids = read_text(built(tokens, bits, zstandard.compress(body) if packed else body))
        assert len(ids) == tokens


@pytest.mark.parametrize(
    "data",
    [
        built(2**32 - 1, 32, zstandard.compress(bytes(1 << 20))),
        built(MAX_TEXT_TOKENS, 32, zstandard.compress(bytes(MAX_TEXT_TOKENS * 4))),  # more than the file pays for
        built(0, 8, b""),
        built(4, 0, bytes(4)),
        built(4, 8, bytes(5)),
        built(1000, 8, zstandard.compress(bytes(999))),
        built(1000, 8, zstandard.compress(bytes(1000)) + b"x"),
    ],
)
def test_claims_that_do_not_fit_are_corrupt(data):
    with pytest.raises(CorruptError):
        read_text(data)


@pytest.mark.parametrize("data", [built(1, 8, b"x", version=(2, 0)), built(1, 8, b"x", flags=2)])
def test_later_versions_are_told_apart_from_damage(data):
    with pytest.raises(FormatVersionError):
        read_text(data)
