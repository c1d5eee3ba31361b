"""Abuse: damage without a matching checksum, and ids that are not the text that the metadata names.

Mitigation: CRC-32 over the header, each segment and the profile; a digest of the token ids.
"""

from __future__ import annotations

import pytest

from kvwire.codec import Profile, verify
from kvwire.errors import CorruptError

from .. import surgery as cut
from .abuse import refused, refused_by_head


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_of_the_head(blob):
    for at in (64, cut.index_at(blob), cut.tail_at(blob) - 1, cut.get(blob, cut.BLOB_FIELDS, "head_bytes") - 1):
        refused_by_head(flipped(blob, at), match="checksum")


@pytest.mark.parametrize("cell", [0, 5, 11])
def test_of_segments(blob, profile, cell):
    at = cut.get(blob, cut.ENTRY_FIELDS, "offset", cut.index_at(blob) + 32 * cell)
    refused(flipped(blob, at), profile, match="length or checksum")
    refused(cut.entry(blob, cell, "crc32", 0), profile, match="length or checksum")
    with pytest.raises(CorruptError, match="checksum"):
        verify(flipped(blob, at))


def test_of_segments_of_other_methods(exact_blob, cachegen_blob, cachegen_profile):
    refused(flipped(exact_blob, len(exact_blob) - 1), match="length or checksum")
    refused(flipped(cachegen_blob, len(cachegen_blob) - 1), cachegen_profile, match="length or checksum")


def test_of_profiles(profile):
    with pytest.raises(CorruptError, match="checksum"):
        Profile.from_bytes(flipped(profile.data, len(profile.data) - 1))


def test_of_the_text(blob, profile):
    """The header is sealed, so its checksum says nothing."""
    other = cut.sealed(flipped(blob, cut.tail_at(blob) - 2))
    refused(other, profile, match="token ids are not those")
