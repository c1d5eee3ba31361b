"""Blobs that are parts of a document: what they say, and what a reader of all parts refuses."""

from dataclasses import replace

import pytest
import torch

from kvwire.codec import BlobDecoder, encode, fit_profile, inspect
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.joining import join_headers
from kvwire.errors import ArgumentError, CorruptError, MismatchError
from kvwire.runtime.answer import level_kl
from kvwire.types import BlobPrefix, digest_tokens

from . import surgery as cut
from .synthetic import make_cache

ENDS = (20, 21, 50)


@pytest.fixture(scope="module")
def whole():
    return make_cache(50, 3)


@pytest.fixture(scope="module")
def profile(whole):
    return fit_profile([whole])


def _parts(whole, profile, **options):
    blobs, start = [], 0
    for end in ENDS:
        prefix = BlobPrefix(start, digest_tokens(whole.token_ids[:start]), "doc") if start else None
        blobs.append(encode(whole.slice(start, end), profile, chunk_tokens=16, prefix=prefix, **options))
        start = end
    return blobs


def test_a_part_says_what_it_stands_behind(whole, profile):
    first, second, _ = _parts(whole, profile)
    assert inspect(first).prefix is None
    assert inspect(second).prefix == BlobPrefix(20, digest_tokens(whole.token_ids[:20]), "doc")
    assert "prefix" not in cut.metadata(first)


@pytest.mark.parametrize("to", [None, [], [0, "a" * 64, ""], [True, "a" * 64, ""], [3, "a" * 63, ""], [3, "a" * 64, 1]])
def test_a_damaged_prefix_is_refused(whole, profile, to):
    _, blob, _ = _parts(whole, profile)
    with pytest.raises(CorruptError, match=r"part|prefix"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"prefix": to}))


def test_what_is_no_prefix_is_not_encoded(whole, profile):
    for prefix in (BlobPrefix(0, "a" * 64), BlobPrefix(3, "a")):
        with pytest.raises(ArgumentError, match="prefix"):
            encode(whole, profile, prefix=prefix)
    with pytest.raises(ArgumentError, match="token ids"):
        encode(replace(whole, token_ids=None), profile, prefix=BlobPrefix(3, "a" * 64))


def test_joined_headers_decode_as_one_encode_of_the_whole(whole, profile):
    blobs = _parts(whole, profile, lossless=True)
    header = join_headers([parse_header(blob) for blob in blobs])
    info = header.info
    assert info.token_ids == whole.token_ids
    assert [info.chunk_span(chunk) for chunk in range(info.chunks)] == [(0, 16), (16, 20), (20, 21), (21, 37), (37, 50)]
    for start in range(50):
        for stop in range(start, 51):
            spans = [info.chunk_span(chunk) for chunk in range(info.chunks)]
            naive = [chunk for chunk, (first, last) in enumerate(spans) if max(first, start) < min(last, stop)]
            assert list(info.chunks_of(start, stop)) == naive
    payload = b"".join(blob[: inspect(blob).header_bytes] for blob in blobs)
    payload += b"".join(blob[inspect(blob).header_bytes :] for blob in blobs)
    assert len(payload) == info.file_bytes
    for level in range(len(info.levels)):
        ours = BlobDecoder(header, profile, offset=None if level < len(info.levels) - 1 else 0)
        for chunk in range(info.chunks):
            ours.decode_chunk(chunk, [payload[each.offset : each.end] for each in info.reads(chunk, level)], level)
        if not info.levels[level].lossless:
            continue
        pairs = zip((*ours.cache.keys, *ours.cache.values), (*whole.keys, *whole.values), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_parts_that_do_not_belong_together_are_refused(whole, profile):
    first, second, third = (parse_header(blob) for blob in _parts(whole, profile))
    for wrong in ([first, third], [second, third], [first, second, second]):
        with pytest.raises(CorruptError, match="encode the whole document anew"):
            join_headers(wrong)
    prefix = BlobPrefix(20, digest_tokens(whole.token_ids[:20]))
    part = whole.slice(20, 50)
    for other in (encode(part, profile, 3, prefix=prefix), encode(part, None, prefix=prefix)):
        with pytest.raises(MismatchError, match="encode the whole document anew"):
            join_headers([first, parse_header(other)])


def test_rows_say_over_which_level_they_were_computed(whole, profile):
    calibrated = replace(profile, error_to_kl=(2.0, 1.0)) if profile.error_to_kl is None else profile
    plain, over = (inspect(encode(whole, calibrated, context_level=level)) for level in (None, 1))
    assert (plain.context_level, over.context_level) == (None, 1)
    for before, after in zip(plain.levels, over.levels, strict=True):
        assert after.predicted_kl == pytest.approx(before.predicted_kl + plain.levels[1].predicted_kl)
    over = inspect(encode(whole, calibrated, context_level=1, lossless=True))
    assert over.levels[-1].lossless
    assert over.levels[-1].predicted_kl == level_kl(over, len(over.levels) - 1) == plain.levels[1].predicted_kl
    first, second, third = _parts(whole, profile)
    second = cut.with_metadata(second, cut.metadata(second) | {"context_level": 3})
    third = cut.with_metadata(third, cut.metadata(third) | {"context_level": 2})
    assert join_headers([parse_header(blob) for blob in (first, second, third)]).info.context_level == 2
    assert "context_level" not in cut.metadata(first)


@pytest.mark.parametrize("to", [-1, 8, True, "1", 1.0])
def test_a_level_that_rows_cannot_have_been_computed_over_is_refused(whole, profile, to):
    blob = encode(whole, profile)
    with pytest.raises(CorruptError, match="context_level"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"context_level": to}))
    if type(to) is int:
        with pytest.raises(ArgumentError, match="context_level"):
            encode(whole, profile, context_level=to)
