"""What a reader of profiles refuses."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from kvwire.codec import Ladder, Profile, fit_profile
from kvwire.codec.fitting.fit import identity_profile
from kvwire.codec.format.arrays import MAX_PACKED_BYTES, MAX_PACKED_TOTAL, pack_arrays, unpack_arrays
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

from . import surgery as cut
from .synthetic import in_8_bits, make_cache, make_statistics

MAGIC = b"\x89TEST\r\n\n"


@pytest.fixture(scope="module")
def data():
    """With a table, predictors and rows of 8 bits, in two groups."""
    return in_8_bits(fit_profile([make_cache(200)], make_statistics(words=True), group_width=64)).data


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
        (1, "<f8"), (1, "|O"), (1, 3), (2, [-1]), (2, [2**40]), (2, [1.0]), (2, 5), (3, 0), (3, -1), (3, 2**60),
        (0, "base"),
    ],
)  # fmt: skip
def test_impossible_array_lists_are_refused(data, number, to):
    meta, parts = cut.profile_parts(data)
    meta["arrays"][2][number] = to
    refused(cut.profile_of(data, meta, parts))


NAMES = (
    "base", "ternary", "points", "table", "g0.mean", "g0.spread", "g1.rows", "g1.row_exponent", "g0.metric3",
    "g1.predictor",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
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
        described[1] = {"<f2": "<u2", "<f4": "<f2", "<i2": "<f2", "<u2": "<i2", "|i1": "<i2"}[described[1]]
        described[2] = [len(raw) // 2]
        raw = raw[: len(raw) // 2 * 2]
    elif change == "shape":
        described[2] = [len(raw) // int(described[1][2]), 1, 1]
    elif name in {"g0.spread", "table", "g1.rows"}:
        return  # any class can be clipped, any byte is an entry
    else:
        raw = (b"\xff\x7f" if described[1] == "<i2" else b"\xff\xff") * (len(raw) // 2)
    described[3] = len(raw)
    refused(cut.profile_of(data, meta, parts | {name: raw}))


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("groups",), []), (("groups",), 3), (("groups",), "ab"), (("groups", 0), []), (("groups", 0, 0), "ab"),
        (("groups", 0, 0), ["key"]), (("groups", 0, 0), ["both", 0]), (("groups", 0, 0), [["key"], 0]),
        (("groups", 0, 0), ["key", 1]), (("groups", 0, 0), ["key", 4]), (("groups", 0, 0), ["key", -1]),
        (("groups", 0, 0), ["key", 0.0]), (("groups", 0, 0), ["key", True]), (("groups", 0, 0), ["value", 0]),
        (("layers",), []), (("layers",), None), (("notes",), 3), (("layers", 0, 2), 2**40), (("layers", 0, 2), 9),
        (("head_start",), None), (("head_start",), 1.0), (("head_start",), -1), (("head_start",), 2**17),
        (("hidden_size",), 1), (("hidden_size",), -1), (("hidden_size",), 2**16 + 1), (("hidden_size",), True),
        (("error_to_kl",), 5), (("error_to_kl",), [1.0, 9.0]), (("error_to_kl",), [-1.0, 1.0]),
        (("error_to_kl",), [1.0]), (("error_to_kl",), "12"),
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
        "small": np.arange(-5, 5, dtype=np.int8),
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


def test_arrays_are_compressed_while_a_reader_accepts_them():
    """The seventeenth megabyte travels as it is: what is written can be read."""
    count = MAX_PACKED_TOTAL // MAX_PACKED_BYTES + 1
    packed = pack_arrays(MAGIC, {}, {f"a{k:02}": np.zeros(MAX_PACKED_BYTES, np.int8) for k in range(count)})
    assert MAX_PACKED_BYTES < len(packed) < MAX_PACKED_BYTES + 10_000
    assert len(unpack_arrays(MAGIC, packed, "test")[1]) == count


@pytest.mark.parametrize(
    ("count", "size"), [(1, MAX_PACKED_BYTES + 2), (MAX_PACKED_TOTAL // MAX_PACKED_BYTES + 1, MAX_PACKED_BYTES)]
)
def test_arrays_that_claim_more_than_allowed_are_refused(data, count, size):
    packed = cut.frame(bytes(size))
    listed = [[f"a{number}", "<u2", [size // 2], len(packed)] for number in range(count)]
    bomb = cut.profile_of(data, {"arrays": listed, "head": {}}, dict.fromkeys((row[0] for row in listed), packed))
    refused(bomb, "more than a compressed array may hold")


@pytest.mark.parametrize("exponent", [121, -121, -(2**15)])
def test_rows_scaled_out_of_range_are_refused(data, exponent):
    meta, parts = cut.profile_parts(data)
    described = next(row for row in meta["arrays"] if row[0] == "g0.row_exponent")
    raw = np.full(described[2], exponent, "<i2").tobytes()
    described[3] = len(raw)
    refused(cut.profile_of(data, meta, parts | {"g0.row_exponent": raw}), "exponents")


def without(data, *names):
    """The profile lacking some arrays."""
    meta, parts = cut.profile_parts(data)
    meta["arrays"] = [row for row in meta["arrays"] if row[0] not in names]
    return cut.profile_of(data, meta, {name: part for name, part in parts.items() if name not in names})


def test_groups_predict_all_or_none(data):
    """A table without predictors, predictors without a table, one group that does otherwise."""
    for names in (("table",), ("g0.predictor",), ("g0.predictor", "g1.predictor")):
        refused(without(data, *names), "wrong shape")
    assert Profile.from_bytes(without(data, "table", "g0.predictor", "g1.predictor")).table is None


def test_the_identity_has_a_scale_and_nothing_else(data):
    inside = identity_profile(make_cache(40), Ladder()).data
    refused(without(inside, "g3.row_scale"), "g3.row_scale")
    refused(without(data, "g0.rows"), "metric or a predictor and no rows")
    refused(without(data, "g0.row_exponent"), "row_exponent")
    meta, parts = cut.profile_parts(inside)
    described = next(row for row in meta["arrays"] if row[0] == "g3.row_scale")
    for wrong in (0.0, -1.0, np.nan, np.inf):
        raw = np.full(described[2], wrong, "<f4").tobytes()
        described[3] = len(raw)
        refused(cut.profile_of(inside, meta, parts | {"g3.row_scale": raw}), "wrong shape or range")


def test_points_lie_within_half_a_step(data):
    meta, parts = cut.profile_parts(data)
    described = next(row for row in meta["arrays"] if row[0] == "points")
    for value, sound in ((32768, True), (32769, False)):
        raw = np.full((42, 2), value, "<u2").tobytes()
        described[3] = len(raw)
        changed = cut.profile_of(data, meta, parts | {"points": raw})
        if sound:
            assert Profile.from_bytes(changed).tables.sizes[1].tolist() == [0.0, 0.5, 1.5]
        else:
            refused(changed, "tables are damaged")
