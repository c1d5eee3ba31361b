"""Abuse: attention sinks that are listed wrongly, do not add up, are bombs, or that the profile knows nothing of.

Mitigation: their list is short, and its sizes fill the header; each frame states its length, which follows from the
profile; a profile has a row of them in all groups or in none, of finite numbers, with steps above 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvwire.codec import BlobDecoder, Profile, decode, encode, fit_profile, inspect
from kvwire.codec.transform.sinks import pack_sink
from kvwire.errors import CorruptError, FormatVersionError

from .. import surgery as cut
from ..conftest import LADDER
from ..synthetic import DEEP, make_cache, make_statistics, with_sinks
from .abuse import refused, refused_by_head
from .test_zip_bombs import BOMBS

WIDTH = 116
PLACES = [0, 20]


@pytest.fixture(scope="module")
def knowing():
    caches = [with_sinks(make_cache(200, seed, layers=DEEP), seed=seed) for seed in (1, 2)]
    return fit_profile(caches, make_statistics(DEEP, words=True), group_width=64)


@pytest.fixture(scope="module")
def sunk(knowing):
    """A blob with two sinks, and a lossless level."""
    blob = encode(with_sinks(make_cache(40, 3, layers=DEEP), PLACES), knowing, LADDER, chunk_tokens=32, lossless=True)
    assert list(inspect(blob).sinks) == PLACES
    decode(blob, 0, knowing)
    return blob


def listed(blob, sinks):
    return cut.with_metadata(blob, cut.metadata(blob) | {"sinks": sinks}, frames=cut.sink_frames(blob))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:0],
        lambda rows: {"ab": rows},
        str,
        len,
        lambda rows: rows[0],
        lambda rows: [*rows, []],
        lambda rows: [["0", rows[0][1]], rows[1]],
        lambda rows: [[0.0, rows[0][1]], rows[1]],
        lambda rows: [[True, rows[0][1]], rows[1]],
        lambda rows: [[-1, rows[0][1]], rows[1]],
        lambda rows: [[0, rows[0][1], 0], rows[1]],
        lambda rows: [rows[1], rows[0]],
        lambda rows: [rows[0], [0, rows[1][1]]],
        lambda rows: [rows[0], [40, rows[1][1]]],
        lambda rows: [rows[0], [10**30, rows[1][1]]],
        lambda rows: [rows[0], [20, 0]],
        lambda rows: [rows[0], [20, -rows[1][1]]],
        lambda rows: [rows[0], [20, 1 << 40]],
    ],
)
def test_what_is_no_list_of_places_and_sizes(sunk, change):
    refused_by_head(listed(sunk, change(cut.metadata(sunk)["sinks"])), match="sinks")


def test_more_than_readers_hold(sunk):
    frame = cut.sink_frames(sunk)[0]
    long = encode(make_cache(100, 3, layers=DEEP), None, LADDER)
    assert len(inspect(cut.with_sinks(long, range(64), [frame] * 64)).sinks) == 64
    refused_by_head(cut.with_sinks(long, range(65), [frame] * 65), match="<= 64 .*sinks")


@pytest.mark.parametrize("more", [64, 1 << 20, (1 << 32) - 200, -64])
def test_sizes_that_do_not_add_up(sunk, more):
    first, second = cut.metadata(sunk)["sinks"]
    refused_by_head(listed(sunk, [first, [20, second[1] + more]]), match="does not add up|sinks")


@pytest.mark.parametrize("sinks", [None, "gone"])
def test_a_flag_without_a_list_and_a_list_without_a_flag(sunk, blob, sinks):
    fields = {name: value for name, value in cut.metadata(sunk).items() if name != "sinks"}
    bare = cut.with_metadata(sunk, fields if sinks else fields | {"sinks": None}, frames=[])
    refused_by_head(bare, match="disagree on attention sinks")
    refused_by_head(cut.field(sunk, "incompatible", 0), match="disagree on attention sinks")
    refused_by_head(cut.field(blob, "incompatible", 8), match="disagree on attention sinks")
    refused_by_head(cut.field(sunk, "incompatible", 40), error=FormatVersionError)


def test_sinks_without_a_level_that_leaves_them_out(exact_blob, cachegen_blob, sunk):
    for blob in (exact_blob, cachegen_blob):
        refused_by_head(cut.with_sinks(blob, [0], cut.sink_frames(sunk)[:1]), match="no level that leaves them out")


@BOMBS
def test_frames_that_are_bombs(sunk, knowing, bomb):
    refused(cut.with_sinks(sunk, PLACES, [cut.sink_frames(sunk)[0], bomb]), knowing, match="attention sink", level=0)


@pytest.mark.parametrize("width", [0, WIDTH - 1, WIDTH + 1, 2 * WIDTH])
def test_frames_of_another_width(sunk, knowing, width):
    other = pack_sink(np.zeros(width, np.int16))
    refused(cut.with_sinks(sunk, PLACES, [other] * 2), knowing, match="attention sink", level=0)


def test_frames_that_are_none_or_have_something_behind_them(sunk, knowing):
    good = cut.sink_frames(sunk)[0]
    for other in (b"x", good[:-1], good + b"\0", good + good, bytes(len(good))):
        refused(cut.with_sinks(sunk, PLACES, [good, other]), knowing, match="attention sink", level=0)
        assert decode(cut.with_sinks(sunk, PLACES, [good, other]), "lossless").tokens == 40  # which needs none


def test_a_profile_that_knows_of_none(sunk, knowing):
    none = np.empty(0, np.float32)
    unaware = replace(knowing, groups=tuple(replace(g, sink=none, sink_steps=none) for g in knowing.groups))
    other = cut.with_metadata(sunk, cut.metadata(sunk) | {"profile": unaware.digest})
    for use in (lambda: decode(other, 0, unaware), lambda: BlobDecoder(other, unaware)):
        with pytest.raises(CorruptError, match="its profile knows of none"):
            use()
    inside = encode(make_cache(40, 3, layers=DEEP), None, LADDER)
    refused(cut.with_sinks(inside, [0], cut.sink_frames(sunk)[:1]), match="its profile knows of none")


def stored(profile, name, array):
    """The profile with one array more, or another one, or without it."""
    meta, parts = cut.profile_parts(profile.data)
    place = next((at for at, row in enumerate(meta["arrays"]) if row[0] == name), None)
    if array is None:
        del meta["arrays"][place], parts[name]
    else:
        meta["arrays"][place] = [name, array.dtype.str, list(array.shape), array.nbytes]
        parts[name] = array.tobytes()
    return cut.profile_of(profile.data, meta, parts)


@pytest.mark.parametrize("name", ["sink", "sink_steps"])
@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:-1],
        lambda a: a[:0],
        lambda a: np.append(a, a[0]),
        lambda a: a[None],
        lambda a: a[0].reshape(()),
        lambda a: a * np.float32("nan"),
        lambda a: a + np.float32("inf"),
        lambda a: a.astype("<f2"),
    ],
)
def test_a_profile_with_a_row_of_another_kind(knowing, name, change):
    array = getattr(knowing.groups[1], name).astype("<f4")
    for other in (change(array), None):
        with pytest.raises(CorruptError, match=r"sink|wrong shape or range|of type"):
            Profile.from_bytes(stored(knowing, f"g1.{name}", other))


@pytest.mark.parametrize("step", [0.0, -1.0])
def test_a_profile_with_steps_that_are_none(knowing, step):
    steps = knowing.groups[0].sink_steps.astype("<f4")
    assert Profile.from_bytes(stored(knowing, "g0.sink_steps", steps)).has_sinks  # as it was
    steps[3] = step
    with pytest.raises(CorruptError, match="wrong shape or range"):
        Profile.from_bytes(stored(knowing, "g0.sink_steps", steps))


def test_a_profile_with_a_row_in_one_group_alone(knowing):
    none = np.empty(0, np.float32)
    first, *rest = knowing.groups
    with pytest.raises(CorruptError, match="some groups of the profile"):
        Profile.from_bytes(replace(knowing, groups=(replace(first, sink=none, sink_steps=none), *rest)).data)
