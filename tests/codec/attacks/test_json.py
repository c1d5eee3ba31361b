"""Abuse: JSON with the same key twice, nested without end, not finite, enormous, or no object at all.

Mitigation: a key may occur once, NaN and Infinity are no numbers, the text is at most a MiB, and what is nested too
deep for the parser is damage. Types are compared, not converted: ``true`` is no 1 and ``"3"`` no 3.
"""

from __future__ import annotations

import json

import pytest

from kvwire.codec import CacheGenProfile, Profile
from kvwire.errors import CorruptError

from .. import surgery as cut
from .abuse import refused

TEXTS = {
    "same key twice": b'{"meta": {}, "meta": {}}',
    "same key twice, deep": b'{"a": [{"b": 1, "b": 1}]}',
    "deep list": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "open end": b'{"a": [' * 1000,
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "long number": b'{"a": ' + b"9" * 100_000 + b"}",
    "no object": b'"text"',
    "no UTF-8": b'{"a": "\xff"}',
    "byte-order mark": b"\xef\xbb\xbf{}",
    "nothing": b"",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_blobs(blob, profile, text):
    refused(cut.with_metadata(blob, text), profile)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_profiles(profile, cachegen_profile, text):
    for kind, data in ((Profile, profile.data), (CacheGenProfile, cachegen_profile.data)):
        with pytest.raises(CorruptError):
            kind.from_bytes(cut.profile_of(data, text, cut.profile_parts(data)[1]))


@pytest.mark.parametrize(
    "key", ["levels", "profile", "head_start", "kept_bytes", "meta", "layers", "inv_freq", "dtype"]
)
def test_every_key_once(blob, profile, key):
    text = json.dumps(cut.metadata(blob))
    assert f'"{key}":' in text
    refused(cut.with_metadata(blob, text.replace(f'"{key}":', f'"{key}": 0, "{key}":', 1).encode()), profile)
