"""Abuse: levels in another order, of two methods at once, of a codec that their segments have not, more than there are.

Mitigation: layered levels or CacheGen's come first, lossless ones last; an entry's codec is its level's; a profile of
the other method, or with fewer levels, is refused before any segment is looked at.
"""

from __future__ import annotations

import pytest

from kvwire.codec import decode
from kvwire.codec.format.codecs import CODECS
from kvwire.errors import CorruptError, FormatVersionError, MismatchError

from .. import surgery as cut
from .abuse import refused, refused_by_head


def with_codecs(blob, codecs, *, entries=True):
    """The blob with other codecs of its levels, in its index too."""
    meta = cut.metadata(blob)
    for level, codec in zip(meta["levels"], codecs, strict=True):
        level[1] = codec
    blob = cut.with_metadata(blob, meta)
    for cell in range(cut.cells(blob) if entries else 0):
        blob = cut.entry(blob, cell, "codec", codecs[cell % len(codecs)])
    return blob


@pytest.mark.parametrize("codecs", [(1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 3), (3, 1, 1, 1), (1, 1, 1, 3), (1, 3, 2, 2)])
def test_orders_that_no_encoder_writes(blob, codecs):
    refused_by_head(with_codecs(blob, codecs), match="order that no encoder writes")


@pytest.mark.parametrize("codecs", [(1, 1, 1, max(CODECS) + 1), (0, 1, 1, 1), (1, 1, 1, 2**40), (255, 255, 255, 255)])
def test_unknown_codecs(blob, codecs):
    refused_by_head(with_codecs(blob, codecs, entries=False), FormatVersionError, "upgrade")


def test_entries_that_contradict_their_level(blob):
    refused_by_head(with_codecs(blob, (1, 1, 1, 2), entries=False), FormatVersionError, "coded in way 1")


def test_a_method_that_the_profile_has_not(blob, cachegen_blob, profile, cachegen_profile):
    as_cachegen, as_layered = with_codecs(blob, (3, 3, 3, 3)), cachegen_blob
    refused(as_cachegen, profile, match="another method")
    with pytest.raises(MismatchError):
        decode(as_layered, None, profile)
    meta = cut.metadata(blob) | {"profile": cachegen_profile.digest}
    refused(cut.with_metadata(blob, meta), cachegen_profile, match="does not know")
    refused(cut.with_metadata(as_cachegen, meta | {"levels": cut.metadata(as_cachegen)["levels"]}), cachegen_profile)


def test_layered_segments_as_lossless_ones(blob):
    """Without a profile nothing but the segment says what it is."""
    refused(with_codecs(blob, (2, 2, 2, 2)), error=CorruptError)


def test_more_levels_than_the_prologue_says(blob):
    meta = cut.metadata(blob)
    for levels in (meta["levels"][:3], [*meta["levels"], meta["levels"][-1]], meta["levels"] * 100):
        refused_by_head(cut.with_metadata(blob, meta | {"levels": levels}), match="names .* levels")
