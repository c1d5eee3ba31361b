"""Abuse: NaN, infinity and numbers out of range in the index, the metadata and every array of a profile.

Mitigation: floats are finite wherever they are read, exponents and steps within bounds, so no later sum has to ask.
"""

from __future__ import annotations

import base64

import numpy as np
import pytest

from kvwire.codec import CacheGenProfile, Profile
from kvwire.errors import CorruptError

from .. import surgery as cut
from .abuse import refused, refused_by_head

WRONG = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)


@WRONG
@pytest.mark.parametrize("name", ["error", "energy"])
def test_index(blob, name, value):
    refused_by_head(cut.entry(blob, 2, name, value), match="impossible errors")
    refused_by_head(cut.entry(blob, 2, name, -1e-3), match="impossible errors")


@pytest.mark.parametrize("name", ["error", "energy"])
def test_nan_that_signals(blob, name):
    """Converting it to another width would warn."""
    at = cut.index_at(blob) + 32 * 2 + cut.ENTRY_FIELDS[name][0]
    refused_by_head(cut.sealed(blob[:at] + b"\x01\x00\x80\x7f" + blob[at + 4 :]), match="impossible errors")


def test_errors_that_overflow_with_their_calibration(blob):
    """Each number is sound, the divergence that they predict is none."""
    meta = cut.metadata(blob) | {"error_to_kl": [1e300, 8.0]}
    calibrated = cut.with_metadata(blob, meta)
    for error in (3e38, 1e5):
        refused_by_head(cut.entry(calibrated, 3, "error", error), match="impossible together")


@WRONG
def test_frequencies(blob, profile, value):
    meta = cut.metadata(blob)
    meta["meta"]["ropes"][0]["inv_freq"] = base64.b64encode(np.full(4, value, "<f4").tobytes()).decode()
    refused(cut.with_metadata(blob, meta), profile)


def changed(data, name, bits, fill):
    """An array of a profile filled with one pattern."""
    meta, parts = cut.profile_parts(data)
    row = next(row for row in meta["arrays"] if row[0] == name)
    raw = np.full(row[2], fill).astype(bits or row[1]).tobytes()
    row[3] = len(raw)
    return cut.profile_of(data, meta, parts | {name: raw})


@WRONG
@pytest.mark.parametrize("name", ["g0.mean", "g0.metric0", "g0.metric7"])
def test_profiles(profile, name, value):
    with pytest.raises(CorruptError, match="wrong shape or range"):
        Profile.from_bytes(changed(profile.data, name, None, value))


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("name", ["g0.rows", "g0.predictor"])
def test_bfloat16_arrays_of_profiles(profile, name, pattern):
    with pytest.raises(CorruptError, match="wrong shape or range"):
        Profile.from_bytes(changed(profile.data, name, None, pattern))


@WRONG
def test_cachegen_profiles(cachegen_profile, value):
    with pytest.raises(CorruptError):
        CacheGenProfile.from_bytes(changed(cachegen_profile.data, "units", None, value))


@WRONG
def test_scales_of_cachegen_segments(cachegen_blob, cachegen_profile, value):
    data = cut.segment(cachegen_blob, 0)
    other = data[:8] + np.array(value, "<f2").tobytes() + data[10:]
    refused(cut.with_segment(cachegen_blob, 0, other), cachegen_profile, level=0, match="scales")
