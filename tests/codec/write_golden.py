"""Writes the golden files of the current format version. They are written once: later they are only read.

Run from the root of the repository: ``PYTHONPATH=. python tests/codec/write_golden.py``. It refuses to touch
files that exist; ``--overwrite`` is for the time before a version is released.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import torch

from kvwire.codec import (
    KVCache,
    Ladder,
    Profile,
    decode,
    encode,
    fit_cachegen_profile,
    fit_profile,
    inspect,
    positions_on,
    read_profile,
)
from kvwire.codec.format.codecs import CODEC_LAYERED
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.header import VERSION
from kvwire.codec.format.segment import SegmentState, decode_segment
from kvwire.types import BlobPrefix, BlockDeviation, SoftTokensName, digest_tokens

GOLDEN = Path(__file__).parent / "golden"
STEM = f"v{VERSION[0]}.{VERSION[1]}"
SECTIONS = f"{STEM}-sections"
"""Of files whose profiles lie in sections (flags 1 and 2). Those of ``v1.0-packed`` have flag 1 alone: nothing writes
such any more. All others are stored plainly."""
TOLD = f"{STEM}-told"
"""Of blobs that say how far their tokens move."""
BEHIND = f"{STEM}-behind"
"""Of blobs whose documents were computed behind a neutral prefix (flag 1)."""
SOFT = f"{STEM}-soft"
"""Of blobs whose documents have soft tokens inside their caches (flag 2)."""
PART = f"{STEM}-part"
"""Of blobs that are parts of a document (flag 4)."""
BEGINNING = f"{STEM}-beginning"
"""Of blobs that have their first token as it begins a prompt (flag 16)."""
SINKS = f"{STEM}-sinks"
"""Of blobs with attention sinks (flag 8), and profiles with a row of them."""
PRUNED = f"{STEM}-holes"
"""Of a pruned cache with an attention sink."""
CONTEXT = f"{STEM}-context"
"""Of blobs whose rows were computed over tokens at a lossy level."""
OFFSET = 3
"""Where golden blobs are decoded to."""
LADDER = Ladder(2.0, ("low", "middle", "high"))


def assert_alike(ours, theirs):
    """Equal up to float noise, but for a few numbers whose expectation lies on the edge between two bfloat16 ones."""
    np.testing.assert_allclose(ours, theirs, atol=0.1, rtol=0.02)
    near = np.isclose(ours, theirs, atol=2e-3, rtol=2e-3)
    assert np.count_nonzero(near) >= 0.99 * near.size


def read_golden(stem: str) -> tuple[dict, dict]:
    """What is said of the golden files of a version, and its profiles by file name."""
    told = json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))
    return told, {name: read_profile((GOLDEN / name).read_bytes()) for name in told["profiles"]}


def quantised(blob: bytes, profile: Profile, level: int) -> np.ndarray:
    """Quantised values of every token at a level, ``[tokens, columns]``, from the segments alone."""
    head, chunks = parse_header(blob), []
    for row in head.info.segments:
        start, stop = head.info.chunk_span(row[0].chunk)
        state = SegmentState(stop - start, profile.spread, profile.tables)
        for segment in row[: level + 1]:
            decode_segment(state, segment.level, head.levels[segment.level].shift, blob[segment.offset : segment.end])
        chunks.append(state.values)
    return np.concatenate(chunks).astype("<i4")


def sha256(*parts: bytes) -> str:
    """Digest of parts in a row."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def facts(blob: bytes, profile, hidden) -> dict:
    """What a reader of any later version must find in a golden blob."""
    info, head = inspect(blob), parse_header(blob)
    layered = [k for k, level in enumerate(head.levels) if level.codec == CODEC_LAYERED]
    inside = Profile.from_bytes(head.profile_bytes) if head.profile_bytes else profile
    finest = decode(blob, None, profile, offset=OFFSET, hidden=hidden)
    exact = decode(blob, "lossless", offset=head.offset) if info.levels[-1].lossless else None
    return {
        "sha256": sha256(blob),
        "method": info.method,
        "head_start": info.prefix_layers,
        "levels": [
            [level.name, level.step, level.cumulative_bytes, round(level.measured_error, 6), level.lossless]
            for level in info.levels
        ],
        "token_ids": info.token_ids,
        "kept": None if finest.kept is None else [None if m is None else int(m.sum()) for m in finest.kept],
        "quantised_sha256": [sha256(quantised(blob, inside, k).tobytes()) for k in layered],
        "tensors": [np.round(t.double().numpy().ravel(), 4).tolist() for t in (*finest.keys, *finest.values)],
        "lossless_sha256": exact and sha256(*(t.numpy().tobytes() for t in (*exact.keys, *exact.values))),
        **({"deviation": [info.deviation.block, info.deviation.values]} if info.deviation else {}),
        **({"neutral_prefix": info.neutral_prefix} if info.neutral_prefix else {}),
        **({"soft_tokens": astuple(info.soft_tokens)} if info.soft_tokens else {}),
        **({"prefix": astuple(info.prefix)} if info.prefix else {}),
        **({"sinks": info.sinks} if info.sinks else {}),
        **({"context_level": info.context_level} if info.context_level is not None else {}),
        **_begun(blob, info, profile),
    }


def _begun(blob: bytes, info, profile) -> dict:
    """The first token at the coarsest level, where nothing stands before it."""
    if not info.can_begin:
        return {}
    first = decode(blob, 0, profile, begins=True).slice(0, 1)
    return {"begun": [np.round(t.double().numpy().ravel(), 4).tolist() for t in (*first.keys, *first.values)]}


def with_hidden(profile: Profile, size: int) -> Profile:
    """A profile that predicts from the tokens and from hidden states, which are not worth much."""
    rng = np.random.default_rng(3)

    def longer(group):
        more = torch.from_numpy(0.05 * rng.standard_normal((size, group.width))).bfloat16()
        return replace(group, predictor=torch.cat([group.predictor, more]))

    groups = tuple(longer(group) for group in profile.groups)
    return replace(profile, groups=groups, prefix_layers=1, hidden_size=size, error_to_kl=(0.25, 1.5))


def make() -> tuple[dict, dict, torch.Tensor]:
    """Profiles by file name; for each blob its bytes and its profile's file name; and the document's hidden states."""
    from synthetic import (
        TINY,
        TINY_ROPES,
        in_8_bits,
        make_cache,
        make_hidden,
        make_statistics,
        make_tiny,
        stored_plainly,
    )

    tiny = make_tiny(20, 5)
    tiny.values[0][1, 9, 2] = 3000.0  # beyond the alphabet: an escape
    hidden = make_hidden(tiny).half().float()
    caches = [make_tiny(200, seed) for seed in (1, 2)]
    told = make_statistics(TINY, TINY_ROPES, words=True)
    named = stored_plainly(fit_profile(caches, told, group_width=40))
    small = in_8_bits(fit_profile(caches, replace(told, token_features=None)))
    both, cachegen = with_hidden(named, hidden.shape[1]), fit_cachegen_profile(caches)
    names = {kind: f"{STEM}{kind}" for kind in (".kvp", "-small.kvp", "-hidden.kvp", ".kvg")}
    profiles = dict(zip(names.values(), (named, small, both, cachegen), strict=True))
    moved, mask = positions_on(tiny, 7), torch.arange(20) % torch.tensor([[3], [7]]) < 2
    kept = [mask, None, None, mask[1:], None]
    pruned = KVCache.from_tensors(moved.keys, moved.values, moved.meta, tiny.token_ids, kept=kept)
    untold = make_cache(5, ids=False, layers=tiny.meta.layers, ropes=tiny.meta.ropes)
    blobs = {
        "named": (encode(tiny, named, LADDER, chunk_tokens=8), names[".kvp"]),
        "small": (encode(tiny, small, LADDER, chunk_tokens=8), names["-small.kvp"]),
        "hidden": (encode(tiny, both, LADDER, chunk_tokens=8, hidden=hidden), names["-hidden.kvp"]),
        "inside": (encode(tiny, None, LADDER, chunk_tokens=8), None),
        "untold": (encode(untold, levels=1), None),
        "pruned": (encode(pruned, named, 1, chunk_tokens=16, lossless=True), names[".kvp"]),
        "lossless": (encode(tiny, levels=0, chunk_tokens=16, lossless=True), None),
        "cachegen": (encode(tiny, cachegen, chunk_tokens=16, lossless=True), names[".kvg"]),
    }
    return profiles, blobs, hidden


def make_sections() -> tuple[dict, dict, torch.Tensor]:
    """Profiles as ``fit_profile`` makes them now: one knows tokens, one hidden states; as ``make``."""
    from synthetic import TINY, TINY_ROPES, make_hidden, make_statistics, make_tiny

    tiny, caches = make_tiny(20, 5), [make_tiny(200, seed) for seed in (1, 2)]
    told, hidden = make_statistics(TINY, TINY_ROPES, words=True), make_hidden(tiny).half().float()
    named = fit_profile(caches, told, group_width=40)
    start = fit_profile(
        caches, replace(told, token_features=None), prefix_layers=1, hidden=[make_hidden(each) for each in caches]
    )
    profiles = {f"{SECTIONS}.kvp": named, f"{SECTIONS}-hidden.kvp": start}
    blobs = {
        "named": (encode(tiny, named, LADDER, chunk_tokens=8), f"{SECTIONS}.kvp"),
        "hidden": (encode(tiny, start, LADDER, chunk_tokens=8, hidden=hidden), f"{SECTIONS}-hidden.kvp"),
    }
    return profiles, blobs, hidden


def make_told() -> tuple[dict, dict, torch.Tensor]:
    """A blob that says how far its tokens move behind other documents; as ``make``."""
    from synthetic import make_hidden, make_tiny

    tiny = make_tiny(20, 5)
    told = BlockDeviation(8, bytes([204, 0, 97]))
    return {}, {"deviation": (encode(tiny, None, LADDER, chunk_tokens=8, deviation=told), None)}, make_hidden(tiny)


def make_behind() -> tuple[dict, dict, torch.Tensor]:
    """A blob of a document that was computed behind a neutral prefix; as ``make``."""
    from synthetic import make_hidden, make_tiny

    tiny = make_tiny(20, 5)
    blob = encode(positions_on(tiny, 3), None, LADDER, chunk_tokens=8, neutral_prefix=(7, 0, 70000))
    return {}, {"neutral": (blob, None)}, make_hidden(tiny)


def make_soft() -> tuple[dict, dict, torch.Tensor]:
    """A blob of a document with soft tokens inside its cache; as ``make``."""
    from synthetic import make_hidden, make_tiny

    tiny = make_tiny(20, 5)
    ids = (1000, 1001, *(tiny.token_ids or ())[2:19], 1002)
    wrapped = KVCache.from_tensors(tiny.keys, tiny.values, tiny.meta, ids)
    named = SoftTokensName("5f" * 32, 1000, 3)
    blob = encode(wrapped, None, LADDER, chunk_tokens=8, soft_tokens=named)
    return {}, {"wrapped": (blob, None)}, make_hidden(tiny)


def make_part() -> tuple[dict, dict, torch.Tensor]:
    """A blob of tokens 3 to 23 of a document, with a lossless level; as ``make``."""
    from synthetic import make_hidden, make_tiny

    tiny = make_tiny(20, 5)
    prefix = BlobPrefix(3, digest_tokens((7, 0, 70000)), "chat")
    blob = encode(positions_on(tiny, 3), None, LADDER, chunk_tokens=8, lossless=True, prefix=prefix)
    return {}, {"chat": (blob, None)}, make_hidden(tiny)


def make_context() -> tuple[dict, dict, torch.Tensor]:
    """A blob, with a lossless level, of rows that were computed over tokens at level 1; as ``make``."""
    from synthetic import make_hidden, make_tiny

    tiny = make_tiny(20, 5)
    blob = encode(tiny, None, LADDER, chunk_tokens=8, lossless=True, context_level=1)
    return {}, {"lossy": (blob, None)}, make_hidden(tiny)


def make_sinks() -> tuple[dict, dict, torch.Tensor]:
    """Blobs with two attention sinks, whose profile lies in sections or is stored plainly; as ``make``."""
    from synthetic import TINY, TINY_ROPES, make_hidden, make_statistics, make_tiny, stored_plainly, with_sinks

    tiny, caches = make_tiny(20, 5), [with_sinks(make_tiny(200, seed), seed=seed, first=0) for seed in (1, 2)]
    sunk, told = with_sinks(tiny, (0, 13), first=0), make_statistics(TINY, TINY_ROPES, words=True)
    named = fit_profile(caches, told, group_width=40)
    plain = stored_plainly(fit_profile(caches, replace(told, token_features=None)))
    profiles = {f"{SINKS}.kvp": named, f"{SINKS}-plain.kvp": plain}
    blobs = {
        "named": (encode(sunk, named, LADDER, chunk_tokens=8, lossless=True), f"{SINKS}.kvp"),
        "plain": (encode(sunk, plain, LADDER, chunk_tokens=8), f"{SINKS}-plain.kvp"),
    }
    return profiles, blobs, make_hidden(tiny)


def make_pruned() -> tuple[dict, dict, torch.Tensor]:
    """A blob of a pruned cache with an attention sink; as ``make``."""
    from synthetic import TINY, TINY_ROPES, make_hidden, make_statistics, make_tiny, with_sinks

    tiny, caches = make_tiny(20, 5), [with_sinks(make_tiny(200, seed), seed=seed, first=0) for seed in (1, 2)]
    profile = fit_profile(caches, make_statistics(TINY, TINY_ROPES, words=True), group_width=40)
    sunk = with_sinks(tiny, (0, 13), first=0)
    mask = (torch.arange(20) % torch.tensor([[3], [7]]) < 2) | (torch.arange(20) == 13)
    pruned = replace(sunk, kept=(mask, None, None, mask[1:], None))
    blob = encode(pruned, profile, LADDER, chunk_tokens=8, lossless=True)
    return {f"{PRUNED}.kvp": profile}, {"sinks": (blob, f"{PRUNED}.kvp")}, make_hidden(tiny)


def make_beginning() -> tuple[dict, dict, torch.Tensor]:
    """A blob of a document behind a neutral prefix, with and without a sink of its own; as ``make``."""
    from synthetic import TINY, TINY_ROPES, make_hidden, make_statistics, make_tiny, with_sinks

    tiny, caches = make_tiny(20, 5), [with_sinks(make_tiny(200, seed), seed=seed, first=0) for seed in (1, 2)]
    profile = fit_profile(caches, make_statistics(TINY, TINY_ROPES, words=True), group_width=40)
    first = with_sinks(tiny.slice(0, 1), (0,), seed=3, first=0)
    how = {"chunk_tokens": 8, "neutral_prefix": (9, 4, 70000), "beginning": first}
    blobs = {
        "first": (encode(tiny, profile, LADDER, **how), f"{BEGINNING}.kvp"),
        "both": (encode(with_sinks(tiny, (5, 13), first=0), profile, LADDER, **how), f"{BEGINNING}.kvp"),
    }
    return {f"{BEGINNING}.kvp": profile}, blobs, make_hidden(tiny)


def main() -> None:
    """Write profiles, blobs of every kind, and what must be found in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true")
    overwrite = parser.parse_args().overwrite
    made = (
        (STEM, *make()),
        (SECTIONS, *make_sections()),
        (TOLD, *make_told()),
        (BEHIND, *make_behind()),
        (SOFT, *make_soft()),
        (PART, *make_part()),
        (CONTEXT, *make_context()),
        (SINKS, *make_sinks()),
        (BEGINNING, *make_beginning()),
        (PRUNED, *make_pruned()),
    )
    written = [_written(*each) for each in made]
    for files in written:
        if not overwrite and any((GOLDEN / name).exists() for name in files):
            sys.stderr.write("golden files of this version exist; they are never written twice\n")
            continue
        for name, data in files.items():
            (GOLDEN / name).write_bytes(data)


def _written(stem: str, profiles: dict, blobs: dict, hidden: torch.Tensor) -> dict[str, bytes]:
    """All files of a stem by name."""
    files = {f"{stem}-{name}.kvw": blob for name, (blob, _) in blobs.items()}
    files |= {name: profile.data for name, profile in profiles.items()}
    told = {
        "profiles": {name: profile.digest for name, profile in profiles.items()},
        "hidden": hidden.tolist(),
        "blobs": {
            name: {"profile": used, **facts(blob, profiles.get(used), hidden)} for name, (blob, used) in blobs.items()
        },
    }
    return files | {f"{stem}.json": (json.dumps(told, separators=(",", ":")) + "\n").encode()}


if __name__ == "__main__":
    main()
