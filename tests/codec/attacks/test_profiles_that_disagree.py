"""Abuse: a sound file whose parts contradict each other: groups, layers, table, predictors, rows, or the blob.

Mitigation: all shapes follow from the layers; each plane is in one group; predictors have the features that there are.
Expectations are kept in a memory that is one for all groups, however many there are.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.codec import CacheMeta, KVCache, Profile, decode, encode
from kvwire.codec.format.arrays import pack_arrays
from kvwire.codec.profile import profile as profile_module
from kvwire.errors import CorruptError, KvwireError, MismatchError
from kvwire.types import LayerSpec

from .. import surgery as cut
from ..synthetic import GQA, make_cache
from .abuse import refused


def altered(profile, change):
    """The profile with another head, arrays as they are."""
    meta, parts = cut.profile_parts(profile.data)
    change(meta["head"])
    return cut.profile_of(profile.data, meta, parts)


def test_groups_that_name_a_plane_twice_or_not_at_all(profile):
    def twice(head):
        head["groups"][0][1] = head["groups"][0][0]

    def missing(head):
        head["groups"][0].pop()

    def beyond(head):
        head["groups"][0][0] = ["key", 2**40]

    for change in (twice, missing, beyond):
        with pytest.raises(CorruptError):
            Profile.from_bytes(altered(profile, change))


def test_layers_of_other_shapes(profile):
    for place, to in ((1, 1), (2, 16), (3, 4), (0, "none")):

        def other(head, place=place, to=to):
            head["layers"][2][place] = to

        with pytest.raises(CorruptError):
            Profile.from_bytes(altered(profile, other))


def test_a_layout_that_only_adds_up(profile):
    """Heads and dims swapped: widths agree, metrics by head do not."""

    def swapped(head):
        head["layers"][0][1:4] = [1, 16, 16]

    with pytest.raises(CorruptError, match="wrong shape"):
        Profile.from_bytes(altered(profile, swapped))


def test_more_rows_than_the_group_is_wide(profile):
    meta, parts = cut.profile_parts(profile.data)
    for name, item in (("g0.rows", 2), ("g0.spread", 2)):
        row = next(row for row in meta["arrays"] if row[0] == name)
        row[2][0] = 1000
        row[3] = item * int(np.prod(row[2]))
        parts[name] = bytes(row[3])
    with pytest.raises(CorruptError, match="wrong shape"):
        Profile.from_bytes(cut.profile_of(profile.data, meta, parts))


def test_the_profile_of_another_model(blob, profile):
    other = Profile.from_bytes(altered(profile, lambda head: head.update(model_revision="r2")))
    with pytest.raises(MismatchError):
        decode(blob, None, other)
    named = cut.with_metadata(blob, cut.metadata(blob) | {"profile": other.digest})
    refused(named, other, MismatchError, "belongs to model")


def test_the_layout_of_another_blob(blob, profile):
    meta = cut.metadata(blob)
    for layers in (meta["meta"]["layers"][:3], meta["meta"]["layers"] * 2):
        other = meta | {"meta": meta["meta"] | {"layers": layers}}
        refused(cut.with_metadata(blob, other), profile, MismatchError, "another cache layout")


def test_many_groups_and_a_large_vocabulary_from_a_short_file(monkeypatch):
    """A table of zeros takes nothing; what is kept for its tokens is bounded all the same."""
    layers = (LayerSpec(1, 1, 1),) * 40
    rows, plain = {}, np.zeros((1, 1), "<u2")
    for number in range(80):
        rows |= {f"g{number}.mean": np.zeros(1, "<f2"), f"g{number}.spread": np.zeros(1, "<i2")}
        rows |= {
            f"g{number}.rows": plain + 0x3F80,
            f"g{number}.predictor": plain,
            f"g{number}.metric0": np.ones(1, "<f4"),
        }

    source = Profile.from_bytes(encode_inside())
    rows |= {"base": source.tables.base, "ternary": source.tables.ternary, "points": source.tables.points}
    rows["table"] = np.zeros((1 << 20, 1), np.int8)
    planes = [[[side, layer]] for side in ("key", "value") for layer in range(40)]
    head = {"model_id": "", "model_revision": "", "layers": [["full", 1, 1, 1, None, None]] * 40, "groups": planes}
    head |= {"head_start": 0, "hidden_size": 0, "error_to_kl": None, "notes": {}}
    data = pack_arrays(b"\x89KVP\r\n\x1a\n", head, rows)
    assert len(data) < 20_000
    small = Profile.from_bytes(data)
    monkeypatch.setattr(profile_module, "ROWS_BYTES", 64 << 20)
    kept = sum(each._cached_rows.nbytes + each._slots.nbytes for each in small.expectations)
    assert kept <= 64 << 20
    tensors = list(make_cache(9, layers=layers, ropes=()).keys)
    cache = KVCache.from_tensors(tensors, tensors, CacheMeta(layers=layers), range(9))
    assert decode(encode(cache, small), None, small).tokens == 9


def encode_inside():
    """The profile that a blob carries."""
    blob = encode(make_cache(9, layers=GQA[:1]))
    at = cut.tail_at(blob)
    return blob[at : at + cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")]


def test_a_profile_inside_that_is_of_something_else(own_blob, cachegen_profile):
    """Another layout, another method, or nothing at all, at the same length."""
    size, at = cut.get(own_blob, cut.BLOB_FIELDS, "profile_bytes"), cut.tail_at(own_blob)
    for inside in (encode_inside(), cachegen_profile.data, b"", b"\x89KVP\r\n\x1a\n"):
        data = inside[:size].ljust(size, b"\0")
        refused(cut.sealed(own_blob[:at] + data + own_blob[at + size :]), error=KvwireError)
