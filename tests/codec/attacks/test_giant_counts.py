"""Abuse: a few bytes that claim billions of tokens, chunks, heads, dims, lanes, words, features or rows.

Mitigation: every count is capped or compared with bytes that are there before anything is allocated by it: a token
costs a byte of ids, a chunk 32 of index, a column two of ``spread``, a token's width has a cap. The cache that a sound
blob decodes to may still be huge, so its memory is taken as chunks are written, and callers may bound it.
"""

from __future__ import annotations

import json

import pytest

from kvwire.codec import BlobDecoder, CacheGenProfile, Profile, decode, encode, inspect
from kvwire.errors import ArgumentError, CorruptError, KvwireError

from .. import surgery as cut
from ..peaks import HAS_RESIDENT_PEAKS, Peak
from ..synthetic import make_cache
from .abuse import refused, refused_by_head

MANY = 2**32 - 1


@pytest.mark.parametrize("name", ["tokens", "meta_stored", "meta_raw", "profile_bytes", "head_bytes", "file_bytes"])
def test_of_the_prologue(blob, name):
    refused_by_head(cut.field(blob, name, MANY))


def test_many_chunks_of_few_tokens(blob):
    one_each = cut.put(blob, cut.BLOB_FIELDS, "chunk_tokens", 1)
    refused_by_head(cut.field(one_each, "tokens", 10**6), match="does not add up")


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("count", [2**20, 2**19, 2**21, 2**40, 10**30])
def test_heads_and_dims(blob, exact_blob, profile, place, count):
    """A blob without a profile is where only the header says how wide a token is."""
    for data, used in ((blob, profile), (exact_blob, None)):
        meta = cut.metadata(data)
        meta["meta"]["layers"][0][place] = count
        refused(cut.with_metadata(data, meta), used, KvwireError)


def test_a_wide_model_that_nothing_pays_for(exact_blob):
    """Within the cap the columns' list has to be there: a frame of another length is refused unread."""
    meta = cut.metadata(exact_blob)
    meta["meta"]["layers"][0][1] = 2**18
    refused(cut.with_metadata(exact_blob, meta), match="length")


@pytest.mark.parametrize("name", ["words", "class_bytes", "escape_bytes", "lanes"])
@pytest.mark.parametrize("cell", [0, 1])
def test_of_layered_segments(blob, profile, cell, name):
    most = 2**16 - 1 if name == "lanes" else MANY
    changed = cut.put(cut.segment(blob, cell), cut.SEGMENT_FIELDS, name, most)
    refused(cut.with_segment(blob, cell, changed), profile, match="add up")


@pytest.mark.parametrize("name", sorted(set(cut.LOSSLESS_FIELDS) - {"reserved"}))
def test_of_lossless_segments(exact_blob, name):
    most = 2**16 - 1 if cut.LOSSLESS_FIELDS[name][1] == "<H" else MANY
    refused(cut.with_segment(exact_blob, 0, cut.put(cut.segment(exact_blob, 0), cut.LOSSLESS_FIELDS, name, most)))


@pytest.mark.parametrize("name", ["escape_bytes", "words"])
def test_of_cachegen_segments(cachegen_blob, cachegen_profile, name):
    changed = cut.put(cut.segment(cachegen_blob, 0), cut.CACHEGEN_FIELDS, name, MANY)
    refused(cut.with_segment(cachegen_blob, 0, changed), cachegen_profile, level=0, match="add up")


@pytest.mark.parametrize("kept", [100, 2**20, 2**40])
def test_kept_entries(blob, kept):
    refused_by_head(cut.with_metadata(blob, cut.metadata(blob) | {"kept_bytes": kept}), match="add up|kept entries")


def test_kept_entries_that_are_none_are_refused_before_a_segment_is_read(blob, profile):
    """Their length is possible, so it takes unpacking them, which only a decoder does."""
    changed = cut.with_metadata(blob, cut.metadata(blob) | {"kept_bytes": 1})
    refused(changed, profile, match="kept entries|add up")


@pytest.mark.parametrize("name", ["table", "g0.rows", "g0.predictor", "g0.mean", "base", "points"])
@pytest.mark.parametrize("shape", [[2**20, 2**20], [2**62, 2**62], [2**31], [1] * 100, [0, 2**40]])
def test_of_profiles(profile, name, shape):
    meta, parts = cut.profile_parts(profile.data)
    next(row for row in meta["arrays"] if row[0] == name)[2] = shape
    with pytest.raises(CorruptError):
        Profile.from_bytes(cut.profile_of(profile.data, meta, parts))


@pytest.mark.parametrize("name", ["head_start", "hidden_size"])
def test_features_that_no_predictor_has(profile, name):
    meta, parts = cut.profile_parts(profile.data)
    for count in (2**16, 2**17, 10**30):
        meta["head"][name] = count
        if name == "hidden_size" or count > 2**16:
            with pytest.raises(CorruptError):
                Profile.from_bytes(cut.profile_of(profile.data, meta, parts))


def test_of_cachegen_profiles(cachegen_profile):
    meta, parts = cut.profile_parts(cachegen_profile.data)
    for levels in ([["x", 1.0]] * 9, [["x", 1.0]] * 10_000):
        wide = json.loads(json.dumps(meta))
        wide["head"]["levels"] = levels
        with pytest.raises(CorruptError):
            CacheGenProfile.from_bytes(cut.profile_of(cachegen_profile.data, wide, parts))


def giant_blob(chunk_tokens):
    """A head of 1.5 kB that claims a cache of 8.4 GB, and segments that hold nothing of it."""
    blob = encode(make_cache(1000, ids=False), levels=0, lossless=True, chunk_tokens=chunk_tokens)
    meta = cut.metadata(blob)
    meta["meta"] |= {"layers": [["full", 1, 2**20, 2**20, None, None]] * 4, "dtype": "float8_e4m3fn"}
    blob = cut.with_metadata(blob, meta)
    for cell in range(cut.cells(blob)):
        blob = cut.with_segment(blob, cell, b"x" * 200)
    return blob


@pytest.mark.skipif(not HAS_RESIDENT_PEAKS, reason="what is only claimed is traced, too")
def test_a_cache_that_is_only_claimed_takes_no_memory():
    blob = giant_blob(128)
    assert cut.get(blob, cut.BLOB_FIELDS, "head_bytes") < 2000
    with Peak() as peak, pytest.raises(KvwireError, match=r"do not fit it|no room"):
        decode(blob, threads=1)
    assert peak.bytes < 64 << 20


def test_chunks_of_more_numbers_than_a_segment_holds():
    refused_by_head(giant_blob(256), match="2147483648 numbers a chunk")


@pytest.mark.parametrize("limit", ["max_tokens", "max_bytes"])
def test_a_caller_bounds_what_is_allocated(blob, profile, limit):
    """The message says what is claimed; a blob just within the limit is decoded."""
    cache = decode(blob, None, profile)
    most = {"max_tokens": 76, "max_bytes": cache.nbytes}
    assert decode(blob, None, profile, **{limit: most[limit]}).tokens == 76
    words = rf"claims 76 tokens \({cache.nbytes} bytes decoded\), more than {limit}={most[limit] - 1};"
    with pytest.raises(ArgumentError, match=words):
        decode(blob, None, profile, **{limit: most[limit] - 1})
    with pytest.raises(ArgumentError, match=words):
        BlobDecoder(blob, profile, **{limit: most[limit] - 1})


def test_a_caller_that_brings_the_output_bounds_tokens_alone(blob, profile):
    out = decode(blob, 0, profile)
    assert BlobDecoder(blob, profile, out=out, max_bytes=1).cache is out
    with pytest.raises(ArgumentError, match="max_tokens=75"):
        BlobDecoder(blob, profile, out=out, max_tokens=75)


def test_a_giant_can_be_looked_at():
    assert inspect(giant_blob(128)).tokens == 1000
