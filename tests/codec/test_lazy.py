"""Profiles that are read section by section do what whole ones do, and read no more than that takes."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import Ladder, Profile, decode, encode, loaded_part, open_profile
from kvwire.codec.format.arrays import describe
from kvwire.codec.profile.group import pieces, unzigzag, zigzag
from kvwire.codec.profile.profile import MAGIC
from kvwire.errors import CorruptError, KvwireError, NotFoundError, TruncatedError

from . import surgery as cut
from .synthetic import make_cache, stored_plainly


class Reader:
    """Serves a file's sections, and remembers which."""

    def __init__(self, data):
        self.data, self.read = data, []
        self.outline = data[: describe(MAGIC, data, "profile").start]

    def __call__(self, sections):
        known = [each.sha256 for each in describe(MAGIC, self.data, "profile").sections]
        self.read += [known.index(each.sha256) for each in sections]
        return [self.data[each.start : each.end] for each in sections]

    def open(self, level=0):
        return open_profile(self.outline, hashlib.sha256(self.data).hexdigest(), self, level)


@pytest.fixture(scope="module")
def profile(packed_profile):
    """Of two groups, whose rows lie in pieces of other sizes than calibration found."""
    first, second = packed_profile.groups
    return replace(
        packed_profile, groups=(replace(first, cuts=(2, 5, 5, 40)), replace(second, cuts=(1, second.rank, 999)))
    )


@pytest.fixture(scope="module")
def blob(profile):
    return encode(make_cache(300, 7), profile, chunk_tokens=64)


def alike(ours, theirs):
    return all(map(torch.equal, [*ours.keys, *ours.values], [*theirs.keys, *theirs.values]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_level_decodes_to_the_bit_as_with_the_whole_profile(profile, blob, dtype):
    reader = Reader(profile.data)
    lazy = reader.open()
    assert lazy.digest == profile.digest
    for level in range(5):
        assert alike(decode(blob, level, lazy, dtype=dtype), decode(blob, level, profile, dtype=dtype))
    assert reader.read == sorted(set(reader.read))  # once each, in order
    assert max(reader.read) < len(describe(MAGIC, profile.data, "profile").sections) - 1


def test_whoever_is_interrupted_while_rows_are_taken_in_leaves_them_right(profile, blob, monkeypatch):
    lazy = Reader(profile.data).open()
    take, calls = type(lazy.groups[0]).take, iter(range(99))

    def broken(self, *given):
        if next(calls) == 1:
            raise KeyboardInterrupt
        take(self, *given)

    monkeypatch.setattr(type(lazy.groups[0]), "take", broken)
    with pytest.raises(KeyboardInterrupt):
        decode(blob, 4, lazy)
    assert alike(decode(blob, 4, lazy), decode(blob, 4, profile))


def test_a_whole_file_is_compared_with_its_digest(profile, packed_profile):
    """An outline proves no more than its name does."""
    reader = Reader(packed_profile.data)
    other = open_profile(reader.outline, profile.digest, reader)
    with pytest.raises(CorruptError, match="another digest"):
        _ = other.data


def test_coarse_levels_read_the_first_sections_alone(profile):
    """A column that is coded decides, not the level's number."""
    reader = Reader(profile.data)
    lazy, quiet = reader.open(), encode(make_cache(64, 7), profile, Ladder(1e6, ("none", "some")))
    assert alike(decode(quiet, 1, lazy), decode(quiet, 1, profile))
    assert reader.read == [0]
    assert Reader(profile.data).open(3).groups[0].ready == 40


@given(st.lists(st.integers(0, 70), max_size=9).map(tuple))
@settings(max_examples=25, deadline=None)
def test_any_cuts_are_read_back(packed_profile, cuts):
    groups = tuple(replace(group, cuts=cuts) for group in packed_profile.groups)
    data = replace(packed_profile, groups=groups).data
    whole, lazy = Profile.from_bytes(data), Reader(data).open()
    for ours, theirs, plain in zip(lazy.groups, whole.groups, packed_profile.groups, strict=True):
        assert pieces(theirs.cuts, theirs.rank) == pieces(cuts, theirs.rank)
        for count in (0, 1, theirs.rank // 2, theirs.rank):
            assert torch.equal(ours.first_rows(count), plain.rows[:count])
            assert count <= ours.loaded_rows <= theirs.rank == theirs.loaded_rows
            assert torch.equal(ours.first_synthesis(count), plain.rows[:count].float())
        assert torch.equal(theirs.rows, plain.rows)
        assert all(map(np.array_equal, ours.metric, plain.metric))
    assert replace(whole).data == data
    assert lazy.data == data
    assert replace(lazy, notes=lazy.notes).data == data


def test_a_lazy_profile_encodes_as_the_whole_one_does(profile):
    cache = make_cache(90, 3)
    assert encode(cache, Reader(profile.data).open()) == encode(cache, profile)


def test_trial_runs_read_nothing(profile):
    reader = Reader(profile.data)
    lazy = reader.open(1)
    known = loaded_part(lazy)
    assert known.digest == lazy.digest
    assert loaded_part(profile) is profile
    part = make_cache(64)
    decode(encode(part, known), None, known)
    assert reader.read == [0, 1]


def test_threads_share_what_is_read(profile, blob):
    reader = Reader(profile.data)
    lazy, wanted, found = reader.open(), decode(blob, None, profile), []
    threads = [threading.Thread(target=lambda: found.append(decode(blob, None, lazy))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(alike(each, wanted) for each in found)
    assert reader.read == sorted(set(reader.read))


def test_profiles_that_are_stored_plainly_have_no_outline(packed_profile):
    plain = stored_plainly(packed_profile)
    assert plain.outline is None
    assert packed_profile.outline == (len(Reader(packed_profile.data).outline), _sha(packed_profile))
    assert Profile.from_bytes(packed_profile.data).outline == packed_profile.outline


def _sha(profile):
    return hashlib.sha256(Reader(profile.data).outline).hexdigest()


def test_a_group_that_was_replaced_is_read_whole(profile):
    """Its rows lie in one piece, as floats."""
    first, second = profile.groups
    other = replace(profile, groups=(replace(first, rows=2 * first.rows), second))
    lazy = Reader(other.data).open()
    assert torch.equal(lazy.groups[0].rows, 2 * first.rows)


def test_what_cannot_be_fetched_later_is_said_and_can_be_asked_again(profile, blob):
    reader = Reader(profile.data)
    lost = [True]

    def fetch(sections):
        if reader.read and lost[0]:
            raise NotFoundError("the profile is gone")
        return reader(sections)

    lazy = open_profile(reader.outline, profile.digest, fetch)
    with pytest.raises(NotFoundError, match="is gone"):
        decode(blob, None, lazy)
    lost[0] = False
    assert alike(decode(blob, None, lazy), decode(blob, None, profile))


def test_outlines_that_are_cut_short_or_changed(profile):
    reader = Reader(profile.data)
    for end in (1, 39, 40, len(reader.outline) - 1):
        with pytest.raises(TruncatedError):
            open_profile(reader.outline[:end], profile.digest, reader)
    for at in range(0, len(reader.outline), 7):
        bad = bytearray(reader.outline)
        bad[at] ^= 16
        with pytest.raises(KvwireError):
            open_profile(bytes(bad), profile.digest, reader)


def test_a_whole_file_is_refused_where_a_section_differs(profile):
    data = profile.data
    for section in describe(MAGIC, data, "profile").sections:
        bad = bytearray(data)
        bad[(section.start + section.end) // 2] ^= 1
        with pytest.raises(CorruptError, match="checksum does not match its content in section"):
            Profile.from_bytes(bytes(bad))


def changed(profile, change):
    """The file with another description of its arrays; sections get the digests that they have."""
    meta, parts = cut.profile_parts(profile.data)
    change(meta, parts)
    return cut.profile_of(profile.data, meta, parts)


def row_of(meta, name):
    return next(row for row in meta["arrays"] if row[0] == name)


@pytest.mark.parametrize("name", ["g0.rows1", "g0.rows3", "g1.rows1", "g0.metric2", "g0.rows_steps", "g1.spread"])
@pytest.mark.parametrize("kind", ["renamed", "longer", "other type", "flat"])
def test_sections_that_contradict_the_outline(profile, name, kind):
    """A lazy reader refuses what a whole one does, at the latest when it is used."""

    def change(meta, parts):
        row = row_of(meta, name)
        if kind == "renamed":
            row[0] = "g7.elsewhere"
        elif kind == "longer":
            row[2] = [row[2][0] + 1, *row[2][1:]]
            parts[name] = bytes(int(np.prod(row[2])) * int(row[1][2]))
            row[3] = len(parts[name])
        elif kind == "other type":
            row[1] = "<f2"
            parts[name] = bytes(2 * int(np.prod(row[2])))
            row[3] = len(parts[name])
        else:
            row[2] = [int(np.prod(row[2])), 1, 1]

    data = changed(profile, change)
    with pytest.raises(CorruptError):
        Profile.from_bytes(data)
    with pytest.raises(CorruptError):
        encode(make_cache(80), Reader(data).open())


@pytest.mark.parametrize(
    "sections",
    [
        None, [], 5, [[1]], [["a", "b", "c"]], [[-1, 0, "0" * 64]], [[10**9, 5, "0" * 64]], [[0, 0, 5]] * 3,
        [[True, 0, "0" * 64]], [[0, 0, "0" * 64]] * 17, [[0, 0, "0" * 64]], [[22, 1, "0" * 64]],
    ],
)  # fmt: skip
def test_sections_that_are_none(profile, sections):
    meta, parts = cut.profile_parts(profile.data)
    raw = dict(meta, sections=sections)
    with pytest.raises(CorruptError, match="array list is damaged"):
        Profile.from_bytes(cut.profile_of(profile.data, json.dumps(raw).encode(), parts))


@given(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=50))
def test_zigzag_numbers_are_what_the_format_says(entries):
    array = np.array(entries, np.int16)
    numbers = zigzag(array)
    assert numbers.tolist() == [2 * n if n >= 0 else -2 * n - 1 for n in entries]
    assert np.array_equal(unzigzag(numbers), array)
