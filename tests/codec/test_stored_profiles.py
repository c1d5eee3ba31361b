"""What a reader of profiles refuses."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from kvwire.codec import Profile, fit_profile
from kvwire.codec.arrays import MAX_PACKED_BYTES, MAX_PACKED_TOTAL, pack_arrays, unpack_arrays
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

from . import surgery as cut
from .synthetic import make_cache

MAGIC = b"\x89TEST\r\n\n"


@pytest.fixture(scope="module")
def data():
    return fit_profile([make_cache(32)]).data


def refused(data, match=None):
    with pytest.raises(CorruptError, match=match):
        Profile.from_bytes(data)


def test_every_truncation_is_a_truncation(data):
    for end in (1, 8, 39, 40, 100, len(data) - 1):
        with pytest.raises(TruncatedError) as caught:
            Profile.from_bytes(data[:end])
        assert end < caught.value.needed <= len(data)
    refused(b"", "signature")
    refused(data + b"\0", "checksum")


def test_every_damaged_byte_is_noticed(data):
    for at in range(0, len(data), 101):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises((CorruptError, FormatVersionError)):
            Profile.from_bytes(bytes(damaged))


@pytest.mark.parametrize(("name", "value"), [("major", 2), ("incompatible", 4)])
def test_unknown_versions_are_not_called_damage(data, name, value):
    with pytest.raises(FormatVersionError, match="upgrade kvwire"):
        Profile.from_bytes(cut.sealed_profile(cut.put(data, cut.PROFILE_FIELDS, name, value)))


def test_what_later_minor_versions_may_add_is_ignored(data):
    meta, parts = cut.profile_parts(data)
    meta["arrays"].append(["later", "<u2", [2], 4])
    meta["head"]["more"] = 1
    newer = cut.profile_of(cut.put(data, cut.PROFILE_FIELDS, "minor", 3), meta, parts | {"later": bytes(4)})
    assert Profile.from_bytes(newer).rank == Profile.from_bytes(data).rank


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (1, "<f8"),
        (1, "|O"),
        (1, 3),
        (2, [-1]),
        (2, [2**40]),
        (2, [1.0]),
        (2, 5),
        (3, 0),
        (3, -1),
        (3, 2**60),
        (0, "base"),
    ],
)
def test_impossible_array_lists_are_refused(data, number, to):
    meta, parts = cut.profile_parts(data)
    meta["arrays"][2][number] = to
    refused(cut.profile_of(data, meta, parts))


@pytest.mark.parametrize("name", ["base", "ternary", "g0.mean", "g0.row_scale", "g0.spread", "g1.rows", "g0.metric3"])
@pytest.mark.parametrize("change", ["gone", "type", "shape", "value"])
def test_impossible_arrays_are_refused(data, name, change):
    meta, parts = cut.profile_parts(data)
    described = next(row for row in meta["arrays"] if row[0] == name)
    raw = parts[name]
    if described[3] != np.prod(described[2]) * int(described[1][2]):
        raw = zstandard.ZstdDecompressor().decompress(raw)
    if change == "gone":
        described[0] = "elsewhere"
    elif change == "type":
        described[1] = {"<f2": "<u2", "<f4": "<f2", "<i2": "<f2", "<u2": "<i2"}[described[1]]
        described[2] = [len(raw) // 2]
    elif change == "shape":
        described[2] = [len(raw) // int(described[1][2]), 1]
    elif name == "g0.spread":
        return  # any class can be clipped
    else:
        raw = b"\xff" * len(raw)
    described[3] = len(raw)
    refused(cut.profile_of(data, meta, parts | {name: raw}))


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("groups",), []), (("groups",), 3), (("groups", 0), []), (("groups", 0, "side"), "both"),
        (("groups", 0, "side"), "value"), (("groups", 0, "layers"), [0, 1, 2]), (("groups", 0, "layers"), [3, 2, 1, 0]),
        (("groups", 0, "layers"), [0, 0, 1, 2, 3]), (("groups", 0, "layers"), [0, 1, 2, 4]),
        (("groups", 0, "layers"), [0, 1, 2, 3.0]), (("groups", 0, "layers"), 5), (("layers",), []), (("layers",), None),
        (("notes",), 3), (("layers", 0, 2), 2**40),
    ],
)  # fmt: skip
def test_impossible_descriptions_are_refused(data, path, to):
    meta, parts = cut.profile_parts(data)
    *steps, last = path
    place = meta["head"]
    for step in steps:
        place = place[step]
    place[last] = to
    refused(cut.profile_of(data, meta, parts))


def test_arrays_travel_raw_or_compressed_whichever_is_shorter():
    arrays = {
        "zeros": np.zeros((3, 5000), np.int16),
        "noise": np.random.default_rng(0).integers(0, 2**16, 5000).astype(np.uint16),
        "one": np.array([3.5], np.float32),
        "empty": np.zeros((0, 4), np.float16),
    }
    packed = pack_arrays(MAGIC, {"a": 1}, arrays)
    assert len(packed) < 10_500
    head, again = unpack_arrays(MAGIC, packed, "test")
    assert head == {"a": 1}
    assert all(
        np.array_equal(again[name], array) and again[name].dtype == array.dtype for name, array in arrays.items()
    )
    assert pack_arrays(MAGIC, {"a": 1}, dict(reversed(arrays.items()))) == packed


def test_large_arrays_are_stored_as_they_are():
    packed = pack_arrays(MAGIC, {}, {"large": np.zeros(MAX_PACKED_BYTES // 2 + 1, np.int16)})
    assert len(packed) > MAX_PACKED_BYTES


@pytest.mark.parametrize(
    ("count", "size"), [(1, MAX_PACKED_BYTES + 2), (MAX_PACKED_TOTAL // MAX_PACKED_BYTES + 1, MAX_PACKED_BYTES)]
)
def test_arrays_that_claim_more_than_allowed_are_refused(data, count, size):
    packed = cut.frame(bytes(size))
    listed = [[f"a{number}", "<u2", [size // 2], len(packed)] for number in range(count)]
    bomb = cut.profile_of(data, {"arrays": listed, "head": {}}, dict.fromkeys((row[0] for row in listed), packed))
    refused(bomb, "more than a compressed array may hold")
