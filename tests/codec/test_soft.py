"""Blobs of documents with soft tokens inside their caches."""

from dataclasses import replace

import pytest

from kvwire.codec import decode, encode, inspect
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError
from kvwire.types import KVCache, SoftTokensName

from . import surgery as cut
from .synthetic import make_cache

NAME = SoftTokensName("ab" * 32, 1000, 6)


def wrapped(count=50):
    """A cache whose first and last tokens are soft ones."""
    cache = make_cache(count, 3)
    ids = [1000, 1001, *range(count - 3), 1005]
    return KVCache.from_tensors(cache.keys, cache.values, cache.meta, ids)


def test_a_blob_says_which_soft_tokens_its_document_has():
    cache = wrapped()
    told, plain = encode(cache, levels=1, soft_tokens=NAME), encode(cache, levels=1)
    assert inspect(told).soft_tokens == NAME
    assert inspect(told).token_ids == decode(told).token_ids == cache.token_ids
    assert inspect(plain).soft_tokens is None
    assert "soft_tokens" not in cut.metadata(plain)
    assert cut.get(told, cut.BLOB_FIELDS, "incompatible") == 2
    for blob in (cut.field(told, "incompatible", 0), cut.field(plain, "incompatible", 2)):
        with pytest.raises(CorruptError, match="disagree on soft tokens"):
            inspect(blob)
    with pytest.raises(FormatVersionError, match="newer than this kvwire"):
        inspect(cut.field(told, "incompatible", 32))
    with pytest.raises(CorruptError, match="lie beyond its soft tokens"):
        inspect(cut.with_metadata(told, cut.metadata(told) | {"soft_tokens": [DIGEST, 1000, 5]}))


DIGEST = "ab" * 32


@pytest.mark.parametrize(
    "to",
    [[], [DIGEST, 1000], [DIGEST[1:], 1000, 6], [DIGEST.upper(), 1000, 6], [DIGEST, 0, 6], [DIGEST, 1000, 0], "5", 7,
     [DIGEST, 1000, 4097], [DIGEST, (1 << 32) - 5, 6], [DIGEST, True, 6], [DIGEST, 1000.0, 6], {"a": 1}],
)  # fmt: skip
def test_impossible_names_are_damage(to):
    blob = encode(wrapped(), levels=1, soft_tokens=NAME)
    with pytest.raises(CorruptError, match="soft tokens"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"soft_tokens": to}))


def test_what_readers_would_refuse_is_not_written():
    cache = wrapped()
    for wrong in (replace(NAME, digest="x"), replace(NAME, count=5000)):
        with pytest.raises(ArgumentError, match="named by a SHA-256"):
            encode(cache, levels=1, soft_tokens=wrong)
    with pytest.raises(ArgumentError, match="none lies beyond them"):
        encode(cache, levels=1, soft_tokens=replace(NAME, count=5))
    with pytest.raises(ArgumentError, match="comes with its token ids"):
        encode(replace(cache, token_ids=None), levels=1, soft_tokens=NAME)
