"""Abuse: profiles whose matrices are whole numbers and steps, with arrays that contradict each other or claim too much.

Mitigation: shapes follow from the steps and these from the layers; a large array's frame stands for at most 16 times
its bytes, whatever it states; steps are finite and above 0.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from kvwire.codec import Profile
from kvwire.codec.format.arrays import MAX_PACKED_BYTES, MOST_PACKED, pack_arrays, unpack_arrays
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError

from .. import surgery as cut
from ..write_golden import STEM, read_golden
from .test_zip_bombs import BOMBS

MAGIC = b"\x89TEST\r\n\n"
BEFORE = {"g0.rows0": "g0.rows", "g0.rows0_wide": "g0.rows_wide"}
"""Names in files without sections."""
NAMES = (
    "g0.rows0", "g0.rows0_wide", "g0.rows_steps", "g1.rows_columns", "g0.predictor", "g1.predictor_steps",
    "g1.predictor_columns", "g0.metric1", "g0.metric1_steps", "table",
)  # fmt: skip


@pytest.fixture(params=["in sections", "without"])
def stored_profile(request, packed_profile):
    """As profiles are stored now, and as they were before they had sections."""
    if request.param == "in sections":
        return packed_profile
    return read_golden(f"{STEM}-packed")[1][f"{STEM}-packed.kvp"]


def named(data, name):
    """An array's name in this file."""
    return name if cut.get(data, cut.PROFILE_FIELDS, "incompatible") & 2 else BEFORE.get(name, name)


def refused(data, match=None):
    with pytest.raises(CorruptError, match=match):
        Profile.from_bytes(data)


def changed(data, name, dtype, shape, raw):
    meta, parts = cut.profile_parts(data)
    name = named(data, name)
    row = next(row for row in meta["arrays"] if row[0] == name)
    row[1:] = [dtype, shape, len(raw)]
    return cut.profile_of(data, meta, parts | {name: raw})


def test_damage_and_truncation_are_noticed(stored_profile):
    data = stored_profile.data
    for at in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises((CorruptError, FormatVersionError)):
            Profile.from_bytes(bytes(damaged))
        with pytest.raises((TruncatedError, CorruptError)):
            Profile.from_bytes(data[:at])


@pytest.mark.parametrize("name", NAMES)
def test_arrays_that_are_gone_or_of_another_type_or_shape(stored_profile, name):
    data = stored_profile.data
    meta, _ = cut.profile_parts(data)
    given, name = name, named(data, name)
    if name not in {row[0] for row in meta["arrays"]}:
        pytest.skip("this file has no such array")
    dtype, shape, _ = next(row[1:] for row in meta["arrays"] if row[0] == name)
    count, item = int(np.prod(shape)), int(dtype[2])
    others = {"|i1": "<i2", "<i2": "<f2", "<u2": "<f2", "<f4": "<f2"}
    refused(changed(data, name, others[dtype], shape, bytes(count * int(others[dtype][2]))))
    longer = [[*shape[:-1], shape[-1] + 1]] if name != "table" else []  # a token more makes a table, too
    for wrong in ([count, 1, 1, 1], [count + 1], [0], *longer, [2**31, 2**31]):
        refused(changed(data, name, dtype, wrong, bytes(min(int(np.prod(wrong, dtype=object)) * item, 1 << 16))))
    if given not in {"g0.rows0_wide", "table"}:
        row = next(row for row in meta["arrays"] if row[0] == name)
        row[0] = "elsewhere"
        refused(cut.profile_of(data, meta, cut.profile_parts(data)[1]))


@pytest.mark.parametrize("name", [5, None, True, 1.5, ["g0.rows"], {}])
def test_names_of_arrays_that_are_no_texts(stored_profile, name):
    meta, parts = cut.profile_parts(stored_profile.data)
    meta["arrays"][-1][0], kept = name, list(parts.values())
    refused(cut.profile_of(stored_profile.data, meta, dict(enumerate(kept))), "array list is damaged")


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("steps", "columns"))])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_steps_that_are_none(stored_profile, name, value):
    meta, _ = cut.profile_parts(stored_profile.data)
    shape = next(row[2] for row in meta["arrays"] if row[0] == name)
    refused(changed(stored_profile.data, name, "<f4", shape, np.full(shape, value, "<f4").tobytes()), "steps|damaged")


@pytest.mark.parametrize("name", ["g0.rows_steps", "g0.rows_columns", "g0.metric1_steps"])
def test_steps_that_leave_the_range_of_numbers(stored_profile, name):
    meta, _ = cut.profile_parts(stored_profile.data)
    shape = next(row[2] for row in meta["arrays"] if row[0] == name)
    refused(changed(stored_profile.data, name, "<f4", shape, np.full(shape, 3e38, "<f4").tobytes()), "shape or range")


@pytest.mark.parametrize("shape", [(0, 100_000), (1, 5000), (2, 3)])
def test_metrics_of_other_shapes_than_the_layers_are_not_multiplied_out(stored_profile, shape):
    """Without heads they hold no bytes, and would take memory by the square of what they claim."""
    heads, dim = shape
    entries = [heads, dim * (dim + 1) // 2]
    meta, parts = cut.profile_parts(stored_profile.data)
    for name, dtype, dims in (("g0.metric1", "|i1", entries), ("g0.metric1_steps", "<f4", [heads, dim])):
        raw = np.ones(dims, dtype).tobytes()
        next(row for row in meta["arrays"] if row[0] == name)[1:] = [dtype, dims, len(raw)]
        parts[name] = raw
    data = cut.profile_of(stored_profile.data, meta, parts)
    tracemalloc.start()
    refused(data, "another shape")
    assert tracemalloc.get_traced_memory()[1] < 8 * len(data) + (1 << 20)
    tracemalloc.stop()


def test_an_unknown_array_is_ignored_whatever_its_name(profile, stored_profile):
    for known in (profile, stored_profile):
        meta, parts = cut.profile_parts(known.data)
        meta["arrays"].append(["x.rows_steps", "|i1", [3], 3])
        found = Profile.from_bytes(cut.profile_of(known.data, meta, parts | {"x.rows_steps": b"abc"}))
        assert np.array_equal(found.table, known.table)


@BOMBS
@pytest.mark.parametrize("name", ["g0.rows0", "table", "g0.mean", "later"])
def test_frames_that_unpack_to_far_more(stored_profile, name, bomb):
    meta, parts = cut.profile_parts(stored_profile.data)
    name = named(stored_profile.data, name)
    if name == "later":
        meta["arrays"].append(["later", "|i1", [1 << 28], len(bomb)])
    else:
        row = next(row for row in meta["arrays"] if row[0] == name)
        row[2:] = [[(1 << 28) // int(row[1][2])], len(bomb)]
    refused(cut.profile_of(stored_profile.data, meta, parts | {name: bomb}))


def test_large_arrays_travel_packed_where_their_frames_are_believed():
    rng = np.random.default_rng(1)
    arrays = {
        "narrow": rng.integers(-2, 3, (1100, 1000)).astype(np.int8),
        "wide": rng.integers(-300, 301, (600, 1000)).astype(np.int16),
        "zeros": np.zeros((1100, 1000), np.int8),
        "noise": rng.integers(-128, 128, (1100, 1000)).astype(np.int8),
        "small": rng.integers(-300, 301, (7, 11)).astype(np.int16),
        "none": np.zeros((0, 5), np.float32),
    }
    data = pack_arrays(MAGIC, {}, arrays, packed=True)
    _, found = unpack_arrays(MAGIC, data, "test")
    assert all(np.array_equal(arrays[name], found[name]) for name in arrays)
    stored = {name: size for name, _, _, size in cut.profile_metadata(data)["arrays"]}
    assert stored["narrow"] < 0.4 * arrays["narrow"].nbytes
    assert stored["wide"] < 0.75 * arrays["wide"].nbytes
    assert stored["noise"] == arrays["noise"].nbytes
    assert stored["zeros"] == arrays["zeros"].nbytes  # a short frame would not be believed


def test_a_frame_stands_for_sixteen_times_its_bytes_at_most():
    rows = np.zeros(MOST_PACKED << 17, np.int8)
    rows[:: MOST_PACKED * 4] = 1
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(rows.tobytes())
    assert MOST_PACKED * len(frame) < rows.nbytes
    assert rows.nbytes > MAX_PACKED_BYTES
    data = pack_arrays(MAGIC, {}, {"a": np.arange(3, dtype=np.int16)}, packed=True)
    meta = {"arrays": [["a", "|i1", [rows.nbytes], len(frame)]], "head": {}}
    with pytest.raises(CorruptError, match="claims more"):
        unpack_arrays(MAGIC, cut.profile_of(data, meta, {"a": frame}), "test")
