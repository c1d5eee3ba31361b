"""Abuse: anything. Bytes of the header, index, segments and profiles changed as hypothesis likes, checksums repaired.

Mitigation: all of the above; what comes out is an error of kvwire's or a cache, in bounded memory.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.codec import CacheGenProfile, KVCache, Profile, decode, encode, inspect, open_profile, read_profile
from kvwire.errors import KvwireError

from .. import surgery as cut
from ..peaks import Peak
from ..synthetic import make_cache

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)


class Target(NamedTuple):
    """A blob and its profile."""

    blob: bytes
    profile: Profile | CacheGenProfile | None

    def __repr__(self):
        """Short: hypothesis prints it."""
        return "target"


@pytest.fixture(params=["layered", "inside", "lossless", "cachegen"])
def target(request, blob, profile, own_blob, exact_blob, cachegen_blob, cachegen_profile):
    pairs = {
        "layered": (blob, profile),
        "inside": (own_blob, None),
        "lossless": (exact_blob, None),
        "cachegen": (cachegen_blob, cachegen_profile),
    }
    found = Target(*pairs[request.param])
    for check in (True, False):  # kernels that are compiled the first time take memory, too
        decode(found.blob, None, found.profile, check=check, threads=1)
    return found


def edited(data, edits, start, stop):
    """Bytes between start and stop replaced."""
    out = bytearray(data)
    for at, byte in edits:
        out[start + at % (stop - start)] = byte
    return bytes(out)


MOST_BYTES = 32 << 20


def taken(data, profile, check):
    """An error of kvwire's or a cache; little memory either way."""
    with Peak() as peak, suppress(KvwireError):
        inspect(data)
        cache = decode(data, None, profile, check=check, threads=1)
        assert isinstance(cache, KVCache)
    assert peak.bytes < MOST_BYTES


@FUZZ
@given(EDITS)
def test_prologue(target, edits):
    data, profile = target
    taken(cut.sealed(edited(data, edits, 8, 64)), profile, check=True)


@FUZZ
@given(EDITS)
def test_index_ids_and_profile_inside(target, edits):
    data, profile = target
    end = cut.get(data, cut.BLOB_FIELDS, "head_bytes")
    taken(cut.sealed(edited(data, edits, cut.index_at(data), end)), profile, check=False)


@FUZZ
@given(EDITS, st.integers(0, 2**16), st.booleans(), st.sampled_from([16, 64, 10**6]))
def test_segments(target, edits, cell, check, reach):
    """Half of the damage hits the first bytes, where the counts are."""
    data, profile = target
    cell %= cut.cells(data)
    segment = cut.segment(data, cell)
    taken(cut.with_segment(data, cell, edited(segment, edits, 0, min(reach, len(segment)))), profile, check)


@FUZZ
@given(EDITS, st.booleans())
def test_profiles(target, edits, behind):
    """Arrays with the checksum repaired; the blob names what came out."""
    data, profile = target
    if profile is None:
        return
    start = 40 + (cut.get(profile.data, cut.PROFILE_FIELDS, "meta_stored") if behind else -32)
    damaged = cut.sealed_profile(edited(profile.data, edits, start, len(profile.data)))
    try:
        other = read_profile(damaged)
    except KvwireError:
        return
    taken(cut.with_metadata(data, cut.metadata(data) | {"profile": other.digest}), other, check=True)


@FUZZ
@given(EDITS, st.integers(0, 40), st.booleans())
def test_sections(packed_profile, sectioned_blob, edits, number, frames):
    """Arrays of a profile in sections, digests repaired: a lazy reader gets what one of the whole does, or an error."""
    meta, parts = cut.profile_parts(packed_profile.data)
    name = list(parts)[number % len(parts)]
    if frames and parts[name]:
        parts[name] = edited(parts[name], edits, 0, len(parts[name]))
    elif not frames:
        row = meta["arrays"][number % len(parts)]
        row[2] = [max(0, size + edits[0][1] % 5 - 2) for size in row[2]]
    data = cut.profile_of(packed_profile.data, meta, parts)
    whole = lazily = None
    with suppress(KvwireError):
        whole = decode(sectioned_blob, None, renamed(Profile.from_bytes(data), packed_profile), threads=1)
    told = 40 + cut.get(data, cut.PROFILE_FIELDS, "meta_stored")
    with suppress(KvwireError):
        lazy = open_profile(data[:told], packed_profile.digest, lambda read: [data[a:b] for a, b, *_ in read])
        lazily = decode(sectioned_blob, None, lazy, threads=1)
    if whole is not None:
        pairs = zip([*whole.keys, *whole.values], [*lazily.keys, *lazily.values], strict=True)
        assert all(torch.equal(ours.nan_to_num(), theirs.nan_to_num()) for ours, theirs in pairs)


def renamed(profile, other):
    """Under the name that the blob knows."""
    profile.__dict__["digest"] = other.digest
    return profile


@pytest.fixture(scope="module")
def sectioned_blob(packed_profile):
    return encode(make_cache(40, 9), packed_profile)
