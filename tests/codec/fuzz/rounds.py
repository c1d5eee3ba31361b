"""One mutant by its number: drawn, read by the product, judged. The same seed and number give the same mutant."""

from __future__ import annotations

import json
import tracemalloc
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kvwire.codec import encode

from ..synthetic import make_hidden, make_tiny
from ..write_golden import GOLDEN, SECTIONS, SINKS, STEM
from . import judge
from .damage import TOO_DAMAGED, damage_blob, damage_json, damage_profile
from .makers import BlobMaker, Made, make_blob
from .wrappings import damage_sealed, damage_text, make_entry, make_sealed, make_text, seal_parts

EXACT_DTYPES = ("bfloat16", "float8_e4m3fn")


class Mutant(NamedTuple):
    """What was read and how it ended. files: what to keep of it, by ending."""

    number: int
    what: str
    files: dict[str, bytes]
    outcome: judge.Outcome


@lru_cache(1)
def golden():
    """Blobs of every kind that kvwire's own encoders wrote, with what reads them."""
    out = []
    for stem in (STEM, f"{STEM}-packed", SECTIONS, SINKS):
        told = json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))
        hidden = np.array(told["hidden"], np.float32)
        for name, facts in told["blobs"].items():
            used = facts["profile"]
            profile = (GOLDEN / used).read_bytes() if used else None
            blob = (GOLDEN / f"{stem}-{name}.kvw").read_bytes()
            out.append(Made(blob, profile, hidden if name == "hidden" else None))
    repeated = make_tiny(20, 5)
    for tensor in (repeated.keys[0], repeated.values[0]):
        tensor[:, 10:] = tensor[:, :10]
    out.append(Made(encode(repeated, levels=0, lossless=True, chunk_tokens=16)))
    for name in EXACT_DTYPES:
        cache = make_tiny(9, 6)
        for tensors in (cache.keys, cache.values):
            tensors[:] = [tensor.to(getattr(torch, name)) for tensor in tensors]
        out.append(Made(encode(cache, levels=0, lossless=True)))
    return out


def warm_up():
    """Have every kernel compiled, so that its compiler's time and memory are not taken for a reader's."""
    for made in golden():
        levels = len(judge.info_of(made.blob).levels)
        got = [judge.judge_blob(made, level, offset).finding for level in range(levels) for offset in (0, 3)]
        troubles = [each for each in got if each and not each.startswith("it took")]
        assert not troubles, troubles


def some_blob(rng):
    """A sound blob: of kvwire's encoders, or made by the text."""
    if rng.random() < 0.6:
        return golden()[rng.integers(len(golden()))]
    return make_blob(rng, head_start=True if rng.random() < 0.3 else None)


def place(rng, made):
    """A level that all chunks have, and an offset."""
    info = judge.info_of(made.blob)
    level = int(rng.integers(min(len(row) for row in info.segments)))
    stood = judge.TextPredictor.offset_of(made.blob)
    return level, [0, 3, None, stood][rng.integers(4)]


def files_of(made):
    """What reading takes."""
    hidden = b"" if made.hidden is None else made.hidden.tobytes()
    return {ending: data for ending, data in (("kvw", made.blob), ("kvp", made.profile), ("f4", hidden)) if data}


def legal_blob(rng):
    made = make_blob(rng, head_start=True if rng.random() < 0.2 else None)
    return files_of(made), judge.judge_blob(made, *place(rng, made))


def damaged_blob(rng):
    made = some_blob(rng)
    mutant = made._replace(blob=damage_blob(rng, made.blob), legal=False)
    level, offset = place(rng, made) if rng.random() < 0.8 else (int(rng.integers(-2, 4)), 0)
    return files_of(mutant), judge.judge_blob(mutant, level, offset, check=bool(rng.random() < 0.85))


def coded_with(rng, data):
    """A blob by the text for a profile that was accepted; its layers are the profile's, without positions."""
    layers = judge.read_profile(data).layers
    rows = [[s.kind, s.kv_heads, s.key_dim, s.value_dim, None, None] for s in layers]
    meta = {"layers": rows, "ropes": [], "model_revision": ""}
    return BlobMaker(rng, profile=data, meta=meta).make()._replace(legal=False)


def damaged_profile(rng):
    """Of a golden blob, with a document to encode, or of one that was made."""
    made = some_blob(rng)
    while not made.profile:
        made = some_blob(rng)
    data = damage_profile(rng, made.profile) if rng.random() < 0.9 else made.profile
    is_golden = any(made is each for each in golden())
    cache = make_tiny(20, 5) if is_golden and rng.random() < 0.5 else None
    hidden = None if cache is None or made.hidden is None else make_hidden(cache)
    legal = data is made.profile
    outcome = judge.judge_profile(data, lambda: coded_with(rng, data), cache, hidden, legal=legal)
    return {"kvp": data}, outcome


def text(rng):
    data, legal = make_text(rng), bool(rng.random() < 0.3)
    data = data if legal else damage_text(rng, data)
    return {"kvt": data}, judge.judge_text(data, legal=legal)


def sealed(rng):
    is_blob, legal = bool(rng.random() < 0.7), bool(rng.random() < 0.2)
    content = some_blob(rng).blob if is_blob else rng.bytes(int(rng.integers(0, 300)))
    if is_blob and not legal and rng.random() < 0.5:
        content = damage_blob(rng, content)
    try:
        parts = make_sealed(rng, content, is_blob=is_blob)
    except TOO_DAMAGED:
        parts, is_blob = make_sealed(rng, content, is_blob=False), False
    data = seal_parts(*parts) if legal or rng.random() < 0.3 else damage_sealed(rng, *parts)
    return {"kve": data}, judge.judge_sealed(data, is_blob=is_blob, legal=legal)


def entry(rng):
    data, legal = make_entry(rng), bool(rng.random() < 0.3)
    data = data if legal else damage_json(rng, data)
    return {"json": data}, judge.judge_entry(data, legal=legal)


KINDS = (*[legal_blob] * 4, *[damaged_blob] * 9, *[damaged_profile] * 3, text, sealed, sealed, entry)


TRACED = 4
"""Memory of every fourth mutant is traced, which takes as long again as the mutant."""


def run(seed, number):
    """Draw and judge one mutant."""
    rng = np.random.default_rng([seed, number])
    how = KINDS[rng.integers(len(KINDS))]
    if number % TRACED == 0:
        tracemalloc.start()
    try:
        files, outcome = how(rng)
    except Exception as error:  # noqa: BLE001 - the others are to be run all the same
        files, outcome = {}, judge.Outcome("", f"the fuzzer itself failed: {type(error).__name__}: {error}")
    finally:
        tracemalloc.stop()
    return Mutant(number, how.__name__, files, outcome)
