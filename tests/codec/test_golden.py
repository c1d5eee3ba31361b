"""Files that earlier versions wrote are read as they were meant, for ever."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvwire.codec import Profile
from kvwire.codec.container import VERSION

from .write_golden import GOLDEN, TOLERANCE, facts

STEMS = sorted(path.stem for path in GOLDEN.glob("v*.json"))
CASES = [
    (stem, name)
    for stem in STEMS
    for name in json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))["blobs"]
]


def test_the_current_version_has_golden_files():
    assert f"v{VERSION[0]}.{VERSION[1]}" in STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_golden_profiles_keep_their_name(stem):
    profile = Profile.from_bytes((GOLDEN / f"{stem}.kvp").read_bytes())
    assert profile.digest == json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))["profile"]


@pytest.mark.parametrize(("stem", "name"), CASES)
def test_golden_blobs_hold_what_was_written(stem, name):
    expected = json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))["blobs"][name]
    profile = Profile.from_bytes((GOLDEN / f"{stem}.kvp").read_bytes())
    found = json.loads(json.dumps(facts((GOLDEN / f"{stem}-{name}.kvw").read_bytes(), profile)))
    tensors, expected_tensors = found.pop("tensors"), expected.pop("tensors")
    assert found == expected
    for ours, theirs in zip(tensors, expected_tensors, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=2e-3)
