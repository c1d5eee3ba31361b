"""Abuse: segments of another document, chunk or level in the place of the right ones, all checksums made right.

Mitigation: whatever the words are, symbols come from tables and indices from the layout: nothing outside is read or
written, streams that do not end as they began are refused, and what remains is the cache of some other text. That costs
quality, which no checksum without a secret can prevent; the store's digest of a whole blob does.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kvwire.codec import decode
from kvwire.errors import CorruptError

from .. import surgery as cut


def tried(data, profile, level=None):
    """Tensors of the right shape, or None where it is refused."""
    try:
        cache = decode(data, level, profile, threads=1)
    except CorruptError:
        return None
    assert cache.keys[0].shape == (2, 76, 8)
    return cache


def with_symbols(data, other, cell, number):
    """Another blob's segment, and its number of symbols too."""
    symbols = cut.get(other, cut.ENTRY_FIELDS, "symbols", cut.index_at(other) + 32 * number)
    return cut.entry(cut.with_segment(data, cell, cut.segment(other, number)), cell, "symbols", symbols)


def test_whole_chunks_of_another_document(blob, other_blob, profile):
    mixed = blob
    for cell in range(4, 8):
        mixed = with_symbols(mixed, other_blob, cell, cell)
    cache, sound, other = (decode(data, None, profile) for data in (mixed, blob, other_blob))
    assert torch.equal(cache.keys[0][:, :32], sound.keys[0][:, :32])
    assert not torch.equal(cache.keys[0][:, 32:64], sound.keys[0][:, 32:64])
    assert cache.keys[0].shape == other.keys[0].shape


@pytest.mark.parametrize("known", [False, True], ids=["index as it was", "index made right"])
def test_any_segment_in_any_place(blob, other_blob, profile, known):
    outcomes = set()
    for cell, number in itertools.product(range(12), range(12)):
        put = with_symbols if known else lambda data, other, c, n: cut.with_segment(data, c, cut.segment(other, n))
        outcomes.add(tried(put(blob, other_blob, cell, number), profile) is None)
    assert True in outcomes


def test_of_lossless_and_cachegen_levels(exact_blob, cachegen_blob, cachegen_profile):
    swapped = cut.with_segment(exact_blob, 0, cut.segment(exact_blob, 1))
    with pytest.raises(CorruptError):
        decode(swapped)
    for cell, number in itertools.product(range(9), range(9)):
        tried(cut.with_segment(cachegen_blob, cell, cut.segment(cachegen_blob, number)), cachegen_profile)
