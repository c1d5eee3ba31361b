"""Random damage, seeded: every mutant gives a kvwire error or some tensors, soon and in little memory.

``KVWIRE_MUTATIONS`` sets how many mutants there are; the mutant number is the seed.
"""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
import torch
from zstandard import ZstdError

from kvwire.codec import (
    CacheGenProfile,
    KVCache,
    Profile,
    decode,
    encode,
    fit_cachegen_profile,
    fit_profile,
    inspect,
    read_profile,
)
from kvwire.errors import KvwireError

from . import surgery as cut
from .synthetic import GQA, LATENT, MIXED, MIXED_ROPES, make_cache, make_hidden, make_statistics
from .write_golden import with_hidden

COUNT = int(os.environ.get("KVWIRE_MUTATIONS", "1200"))
TOO_DAMAGED = (
    LookupError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    struct.error,
    ZstdError,
)
"""What the surgeon meets in blobs that are too damaged already to be damaged where it was meant."""
NUMBERS = (0, 1, 2, 7, 63, 64, 255, 256, 4096, 65535, 2**31, 2**32 - 1)
ODD = (None, True, "", "\ud800", [], {}, [[]], -1, 0, 1, 10**30, -(10**400), 1.5, 1e308, 1e-308, "none", 2**20, 65536)


class Target(NamedTuple):
    """A sound blob, what decodes it, and the cache that it was made of."""

    blob: bytes
    profile: Profile | CacheGenProfile | None
    hidden: torch.Tensor | None
    cache: KVCache


class Targets:
    """Sound blobs and profiles to damage."""

    def __init__(self):
        small, odd = make_cache(44, layers=GQA[:2]), make_cache(30, layers=MIXED, ropes=MIXED_ROPES)
        small.values[1][0, 7, 3] = 9000.0  # escapes
        calibration, told = [make_cache(300, 1, layers=GQA[:2])], make_statistics(GQA[:2], words=True)
        words = fit_profile(calibration, told, group_width=40)
        rows8 = fit_profile([make_cache(64, layers=MIXED, ropes=MIXED_ROPES)], small=True)
        hidden = make_hidden(small)
        both, cachegen = with_hidden(words, hidden.shape[1]), fit_cachegen_profile(calibration)
        mask = [torch.arange(44) % torch.tensor([[2], [3]]) < 1, None]
        pruned = KVCache.from_tensors(small.keys, small.values, small.meta, small.token_ids, kept=mask)
        low = make_cache(30, layers=LATENT, dtype=torch.bfloat16)
        made = [
            (small, words, None, {"levels": 4, "chunk_tokens": 16}),
            (small, None, None, {"levels": 4, "chunk_tokens": 16}),
            (odd, None, None, {"levels": 2}),
            (odd, rows8, None, {"levels": 3, "chunk_tokens": 4096}),
            (small, both, hidden, {"levels": 2, "chunk_tokens": 16}),
            (pruned, words, None, {"levels": 1, "chunk_tokens": 16, "lossless": True}),
            (low, None, None, {"levels": 0, "chunk_tokens": 16, "lossless": True}),
            (small, cachegen, None, {"levels": 2, "chunk_tokens": 16}),
        ]
        self.all = [Target(encode(c, p, hidden=h, **how), p, h, c) for c, p, h, how in made]
        self.coders = [self.all[number] for number in (0, 3, 4, 7)]


@pytest.fixture(scope="module")
def targets():
    return Targets()


def flip(rng, data):
    out = bytearray(data)
    for at in rng.integers(0, len(data), rng.integers(1, 5)):
        out[at] ^= 1 << rng.integers(8)
    return bytes(out)


def overwrite(rng, data):
    at, count = int(rng.integers(len(data))), int(rng.integers(1, 40))
    fill = rng.bytes(count) if rng.random() < 0.5 else bytes([rng.choice([0, 255, 128])]) * count
    return data[:at] + fill[: len(data) - at] + data[at + count :]


def truncate(rng, data):
    return data[: rng.integers(len(data))]


def splice(rng, data):
    start, stop, at = *sorted(rng.integers(0, len(data), 2)), rng.integers(len(data))
    stop = min(stop, start + 200)
    return data[:at] + data[start:stop] + data[at + (stop - start if rng.random() < 0.5 else 0) :]


def number(rng, was, form):
    bits = 8 * struct.calcsize(form)
    if form == "<f":
        return float(rng.choice([0.0, -1.0, np.inf, np.nan, 1e38]))
    choice = int(rng.choice([*NUMBERS, was + 1, was - 1, was * 2, was ^ (1 << int(rng.integers(bits))), 2**bits - 1]))
    return choice % 2**bits


def edit(rng, data, fields, base=0):
    name = str(rng.choice(list(fields)))
    try:
        return cut.put(
            data,
            fields,
            name,
            number(rng, int(np.nan_to_num(cut.get(data, fields, name, base))), fields[name][1]),
            base,
        )
    except struct.error:
        return data


def change_json(rng, value):
    """One random place of the JSON replaced, dropped or doubled."""
    if isinstance(value, dict | list) and len(value) and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[rng.integers(len(keys))]
        if rng.random() < 0.1:
            del value[key]
        elif isinstance(value, list) and rng.random() < 0.1:
            value.append(value[key])
        else:
            value[key] = change_json(rng, value[key])
        return value
    if isinstance(value, int) and rng.random() < 0.5:
        return number(rng, value, "<Q") if rng.random() < 0.5 else value + int(rng.integers(-2, 3))
    return ODD[rng.integers(len(ODD))]


def edit_index(rng, blob):
    return edit(rng, blob, cut.ENTRY_FIELDS, cut.index_at(blob) + 32 * int(rng.integers(cut.cells(blob))))


def edit_segment(rng, blob):
    cell = int(rng.integers(cut.cells(blob)))
    data = cut.segment(blob, cell)
    fields = {1: cut.SEGMENT_FIELDS, 2: cut.LOSSLESS_FIELDS, 3: cut.CACHEGEN_FIELDS}
    codec = cut.get(blob, cut.ENTRY_FIELDS, "codec", cut.index_at(blob) + 32 * cell)
    own = fields.get(codec, cut.SEGMENT_FIELDS)
    how = rng.choice([flip, overwrite, truncate, splice, lambda rng, data: edit(rng, data, own)])
    return cut.with_segment(blob, cell, how(rng, data))


def edit_metadata(rng, blob):
    return cut.with_metadata(blob, change_json(rng, cut.metadata(blob)))


def edit_inside(rng, blob):
    """The profile inside, damaged at the same length and sealed."""
    size = cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")
    if not 0 < size < len(blob):
        return edit_segment(rng, blob)
    at = cut.tail_at(blob)
    damaged = mutate_profile(rng, blob[at : at + size])[:size]
    return blob[:at] + damaged.ljust(size, b"\0") + blob[at + size :]


def swap(rng, blob):
    """Two segments in each other's place, the index knowing it."""
    first, second = (int(cell) for cell in rng.integers(0, cut.cells(blob), 2))
    one, other = cut.segment(blob, first), cut.segment(blob, second)
    return cut.with_segment(cut.with_segment(blob, first, other), second, one)


def mutate_blob(rng, blob):
    simple = [flip, overwrite, truncate, splice, lambda rng, data: edit(rng, data, cut.BLOB_FIELDS)]
    deep = [edit_index, edit_segment, edit_segment, edit_metadata, edit_metadata, edit_inside, swap]
    for _ in range(rng.integers(1, 3)):
        how = rng.choice(simple if rng.random() < 0.4 else deep)
        try:
            blob = how(rng, blob)
        except TOO_DAMAGED:
            continue
        if not blob:
            return blob
    return cut.sealed(blob) if rng.random() < 0.8 else blob


def mutate_profile(rng, data):
    if rng.random() < 0.5:
        meta, parts = cut.profile_parts(data)
        if rng.random() < 0.5:
            meta = change_json(rng, meta)
        else:
            name = str(rng.choice(list(parts)))
            parts[name] = rng.choice([flip, overwrite, truncate, splice])(rng, parts[name])
            if rng.random() < 0.7:
                next(row for row in meta["arrays"] if row[0] == name)[3] = len(parts[name])
        data = cut.profile_of(data, meta, parts)
    else:
        data = rng.choice([flip, overwrite, truncate, splice, lambda r, d: edit(r, d, cut.PROFILE_FIELDS)])(rng, data)
    return cut.sealed_profile(data) if rng.random() < 0.8 else data


def outcome(mutant, level, target, check):
    """What reading a mutant comes to: an error's name, or ``tensors``."""
    try:
        inspect(mutant)
        decoded = decode(mutant, level, target.profile, check=check, hidden=target.hidden, threads=1)
    except KvwireError as error:
        return type(error).__name__
    assert isinstance(decoded, KVCache)
    return "tensors"


def run_blob(seed, targets):
    rng = np.random.default_rng(seed)
    target = targets.all[rng.integers(len(targets.all))]
    mutant = mutate_blob(rng, target.blob)
    return outcome(mutant, int(rng.integers(-2, 2)), target, bool(rng.random() < 0.3))


def run_profile(seed, targets):
    """A damaged profile, and where it is still read, a cache coded with it."""
    rng = np.random.default_rng(seed)
    target = targets.coders[rng.integers(len(targets.coders))]
    try:
        profile = read_profile(mutate_profile(rng, target.profile.data))
        blob = encode(target.cache, profile, hidden=target.hidden, threads=1)
        return outcome(blob, None, target._replace(profile=profile), check=True)
    except KvwireError as error:
        return type(error).__name__


def test_damaged_blobs_give_errors_or_tensors(targets):
    seen = {}
    for seed in range(COUNT):
        start = time.thread_time()
        got = run_blob(seed, targets)
        assert time.thread_time() - start < 10, seed
        seen[got] = seen.get(got, 0) + 1
    assert {"CorruptError", "tensors"} <= set(seen)


def test_damaged_profiles_give_errors_or_tensors(targets):
    seen = {run_profile(seed, targets) for seed in range(COUNT // 8)}
    assert {"CorruptError", "tensors"} <= seen


def peak_bytes(run):
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    run()
    return tracemalloc.get_traced_memory()[1] - before


def test_damage_earns_no_memory(targets):
    """Objects and arrays are traced; tensors are not, and stand in proportion to the head's tokens."""
    tracemalloc.start()
    try:
        sound = max(
            peak_bytes(lambda target=each: outcome(target.blob, None, target, check=True)) for each in targets.all
        )
        peaks = [peak_bytes(lambda seed=seed: run_blob(seed, targets)) for seed in range(min(COUNT, 300))]
    finally:
        tracemalloc.stop()
    assert max(peaks) < 4 * sound
