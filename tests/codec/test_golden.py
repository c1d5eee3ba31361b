"""Files that earlier versions wrote are read as they were meant, for ever."""

from __future__ import annotations

import json

import pytest
import torch

from kvwire.codec.format.header import VERSION

from .write_golden import GOLDEN, STEM, assert_alike, facts, read_golden

STEMS = sorted(path.stem for path in GOLDEN.glob("v*.json"))
CASES = [(stem, name) for stem in STEMS for name in read_golden(stem)[0]["blobs"]]


def test_the_current_version_has_golden_files():
    assert f"v{VERSION[0]}.{VERSION[1]}" == STEM
    assert STEM in STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_golden_profiles_keep_their_name(stem):
    told, profiles = read_golden(stem)
    assert {name: profile.digest for name, profile in profiles.items()} == told["profiles"]


@pytest.mark.parametrize(("stem", "name"), CASES)
def test_golden_blobs_hold_what_was_written(stem, name):
    told, profiles = read_golden(stem)
    expected = told["blobs"][name]
    profile, blob = profiles.get(expected.pop("profile")), (GOLDEN / f"{stem}-{name}.kvw").read_bytes()
    found = json.loads(json.dumps(facts(blob, profile, torch.tensor(told["hidden"]))))
    tensors, expected_tensors = found.pop("tensors"), expected.pop("tensors")
    assert found == expected
    for ours, theirs in zip(tensors, expected_tensors, strict=True):
        assert_alike(ours, theirs)
