"""Blobs of documents that were computed behind a neutral prefix."""

import pytest
import torch

from kvwire.codec import Ladder, decode, encode, inspect
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.joining import join_headers
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import BlobPrefix, digest_tokens

from . import surgery as cut
from .synthetic import DEEP, make_cache
from .test_sinks import assert_sinks_near, document, fitted, unaware

PREFIX = (5, 0, 1 << 31)
LADDER = Ladder(3.6, ("coarse", "fine"))
PLAIN, FIRST = make_cache(40, 3, layers=DEEP), document(1, 5)


@pytest.fixture(scope="module")
def sunk_profile():
    return fitted([document(200, seed) for seed in (1, 2)])


@pytest.fixture(params=["numba", "triton"])
def backend(request):
    return request.param


def begun(profile, backend="numba"):
    return encode(PLAIN, profile, LADDER, neutral_prefix=PREFIX, beginning=FIRST, backend=backend)


def test_a_blob_says_what_its_document_was_computed_behind():
    cache = make_cache(50, 3)
    told, plain = encode(cache, levels=1, neutral_prefix=PREFIX), encode(cache, levels=1)
    assert inspect(told).neutral_prefix == PREFIX
    assert inspect(plain).neutral_prefix == ()
    assert "neutral_prefix" not in cut.metadata(plain)
    assert cut.get(told, cut.BLOB_FIELDS, "incompatible") == 1
    for blob in (cut.field(told, "incompatible", 0), cut.field(plain, "incompatible", 1)):
        with pytest.raises(CorruptError, match="disagree on a neutral prefix"):
            inspect(blob)
    with pytest.raises(ArgumentError, match="4096 tokens at most"):
        encode(cache, levels=1, neutral_prefix=[1] * 4097)


@pytest.mark.parametrize("to", [[], [-1], [1 << 32], [True], "5", {"a": 1}, [1] * 4097, [1.0]])
def test_impossible_prefixes_are_damage(to):
    blob = encode(make_cache(50, 3), levels=1, neutral_prefix=PREFIX)
    with pytest.raises(CorruptError, match=r"neutral.prefix"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"neutral_prefix": to}))


# The first token as it begins a prompt


def test_the_first_token_is_another_one_where_the_document_begins_a_prompt(sunk_profile, backend):
    blob = begun(sunk_profile, backend)
    assert inspect(blob).can_begin
    assert cut.get(blob, cut.BLOB_FIELDS, "incompatible") == 17
    for level in range(2):
        first, elsewhere = (
            decode(blob, level, sunk_profile, begins=begins, backend=backend) for begins in (True, False)
        )
        pairs = zip((*first.values, *first.keys), (*elsewhere.values, *elsewhere.keys), strict=True)
        assert all(torch.equal(ours[:, 1:], theirs[:, 1:]) for ours, theirs in pairs)
        assert_sinks_near(first, FIRST, sunk_profile, (0,))
        with pytest.raises(AssertionError):
            assert_sinks_near(elsewhere, FIRST, sunk_profile, (0,))


def test_models_without_sinks_store_nothing(sunk_profile):
    for used in (None, unaware(sunk_profile)):
        blob = encode(PLAIN, used, LADDER, neutral_prefix=PREFIX, beginning=FIRST)
        assert not inspect(blob).can_begin
        assert cut.get(blob, cut.BLOB_FIELDS, "incompatible") == 1


def test_parts_of_a_document_begin_as_its_first_one(sunk_profile):
    first = encode(PLAIN.slice(0, 30), sunk_profile, LADDER, neutral_prefix=PREFIX, beginning=FIRST)
    rest = BlobPrefix(30, digest_tokens(PLAIN.token_ids[:30]))
    second = encode(PLAIN.slice(30, 40), sunk_profile, LADDER, neutral_prefix=PREFIX, prefix=rest)
    joined = join_headers([parse_header(first), parse_header(second)])
    assert joined.beginning == parse_header(first).beginning
    assert joined.info.can_begin


@pytest.mark.parametrize("size", [0, -1, True, "5", None, 1 << 20])
def test_impossible_beginnings_are_damage(sunk_profile, size):
    blob = begun(sunk_profile)
    with pytest.raises(CorruptError, match=r"begin|add up"):
        inspect(cut.with_metadata(blob, cut.metadata(blob) | {"beginning": size}, frames=cut.sink_frames(blob)))


@pytest.mark.parametrize(("flags", "match"), [(1, "begins a prompt"), (16, "neutral prefix"), (21, "part of")])
def test_flag_and_beginning_go_together(sunk_profile, flags, match):
    with pytest.raises(CorruptError, match=match):
        inspect(cut.field(begun(sunk_profile), "incompatible", flags))


def test_a_beginning_needs_a_profile_with_rows_of_sinks(sunk_profile):
    """A blob that names one without."""
    other = unaware(sunk_profile)
    blob = begun(sunk_profile)
    renamed = cut.with_metadata(blob, cut.metadata(blob) | {"profile": other.digest}, frames=cut.sink_frames(blob))
    with pytest.raises(CorruptError, match="sinks"):
        decode(renamed, 0, other)
