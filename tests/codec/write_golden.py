"""Writes the golden files of the current format version. They are written once: later they are only read.

Run from the root of the repository: ``PYTHONPATH=.typing python tests/codec/write_golden.py``. It refuses to touch
files that exist; ``--overwrite`` is for the time before a version is released.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from kvwire.codec import Ladder, Profile, decode, encode, fit_profile, inspect
from kvwire.codec.container import VERSION, parse_head
from kvwire.codec.segment import ChunkState, decode_segment

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4
"""Of the tensors: float products are summed in another order elsewhere. Quantised values are equal to the bit."""


def quantised(blob: bytes, profile: Profile, level: int) -> np.ndarray:
    """Quantised values of every token at a level, ``[tokens, columns]``, from the segments alone."""
    head, chunks = parse_head(blob), []
    for row in head.info.segments:
        start, stop = head.info.chunk_span(row[0].chunk)
        state = ChunkState(stop - start, profile.spread, profile.tables)
        for segment in row[: level + 1]:
            decode_segment(state, segment.level, head.levels[segment.level].shift, blob[segment.offset : segment.end])
        chunks.append(state.values)
    return np.concatenate(chunks).astype("<i4")


def facts(blob: bytes, profile: Profile) -> dict:
    """What a reader of any later version must find in a golden blob."""
    info = inspect(blob)
    inside = Profile.from_bytes(parse_head(blob).profile_bytes) if not info.profile_digest else profile
    digests = [hashlib.sha256(quantised(blob, inside, k).tobytes()).hexdigest() for k in range(len(info.levels))]
    finest = decode(blob, None, profile, offset=3)
    return {
        "sha256": hashlib.sha256(blob).hexdigest(),
        "profile": info.profile_digest,
        "levels": [
            [level.name, level.step, level.cumulative_bytes, round(level.measured_error, 6)] for level in info.levels
        ],
        "token_ids": info.token_ids,
        "quantised_sha256": digests,
        "tensors": [np.round(t.double().numpy().ravel(), 4).tolist() for t in (*finest.keys, *finest.values)],
    }


def main() -> None:
    """Write the profile, a blob with it, a blob with its own profile inside, and what must be found in them."""
    from synthetic import make_cache, make_tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true")
    overwrite = parser.parse_args().overwrite
    tiny = make_tiny(20, 5)
    tiny.values[0][1, 9, 2] = 3000.0  # beyond the alphabet: an escape
    profile = fit_profile([make_tiny(200, seed) for seed in (1, 2)])
    ladder = Ladder(2.0, ("low", "middle", "high"))
    blobs = {
        "named": encode(tiny, profile, ladder, chunk_tokens=8),
        "inside": encode(tiny, levels=ladder, chunk_tokens=8),
    }
    blobs["untold"] = encode(make_cache(5, ids=False, layers=tiny.meta.layers, ropes=tiny.meta.ropes), levels=1)
    stem = f"v{VERSION[0]}.{VERSION[1]}"
    files = {f"{stem}-{name}.kvw": blob for name, blob in blobs.items()} | {f"{stem}.kvp": profile.data}
    expected = {"profile": profile.digest, "blobs": {name: facts(blob, profile) for name, blob in blobs.items()}}
    files[f"{stem}.json"] = (json.dumps(expected, separators=(",", ":")) + "\n").encode()
    if not overwrite and any((GOLDEN / name).exists() for name in files):
        parser.error("golden files of this version exist; they are never written twice")
    for name, data in files.items():
        (GOLDEN / name).write_bytes(data)


if __name__ == "__main__":
    main()
