"""What a reader of blobs refuses, and how it says so."""

from __future__ import annotations

import tracemalloc

import pytest

from kvwire.codec import BlobDecoder, decode, encode, inspect, read_header
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, TruncatedError

from . import surgery as cut
from .fuzz.drafts import Draft
from .synthetic import make_cache

MISSING = 2**64 - 1


def refused(data, profile, error=CorruptError, match=None):
    with pytest.raises(error, match=match):
        decode(data, None, profile)


def test_surgery_without_a_cut_changes_nothing(blob, own_blob, profile):
    for data in (blob, own_blob):
        again = cut.with_metadata(data, cut.metadata(data))
        assert inspect(again).segments[0][0].crc32 == inspect(data).segments[0][0].crc32
        assert decode(again, None, profile).tokens == 76
        assert cut.with_segment(data, 5, cut.segment(data, 5)) == data
    assert cut.profile_of(profile.data, *cut.profile_parts(profile.data))[-100:] == profile.data[-100:]


def test_every_truncation_is_a_truncation(blob, own_blob, profile):
    for data, used in ((blob, profile), (own_blob, None)):
        info = inspect(data)
        boundaries = {0, 8, 63, 64, cut.index_at(data), info.header_bytes - 1, info.header_bytes, len(data) - 1}
        boundaries |= {s.offset + extra for row in info.segments for s in row for extra in (0, 1, 16)}
        for end in sorted(boundaries - {0}):
            with pytest.raises(TruncatedError) as caught:
                decode(data[:end], None, used)
            assert end < caught.value.needed <= len(data)
        refused(b"", used, CorruptError, "signature")


def test_needed_leads_to_the_whole_head(blob):
    have = 1
    for _ in range(3):
        try:
            info = read_header(blob[:have])
        except TruncatedError as error:
            have = error.needed
    assert have == info.header_bytes


def test_damaged_bytes_and_bytes_after_the_end_are_noticed(blob, profile):
    refused(blob + b"\0", profile, CorruptError, "1 bytes follow")
    for at in range(0, len(blob), 13):
        damaged = bytearray(blob)
        damaged[at] ^= 0x10
        refused(bytes(damaged), profile, (CorruptError, FormatVersionError))


@pytest.mark.parametrize(
    ("name", "value"), [("major", 2), ("major", 0), ("incompatible", 32), ("incompatible", 1 << 31)]
)
def test_unknown_versions_are_not_called_damage(blob, profile, name, value):
    refused(cut.field(blob, name, value), profile, FormatVersionError, "upgrade kvwire")


def test_what_later_minor_versions_may_add_is_ignored(blob, profile):
    newer = cut.field(cut.field(cut.field(blob, "minor", 7), "compatible", 0xFFFFFFFF), "reserved", 9)
    newer = cut.with_metadata(newer, cut.metadata(newer) | {"more": [1, {"a": None}]})
    assert inspect(newer).version == (1, 7)
    assert decode(newer, None, profile).tokens == 76


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("magic", 0), ("head_bytes", 0), ("head_bytes", 63), ("head_bytes", 1 << 40), ("file_bytes", 0),
        ("meta_stored", 0),
        ("file_bytes", MISSING), ("meta_stored", 2**32 - 1), ("meta_raw", 0), ("meta_raw", 2**32 - 1), ("tokens", 0),
        ("tokens", 2**32 - 1), ("chunk_tokens", 0), ("chunk_tokens", 4097), ("levels", 0), ("levels", 9), ("levels", 3),
        ("id_bits", 7), ("id_bits", 33), ("id_bits", 8), ("profile_bytes", 2**32 - 1), ("profile_bytes", 64),
    ],
)  # fmt: skip
def test_impossible_headers_are_refused(blob, profile, name, value):
    with pytest.raises(CorruptError):
        decode(cut.field(blob, name, value), None, profile)


def test_a_wrong_checksum_passes_only_where_it_is_not_asked_for(blob):
    wrong = cut.put(blob, cut.BLOB_FIELDS, "crc", 1)
    with pytest.raises(CorruptError, match="checksum"):
        read_header(wrong)
    assert read_header(wrong, check=False).tokens == 76


@pytest.mark.parametrize(
    ("cell", "name", "change"),
    [
        (1, "offset", -1), (1, "offset", 1), (0, "offset", -64), (11, "stored", 1), (11, "stored", -1),
        (4, "stored", 2**31),
        (2, "symbols", 1), (3, "crc32", 1),
    ],
)  # fmt: skip
def test_overlaps_gaps_and_ends_in_the_index_are_refused(blob, profile, cell, name, change):
    was = cut.get(blob, cut.ENTRY_FIELDS, name, cut.index_at(blob) + 32 * cell)
    refused(cut.entry(blob, cell, name, (was + change) % 2**32), profile)


@pytest.mark.parametrize(("name", "value"), [("codec", 0), ("codec", 2), ("codec", 4), ("codec", 0xFFFF), ("flags", 1)])
def test_segments_and_levels_coded_in_unknown_ways_are_not_called_damage(blob, profile, name, value):
    refused(cut.entry(blob, 6, name, value), profile, FormatVersionError, "upgrade kvwire")
    if name == "codec" and value != 2:
        unknown = cut.with_metadata(blob, changed(cut.metadata(blob), ("levels", 3, 1), value + (value > 4)))
        refused(unknown, profile, FormatVersionError, "upgrade kvwire")


def test_missing_levels_are_known_as_missing(blob, profile):
    """The last chunk's finest level is left out; one below a level that is there may not be."""
    end = len(blob) - len(cut.segment(blob, 11))
    shorter = cut.entry(cut.put(blob[:end], cut.BLOB_FIELDS, "file_bytes", end), 11, "offset", MISSING)
    info = inspect(shorter)
    assert [len(row) for row in info.segments] == [4, 4, 3]
    assert info.levels[-1].cumulative_bytes == len(shorter)
    assert decode(shorter, "fine", profile).tokens == 76
    with pytest.raises(ArgumentError, match="chunk 2 lacks level 3"):
        decode(shorter, None, profile)
    refused(cut.entry(blob, 10, "offset", MISSING), profile, CorruptError, "lacks a level")


def changed(value, path, to):
    """JSON with one place changed; None as the last step's value deletes it."""
    *steps, last = path
    place = value
    for step in steps:
        place = place[step]
    if to is None:
        del place[last]
    else:
        place[last] = to
    return value


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("levels",), None), (("levels",), 7), (("levels",), []), (("levels", 0), ["a", 1.0]), (("levels", 0, 0), 3),
        (("levels", 0, 2), 0), (("levels", 0, 2), 1e300), (("levels", 0, 2), "x"), (("levels", 0, 3), 1.5),
        (("levels", 0, 3), 10**30), (("levels", 0, 2), 10**400), (("levels", 0, 2), -1.0), (("levels", 0, 2), "3.6"),
        (("levels", 0, 2), True), (("levels", 0, 1), 2), (("levels", 0, 1), 3),
        (("levels", 3, 1), 3), (("levels", 0, 1), True), (("levels", 0, 1), 1.0),
        (("head_start",), None), (("head_start",), 1), (("head_start",), -1), (("head_start",), 2**40),
        (("head_start",), 0.0), (("error_to_kl",), 5), (("error_to_kl",), [1.0]), (("error_to_kl",), [0.0, 1.0]),
        (("error_to_kl",), [1.0, 9.0]), (("error_to_kl",), [1.0, -1.0]), (("error_to_kl",), ["1", "2"]),
        (("error_to_kl",), "12"), (("error_to_kl",), [10**400, 1.0]), (("error_to_kl",), [1e308, 1e308]),
        (("offset",), 0.5), (("offset",), "0"), (("offset",), 2**32), (("offset",), -(2**32)),
        (("kept_bytes",), None), (("kept_bytes",), -1), (("kept_bytes",), 1.0), (("kept_bytes",), 64),
        (("kept_bytes",), 2**70), (("meta",), None), (("meta",), []),
        (("meta", "layers"), []),
        (("meta", "layers", 0), 5), (("meta", "layers", 0, 0), "odd"), (("meta", "layers", 0, 1), 2**21),
        (("meta", "layers", 0, 1), 0), (("meta", "layers", 0, 2), -8), (("meta", "layers", 0, 3), 8.0),
        (("meta", "layers", 0, 4), 1), (("meta", "layers", 0, 4), True), (("meta", "layers", 0, 5), "x"),
        (("meta", "layers"), [["none", 1, 1, 1, None, None]]), (("meta", "ropes"), None), (("meta", "ropes"), [3]),
        (("meta", "ropes", 0, "inv_freq"), "?"), (("meta", "ropes", 0, "inv_freq"), ""),
        (("meta", "ropes", 0, "inv_freq"), "AA=="),
        (("meta", "ropes", 0, "inv_freq"), "AADAfw=="), (("meta", "ropes", 0, "max_positions"), 1.5),
        (("meta", "ropes", 0, "attention_scaling"), 10**400), (("meta", "model_id"), 3), (("profile",), None),
        (("profile",), ""), (("profile",), 5), (("profile",), "ab"),
    ],
)  # fmt: skip
def test_impossible_metadata_is_refused(blob, profile, path, to):
    refused(cut.with_metadata(blob, changed(cut.metadata(blob), path, to)), profile)


def test_a_frame_with_something_after_it_is_refused(blob, profile):
    refused(cut.with_metadata(blob, cut.metadata(blob), packed=cut.frame(b"{}") + b"\0", raw_length=2), profile)


def test_metadata_of_the_largest_length_takes_little_memory(blob, profile):
    """A megabyte of empty lists is some hundred bytes on the wire."""
    bomb = cut.with_metadata(blob, b'{"a":[' + b"[]," * 349_000 + b"[]]}")
    assert len(bomb) < len(blob) + 1000
    tracemalloc.start()
    try:
        refused(bomb, profile)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    refused(cut.with_metadata(blob, b'{"a":[' + b"[]," * 350_000 + b"[]]}"), profile, CorruptError, "more than")


def test_a_profile_that_no_level_needs_is_refused():
    draft = Draft.read(encode(make_cache(9), levels=0, lossless=True))
    draft.inside = b"xx"
    refused(draft.pack(), None, match="one that it does not need")


@pytest.mark.parametrize("name", ["words", "class_bytes", "escape_bytes", "lanes"])
@pytest.mark.parametrize("value", [0, 1, 0xFFFF])
def test_segments_whose_parts_do_not_add_up_are_refused(blob, profile, name, value):
    for cell in (0, 1):
        data = cut.segment(blob, cell)
        if cut.get(data, cut.SEGMENT_FIELDS, name) != value:
            refused(cut.with_segment(blob, cell, cut.put(data, cut.SEGMENT_FIELDS, name, value)), profile)


def test_segments_cut_short_and_escapes_above_level_0_are_refused(blob, profile):
    for cell in (0, 3):
        data = cut.segment(blob, cell)
        for end in (0, 1, 15, 16, len(data) - 2):
            refused(cut.with_segment(blob, cell, data[:end]), profile)
    data, extra = cut.segment(blob, 1), cut.frame(bytes(4))
    at = 16 + cut.get(data, cut.SEGMENT_FIELDS, "class_bytes")
    longer = cut.put(data[:at] + extra + data[at:], cut.SEGMENT_FIELDS, "escape_bytes", len(extra))
    refused(cut.with_segment(blob, 1, longer), profile, CorruptError, "holds escapes")


def test_a_damaged_segment_leaves_the_output_alone(blob, profile):
    decoder = BlobDecoder(blob, profile)
    row = inspect(blob).segments[0]
    pieces = [blob[s.offset : s.end] for s in row]
    for wrong, error in ((pieces[1][:-1], TruncatedError), (pieces[1] + b"x", CorruptError), (pieces[2], CorruptError)):
        with pytest.raises(error):
            decoder.decode_chunk(0, [pieces[0], wrong])
    with pytest.raises(TruncatedError) as caught:
        decoder.decode_chunk(0, [pieces[0], pieces[1][:-1]])
    assert caught.value.needed == row[1].end
    assert not any(t.any() for t in (*decoder.cache.keys, *decoder.cache.values))


def test_a_damaged_profile_inside_is_damage_not_truncation(own_blob):
    at = cut.index_at(own_blob) + 32 * cut.cells(own_blob)
    inside = own_blob.index(b"\x89KVP", at)
    longer = cut.put(own_blob, cut.PROFILE_FIELDS, "file_bytes", 1 << 30, inside)
    with pytest.raises(CorruptError, match="inside") as caught:
        decode(cut.sealed(longer))
    assert not isinstance(caught.value, TruncatedError)
