"""Abuse: zstd frames that unpack to far more than they take, in every place where the format has one.

Mitigation: each frame states its content's size, which must be the one that is known from elsewhere and is capped; it
is compared before anything is allocated, and what comes out is compared again.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvwire.codec import KVCache, Profile, encode
from kvwire.errors import CorruptError

from .. import surgery as cut
from ..synthetic import make_cache
from .abuse import refused, refused_by_head

BOMB = cut.frame(bytes(1 << 28))
"""A quarter of a GiB in some KiB."""


def liar(length):
    """A frame of an empty raw block whose header claims that many bytes."""
    return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, length) + b"\x01\x00\x00"


BOMBS = pytest.mark.parametrize("bomb", [BOMB, liar(2**40), liar(2**63)], ids=["bomb", "liar", "giant liar"])


@BOMBS
@pytest.mark.parametrize("raw_length", [1 << 20, 1 << 28, 2**32 - 1])
def test_metadata(blob, bomb, raw_length):
    refused_by_head(cut.with_metadata(blob, b"{}", bomb, raw_length))


def with_frame(data, fields, header_bytes, names, which, bomb):
    """A segment with another list; names: of the lists' lengths in their order."""
    at = header_bytes + sum(cut.get(data, fields, name) for name in names[: names.index(which)])
    size = cut.get(data, fields, which)
    return cut.put(data[:at] + bomb + data[at + size :], fields, which, len(bomb))


@BOMBS
@pytest.mark.parametrize("which", ["class_bytes", "escape_bytes"])
def test_layered_segments(blob, profile, which, bomb):
    changed = with_frame(cut.segment(blob, 0), cut.SEGMENT_FIELDS, 16, ["class_bytes", "escape_bytes"], which, bomb)
    refused(cut.with_segment(blob, 0, changed), profile)


LISTS = ["table_bytes", "class_bytes", "reference_bytes", "block_bytes", "row_bytes", "escape_bytes"]


@BOMBS
@pytest.mark.parametrize("which", LISTS)
def test_lossless_segments(exact_blob, which, bomb):
    changed = with_frame(cut.segment(exact_blob, 0), cut.LOSSLESS_FIELDS, 40, LISTS, which, bomb)
    refused(cut.with_segment(exact_blob, 0, changed))


@BOMBS
def test_cachegen_segments(cachegen_blob, cachegen_profile, bomb):
    data = cut.segment(cachegen_blob, 0)
    scales = 2 * len(cachegen_profile.blocks) * -(-32 // 10)
    changed = with_frame(data, cut.CACHEGEN_FIELDS, 8 + scales, ["escape_bytes"], "escape_bytes", bomb)
    refused(cut.with_segment(cachegen_blob, 0, changed), cachegen_profile, level=0)


@BOMBS
@pytest.mark.parametrize("name", ["g0.mean", "table", "base", "later"])
def test_profiles(profile, name, bomb):
    meta, parts = cut.profile_parts(profile.data)
    if name == "later":
        meta["arrays"].append(["later", "|i1", [1 << 28], len(bomb)])
    else:
        row = next(row for row in meta["arrays"] if row[0] == name)
        row[2:] = [[(1 << 28) // int(row[1][2])], len(bomb)]
    with pytest.raises(CorruptError):
        Profile.from_bytes(cut.profile_of(profile.data, meta, parts | {name: bomb}))


def pruned_blob(profile):
    cache = make_cache(4000, 3)
    mask = np.random.default_rng(0).random((2, 4000)) < 0.5
    import torch

    kept = [torch.from_numpy(mask), None, None, None]
    return encode(KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=kept), profile, 1)


def test_kept_entries(profile):
    """At most 256 bytes for each one stored, and exactly those that the layout calls for."""
    blob = pruned_blob(profile)
    at, size = cut.tail_at(blob), cut.kept_bytes(blob)
    for raw in (bytes(3999), bytes(4001), bytes(1 << 24)):
        bomb = cut.frame(raw)
        assert len(bomb) <= size
        short = cut.with_metadata(
            blob[:at] + bomb + blob[at + len(bomb) :], cut.metadata(blob) | {"kept_bytes": len(bomb)}
        )
        refused_by_head(short)
