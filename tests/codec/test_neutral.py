"""Blobs of documents that were computed behind a neutral prefix."""

import pytest

from kvwire.codec import encode, inspect
from kvwire.errors import ArgumentError, CorruptError

from . import surgery as cut
from .synthetic import make_cache

PREFIX = (5, 0, 1 << 31)


def test_a_blob_says_what_its_document_was_computed_behind():
    cache = make_cache(50, 3)
    told, plain = encode(cache, levels=1, neutral_prefix=PREFIX), encode(cache, levels=1)
    assert inspect(told).neutral_prefix == PREFIX
    assert inspect(plain).neutral_prefix == ()
    assert "neutral_prefix" not in cut.metadata(plain)
    assert cut.get(told, cut.BLOB_FIELDS, "incompatible") == 1


@pytest.mark.parametrize("to", [[], [-1], [1 << 32], [True], "5", {"a": 1}, [1] * 4097, [1.0]])
def test_impossible_prefixes_are_damage(to):
    blob = encode(make_cache(50, 3), levels=1, neutral_prefix=PREFIX)
    with pytest.raises(CorruptError, match="neutral prefix"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"neutral_prefix": to}))


def test_flag_and_prefix_go_together():
    cache = make_cache(50, 3)
    told, plain = encode(cache, levels=1, neutral_prefix=PREFIX), encode(cache, levels=1)
    for blob in (cut.field(told, "incompatible", 0), cut.field(plain, "incompatible", 1)):
        with pytest.raises(CorruptError, match="disagree on a neutral prefix"):
            inspect(blob)


def test_a_prefix_that_is_too_long_is_refused():
    with pytest.raises(ArgumentError, match="4096 tokens at most"):
        encode(make_cache(50, 3), levels=1, neutral_prefix=[1] * 4097)
